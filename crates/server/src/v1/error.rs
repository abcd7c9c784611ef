//! The error body that all routes of the native API share.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use proto::{Failure, Kind};
use serde::Serialize;
use utoipa::ToSchema;

/// Why the server refused a request: the kind of error, a message, and hints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Error)]
pub struct ErrorBody {
    /// The kind of error.
    pub kind: ErrorKind,
    /// A description of the failure.
    pub message: String,
    /// Steps that may help, most with a command or a request.
    pub hints: Vec<String>,
    /// The HTTP status of this response.
    #[schema(minimum = 400, maximum = 599)]
    pub status: u16,
}

/// An error that every operation may answer with, as the API's description names it.
pub struct NamedError {
    /// The HTTP status.
    pub status: u16,
    /// The name in the description.
    pub name: &'static str,
    /// The usual kind.
    pub kind: ErrorKind,
    /// When it is the answer.
    pub description: &'static str,
}

/// The errors that every operation may answer with.
pub const NAMED_ERRORS: &[NamedError] = &[
    named(400, "BadRequest", ErrorKind::Usage, "the request is invalid"),
    named(401, "Unauthorized", ErrorKind::Denied, "the request has no valid key"),
    named(403, "Forbidden", ErrorKind::Denied, "the scope of the key does not allow the request"),
    named(404, "NotFound", ErrorKind::NotFound, "there is no such resource, or the key does not reach it"),
    named(409, "Conflict", ErrorKind::Conflict, "the state of the resource does not allow the request"),
    named(
        429,
        "TooManyRequests",
        ErrorKind::Limit,
        "a limit was reached; `Retry-After` says when to try again",
    ),
    named(500, "InternalError", ErrorKind::Internal, "a bug in Palisade"),
    named(503, "Unavailable", ErrorKind::Host, "the host cannot do it, for the moment or at all"),
];

const fn named(status: u16, name: &'static str, kind: ErrorKind, description: &'static str) -> NamedError {
    NamedError { status, name, kind, description }
}

impl From<Failure> for ErrorBody {
    fn from(failure: Failure) -> Self {
        let (kind, status) = (failure.kind.into(), failure.kind.http_status());
        Self { kind, message: failure.message, hints: failure.hints, status }
    }
}

/// The kind of an error; it tells whether the request, a policy, the host or the server is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is invalid.
    Usage,
    /// The resource that the request names does not exist.
    NotFound,
    /// The request conflicts with the current state of the resource.
    Conflict,
    /// A policy or a missing permission forbids the request.
    Denied,
    /// A limit was reached.
    Limit,
    /// The host cannot do it, for the moment or at all.
    Host,
    /// The snapshot could not be restored completely.
    RestoreIncomplete,
    /// A bug in Palisade.
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

/// A refused request, ready to be sent as a response.
#[derive(Debug)]
pub struct V1Refusal {
    status: StatusCode,
    failure: Failure,
}

impl V1Refusal {
    /// A refusal with another HTTP status than the one of its kind.
    pub fn with(status: StatusCode, failure: Failure) -> Self {
        Self { status, failure }
    }

    /// The request has no valid API key.
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
        // Causes may name paths of the host. They go to the server's own log, for its operator.
        if status.is_server_error() {
            tracing::warn!(status = status.as_u16(), causes = ?failure.causes(), "{failure}");
        }
        let body = ErrorBody { status: status.as_u16(), ..failure.into() };
        let mut response = (status, Json(body)).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
