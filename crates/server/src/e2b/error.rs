//! Refusals in E2B's words.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use proto::Failure;
use serde_json::json;

/// An answer that says no.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Its status, also in the body: the JavaScript SDK reads only that.
    pub status: StatusCode,
    /// What happened and what to do.
    pub message: String,
}

impl Refusal {
    /// A refusal.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let status = StatusCode::from_u16(failure.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self::new(status, failure.message)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "code": self.status.as_u16(), "message": self.message }))).into_response()
    }
}
