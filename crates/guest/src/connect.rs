//! The part of the Connect protocol that the E2B SDKs and we use: unary and streaming calls, JSON and protobuf.
//!
//! Absent on purpose: compression, gRPC, GET requests.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use proto::{
    envelope::{self, END, EnvelopeReader},
    guest::StartRefusal,
};
use serde::{Serialize, de::DeserializeOwned};

use crate::reply::{HttpReply, ReplyBody};

/// Longest message either way.
pub const MESSAGE_LEN_MAX: usize = 16 << 20;
/// How long a caller may be silent inside one request message.
const MESSAGE_WAIT: Duration = Duration::from_secs(60);
/// Longest deadline that is not "none".
const TIMEOUT_MS_MAX: u64 = 10 * 365 * 24 * 3600 * 1000;

/// Connect's error codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unavailable,
    Unauthenticated,
}

impl Code {
    fn word_and_status(self) -> (&'static str, u16) {
        match self {
            Self::InvalidArgument => ("invalid_argument", 400),
            Self::DeadlineExceeded => ("deadline_exceeded", 504),
            Self::NotFound => ("not_found", 404),
            Self::AlreadyExists => ("already_exists", 409),
            Self::PermissionDenied => ("permission_denied", 403),
            Self::ResourceExhausted => ("resource_exhausted", 429),
            Self::FailedPrecondition => ("failed_precondition", 400),
            Self::Unimplemented => ("unimplemented", 501),
            Self::Internal => ("internal", 500),
            Self::Unavailable => ("unavailable", 503),
            Self::Unauthenticated => ("unauthenticated", 401),
        }
    }

    pub fn status(self) -> StatusCode {
        StatusCode::from_u16(self.word_and_status().1).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

/// The reason why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectError {
    pub code: Code,
    pub message: String,
    /// A machine-readable reason in a field of its own, because Connect's codes are too coarse for it.
    pub reason: Option<StartRefusal>,
}

impl ConnectError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), reason: None }
    }

    /// Adds a reason by which programs can tell this failure from others.
    pub fn reason(self, reason: StartRefusal) -> Self {
        Self { reason: Some(reason), ..self }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    fn json(&self) -> serde_json::Value {
        let mut object =
            serde_json::json!({ "code": self.code.word_and_status().0, "message": self.message });
        if let Some(reason) = self.reason {
            object["reason"] = serde_json::json!(reason);
        }
        object
    }
}

/// The encoding of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Json,
    Proto,
}

/// Whether a call carries single messages or streams of envelopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageFraming {
    Unary,
    Stream,
}

impl Codec {
    pub fn encode<M: prost::Message + Serialize>(self, message: &M) -> Bytes {
        match self {
            Self::Proto => message.encode_to_vec().into(),
            Self::Json => serde_json::to_vec(message).unwrap_or_default().into(),
        }
    }

    pub fn decode<M: prost::Message + Default + DeserializeOwned>(
        self,
        bytes: &[u8],
    ) -> Result<M, ConnectError> {
        match self {
            Self::Proto => {
                M::decode(bytes).map_err(|error| ConnectError::invalid(format!("not a message: {error}")))
            }
            Self::Json => serde_json::from_slice(bytes)
                .map_err(|error| ConnectError::invalid(format!("not a message: {error}"))),
        }
    }
}

/// Codec and framing that the content type names; `None` for a type that the guest does not support.
pub fn kind_of(headers: &HeaderMap) -> Option<(Codec, MessageFraming)> {
    let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    match kind.split(';').next()?.trim().to_ascii_lowercase().as_str() {
        "application/json" => Some((Codec::Json, MessageFraming::Unary)),
        "application/proto" => Some((Codec::Proto, MessageFraming::Unary)),
        "application/connect+json" => Some((Codec::Json, MessageFraming::Stream)),
        "application/connect+proto" => Some((Codec::Proto, MessageFraming::Stream)),
        _ => None,
    }
}

/// Answers 415 and lists the supported content types.
pub fn unsupported_type(shape: MessageFraming) -> HttpReply {
    let mut reply = crate::reply::empty(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let supported = match shape {
        MessageFraming::Unary => "application/json, application/proto",
        MessageFraming::Stream => "application/connect+json, application/connect+proto",
    };
    reply.headers_mut().insert("accept-post", HeaderValue::from_static(supported));
    reply
}

/// Refuses compressed requests.
pub fn check_encoding(headers: &HeaderMap) -> Result<(), ConnectError> {
    for name in ["content-encoding", "connect-content-encoding"] {
        match headers.get(name).map(HeaderValue::as_bytes) {
            None | Some(b"identity" | b"") => {}
            Some(_) => {
                return Err(ConnectError::new(Code::Unimplemented, "compressed requests are not supported"));
            }
        }
    }
    Ok(())
}

/// `Connect-Timeout-Ms`; 0 is none.
pub fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, ConnectError> {
    let Some(value) = headers.get("connect-timeout-ms") else { return Ok(None) };
    let ms: Option<u64> = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    match ms {
        Some(0) => Ok(None),
        Some(ms) if ms > TIMEOUT_MS_MAX => Ok(None),
        Some(ms) => Ok(Some(Duration::from_millis(ms))),
        None => Err(ConnectError::invalid("Connect-Timeout-Ms is not a number of milliseconds")),
    }
}

/// `Keepalive-Ping-Interval`, in seconds.
pub fn keepalive_of(headers: &HeaderMap) -> Duration {
    let seconds = headers.get("keepalive-ping-interval").and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.filter(|seconds| (1..=86_400).contains(seconds)).unwrap_or(90))
}

/// Reads the one message of a unary call.
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

    /// The next message; `None` after the last one.
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

    /// The only message of the request, which must arrive within `MESSAGE_WAIT`.
    ///
    /// The request is read to its end: the kernel resets a connection that is closed with unread bytes, and the
    /// caller would lose the part of the answer that it had not read yet.
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

/// The answer to a unary call.
pub fn unary_reply(codec: Codec, answer: Result<Bytes, ConnectError>) -> HttpReply {
    let (status, kind, body) = match (answer, codec) {
        (Ok(body), Codec::Json) => (StatusCode::OK, "application/json", body),
        (Ok(body), Codec::Proto) => (StatusCode::OK, "application/proto", body),
        (Err(fault), _) => (fault.code.status(), "application/json", fault.json().to_string().into()),
    };
    let mut reply = Response::new(ReplyBody::Whole(body));
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

/// The answer to a streaming call: always 200, errors come in the last envelope.
pub fn stream_reply(codec: Codec, answer: Result<ReplyBody, ConnectError>) -> HttpReply {
    let kind = match codec {
        Codec::Json => "application/connect+json",
        Codec::Proto => "application/connect+proto",
    };
    let payload = answer.unwrap_or_else(|fault| ReplyBody::Whole(end_envelope(Some(&fault))));
    let mut reply = Response::new(payload);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

/// The last envelope of a stream.
pub fn end_envelope(fault: Option<&ConnectError>) -> Bytes {
    match fault {
        None => envelope::seal(END, b"{}"),
        Some(fault) => {
            envelope::seal(END, serde_json::json!({ "error": fault.json() }).to_string().as_bytes())
        }
    }
}

/// An envelope around one large field of bytes, nested in messages: head, then the bytes themselves, not copied.
///
/// `path` names the fields from the outside in, each with its number and its JSON name.
pub fn nested_bytes(codec: Codec, path: &[(u8, &str)], data: &Bytes) -> (Bytes, Option<Bytes>) {
    match codec {
        Codec::Json => (nested_json(path, data), None),
        Codec::Proto => (nested_proto_head(path, data.len()), Some(data.clone())),
    }
}

fn nested_json(path: &[(u8, &str)], data: &[u8]) -> Bytes {
    let names: usize = path.iter().map(|(_, name)| name.len() + 5).sum();
    let len = names + data.len().div_ceil(3) * 4 + 2;
    let mut out = Vec::with_capacity(len + 5);
    out.put_u8(0);
    out.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
    for (_, name) in path {
        out.extend_from_slice(b"{\"");
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b"\":");
    }
    out.push(b'"');
    let from = out.len();
    out.resize(from + data.len().div_ceil(3) * 4, 0);
    // The room is exact, so this cannot fail; a failure would show as an empty text.
    let _ = STANDARD.encode_slice(data, &mut out[from..]);
    out.push(b'"');
    out.extend(std::iter::repeat_n(b'}', path.len()));
    out.into()
}

fn nested_proto_head(path: &[(u8, &str)], data_len: usize) -> Bytes {
    const LENGTH_DELIMITED: u8 = 2;
    let mut lens = Vec::with_capacity(path.len());
    let mut len = data_len;
    for _ in path {
        lens.push(len);
        len += 1 + prost::length_delimiter_len(len);
    }
    let mut head = BytesMut::with_capacity(5 + len - data_len);
    head.put_u8(0);
    head.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
    for ((number, _), len) in path.iter().zip(lens.into_iter().rev()) {
        head.put_u8(number << 3 | LENGTH_DELIMITED);
        // Room was reserved; the only error is a lack of it.
        let _ = prost::encode_length_delimiter(len, &mut head);
    }
    head.freeze()
}

fn too_long() -> ConnectError {
    ConnectError::new(Code::ResourceExhausted, format!("a message may hold {MESSAGE_LEN_MAX} bytes"))
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use proto::wire::process::{
        ProcessEvent, StartResponse,
        process_event::{DataEvent, Event, data_event::Output},
    };

    use super::*;

    #[test]
    fn nested_bytes_are_what_the_generated_code_would_write() {
        let path = [(1, "event"), (2, "data"), (2, "stderr")];
        for len in [0, 1, 2, 3, 127, 128, 40_000] {
            let data = Bytes::from(vec![0xfe_u8; len]);
            let output = Some(Output::Stderr(data.clone()));
            let event = Some(ProcessEvent { event: Some(Event::Data(DataEvent { output })) });
            let message = StartResponse { event };
            let (head, tail) = nested_bytes(Codec::Proto, &path, &data);
            assert_eq!([head, tail.unwrap()].concat(), envelope::seal(0, &message.encode_to_vec()));
            let (json, tail) = nested_bytes(Codec::Json, &path, &data);
            assert_eq!(tail, None);
            assert_eq!(json, envelope::seal(0, &serde_json::to_vec(&message).unwrap()));
        }
    }

    #[test]
    fn timeouts_are_milliseconds_and_zero_is_none() {
        let with = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("connect-timeout-ms", HeaderValue::from_str(text).unwrap());
            timeout_of(&headers).ok()
        };
        assert_eq!(with("1500"), Some(Some(Duration::from_millis(1500))));
        assert_eq!((with("0"), with("99999999999999999"), with("x")), (Some(None), Some(None), None));
        assert_eq!(timeout_of(&HeaderMap::new()), Ok(None));
    }

    #[test]
    fn deep_json_is_refused() {
        let deep = "[".repeat(10_000);
        let text = format!("{{\"process\":{deep}");
        assert!(Codec::Json.decode::<proto::wire::process::StartRequest>(text.as_bytes()).is_err());
    }
}
