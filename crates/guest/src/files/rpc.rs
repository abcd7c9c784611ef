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
    operations::{self, Caller},
    watch::{Asked, Watch},
    watchers::WatchEvents,
};
use crate::{
    auth,
    connect::{
        Codec, Fault, Messages, Shape, check_encoding, keepalive_of, kind_of, stream_reply, unary_reply,
        unsupported_type, whole,
    },
    reply::{Payload, Reply},
    server::Guest,
    users,
};

/// Answers one call; `None` if there is no such method.
pub async fn call(guest: Rc<Guest>, method: &str, request: Request<Incoming>) -> Option<Reply> {
    let shape = match method {
        "Stat" | "MakeDir" | "Move" | "ListDir" | "Remove" => Shape::Unary,
        "CreateWatcher" | "GetWatcherEvents" | "RemoveWatcher" => Shape::Unary,
        "WatchDir" => Shape::Stream,
        _ => return None,
    };
    let codec = match kind_of(request.headers()) {
        Some((codec, asked)) if asked == shape => codec,
        _ => return Some(unsupported_type(shape)),
    };
    let encoding = check_encoding(request.headers());
    Some(match (shape, encoding) {
        (Shape::Unary, Err(fault)) => unary_reply(codec, Err(fault)),
        (Shape::Stream, Err(fault)) => stream_reply(codec, Err(fault)),
        (Shape::Unary, Ok(())) => unary_reply(codec, unary(&guest, method, codec, request).await),
        (Shape::Stream, Ok(())) => stream_reply(codec, watch_dir(&guest, codec, request).await),
    })
}

async fn unary(
    guest: &Rc<Guest>,
    method: &str,
    codec: Codec,
    request: Request<Incoming>,
) -> Result<Bytes, Fault> {
    let who = Who::of(guest, &request);
    let message = whole(request.into_body()).await?;
    match method {
        "Stat" => helped(who, codec, message, operations::stat).await,
        "MakeDir" => helped(who, codec, message, operations::make).await,
        "Move" => helped(who, codec, message, operations::rename).await,
        "ListDir" => helped(who, codec, message, operations::list).await,
        "Remove" => helped(who, codec, message, operations::delete).await,
        "CreateWatcher" => {
            let asked: CreateWatcherRequest = codec.decode(&message)?;
            let asked = Asked {
                path: asked.path,
                recursive: asked.recursive,
                include_entry: asked.include_entry,
                allow_network_mounts: asked.allow_network_mounts,
            };
            let watch = watch(who, asked).await?;
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

async fn watch_dir(guest: &Rc<Guest>, codec: Codec, request: Request<Incoming>) -> Result<Payload, Fault> {
    let who = Who::of(guest, &request);
    let keepalive = keepalive_of(request.headers());
    let asked: WatchDirRequest = codec.decode(&Messages::new(request.into_body()).only().await?)?;
    let asked = Asked {
        path: asked.path,
        recursive: asked.recursive,
        include_entry: asked.include_entry,
        allow_network_mounts: asked.allow_network_mounts,
    };
    let place = guest.watchers.place()?;
    let watch = watch(who, asked).await?;
    Ok(Payload::pieces(WatchEvents::new(watch, place, codec, keepalive)?))
}

async fn watch(who: Who, asked: Asked) -> Result<Watch, Fault> {
    on_helper(move || Watch::new(&who.caller()?, &asked)).await
}

/// Decodes, runs on a helper thread as the caller named, encodes.
async fn helped<Q, A>(
    who: Who,
    codec: Codec,
    message: Bytes,
    operation: fn(&Caller, &Q) -> Result<A, Fault>,
) -> Result<Bytes, Fault>
where
    Q: Message + Default + DeserializeOwned + 'static,
    A: Message + Serialize + 'static,
{
    let asked: Q = codec.decode(&message)?;
    on_helper(move || operation(&who.caller()?, &asked).map(|answer| codec.encode(&answer))).await
}

/// Runs what may block where it may.
pub async fn on_helper<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(Fault::internal(error.to_string())))
}

/// The caller by name; the name is looked up on the helper thread.
struct Who {
    name: String,
    workdir: Option<String>,
}

impl Who {
    fn of(guest: &Guest, request: &Request<Incoming>) -> Self {
        let name = auth::basic_user(request.headers()).unwrap_or_else(|| guest.config().user.clone());
        Self { name, workdir: guest.config().workdir.clone() }
    }

    fn caller(&self) -> Result<Caller, Fault> {
        let user = users::known(&self.name)?;
        users::check_reachable(&user)?;
        Ok(Caller { user, workdir: self.workdir.clone() })
    }
}
