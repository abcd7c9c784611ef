//! Connect over HTTP, as the guest serves it: request messages in, answers out.
//!
//! `proto::connect` has the protocol itself.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use proto::{
    connect::{self, ENCODING_HEADERS},
    envelope::{END, EnvelopeReader},
};

pub use proto::connect::{Code, Codec, ConnectError, MessageFraming, end_envelope};

use crate::reply::{HttpReply, PlainRefusal, ReplyBody};

/// Longest message either way.
pub const MESSAGE_LEN_MAX: usize = 16 << 20;
/// How long a caller may be silent inside one request message.
const MESSAGE_WAIT: Duration = Duration::from_secs(60);

/// Reads the content type of a call; `None` is a type outside of Connect.
pub fn kind_of(headers: &HeaderMap) -> Option<(Codec, MessageFraming)> {
    connect::parse_content_type(headers.get(header::CONTENT_TYPE)?.to_str().ok()?)
}

/// 404: the service has no such method.
pub fn unknown_method() -> HttpReply {
    PlainRefusal::new(StatusCode::NOT_FOUND, "no such method").reply()
}

/// 415, and the types that the call takes.
pub fn unsupported_type(shape: MessageFraming) -> HttpReply {
    let mut reply = crate::reply::empty(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    reply.headers_mut().insert("accept-post", HeaderValue::from_static(shape.accepted_types()));
    reply
}

/// Refuses compressed requests.
pub fn check_encoding(headers: &HeaderMap) -> Result<(), ConnectError> {
    let mut named = ENCODING_HEADERS.iter().filter_map(|name| headers.get(*name));
    named.try_for_each(|value| connect::check_encoding(value.as_bytes()))
}

/// `Connect-Timeout-Ms`; 0 is none.
pub fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, ConnectError> {
    headers.get("connect-timeout-ms").map_or(Ok(None), |value| connect::parse_timeout(value.as_bytes()))
}

/// `Keepalive-Ping-Interval`, in seconds.
pub fn keepalive_of(headers: &HeaderMap) -> Duration {
    connect::parse_keepalive(headers.get("keepalive-ping-interval").and_then(|value| value.to_str().ok()))
}

/// The one message of a unary call.
pub async fn whole(body: Incoming) -> Result<Bytes, ConnectError> {
    let read = Limited::new(body, MESSAGE_LEN_MAX).collect();
    match tokio::time::timeout(MESSAGE_WAIT, read).await {
        Err(_) => Err(ConnectError::new(Code::DeadlineExceeded, "the request did not arrive in time")),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_long()),
        Ok(Err(error)) => Err(ConnectError::invalid(format!("the request was cut: {error}"))),
    }
}

/// The messages of a streaming request, one after the other.
pub struct Messages {
    body: Incoming,
    opener: EnvelopeReader,
    ended: bool,
}

impl Messages {
    pub fn new(body: Incoming) -> Self {
        Self { body, opener: EnvelopeReader::new(MESSAGE_LEN_MAX), ended: false }
    }

    /// The next message; `None` when the caller has said all.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ConnectError> {
        loop {
            if let Some(envelope) =
                self.opener.next().map_err(|error| ConnectError::invalid(error.to_string()))?
            {
                if envelope.flags & END != 0 {
                    continue;
                }
                return Ok(Some(envelope.message));
            }
            if self.ended {
                self.opener.finish().map_err(|error| ConnectError::invalid(error.to_string()))?;
                return Ok(None);
            }
            self.read_more().await?;
        }
    }

    /// The only message, which must come soon.
    ///
    /// The request is read to its end: a connection that is closed with something unread is reset, and what the
    /// caller had not read by then would be lost.
    pub async fn only(mut self) -> Result<Bytes, ConnectError> {
        let only = async {
            let message =
                self.next().await?.ok_or_else(|| ConnectError::invalid("the request holds no message"))?;
            match self.next().await? {
                None => Ok(message),
                Some(_) => Err(ConnectError::invalid("the request holds more than one message")),
            }
        };
        let late = |_| ConnectError::new(Code::DeadlineExceeded, "the request did not arrive in time");
        tokio::time::timeout(MESSAGE_WAIT, only).await.map_err(late)?
    }

    async fn read_more(&mut self) -> Result<(), ConnectError> {
        match self.body.frame().await {
            None => self.ended = true,
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.opener.push(data);
                }
            }
            Some(Err(error)) => return Err(ConnectError::invalid(format!("the request was cut: {error}"))),
        }
        Ok(())
    }
}

/// The HTTP status of a code.
pub fn status_of(code: Code) -> StatusCode {
    StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// The answer to a unary call.
pub fn unary_reply(codec: Codec, answer: Result<Bytes, ConnectError>) -> HttpReply {
    let (status, kind, body) = match answer {
        Ok(body) => (StatusCode::OK, codec.content_type(MessageFraming::Unary), body),
        Err(fault) => (status_of(fault.code), "application/json", fault.json().to_string().into()),
    };
    let mut reply = Response::new(ReplyBody::Whole(body));
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

/// The answer to a streaming call: always 200, errors come in the last envelope.
pub fn stream_reply(codec: Codec, answer: Result<ReplyBody, ConnectError>) -> HttpReply {
    let kind = codec.content_type(MessageFraming::Stream);
    let payload = answer.unwrap_or_else(|fault| ReplyBody::Whole(end_envelope(Some(&fault))));
    let mut reply = Response::new(payload);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

fn too_long() -> ConnectError {
    ConnectError::new(Code::ResourceExhausted, format!("a message may hold {MESSAGE_LEN_MAX} bytes"))
}
