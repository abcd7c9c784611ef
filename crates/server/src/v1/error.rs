//! The one error body of the native API.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use proto::{Failure, Kind};
use serde::Serialize;
use utoipa::ToSchema;

/// Why a request was not done: whose fault, what happened, what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Error)]
pub struct ErrorBody {
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// What happened.
    pub message: String,
    /// What to do about it.
    pub hints: Vec<String>,
    /// The status of this answer.
    #[schema(minimum = 400, maximum = 599)]
    pub status: u16,
}

/// Whose fault an error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request makes no sense.
    Usage,
    /// What it names is not there.
    NotFound,
    /// It clashes with what is there now.
    Conflict,
    /// Policy or permission says no.
    Denied,
    /// A limit was reached.
    Limit,
    /// The host cannot do it, now or at all.
    Host,
    /// What was frozen could not be thawed whole.
    RestoreIncomplete,
    /// A bug of ours.
    Internal,
}

impl From<Kind> for ErrorKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Usage => Self::Usage,
            Kind::NotFound | Kind::CommandNotFound => Self::NotFound,
            Kind::Conflict => Self::Conflict,
            Kind::Denied | Kind::CommandNotExecutable => Self::Denied,
            Kind::Limit => Self::Limit,
            Kind::Host => Self::Host,
            Kind::RestoreIncomplete => Self::RestoreIncomplete,
            Kind::Internal => Self::Internal,
        }
    }
}

/// An answer that says no.
#[derive(Debug)]
pub struct V1Refusal {
    status: StatusCode,
    failure: Failure,
}

impl V1Refusal {
    /// With another status than the kind's own.
    pub fn with(status: StatusCode, failure: Failure) -> Self {
        Self { status, failure }
    }

    /// Nobody knows who is asking.
    pub fn unknown_caller() -> Self {
        let failure = Failure::new(Kind::Denied, "this needs a valid API key")
            .hint("send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`")
            .hint("make one: pal keys create NAME");
        Self::with(StatusCode::UNAUTHORIZED, failure)
    }
}

impl From<Failure> for V1Refusal {
    fn from(failure: Failure) -> Self {
        let status =
            StatusCode::from_u16(failure.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self { status, failure }
    }
}

impl IntoResponse for V1Refusal {
    fn into_response(self) -> Response {
        let Self { status, failure } = self;
        // Causes may name paths of the host; they are for whoever runs the server.
        if status.is_server_error() {
            tracing::warn!(status = status.as_u16(), causes = ?failure.causes(), "{failure}");
        }
        let body = ErrorBody {
            kind: failure.kind.into(),
            message: failure.message,
            hints: failure.hints,
            status: status.as_u16(),
        };
        let mut response = (status, Json(body)).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
