//! The control plane as E2B's SDKs speak it.
//!
//! Invariant: every refusal is JSON with `code` and `message`: the SDKs parse nothing else.

mod error;

use axum::Router;

use crate::App;

pub use error::Refusal;

/// Its routes, and the answer to whatever is no route of anybody's.
pub fn router() -> Router<App> {
    Router::new().fallback(async || Refusal::new(axum::http::StatusCode::NOT_FOUND, "there is no such route"))
}
