//! Answers and errors in the three wire formats.

mod anthropic;
mod chat;
mod responses;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::model::{Wire, scripted::track::PlannedAnswer};

/// How many characters one event of a stream carries.
const PIECE_CHARS: usize = 7;

/// An answer in both of its forms.
pub struct WireAnswer {
    /// The events of a stream, each with its empty line.
    pub events: Vec<String>,
    /// The one document of an answer that is no stream.
    pub document: String,
}

impl WireAnswer {
    /// Writes an answer, or a refusal in its place.
    pub fn write(wire: Wire, model: &str, planned: &PlannedAnswer, is_refusal: bool) -> Self {
        match wire {
            Wire::Anthropic => anthropic::write(model, planned, is_refusal),
            Wire::Chat | Wire::Script => chat::write(model, planned, is_refusal),
            Wire::Responses => responses::write(model, planned, is_refusal),
        }
    }
}

/// The kinds of errors that a status tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorLabel {
    Invalid,
    Authentication,
    Overflow,
    RateLimit,
    Overload,
    Server,
}

impl ErrorLabel {
    /// The HTTP status. OpenAI has no 529 of its own.
    pub fn status(self, wire: Wire) -> u16 {
        match self {
            Self::Invalid | Self::Overflow => 400,
            Self::Authentication => 401,
            Self::RateLimit => 429,
            Self::Overload if wire == Wire::Anthropic => 529,
            Self::Overload => 503,
            Self::Server => 500,
        }
    }

    /// Whether a client may come again.
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::RateLimit | Self::Overload | Self::Server)
    }
}

/// The body of an error.
pub fn error_document(wire: Wire, label: ErrorLabel, message: &str) -> String {
    let message = match label {
        ErrorLabel::Overflow if wire == Wire::Anthropic => {
            "prompt is too long: 200001 tokens > 200000 maximum"
        }
        ErrorLabel::Overflow => "This model's maximum context length is 128000 tokens.",
        _ => message,
    };
    let (kind, code) = match (wire, label) {
        (Wire::Anthropic, ErrorLabel::Invalid | ErrorLabel::Overflow) => ("invalid_request_error", None),
        (Wire::Anthropic, ErrorLabel::Authentication) => ("authentication_error", None),
        (Wire::Anthropic, ErrorLabel::RateLimit) => ("rate_limit_error", None),
        (Wire::Anthropic, ErrorLabel::Overload) => ("overloaded_error", None),
        (Wire::Anthropic, ErrorLabel::Server) => ("api_error", None),
        (_, ErrorLabel::Invalid) => ("invalid_request_error", None),
        (_, ErrorLabel::Overflow) => ("invalid_request_error", Some("context_length_exceeded")),
        (_, ErrorLabel::Authentication) => ("invalid_request_error", Some("invalid_api_key")),
        (_, ErrorLabel::RateLimit) => ("requests", Some("rate_limit_exceeded")),
        (_, ErrorLabel::Overload) => ("service_unavailable_error", Some("server_is_overloaded")),
        (_, ErrorLabel::Server) => ("server_error", None),
    };
    let document = match wire {
        Wire::Anthropic => json!({ "type": "error", "error": { "type": kind, "message": message } }),
        _ => json!({ "error": { "message": message, "type": kind, "param": null, "code": code } }),
    };
    document.to_string()
}

/// The event of an error in the middle of a stream.
pub fn error_event(wire: Wire, message: &str) -> String {
    match wire {
        Wire::Anthropic => named_event(&json!({
            "type": "error",
            "error": { "type": "overloaded_error", "message": message },
        })),
        Wire::Responses => named_event(&json!({
            "type": "error", "sequence_number": 999, "code": "server_is_overloaded", "message": message, "param": null,
        })),
        _ => plain_event(&json!({ "error": {
            "message": message, "type": "service_unavailable_error", "param": null, "code": "server_is_overloaded",
        } })),
    }
}

/// An event whose name is its type.
fn named_event(value: &Value) -> String {
    format!("event: {}\ndata: {value}\n\n", value["type"].as_str().unwrap_or_default())
}

/// An event without a name.
fn plain_event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// Cuts a text into the pieces of a stream. An empty text has no piece.
fn cut(text: &str) -> impl Iterator<Item = String> {
    let letters: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = letters.chunks(PIECE_CHARS).map(|piece| piece.iter().collect()).collect();
    pieces.into_iter()
}

/// The signature under a thought, by which the server knows it again.
pub fn sign(thought: &str) -> String {
    let digest = Sha256::digest(thought.as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An id that follows from the answer.
fn make_id(prefix: &str, planned: &PlannedAnswer) -> String {
    let digest = sign(&format!("{:?} {} {:?}", planned.think, planned.text, planned.calls));
    format!("{prefix}{}", &digest[..24])
}
