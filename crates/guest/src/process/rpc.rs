//! `process.Process`: each method, from message to message.

use std::rc::Rc;

use bytes::Bytes;
use hyper::{Request, body::Incoming};
use proto::{
    guest::{HANG_UP, REPLAY},
    wire::process::{
        CloseStdinRequest, CloseStdinResponse, ConnectRequest, ListRequest, ListResponse, SendInputRequest,
        SendInputResponse, SendSignalRequest, SendSignalResponse, StartRequest, StreamInputRequest,
        StreamInputResponse, UpdateRequest, UpdateResponse, process_selector::Selector,
        stream_input_request::Event,
    },
};

use super::{
    Keeping,
    hub::ReplayStart,
    kept, not_found, start,
    stream::{ListenCall, ProcessEvents},
};
use crate::{
    auth,
    connect::{
        Code, Codec, ConnectError, MessageFraming, Messages, check_encoding, end_envelope, keepalive_of,
        kind_of, stream_reply, timeout_of, unary_reply, unknown_method, unsupported_type, whole,
    },
    drain,
    reply::{HttpReply, ReplyBody},
    server::GuestServer,
    users,
};

const ENVIRONMENT_MAX: usize = 4096;

/// Answers a call about a kept command: `start`, `follow` or `read`.
pub async fn call_kept(guest: Rc<GuestServer>, method: &str, request: Request<Incoming>) -> HttpReply {
    if method == "read" {
        return kept::read(&guest, request).await;
    }
    let codec = match kind_of(request.headers()) {
        Some((codec, MessageFraming::Stream)) => codec,
        _ => return drain::refuse(request, unsupported_type(MessageFraming::Stream)),
    };
    if let Err(fault) = check_encoding(request.headers()) {
        return drain::refuse(request, stream_reply(codec, Err(fault)));
    }
    match method {
        "start" => stream_reply(codec, start_call(guest, codec, request, Keeping::Kept).await),
        "follow" => stream_reply(codec, follow_kept(&guest, codec, request).await),
        _ => drain::refuse(request, unknown_method()),
    }
}

/// Answers one call.
pub async fn call(guest: Rc<GuestServer>, method: &str, request: Request<Incoming>) -> HttpReply {
    let shape = match method {
        "List" | "Update" | "SendInput" | "SendSignal" | "CloseStdin" => MessageFraming::Unary,
        "Start" | "Connect" | "StreamInput" => MessageFraming::Stream,
        _ => return drain::refuse(request, unknown_method()),
    };
    let codec = match kind_of(request.headers()) {
        Some((codec, asked)) if asked == shape => codec,
        _ => return drain::refuse(request, unsupported_type(shape)),
    };
    if let Err(fault) = check_encoding(request.headers()) {
        let reply = match shape {
            MessageFraming::Unary => unary_reply(codec, Err(fault)),
            MessageFraming::Stream => stream_reply(codec, Err(fault)),
        };
        return drain::refuse(request, reply);
    }
    match method {
        "Start" => stream_reply(codec, start_call(guest, codec, request, Keeping::No).await),
        "Connect" => stream_reply(codec, connect(&guest, codec, request).await),
        "StreamInput" => stream_reply(codec, stream_input(&guest, codec, request.into_body()).await),
        _ => unary_reply(codec, unary(&guest, method, codec, request.into_body()).await),
    }
}

async fn unary(
    guest: &GuestServer,
    method: &str,
    codec: Codec,
    body: Incoming,
) -> Result<Bytes, ConnectError> {
    let message = whole(body).await?;
    let processes = &guest.processes;
    match method {
        "List" => {
            codec.decode::<ListRequest>(&message)?;
            Ok(codec.encode(&ListResponse { processes: processes.list() }))
        }
        "Update" => {
            let asked: UpdateRequest = codec.decode(&message)?;
            let process = processes.find_running(asked.process.as_ref())?;
            if let Some(pty) = asked.pty {
                process.resize(pty.size.unwrap_or_default())?;
            }
            Ok(codec.encode(&UpdateResponse {}))
        }
        "SendInput" => {
            let asked: SendInputRequest = codec.decode(&message)?;
            processes.find_running(asked.process.as_ref())?.write(asked.input).await?;
            Ok(codec.encode(&SendInputResponse {}))
        }
        "SendSignal" => {
            let asked: SendSignalRequest = codec.decode(&message)?;
            let process = processes.find_running(asked.process.as_ref())?;
            process.signal(asked.signal)?;
            if asked.signal == rustix::process::Signal::KILL.as_raw() {
                processes.note_exit(&process).await;
            }
            Ok(codec.encode(&SendSignalResponse {}))
        }
        _ => {
            let asked: CloseStdinRequest = codec.decode(&message)?;
            processes.find_running(asked.process.as_ref())?.close_stdin().await?;
            Ok(codec.encode(&CloseStdinResponse {}))
        }
    }
}

async fn start_call(
    guest: Rc<GuestServer>,
    codec: Codec,
    request: Request<Incoming>,
    keeping: Keeping,
) -> Result<ReplyBody, ConnectError> {
    let age_max = timeout_of(request.headers())?;
    let keepalive = keepalive_of(request.headers());
    let hang_up = keeping == Keeping::No && request.headers().contains_key(HANG_UP);
    let user = auth::basic_user(request.headers()).unwrap_or_else(|| guest.config().user.clone());
    let asked: StartRequest = codec.decode(&Messages::new(request.into_body()).only().await?)?;
    check(&asked)?;
    let listener = start::start(guest, asked, users::known(&user)?, age_max, keeping).await?;
    let events = ProcessEvents::new(listener, codec, ListenCall::Start, keepalive);
    Ok(ReplyBody::pieces(if hang_up { events.hang_up_without_caller() } else { events }))
}

/// Checks a start request before anything is started.
fn check(asked: &StartRequest) -> Result<(), ConnectError> {
    let config = asked.process.as_ref().ok_or_else(|| ConnectError::invalid("no process is described"))?;
    if config.envs.len() > ENVIRONMENT_MAX {
        return Err(ConnectError::invalid(format!("a process may be given {ENVIRONMENT_MAX} variables")));
    }
    Ok(())
}

async fn connect(
    guest: &GuestServer,
    codec: Codec,
    request: Request<Incoming>,
) -> Result<ReplyBody, ConnectError> {
    let keepalive = keepalive_of(request.headers());
    let since =
        if request.headers().contains_key(REPLAY) { ReplayStart::Recent } else { ReplayStart::Unheard };
    let asked: ConnectRequest = codec.decode(&Messages::new(request.into_body()).only().await?)?;
    let listener = guest.processes.find_any(asked.process.as_ref())?.listen(since)?;
    Ok(ReplyBody::pieces(ProcessEvents::new(listener, codec, ListenCall::Connect, keepalive)))
}

/// Follows a kept command, from its first kept byte to its end.
async fn follow_kept(
    guest: &GuestServer,
    codec: Codec,
    request: Request<Incoming>,
) -> Result<ReplyBody, ConnectError> {
    let keepalive = keepalive_of(request.headers());
    let asked: ConnectRequest = codec.decode(&Messages::new(request.into_body()).only().await?)?;
    let tag = match asked.process.and_then(|process| process.selector) {
        Some(Selector::Tag(tag)) => tag,
        _ => return Err(ConnectError::invalid("a kept command is named by its tag")),
    };
    let process = guest.processes.find_kept(&tag).ok_or_else(|| not_found(&Selector::Tag(tag)))?;
    let listener = process.listen(ReplayStart::Unheard)?;
    Ok(ReplyBody::pieces(ProcessEvents::new(listener, codec, ListenCall::Start, keepalive)))
}

async fn stream_input(guest: &GuestServer, codec: Codec, body: Incoming) -> Result<ReplyBody, ConnectError> {
    let mut messages = Messages::new(body);
    let mut process = None;
    while let Some(message) = messages.next().await? {
        match codec.decode::<StreamInputRequest>(&message)?.event {
            Some(Event::Start(start)) => {
                process = Some(guest.processes.find_running(start.process.as_ref())?)
            }
            Some(Event::Data(data)) => {
                let process =
                    process.as_ref().ok_or_else(|| ConnectError::invalid("input came before the start"))?;
                process.write(data.input).await?;
            }
            Some(Event::Keepalive(_)) => {}
            None => return Err(ConnectError::new(Code::Unimplemented, "no event is given")),
        }
    }
    let answer = codec.seal(&StreamInputResponse {});
    Ok(ReplyBody::Whole([answer, end_envelope(None)].concat().into()))
}

pub use super::program::body_environment;
