//! Serves `process.Process/Start` for envd's clients: turns the request into an exec of the fleet, and sends
//! its events in the client's codec.
//!
//! Invariant: a request that carries the Body's token never reaches the guest unrecorded.
//! Invariant: a response whose stream was cut never looks complete.
//! Trust: the client is hostile. Its request has a size limit and a deadline, and the server parses it by the
//! guest's own rules.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use fleet::{ExecRequest, OutputChunk, StartError, Stdin, TtySize};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Frame;
use proto::{
    BodyId,
    connect::{
        self, Code, Codec, ConnectError, ENCODING_HEADERS, MessageFraming, end_envelope, seal_event,
        seal_output,
    },
    event_data::StartedBy,
    wire::process::{
        Pty, StartRequest,
        process_event::{Event, KeepAlive, StartEvent, data_event::Output},
    },
};
use tokio::{
    sync::mpsc,
    time::{Instant, Sleep},
};

use crate::{
    App,
    abort::AbortHandle,
    exec_tasks::{ExecUpdate, FollowedExec},
    keys, proxy,
    streams::OpenStream,
};

/// The path of the call that starts a command.
pub const START: &str = "/process.Process/Start";
/// Twice the size of the largest event.
const REQUEST_LEN_MAX: usize = 2 << 20;
const REQUEST_WAIT: Duration = Duration::from_secs(60);
const SIZE_DEFAULT: TtySize = TtySize { cols: 80, rows: 24 };

/// Whether the request carries the token of that Body. The guest itself refuses a request without it.
pub fn has_token(app: &App, id: &BodyId, headers: &HeaderMap) -> bool {
    let token = headers.get("x-access-token").map(|token| token.as_bytes());
    token.is_some_and(|token| keys::same(token, app.fleet().token(id).as_bytes()))
}

/// Starts the command of a request.
pub async fn start(app: &App, id: &BodyId, request: Request, open: OpenStream) -> Result<Response, Response> {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let Some((codec, MessageFraming::Stream)) = content_type.and_then(connect::parse_content_type) else {
        return Ok(unsupported_type());
    };
    let abort = request.extensions().get::<AbortHandle>().cloned().unwrap_or_default();
    let started = match read_request(request, codec).await {
        Ok((exec, keepalive)) => {
            app.exec_tasks().start(app, id, exec, None, ()).await.map(|followed| (followed, keepalive))
        }
        Err(error) => Err(StartError::Refused(error)),
    };
    match started {
        Ok((followed, keepalive)) => {
            let cut = Box::pin(open.cut());
            let body = ExecEvents::new(followed, codec, keepalive);
            Ok(stream_response(codec, Body::new(EventBody { body, cut, abort, _open: open })))
        }
        Err(StartError::Refused(error)) => Ok(refusal(codec, &error)),
        Err(StartError::NotRecorded(failure)) => {
            Ok(refusal(codec, &ConnectError::new(Code::Unavailable, failure.to_string())))
        }
        Err(StartError::Unreachable(_)) => Err(proxy::no_answer(app, id).await),
    }
}

async fn read_request(request: Request, codec: Codec) -> Result<(ExecRequest, Duration), ConnectError> {
    let (parts, body) = request.into_parts();
    let headers = parts.headers;
    let mut encodings = ENCODING_HEADERS.iter().filter_map(|name| headers.get(*name));
    encodings.try_for_each(|value| connect::check_encoding(value.as_bytes()))?;
    let timeout = headers.get("connect-timeout-ms").map(|value| connect::parse_timeout(value.as_bytes()));
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let keepalive = connect::parse_keepalive(text("keepalive-ping-interval"));
    let user = text("authorization").and_then(connect::parse_basic_user);
    let message = connect::only_message(&collect(body).await?, REQUEST_LEN_MAX)?;
    let request = exec_request(codec.decode(&message)?)?;
    Ok((ExecRequest { user, timeout: timeout.transpose()?.flatten(), ..request }, keepalive))
}

async fn collect(body: Body) -> Result<Bytes, ConnectError> {
    match tokio::time::timeout(REQUEST_WAIT, Limited::new(body, REQUEST_LEN_MAX).collect()).await {
        Err(_) => Err(ConnectError::new(Code::DeadlineExceeded, "the request did not arrive in time")),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ConnectError::new(
            Code::ResourceExhausted,
            format!("a request that starts a command may hold {REQUEST_LEN_MAX} bytes"),
        )),
        Ok(Err(error)) => Err(ConnectError::invalid(format!("the request was cut: {error}"))),
    }
}

/// Converts the message to an exec request, with envd's defaults.
fn exec_request(start: StartRequest) -> Result<ExecRequest, ConnectError> {
    let process = start.process.ok_or_else(|| ConnectError::invalid("no process is described"))?;
    let argv = std::iter::once(process.cmd).chain(process.args);
    Ok(ExecRequest {
        env: process.envs.into_iter().collect(),
        workdir: process.cwd,
        tty: start.pty.map(tty_size).transpose()?,
        // A client that does not set `stdin` may still send input.
        stdin: if start.stdin.unwrap_or(true) { Stdin::Open } else { Stdin::Null },
        tag: start.tag,
        by: Some(StartedBy::Envd),
        ..ExecRequest::new(argv)
    })
}

fn tty_size(pty: Pty) -> Result<TtySize, ConnectError> {
    let Some(size) = pty.size else { return Ok(SIZE_DEFAULT) };
    match (u16::try_from(size.cols), u16::try_from(size.rows)) {
        (Ok(cols), Ok(rows)) => Ok(TtySize { cols, rows }),
        _ => Err(ConnectError::invalid(format!(
            "a terminal of {} columns and {} rows cannot be made",
            size.cols, size.rows
        ))),
    }
}

fn unsupported_type() -> Response {
    let accepted = [("accept-post", MessageFraming::Stream.accepted_types())];
    allow_browsers((StatusCode::UNSUPPORTED_MEDIA_TYPE, accepted).into_response())
}

/// A streaming call reports errors in its last envelope, with status 200.
fn refusal(codec: Codec, error: &ConnectError) -> Response {
    stream_response(codec, Body::from(end_envelope(Some(error))))
}

fn stream_response(codec: Codec, body: Body) -> Response {
    let content_type = [(header::CONTENT_TYPE, codec.content_type(MessageFraming::Stream))];
    allow_browsers((content_type, body).into_response())
}

/// Lets browsers read the response, as the guest does with its own responses: the token protects a Body, not
/// the origin.
fn allow_browsers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(connect::EXPOSED_HEADERS));
    response
}

/// The events of one command, encoded for its client.
struct ExecEvents {
    updates: mpsc::Receiver<ExecUpdate>,
    codec: Codec,
    ready: VecDeque<Bytes>,
    keepalive: Duration,
    timer: Pin<Box<Sleep>>,
    ended: bool,
}

/// The stream ended before the command did.
#[derive(Debug, thiserror::Error)]
#[error("the stream was cut")]
struct StreamCut;

impl ExecEvents {
    fn new(followed: FollowedExec, codec: Codec, keepalive: Duration) -> Self {
        let start = seal_event(codec, Event::Start(StartEvent { pid: followed.pid }));
        Self {
            updates: followed.updates,
            codec,
            ready: VecDeque::from([start]),
            keepalive,
            timer: Box::pin(tokio::time::sleep(keepalive)),
            ended: false,
        }
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, StreamCut>>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(bytes)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            match self.updates.poll_recv(context) {
                Poll::Ready(Some(ExecUpdate::Output(output))) => self.pass_on(output),
                Poll::Ready(Some(ExecUpdate::Ended(_, Some(end)))) => {
                    self.ready.push_back(seal_event(self.codec, Event::End(end)));
                    self.end(None);
                }
                Poll::Ready(Some(ExecUpdate::Ended(ended, None))) if ended.timed_out => {
                    let message = "the process ran longer than its timeout";
                    self.end(Some(ConnectError::new(Code::DeadlineExceeded, message)));
                }
                // The Body ended, the guest's stream broke, or this client was too slow.
                Poll::Ready(_) => return Poll::Ready(Some(Err(StreamCut))),
                Poll::Pending => {
                    ready!(self.timer.as_mut().poll(context));
                    self.ready.push_back(seal_event(self.codec, Event::Keepalive(KeepAlive {})));
                    self.rest();
                }
            }
        }
    }

    fn pass_on(&mut self, output: OutputChunk) {
        let output = match output {
            OutputChunk::Stdout(bytes) => Output::Stdout(bytes),
            OutputChunk::Stderr(bytes) => Output::Stderr(bytes),
            OutputChunk::Tty(bytes) => Output::Pty(bytes),
        };
        let (head, tail) = seal_output(self.codec, &output);
        self.ready.push_back(head);
        self.ready.extend(tail);
        self.rest();
    }

    /// Schedules the next keepalive.
    fn rest(&mut self) {
        self.timer.as_mut().reset(Instant::now() + self.keepalive);
    }

    fn end(&mut self, error: Option<ConnectError>) {
        self.ended = true;
        self.ready.push_back(end_envelope(error.as_ref()));
    }
}

/// A response body that is cut off when its stream is cut.
struct EventBody<C> {
    body: ExecEvents,
    cut: Pin<Box<C>>,
    abort: AbortHandle,
    _open: OpenStream,
}

impl<C: Future<Output = ()>> hyper::body::Body for EventBody<C> {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let next = match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Some(Err(StreamCut)),
            Poll::Pending => ready!(self.body.poll_next(context)),
        };
        if matches!(next, Some(Err(_))) {
            self.abort.say();
        }
        Poll::Ready(next.map(|next| next.map(Frame::data).map_err(Into::into)))
    }
}

#[cfg(test)]
mod tests {
    use proto::wire::process::{ProcessConfig, pty::Size};

    use super::*;

    fn start(stdin: Option<bool>, size: Option<Size>) -> Result<ExecRequest, ConnectError> {
        let process =
            Some(ProcessConfig { cmd: "a".into(), args: vec!["b".into()], ..ProcessConfig::default() });
        exec_request(StartRequest { process, pty: Some(Pty { size }), tag: None, stdin })
    }

    #[test]
    fn a_request_has_envds_defaults() {
        let asked = start(None, None).unwrap();
        assert_eq!(
            (asked.argv, asked.stdin, asked.tty),
            (vec!["a".into(), "b".into()], Stdin::Open, Some(SIZE_DEFAULT))
        );
        assert_eq!(start(Some(false), None).unwrap().stdin, Stdin::Null);
        assert!(start(None, Some(Size { cols: 70_000, rows: 1 })).is_err());
        assert!(exec_request(StartRequest::default()).is_err());
    }
}
