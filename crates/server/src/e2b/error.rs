//! Error responses in E2B's format.

use axum::{
    Json,
    http::{HeaderValue, StatusCode},
    response::{IntoResponse, Response},
};
use proto::{Failure, Kind};
use serde_json::json;

use crate::idempotency::IdempotencyError;

/// A refused request, ready to be sent as a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct E2bRefusal {
    /// The HTTP status; it is also in the response body, because the JavaScript SDK reads only that.
    pub status: StatusCode,
    /// A description of the failure, with hints.
    pub message: String,
    /// An error code for programs.
    pub code: Option<&'static str>,
}

impl E2bRefusal {
    /// A refusal with a status and a message.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), code: None }
    }

    /// The request is invalid.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// The sandbox does not exist, or this caller may not see it.
    pub fn no_sandbox(id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("sandbox \"{}\" was not found", proto::text::visible(id)))
    }

    /// A feature that E2B has and this server lacks.
    pub fn absent(what: &str) -> Self {
        let message = format!("this server has no {what}");
        Self { code: Some("not_supported"), ..Self::new(StatusCode::NOT_IMPLEMENTED, message) }
    }
}

impl From<Failure> for E2bRefusal {
    fn from(failure: Failure) -> Self {
        let status =
            StatusCode::from_u16(failure.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // The causes of host failures and bugs go to the server's own log, not to callers.
        Self::new(status, failure.message)
    }
}

impl From<IdempotencyError> for E2bRefusal {
    fn from(error: IdempotencyError) -> Self {
        match error {
            IdempotencyError::Key => Self::bad(error.to_string()),
            IdempotencyError::OtherRequest => Self::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()),
            IdempotencyError::Lookup(failure) => failure.into(),
        }
    }
}

impl IntoResponse for E2bRefusal {
    fn into_response(self) -> Response {
        let mut body = json!({ "code": self.status.as_u16(), "message": self.message });
        if let Some(code) = self.code {
            body["error_code"] = code.into();
        }
        let mut response = (self.status, Json(body)).into_response();
        if self.status.as_u16() == Kind::Limit.http_status() {
            response.headers_mut().insert("retry-after", HeaderValue::from_static("1"));
        }
        response
    }
}
