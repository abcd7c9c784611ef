//! The native API: everything `pal` can do. `/openapi.json` describes it.
//!
//! Invariant: every refusal is an [`error::ErrorBody`], built from `proto`'s one table.
//! Invariant: a key sees and changes the Bodies that it created and those of its reach, an admin key every Body. To
//! other keys a Body does not exist.

mod agent_create;
mod agent_events;
mod agent_input;
mod agent_log;
mod agent_models;
mod agent_travel;
mod agents;
mod api_keys;
mod bodies;
mod document;
mod error;
mod events;
mod exec;
mod extract;
mod files;
mod host;
mod land;
mod long_work;
mod models;
mod network;
mod page;
mod pty;
mod running;
mod secrets;
mod services;
mod snapshots;
mod storage;
mod templates;
mod work;
mod work_models;

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use proto::{Failure, Kind};
use utoipa_axum::router::OpenApiRouter;

use crate::App;

pub use extract::{read_object, read_object_or_null, read_objects};
pub use services::Services;

/// The routes of the native API.
pub fn router() -> Router<App> {
    let (router, document) = described();
    let text = document.to_string();
    let v1 = router
        .fallback(async || RouterRefusal(StatusCode::NOT_FOUND, "there is no such route"))
        .method_not_allowed_fallback(async || {
            RouterRefusal(StatusCode::METHOD_NOT_ALLOWED, "this route has no such method")
        });
    Router::new()
        .route("/health", get(async || StatusCode::NO_CONTENT))
        .route("/", get(document::index))
        .route(
            "/openapi.json",
            get(move |_: extract::DocumentAccess| async move {
                ([(header::CONTENT_TYPE, "application/json")], text)
            }),
        )
        .route("/metrics", get(metrics))
        .nest("/v1", v1)
}

/// All routes, and their description.
fn described() -> (Router<App>, serde_json::Value) {
    let all = OpenApiRouter::new()
        .merge(bodies::router())
        .merge(running::router())
        .merge(network::router())
        .merge(secrets::router())
        .merge(exec::router())
        .merge(files::router())
        .merge(pty::router())
        .merge(work::router())
        .merge(land::router())
        .merge(snapshots::router())
        .merge(templates::router())
        .merge(storage::router())
        .merge(agents::router())
        .merge(agent_input::router())
        .merge(agent_travel::router())
        .merge(agent_events::router())
        .merge(agent_log::router())
        .merge(events::router())
        .merge(api_keys::router())
        .merge(host::router());
    let (router, paths) = all.split_for_parts();
    (router, document::describe(paths))
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
