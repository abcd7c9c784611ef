//! `filesystem.Filesystem`: each method, from message to message.

use std::rc::Rc;

use bytes::Bytes;
use hyper::{Request, body::Incoming};
use prost::Message;
use proto::wire::filesystem::{
    CreateWatcherRequest, CreateWatcherResponse, GetWatcherEventsRequest, GetWatcherEventsResponse,
    RemoveWatcherRequest, RemoveWatcherResponse, WatchDirRequest,
};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    operations::{self, FileCaller},
    watch::{DirWatch, WatchRequest},
    watchers::WatchEvents,
};
use crate::{
    auth,
    connect::{
        Codec, ConnectError, MessageFraming, Messages, check_encoding, keepalive_of, kind_of, stream_reply,
        unary_reply, unknown_method, unsupported_type, whole,
    },
    drain,
    reply::{HttpReply, ReplyBody},
    server::GuestServer,
    users,
};

/// Answers one call.
pub async fn call(guest: Rc<GuestServer>, method: &str, request: Request<Incoming>) -> HttpReply {
    let shape = match method {
        "Stat" | "MakeDir" | "Move" | "ListDir" | "Remove" => MessageFraming::Unary,
        "CreateWatcher" | "GetWatcherEvents" | "RemoveWatcher" => MessageFraming::Unary,
        "WatchDir" => MessageFraming::Stream,
        _ => return drain::refuse(request, unknown_method()),
    };
    let codec = match kind_of(request.headers()) {
        Some((codec, asked)) if asked == shape => codec,
        _ => return drain::refuse(request, unsupported_type(shape)),
    };
    let encoding = check_encoding(request.headers());
    match (shape, encoding) {
        (MessageFraming::Unary, Err(fault)) => drain::refuse(request, unary_reply(codec, Err(fault))),
        (MessageFraming::Stream, Err(fault)) => drain::refuse(request, stream_reply(codec, Err(fault))),
        (MessageFraming::Unary, Ok(())) => unary_reply(codec, unary(&guest, method, codec, request).await),
        (MessageFraming::Stream, Ok(())) => stream_reply(codec, watch_dir(&guest, codec, request).await),
    }
}

async fn unary(
    guest: &Rc<GuestServer>,
    method: &str,
    codec: Codec,
    request: Request<Incoming>,
) -> Result<Bytes, ConnectError> {
    let caller_name = CallerName::of(guest, &request);
    let message = whole(request.into_body()).await?;
    match method {
        "Stat" => run_operation(caller_name, codec, message, operations::stat).await,
        "MakeDir" => run_operation(caller_name, codec, message, operations::make).await,
        "Move" => run_operation(caller_name, codec, message, operations::rename).await,
        "ListDir" => run_operation(caller_name, codec, message, operations::list).await,
        "Remove" => run_operation(caller_name, codec, message, operations::delete).await,
        "CreateWatcher" => {
            let asked: CreateWatcherRequest = codec.decode(&message)?;
            let asked = WatchRequest {
                path: asked.path,
                recursive: asked.recursive,
                include_entry: asked.include_entry,
                allow_network_mounts: asked.allow_network_mounts,
            };
            let watch = watch(caller_name, asked).await?;
            Ok(codec.encode(&CreateWatcherResponse { watcher_id: guest.watchers.add(watch)? }))
        }
        "GetWatcherEvents" => {
            let asked: GetWatcherEventsRequest = codec.decode(&message)?;
            Ok(codec.encode(&GetWatcherEventsResponse { events: guest.watchers.events(&asked.watcher_id)? }))
        }
        _ => {
            let asked: RemoveWatcherRequest = codec.decode(&message)?;
            guest.watchers.remove(&asked.watcher_id)?;
            Ok(codec.encode(&RemoveWatcherResponse {}))
        }
    }
}

async fn watch_dir(
    guest: &Rc<GuestServer>,
    codec: Codec,
    request: Request<Incoming>,
) -> Result<ReplyBody, ConnectError> {
    let caller_name = CallerName::of(guest, &request);
    let keepalive = keepalive_of(request.headers());
    let asked: WatchDirRequest = codec.decode(&Messages::new(request.into_body()).only().await?)?;
    let asked = WatchRequest {
        path: asked.path,
        recursive: asked.recursive,
        include_entry: asked.include_entry,
        allow_network_mounts: asked.allow_network_mounts,
    };
    let place = guest.watchers.place()?;
    let watch = watch(caller_name, asked).await?;
    Ok(ReplyBody::pieces(WatchEvents::new(watch, place, codec, keepalive)?))
}

async fn watch(caller_name: CallerName, asked: WatchRequest) -> Result<DirWatch, ConnectError> {
    on_helper(move || DirWatch::new(&caller_name.caller()?, &asked)).await
}

/// Decodes a request, runs the operation on a helper thread as the named user, and encodes the answer.
async fn run_operation<Q, A>(
    caller_name: CallerName,
    codec: Codec,
    message: Bytes,
    operation: fn(&FileCaller, &Q) -> Result<A, ConnectError>,
) -> Result<Bytes, ConnectError>
where
    Q: Message + Default + DeserializeOwned + 'static,
    A: Message + Serialize + 'static,
{
    let asked: Q = codec.decode(&message)?;
    on_helper(move || operation(&caller_name.caller()?, &asked).map(|answer| codec.encode(&answer))).await
}

/// Runs work that may block on a helper thread.
pub async fn on_helper<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ConnectError::internal(error.to_string())))
}

/// The user name of the caller; the helper thread looks it up, because reading `/etc/passwd` may block.
struct CallerName {
    name: String,
    workdir: Option<String>,
}

impl CallerName {
    fn of(guest: &GuestServer, request: &Request<Incoming>) -> Self {
        let name = auth::basic_user(request.headers()).unwrap_or_else(|| guest.config().user.clone());
        Self { name, workdir: guest.config().workdir.clone() }
    }

    fn caller(&self) -> Result<FileCaller, ConnectError> {
        let user = users::known(&self.name)?;
        users::check_reachable(&user)?;
        Ok(FileCaller { user, workdir: self.workdir.clone() })
    }
}
