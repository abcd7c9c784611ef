//! The native API.

use axum::{Json, Router, http::StatusCode, routing::get};
use serde_json::{Value, json};

use crate::App;

/// Its routes.
pub fn router() -> Router<App> {
    Router::new().route("/health", get(health)).route("/v1/version", get(version))
}

async fn health() -> StatusCode {
    StatusCode::NO_CONTENT
}

async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}
