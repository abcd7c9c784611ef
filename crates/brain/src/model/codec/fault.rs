//! Errors of model endpoints: a status, a JSON body or an error event becomes a [`ModelError`].

use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::model::{ModelError, TokenUsage};

const MESSAGE_CHARS_MAX: usize = 2000;

/// Texts by which providers say that a conversation is too long; most give no code of their own for it.
const OVERFLOW_TEXTS: &[&str] = &[
    "context_length_exceeded",
    "context length",
    "context window",
    "context size",
    "prompt is too long",
    "input is too long",
    "input length and `max_tokens` exceed",
    "too many tokens",
    "reduce the length of the messages",
    "exceeds the maximum number of tokens",
];

/// Codes and texts by which providers say that their policy forbids an answer.
const POLICY_TEXTS: &[&str] = &[
    "content_policy_violation",
    "content_filter",
    "content management policy",
    "invalid_prompt",
    "usage policy",
];

/// Codes that mean a key without credit; they come with status 429, but waiting does not help.
const CREDIT_TEXTS: &[&str] = &["insufficient_quota", "billing_error", "credit balance is too low"];

/// The error object of a provider.
#[derive(Debug, Default, PartialEq)]
struct ProviderError {
    /// Type and code, each possibly empty.
    labels: [String; 2],
    message: String,
}

impl ProviderError {
    fn read(text: &str) -> Self {
        match serde_json::from_str::<Value>(text) {
            Ok(value) => Self::from_value(&value),
            Err(_) => Self { message: shorten(text.trim()), ..Self::default() },
        }
    }

    fn from_value(value: &Value) -> Self {
        let error = value.get("error").filter(|error| !error.is_null()).unwrap_or(value);
        let message = [error.get("message"), error.get("detail"), error.get("msg"), Some(error)]
            .into_iter()
            .flatten()
            .find_map(Value::as_str)
            .map_or_else(|| error.to_string(), str::to_owned);
        Self {
            labels: [to_label(error.get("type")), to_label(error.get("code"))],
            message: shorten(&message),
        }
    }

    fn says(&self, texts: &[&str]) -> bool {
        let all = format!("{} {} {}", self.labels[0], self.labels[1], self.message).to_lowercase();
        texts.iter().any(|text| all.contains(text))
    }

    /// The HTTP status that fits the labels, for errors that come without one.
    fn status(&self) -> u16 {
        self.labels.iter().find_map(|label| to_status(label)).unwrap_or(500)
    }
}

fn to_label(value: Option<&Value>) -> String {
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => String::new(),
    }
}

fn to_status(label: &str) -> Option<u16> {
    Some(match label {
        "invalid_request_error" | "context_length_exceeded" | "invalid_prompt" => 400,
        "authentication_error" | "invalid_api_key" => 401,
        "billing_error" | "insufficient_quota" => 402,
        "permission_error" => 403,
        "not_found_error" | "model_not_found" => 404,
        "request_too_large" => 413,
        "rate_limit_error" | "rate_limit_exceeded" | "too_many_requests" => 429,
        "timeout_error" => 504,
        "overloaded_error" | "server_is_overloaded" | "slow_down" => 529,
        "api_error" | "server_error" => 500,
        number => return number.parse().ok().filter(|status| (400..600).contains(status)),
    })
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// The error that an answer with a status other than 200 means.
pub fn read_status(status: u16, body: &str, retry_after: Option<Duration>) -> ModelError {
    sort(status, ProviderError::read(body), retry_after)
}

/// The error that an error event in a stream means.
pub fn read_event(value: &Value) -> ModelError {
    let error = ProviderError::from_value(value);
    sort(error.status(), error, None)
}

fn sort(status: u16, error: ProviderError, retry_after: Option<Duration>) -> ModelError {
    if error.says(CREDIT_TEXTS) {
        return ModelError::Authentication { status, message: error.message };
    }
    match status {
        400 | 413 | 422 if error.says(OVERFLOW_TEXTS) => {
            ModelError::ContextOverflow { message: error.message }
        }
        400 | 403 | 422 if error.says(POLICY_TEXTS) => {
            ModelError::Refused { message: error.message, usage: TokenUsage::default() }
        }
        413 => ModelError::RequestTooLarge { message: error.message },
        401..=403 | 407 => ModelError::Authentication { status, message: error.message },
        429 => ModelError::RateLimited { retry_after, message: error.message },
        503 | 529 => ModelError::Overloaded { retry_after, message: error.message },
        408 | 409 | 425 | 500.. => ModelError::Server { status, retry_after, message: error.message },
        _ => ModelError::BadRequest { status, message: error.message },
    }
}

/// Reads how long a provider asks to wait: milliseconds, seconds or a date.
pub fn read_retry_after(
    milliseconds: Option<&str>,
    seconds_or_date: Option<&str>,
    now: SystemTime,
) -> Option<Duration> {
    let milliseconds =
        milliseconds.and_then(|text| text.trim().parse::<f64>().ok()).map(|value| value / 1000.0);
    let text = seconds_or_date.map(str::trim);
    let seconds = milliseconds.or_else(|| text?.parse().ok());
    match seconds {
        Some(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        None => Some(httpdate::parse_http_date(text?).ok()?.duration_since(now).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_status_and_its_body_become_one_kind_of_error() {
        let cases = [
            (429, r#"{"error":{"message":"slow","type":"rate_limit_exceeded","code":null}}"#, "rate_limited"),
            (
                429,
                r#"{"error":{"message":"pay","type":"insufficient_quota","code":"insufficient_quota"}}"#,
                "authentication",
            ),
            (
                529,
                r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
                "overloaded",
            ),
            (503, "<html>busy</html>", "overloaded"),
            (500, "", "server_error"),
            (502, "bad gateway", "server_error"),
            (408, "{}", "server_error"),
            (401, r#"{"error":"no key"}"#, "authentication"),
            (403, r#"{"detail":"forbidden"}"#, "authentication"),
            (
                400,
                r#"{"error":{"message":"prompt is too long: 9 > 8","type":"invalid_request_error"}}"#,
                "context_overflow",
            ),
            (400, r#"{"error":{"code":"context_length_exceeded","message":"x"}}"#, "context_overflow"),
            (
                400,
                r#"{"message":"This model's maximum context length is 8 tokens","code":400}"#,
                "context_overflow",
            ),
            (
                413,
                r#"{"type":"error","error":{"type":"request_too_large","message":"Request exceeds 32 MB"}}"#,
                "request_too_large",
            ),
            (400, r#"{"error":{"code":"content_policy_violation","message":"x"}}"#, "refused"),
            (400, r#"{"error":{"message":"tool x unknown"}}"#, "bad_request"),
            (404, r#"{"error":{"message":"no such model"}}"#, "bad_request"),
            (302, "", "bad_request"),
        ];
        for (status, body, kind) in cases {
            assert_eq!(read_status(status, body, None).kind(), kind, "{status} {body}");
        }
        let wait = Some(Duration::from_secs(3));
        assert_eq!(read_status(429, "", wait).retry_after(), wait);
    }

    #[test]
    fn an_error_event_is_sorted_by_its_labels() {
        let cases = [
            (json!({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}), "overloaded"),
            (json!({"type": "error", "code": "server_error", "message": "x"}), "server_error"),
            (json!({"code": "rate_limit_exceeded", "message": "x"}), "rate_limited"),
            (json!({"error": {"code": 429, "message": "x"}}), "rate_limited"),
            (json!({"error": {"code": 502, "message": "x"}}), "server_error"),
            (json!({"error": {"message": "x"}}), "server_error"),
            (json!({"error": "context window exceeded", "type": "invalid_request_error"}), "server_error"),
            (json!({"code": "context_length_exceeded", "message": "x"}), "context_overflow"),
            (json!({"code": "invalid_prompt", "message": "flagged"}), "refused"),
            (json!(null), "server_error"),
        ];
        for (value, kind) in cases {
            assert_eq!(read_event(&value).kind(), kind, "{value}");
        }
    }

    #[test]
    fn a_wait_is_read_as_milliseconds_seconds_or_date() {
        let now = httpdate::parse_http_date("Wed, 18 Nov 2026 08:00:00 GMT").unwrap();
        let read = |ms, other| read_retry_after(ms, other, now);
        assert_eq!(read(Some("1500"), Some("7")), Some(Duration::from_millis(1500)));
        assert_eq!(read(None, Some(" 7 ")), Some(Duration::from_secs(7)));
        assert_eq!(read(None, Some("0.5")), Some(Duration::from_millis(500)));
        assert_eq!(read(None, Some("Wed, 18 Nov 2026 08:00:09 GMT")), Some(Duration::from_secs(9)));
        assert_eq!(read(None, Some("Wed, 18 Nov 2026 07:00:00 GMT")), Some(Duration::ZERO));
        for text in ["-1", "nan", "inf", "1e300", "soon", ""] {
            assert_eq!(read(None, Some(text)), None, "{text}");
        }
        assert_eq!(read(Some("x"), None), None);
    }
}
