//! The Connect protocol without its I/O: error codes, codecs, header values, and the messages of a stream.
//!
//! The guest, its client and the server use these functions, so they read one request by one set of rules.
//! [`crate::envelope`] has the framing.
//!
//! Absent on purpose: compression, gRPC, GET requests.
//! Trust: every value here comes from a peer that may be hostile.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    envelope::{self, END, EnvelopeReader},
    guest::StartRefusal,
    wire::process::{
        ProcessEvent, StartResponse,
        process_event::{Event, data_event::Output},
    },
};

/// Longest deadline that is not "none".
const TIMEOUT_MS_MAX: u64 = 10 * 365 * 24 * 3600 * 1000;
/// Seconds between keepalives where the caller asks for no other.
const KEEPALIVE_DEFAULT: u64 = 90;

/// The reason of a failure, in Connect's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are Connect's own")]
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
    const ALL: [Self; 11] = [
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::Unauthenticated,
    ];

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

    /// Connect's word.
    pub fn word(self) -> &'static str {
        self.word_and_status().0
    }

    /// The HTTP status of a unary answer.
    pub fn http_status(self) -> u16 {
        self.word_and_status().1
    }

    /// Reads Connect's word; a word that this version does not know is an internal error.
    pub fn from_word(word: &str) -> Self {
        Self::ALL.into_iter().find(|code| code.word() == word).unwrap_or(Self::Internal)
    }
}

/// The failure of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectError {
    /// Connect's code.
    pub code: Code,
    /// The text for a person.
    pub message: String,
    /// The reason of a refused start; Connect's own fields have no room for it.
    pub reason: Option<StartRefusal>,
}

impl ConnectError {
    /// An error with that code.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), reason: None }
    }

    /// Adds the reason that a program can tell from others.
    pub fn reason(self, reason: StartRefusal) -> Self {
        Self { reason: Some(reason), ..self }
    }

    /// An `invalid_argument`.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// An `internal`.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    /// The JSON that Connect sends.
    pub fn json(&self) -> serde_json::Value {
        let mut json = serde_json::json!({ "code": self.code.word(), "message": self.message });
        if let Some(reason) = self.reason {
            json["reason"] = serde_json::json!(reason);
        }
        json
    }
}

/// An error as a peer sent it; envd's plain HTTP paths send a number as code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentError {
    /// Connect's word, or the number as text.
    pub code: String,
    /// The peer's text, unchecked.
    pub message: String,
    /// The reason; none if this version does not know it.
    pub reason: Option<StartRefusal>,
}

impl SentError {
    /// Reads the body of an answer that is an error.
    pub fn parse(body: &[u8]) -> Option<Self> {
        Self::from_json(&serde_json::from_slice(body).ok()?)
    }

    /// Reads the last message of a stream; none if the stream ended well.
    pub fn parse_end(message: &[u8]) -> Option<Self> {
        let end: serde_json::Value = serde_json::from_slice(message).ok()?;
        Self::from_json(end.get("error")?)
    }

    fn from_json(json: &serde_json::Value) -> Option<Self> {
        let code = match json.get("code")? {
            serde_json::Value::String(code) => code.clone(),
            code => code.to_string(),
        };
        let message = json.get("message").and_then(serde_json::Value::as_str).unwrap_or_default();
        let reason = json.get("reason").and_then(|reason| StartRefusal::deserialize(reason).ok());
        Some(Self { code, message: message.to_owned(), reason })
    }
}

/// The encoding of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// JSON, as proto3 defines it.
    Json,
    /// Binary protobuf.
    Proto,
}

/// One message, or envelopes of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageFraming {
    /// One bare message.
    Unary,
    /// Envelopes.
    Stream,
}

impl Codec {
    /// Writes a message.
    pub fn encode<M: prost::Message + Serialize>(self, message: &M) -> Bytes {
        match self {
            Self::Proto => message.encode_to_vec().into(),
            Self::Json => serde_json::to_vec(message).unwrap_or_default().into(),
        }
    }

    /// Reads a message.
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

    /// The content type of messages in this encoding and framing.
    pub fn content_type(self, framing: MessageFraming) -> &'static str {
        match (self, framing) {
            (Self::Json, MessageFraming::Unary) => "application/json",
            (Self::Proto, MessageFraming::Unary) => "application/proto",
            (Self::Json, MessageFraming::Stream) => "application/connect+json",
            (Self::Proto, MessageFraming::Stream) => "application/connect+proto",
        }
    }

    /// Puts a message into an envelope.
    pub fn seal<M: prost::Message + Serialize>(self, message: &M) -> Bytes {
        envelope::seal(0, &self.encode(message))
    }
}

impl MessageFraming {
    /// The content types that a call of this framing takes.
    pub fn accepted_types(self) -> &'static str {
        match self {
            Self::Unary => "application/json, application/proto",
            Self::Stream => "application/connect+json, application/connect+proto",
        }
    }
}

/// Reads a content type; `None` is a type outside of Connect.
pub fn parse_content_type(value: &str) -> Option<(Codec, MessageFraming)> {
    let kind = value.split(';').next()?.trim().to_ascii_lowercase();
    [Codec::Json, Codec::Proto]
        .into_iter()
        .flat_map(|codec| [(codec, MessageFraming::Unary), (codec, MessageFraming::Stream)])
        .find(|(codec, framing)| codec.content_type(*framing) == kind)
}

/// Headers of an answer that a browser may show to its page.
pub const EXPOSED_HEADERS: &str =
    "Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, Location, Cache-Control, X-Content-Type-Options";

/// Headers that may name a compression of the request.
pub const ENCODING_HEADERS: [&str; 2] = ["content-encoding", "connect-content-encoding"];

/// Refuses a compressed request, by the value of one of [`ENCODING_HEADERS`].
pub fn check_encoding(value: &[u8]) -> Result<(), ConnectError> {
    match value {
        b"identity" | b"" => Ok(()),
        _ => Err(ConnectError::new(Code::Unimplemented, "compressed requests are not taken")),
    }
}

/// Reads `Connect-Timeout-Ms`; 0 is none.
pub fn parse_timeout(value: &[u8]) -> Result<Option<Duration>, ConnectError> {
    let ms: Option<u64> = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse().ok());
    match ms {
        Some(0) => Ok(None),
        Some(ms) if ms > TIMEOUT_MS_MAX => Ok(None),
        Some(ms) => Ok(Some(Duration::from_millis(ms))),
        None => Err(ConnectError::invalid("Connect-Timeout-Ms is not a number of milliseconds")),
    }
}

/// Reads `Keepalive-Ping-Interval`, in seconds.
pub fn parse_keepalive(value: Option<&str>) -> Duration {
    let seconds = value.and_then(|value| value.parse().ok());
    Duration::from_secs(seconds.filter(|seconds| (1..=86_400).contains(seconds)).unwrap_or(KEEPALIVE_DEFAULT))
}

/// The user part of Basic authorization.
pub fn parse_basic_user(value: &str) -> Option<String> {
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = STANDARD.decode(encoded.trim()).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    text.split_once(':').map(|(user, _)| user.to_owned())
}

/// Basic authorization that names a user.
pub fn basic_authorization(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}

/// The one message of a streaming request that has arrived as a whole.
pub fn only_message(body: &[u8], len_max: usize) -> Result<Bytes, ConnectError> {
    let invalid = |error: envelope::EnvelopeError| ConnectError::invalid(error.to_string());
    let mut reader = EnvelopeReader::new(len_max);
    reader.push(body);
    let mut only = None;
    while let Some(envelope) = reader.next().map_err(invalid)? {
        // An envelope that is marked as the end of a stream is no message.
        if envelope.flags & END == 0 && only.replace(envelope.message).is_some() {
            return Err(ConnectError::invalid("the request holds more than one message"));
        }
    }
    reader.finish().map_err(invalid)?;
    only.ok_or_else(|| ConnectError::invalid("the request holds no message"))
}

/// The last envelope of a stream.
pub fn end_envelope(error: Option<&ConnectError>) -> Bytes {
    match error {
        None => envelope::seal(END, b"{}"),
        Some(error) => {
            envelope::seal(END, serde_json::json!({ "error": error.json() }).to_string().as_bytes())
        }
    }
}

/// Puts an event of a process into an envelope.
pub fn seal_event(codec: Codec, event: Event) -> Bytes {
    codec.seal(&StartResponse { event: Some(ProcessEvent { event: Some(event) }) })
}

/// Puts output of a process into an envelope: its head, and the bytes where the codec needs no copy of them.
pub fn seal_output(codec: Codec, output: &Output) -> (Bytes, Option<Bytes>) {
    let (field, bytes) = match output {
        Output::Stdout(bytes) => ((1, "stdout"), bytes),
        Output::Stderr(bytes) => ((2, "stderr"), bytes),
        Output::Pty(bytes) => ((3, "pty"), bytes),
    };
    nested_bytes(codec, &[(1, "event"), (2, "data"), field], bytes)
}

/// An envelope around one large field of bytes, nested in messages: head, then the bytes themselves, not copied.
///
/// `path` names the fields from the outside in, each with its number and its JSON name.
fn nested_bytes(codec: Codec, path: &[(u8, &str)], data: &Bytes) -> (Bytes, Option<Bytes>) {
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

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::wire::process::process_event::DataEvent;

    #[test]
    fn sealed_output_is_what_the_generated_code_would_write() {
        for len in [0, 1, 2, 3, 127, 128, 40_000] {
            let data = Bytes::from(vec![0xfe_u8; len]);
            for output in
                [Output::Stdout(data.clone()), Output::Stderr(data.clone()), Output::Pty(data.clone())]
            {
                let event = Event::Data(DataEvent { output: Some(output.clone()) });
                let message = StartResponse { event: Some(ProcessEvent { event: Some(event.clone()) }) };
                let (head, tail) = seal_output(Codec::Proto, &output);
                assert_eq!([head, tail.unwrap()].concat(), envelope::seal(0, &message.encode_to_vec()));
                assert_eq!(seal_output(Codec::Json, &output), (seal_event(Codec::Json, event), None));
            }
        }
    }

    #[test]
    fn timeouts_are_milliseconds_and_zero_is_none() {
        let with = |text: &str| parse_timeout(text.as_bytes()).ok();
        assert_eq!(with("1500"), Some(Some(Duration::from_millis(1500))));
        assert_eq!((with("0"), with("99999999999999999"), with("x")), (Some(None), Some(None), None));
    }

    #[test]
    fn content_types_name_codec_and_framing() {
        let stream = Some((Codec::Json, MessageFraming::Stream));
        assert_eq!(parse_content_type("Application/Connect+JSON; charset=utf-8"), stream);
        assert_eq!(parse_content_type("application/proto"), Some((Codec::Proto, MessageFraming::Unary)));
        assert_eq!(parse_content_type("text/plain"), None);
    }

    #[test]
    fn the_user_is_the_first_part_of_basic() {
        assert_eq!(parse_basic_user("basic cm9vdDo="), Some("root".into()));
        assert_eq!(parse_basic_user("Bearer cm9vdDo="), None);
        assert_eq!(parse_basic_user(&basic_authorization("user")), Some("user".into()));
    }

    #[test]
    fn a_request_of_one_call_holds_one_message() {
        let (one, end) = (envelope::seal(0, b"one"), envelope::seal(END, b"two"));
        assert_eq!(only_message(&[&end[..], &one].concat(), 64).unwrap(), &b"one"[..]);
        for wrong in
            [Vec::new(), end.to_vec(), [&one[..], &one].concat(), one[..6].to_vec(), b"garbage".to_vec()]
        {
            assert!(only_message(&wrong, 64).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn errors_are_read_in_both_dialects() {
        let code = |body: &str| {
            let sent = SentError::parse(body.as_bytes())?;
            Some(sent.reason.map_or(sent.code, |reason| format!("{reason:?}")))
        };
        assert_eq!(code(r#"{"code":"not_found","message":"x"}"#).unwrap(), "not_found");
        assert_eq!(code(r#"{"code":404,"message":"x"}"#).unwrap(), "404");
        let missing = r#"{"code":"not_found","message":"x","reason":"command_not_found"}"#;
        assert_eq!(code(missing).unwrap(), "CommandNotFound");
        assert_eq!(code(&missing.replace("command_", "unheard_of_")).unwrap(), "not_found");
        assert_eq!(code("garbage"), None);
        assert_eq!(SentError::parse_end(b"{}"), None);
        let error = ConnectError::new(Code::DeadlineExceeded, "late");
        let end = end_envelope(Some(&error));
        let sent = SentError::parse_end(&end[5..]).unwrap();
        assert_eq!((Code::from_word(&sent.code), sent.message.as_str()), (error.code, "late"));
    }

    #[test]
    fn deep_json_is_refused() {
        let deep = "[".repeat(10_000);
        let text = format!("{{\"process\":{deep}");
        assert!(Codec::Json.decode::<crate::wire::process::StartRequest>(text.as_bytes()).is_err());
    }
}
