//! Gives a body to the refusals that hyper writes by itself: of malformed requests and of heads that are too long.
//!
//! Hyper answers such a request with a bare head, before any code of the server sees it. This stream replaces the
//! head while no request is being answered, so it never touches a response of the server or of a program in a Body.
//!
//! Invariant: a caller that is still sending gets to read the refusal: the kernel resets a connection that is closed
//! with unread bytes, so the stream reads on for a moment after its last byte.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Json,
    body::{Body, Bytes},
    http::StatusCode,
    response::Response,
};
use hyper::body::{Frame, SizeHint};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};

const LINGER_LEN_MAX: usize = 4 << 20;
const LINGER_WAIT: Duration = Duration::from_secs(1);

/// The requests of one connection that are being answered.
#[derive(Debug, Clone, Default)]
pub struct ConnectionTurns(Arc<Mutex<TurnCounts>>);

#[derive(Debug, Default)]
struct TurnCounts {
    open: usize,
    /// Whether a response may still be in hyper's buffer.
    unflushed: bool,
    lingers: bool,
}

/// One request that is being answered, until its response is in hyper's buffer.
struct ResponseTurn(ConnectionTurns);

impl ConnectionTurns {
    /// Marks the connection as busy until hyper has taken the last byte of the response, or for good if the response
    /// hands the connection over to another protocol.
    pub async fn answer(&self, response: impl Future<Output = Response>) -> Response {
        self.held().open += 1;
        let turn = ResponseTurn(self.clone());
        let response = response.await;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            self.held().open += 1;
        }
        response.map(|body| Body::new(TurnBody { body, _turn: turn }))
    }

    /// Makes the end of the connection wait for a caller that is still sending.
    pub fn linger(&self) {
        self.held().lingers = true;
    }

    fn is_idle(&self) -> bool {
        let counts = self.held();
        counts.open == 0 && !counts.unflushed
    }

    fn flushed(&self) {
        let mut counts = self.held();
        counts.unflushed &= counts.open > 0;
    }

    fn held(&self) -> MutexGuard<'_, TurnCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ResponseTurn {
    fn drop(&mut self) {
        let mut counts = self.0.held();
        counts.open -= 1;
        counts.unflushed = true;
    }
}

/// The body of a response; it holds the turn of its request.
struct TurnBody {
    body: Body,
    _turn: ResponseTurn,
}

impl hyper::body::Body for TurnBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection whose bare refusals get a body.
#[derive(Debug)]
pub struct ExplainedStream<S> {
    stream: S,
    turns: ConnectionTurns,
    /// The rest of a refusal that replaces hyper's.
    refusal: Bytes,
    lingering: Option<(Pin<Box<Sleep>>, usize)>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ExplainedStream<S> {
    /// Wraps the stream of a connection.
    pub fn new(stream: S, turns: ConnectionTurns) -> Self {
        Self { stream, turns, refusal: Bytes::new(), lingering: None }
    }

    fn poll_refusal(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.refusal.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.refusal))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let _ = self.refusal.split_to(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Takes a bare refusal of hyper, to write an explained one instead.
    fn explain(&mut self, bytes: &[u8]) -> bool {
        let explained = if self.turns.is_idle() { explained(bytes) } else { None };
        let Some(refusal) = explained else { return false };
        self.refusal = refusal;
        self.turns.linger();
        true
    }

    fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.turns.held().lingers {
            return Poll::Ready(());
        }
        let (timer, left) =
            self.lingering.get_or_insert_with(|| (Box::pin(tokio::time::sleep(LINGER_WAIT)), LINGER_LEN_MAX));
        while timer.as_mut().poll(context).is_pending() && *left > 0 {
            let mut space = [0; 8192];
            let mut buffer = ReadBuf::new(&mut space);
            match ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => *left = left.saturating_sub(buffer.filled().len()),
                _ => break,
            }
        }
        Poll::Ready(())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for ExplainedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ExplainedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_refusal(context))?;
        if self.explain(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_refusal(context))?;
        if let [head] = bytes
            && self.explain(head)
        {
            return Poll::Ready(Ok(head.len()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_refusal(context))?;
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.turns.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_refusal(context))?;
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        }
        ready!(self.poll_linger(context));
        Poll::Ready(Ok(()))
    }
}

/// The refusal of a request that is malformed or too long. Its body has the fields of both APIs, because nothing tells
/// which one the caller meant.
pub fn refusal(status: StatusCode) -> (StatusCode, Json<Value>) {
    let message = match status {
        StatusCode::URI_TOO_LONG => "the request's target is longer than 65,534 bytes",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => {
            "the request has more than 128 headers, or its head is longer than 256 KiB"
        }
        _ => "the request is malformed: this server speaks HTTP/1.1",
    };
    let code = status.as_u16();
    (status, Json(json!({ "code": code, "status": code, "kind": "usage", "message": message, "hints": [] })))
}

/// The whole response for a bare refusal of hyper; none if the bytes are something else.
fn explained(bytes: &[u8]) -> Option<Bytes> {
    let head = std::str::from_utf8(bytes).ok()?.strip_prefix("HTTP/1.1 ")?;
    let is_bare =
        head.ends_with("\r\n\r\n") && head.to_ascii_lowercase().contains("\r\ncontent-length: 0\r\n");
    let status = head.get(..3).filter(|_| is_bare)?;
    let status = ["400", "414", "431"].contains(&status).then(|| status.parse::<StatusCode>().ok())??;
    let (status, Json(body)) = refusal(status);
    let (body, reason) = (body.to_string(), status.canonical_reason().unwrap_or_default());
    let head = format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        status.as_u16(),
        body.len()
    );
    Some((head + &body).into())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const BARE: &[u8] = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\ndate: x\r\n\r\n";

    async fn pass(turns: &ConnectionTurns, bytes: &[u8]) -> String {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let mut stream = ExplainedStream::new(near, turns.clone());
        stream.write_all(bytes).await.unwrap();
        stream.flush().await.unwrap();
        drop(stream);
        let mut text = String::new();
        far.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn bare_refusals_get_a_body() {
        let text = pass(&ConnectionTurns::default(), BARE).await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{text}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!((&body["code"], &body["kind"]), (&json!(431), &json!("usage")));
        for other in
            ["HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nab", "HTTP/1.1 100 Continue\r\n\r\n"]
        {
            assert_eq!(pass(&ConnectionTurns::default(), other.as_bytes()).await, other);
        }
    }

    #[tokio::test]
    async fn responses_to_requests_pass_unchanged() {
        let turns = ConnectionTurns::default();
        let response = turns.answer(async { Response::new(Body::empty()) }).await;
        assert_eq!(pass(&turns, BARE).await.as_bytes(), BARE, "its body is still being sent");
        drop(response);
        assert_eq!(pass(&turns, BARE).await.as_bytes(), BARE, "it is not flushed yet");
        assert_ne!(pass(&turns, BARE).await.as_bytes(), BARE, "it is flushed");
        let switch = async {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            response
        };
        drop(turns.answer(switch).await);
        for _ in 0..2 {
            assert_eq!(pass(&turns, BARE).await.as_bytes(), BARE, "the bytes belong to another protocol");
        }
    }
}
