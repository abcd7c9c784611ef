//! Answers to callers: bodies and plain (not Connect) replies.
//!
//! Invariant: a body that fails ends with an error, which aborts the connection; an incomplete answer never looks
//! complete.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::{
    Response, StatusCode,
    body::{Body, Frame, SizeHint},
    header::{self, HeaderValue},
};
use serde::Serialize;

/// An answer.
pub type HttpReply = Response<ReplyBody>;

/// Produces a body piece by piece, when the connection has room for one.
pub trait BodySource {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>>;
}

/// The body of an answer.
pub enum ReplyBody {
    Whole(Bytes),
    Pieces { source: Box<dyn BodySource>, left: Option<u64> },
}

impl ReplyBody {
    pub fn empty() -> Self {
        Self::Whole(Bytes::new())
    }

    /// A body of unknown length.
    pub fn pieces(source: impl BodySource + 'static) -> Self {
        Self::Pieces { source: Box::new(source), left: None }
    }

    /// A body of exactly `len` bytes.
    pub fn sized(source: impl BodySource + 'static, len: u64) -> Self {
        Self::Pieces { source: Box::new(source), left: Some(len) }
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match self.get_mut() {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Pieces { source, left } => {
                let piece = std::task::ready!(source.poll_next(cx));
                if let (Some(Ok(bytes)), Some(left)) = (&piece, left) {
                    *left = left.saturating_sub(bytes.len() as u64);
                }
                Poll::Ready(piece.map(|piece| piece.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Pieces { left: Some(left), .. } => SizeHint::with_exact(*left),
            Self::Pieces { left: None, .. } => SizeHint::default(),
        }
    }
}

/// An error of a plain request: `{"code": status, "message": …}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainRefusal {
    pub status: StatusCode,
    pub message: String,
}

impl PlainRefusal {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub fn reply(&self) -> HttpReply {
        let body = serde_json::json!({ "code": self.status.as_u16(), "message": self.message });
        with_json(self.status, body.to_string())
    }
}

/// Answers 200 with JSON.
pub fn json(value: &impl Serialize) -> HttpReply {
    match serde_json::to_string(value) {
        Ok(text) => with_json(StatusCode::OK, text),
        Err(error) => PlainRefusal::internal(error.to_string()).reply(),
    }
}

/// Answers without a body.
pub fn empty(status: StatusCode) -> HttpReply {
    let mut reply = Response::new(ReplyBody::empty());
    *reply.status_mut() = status;
    reply
}

fn with_json(status: StatusCode, text: String) -> HttpReply {
    let mut reply = Response::new(ReplyBody::Whole(text.into()));
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// Lets browsers read every answer; the token, not the origin, is what protects the guest.
pub fn allow_browsers(reply: &mut HttpReply) {
    let headers = reply.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(
        header::ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static("Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, Location, Cache-Control, X-Content-Type-Options"),
    );
}

/// Answers a CORS preflight request.
pub fn preflight() -> HttpReply {
    let mut reply = empty(StatusCode::NO_CONTENT);
    let headers = reply.headers_mut();
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("HEAD, GET, POST, PUT, PATCH, DELETE"),
    );
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*"));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    reply
}
