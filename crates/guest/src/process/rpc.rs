//! `process.Process`: each method, from message to message.

use std::rc::Rc;

use bytes::Bytes;
use hyper::{Request, body::Incoming};
use proto::{
    envelope,
    guest::REPLAY,
    wire::process::{
        CloseStdinRequest, CloseStdinResponse, ConnectRequest, ListRequest, ListResponse, SendInputRequest,
        SendInputResponse, SendSignalRequest, SendSignalResponse, StartRequest, StreamInputRequest,
        StreamInputResponse, UpdateRequest, UpdateResponse, stream_input_request::Event,
    },
};

use super::{
    hub::Since,
    start,
    stream::{Events, Through},
};
use crate::{
    auth,
    connect::{
        Code, Codec, Fault, Messages, Shape, check_encoding, end_envelope, keepalive_of, kind_of,
        stream_reply, timeout_of, unary_reply, unsupported_type, whole,
    },
    reply::{Payload, Reply},
    server::Guest,
    users,
};

const ENVIRONMENT_MAX: usize = 4096;

/// Answers one call; `None` if there is no such method.
pub async fn call(guest: Rc<Guest>, method: &str, request: Request<Incoming>) -> Option<Reply> {
    let shape = match method {
        "List" | "Update" | "SendInput" | "SendSignal" | "CloseStdin" => Shape::Unary,
        "Start" | "Connect" | "StreamInput" => Shape::Stream,
        _ => return None,
    };
    let codec = match kind_of(request.headers()) {
        Some((codec, asked)) if asked == shape => codec,
        _ => return Some(unsupported_type(shape)),
    };
    if let Err(fault) = check_encoding(request.headers()) {
        return Some(match shape {
            Shape::Unary => unary_reply(codec, Err(fault)),
            Shape::Stream => stream_reply(codec, Err(fault)),
        });
    }
    Some(match method {
        "Start" => stream_reply(codec, start_call(guest, codec, request).await),
        "Connect" => stream_reply(codec, connect(&guest, codec, request).await),
        "StreamInput" => stream_reply(codec, stream_input(&guest, codec, request.into_body()).await),
        _ => unary_reply(codec, unary(&guest, method, codec, request.into_body()).await),
    })
}

async fn unary(guest: &Guest, method: &str, codec: Codec, body: Incoming) -> Result<Bytes, Fault> {
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
                processes.buried(&process).await;
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

async fn start_call(guest: Rc<Guest>, codec: Codec, request: Request<Incoming>) -> Result<Payload, Fault> {
    let age_max = timeout_of(request.headers())?;
    let keepalive = keepalive_of(request.headers());
    let user = auth::basic_user(request.headers()).unwrap_or_else(|| guest.config().user.clone());
    // Looked up while the rest of the question may still be on its way. What was started before knows its user already.
    let found = (!guest.has_first()).then(|| users::known(&user));
    let asked: StartRequest = codec.decode(&Messages::new(request.into_body()).only().await?)?;
    check(&asked)?;
    let by = start::By { name: user, found };
    let listener = start::start(guest, asked, by, age_max).await?;
    Ok(Payload::pieces(Events::new(listener, codec, Through::Start, keepalive)))
}

/// Whether that can be a command at all.
pub fn check(asked: &StartRequest) -> Result<(), Fault> {
    let config = asked.process.as_ref().ok_or_else(|| Fault::invalid("no process is described"))?;
    if config.envs.len() > ENVIRONMENT_MAX {
        return Err(Fault::invalid(format!("a process may be given {ENVIRONMENT_MAX} variables")));
    }
    Ok(())
}

async fn connect(guest: &Guest, codec: Codec, request: Request<Incoming>) -> Result<Payload, Fault> {
    let keepalive = keepalive_of(request.headers());
    let since = if request.headers().contains_key(REPLAY) { Since::Recent } else { Since::Unheard };
    let asked: ConnectRequest = codec.decode(&Messages::new(request.into_body()).only().await?)?;
    let listener = guest.processes.find_any(asked.process.as_ref())?.listen(since)?;
    Ok(Payload::pieces(Events::new(listener, codec, Through::Connect, keepalive)))
}

async fn stream_input(guest: &Guest, codec: Codec, body: Incoming) -> Result<Payload, Fault> {
    let mut messages = Messages::new(body);
    let mut process = None;
    while let Some(message) = messages.next().await? {
        match codec.decode::<StreamInputRequest>(&message)?.event {
            Some(Event::Start(start)) => {
                process = Some(guest.processes.find_running(start.process.as_ref())?)
            }
            Some(Event::Data(data)) => {
                let process =
                    process.as_ref().ok_or_else(|| Fault::invalid("input came before the start"))?;
                process.write(data.input).await?;
            }
            Some(Event::Keepalive(_)) => {}
            None => return Err(Fault::new(Code::Unimplemented, "no event is given")),
        }
    }
    let answer = envelope::seal(0, &codec.encode(&StreamInputResponse {}));
    Ok(Payload::Whole([answer, end_envelope(None)].concat().into()))
}

pub use super::program::body_environment;
