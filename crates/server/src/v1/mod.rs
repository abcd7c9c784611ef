//! The native API: everything `pal` can do. `/openapi.json` describes it.
//!
//! Invariant: every refusal is an [`error::ErrorBody`], built from `proto`'s one table.
//! Invariant: a key sees and changes the Bodies that it created, an admin key every Body. To other keys a
//! Body does not exist.

mod bodies;
mod error;
mod events;
mod exec;
mod extract;
mod files;
mod host;
mod models;
mod page;
mod pty;
mod services;
mod snapshots;

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use proto::{Failure, Kind};
use utoipa::{
    Modify, OpenApi,
    openapi::{
        SecurityRequirement,
        security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};
use utoipa_axum::router::OpenApiRouter;

use crate::App;

pub use services::Services;

#[derive(OpenApi)]
#[openapi(info(title = "Palisade", description = "Every AI agent a computer of its own, on yours."), modifiers(&KeyAuth))]
struct ApiDocument;

/// Declares in the OpenAPI document that every route requires a key.
struct KeyAuth;

impl Modify for KeyAuth {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        document.components.get_or_insert_default().add_security_scheme("key", scheme);
        document.security = Some(vec![SecurityRequirement::new("key", Vec::<String>::new())]);
    }
}

/// The routes of the native API.
pub fn router() -> Router<App> {
    let (router, document) = described();
    let text = document.to_json().unwrap_or_default();
    let v1 = router
        .fallback(async || RouterRefusal(StatusCode::NOT_FOUND, "there is no such route"))
        .method_not_allowed_fallback(async || {
            RouterRefusal(StatusCode::METHOD_NOT_ALLOWED, "this route has no such method")
        });
    Router::new()
        .route("/health", get(async || StatusCode::NO_CONTENT))
        .route(
            "/openapi.json",
            get(move |_: extract::ReadAccess| async move { ([(header::CONTENT_TYPE, "application/json")], text) }),
        )
        .route("/metrics", get(metrics))
        .nest("/v1", v1)
}

fn described() -> (Router<App>, utoipa::openapi::OpenApi) {
    let all = OpenApiRouter::new()
        .merge(bodies::router())
        .merge(exec::router())
        .merge(files::router())
        .merge(pty::router())
        .merge(snapshots::router())
        .merge(events::router())
        .merge(host::router());
    let (router, paths) = all.split_for_parts();
    let mut document = ApiDocument::openapi();
    document.info.version = env!("CARGO_PKG_VERSION").into();
    (router, document.nest("/v1", paths))
}

/// A refusal by the router itself: unknown route or method.
struct RouterRefusal(StatusCode, &'static str);

impl IntoResponse for RouterRefusal {
    fn into_response(self) -> axum::response::Response {
        let kind = if self.0 == StatusCode::NOT_FOUND { Kind::NotFound } else { Kind::Usage };
        error::V1Refusal::with(self.0, Failure::new(kind, self.1).hint("list the routes: GET /openapi.json"))
            .into_response()
    }
}

async fn metrics(app: State<App>, _: extract::ReadAccess) -> Result<impl IntoResponse, error::V1Refusal> {
    let text = crate::metrics::text(&app.0).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}
