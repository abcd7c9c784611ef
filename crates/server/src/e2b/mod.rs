//! The control plane in the API of E2B's SDKs.
//!
//! A sandbox is a Body, its `templateID` is the template of the Body, and its end time is a lease. The server
//! refuses features that E2B has and it lacks (volumes, secrets, identity tokens) with an error that names
//! them; it never ignores them.
//!
//! Invariant: every refusal is JSON with `code` and `message`: the SDKs parse nothing else.
//! Invariant: a key sees and changes the Bodies that it created, an admin key every Body.

mod builds;
mod create;
mod error;
mod extract;
mod life;
mod list;
mod metrics_logs;
mod network;
mod sandbox;
mod snapshots;
mod templates;

use axum::{
    Router,
    http::StatusCode,
    middleware::from_fn_with_state,
    routing::{any, get, patch, post, put},
};

use crate::App;

pub use error::E2bRefusal;

/// The routes of the E2B API, and the fallback for unknown routes.
pub fn router(app: &App) -> Router<App> {
    Router::new()
        .route("/sandboxes", post(create::v1).get(list::running))
        .route("/v2/sandboxes", post(create::v2).get(list::all))
        .route("/sandboxes/metrics", get(metrics_logs::metrics_of_many))
        .route("/sandboxes/{id}", get(life::info).delete(life::kill))
        .route("/sandboxes/{id}/connect", post(life::connect))
        .route("/v2/sandboxes/{id}/connect", post(life::connect))
        .route("/sandboxes/{id}/resume", post(life::resume))
        .route("/sandboxes/{id}/timeout", post(life::timeout))
        .route("/sandboxes/{id}/refreshes", post(life::refresh))
        .route("/sandboxes/{id}/pause", post(life::pause))
        .route("/sandboxes/{id}/fork", post(life::fork))
        .route("/sandboxes/{id}/network", put(network::replace))
        .route("/sandboxes/{id}/metrics", get(metrics_logs::metrics))
        .route("/sandboxes/{id}/logs", get(metrics_logs::logs))
        .route("/v2/sandboxes/{id}/logs", get(metrics_logs::logs_v2))
        .route("/sandboxes/{id}/snapshots", post(snapshots::take))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list).post(absent_pushed_images))
        .route("/v2/templates", get(templates::list).post(builds::ask_v2))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route("/templates/tags", post(templates::tag).delete(templates::untag))
        .route("/templates/{id}/tags", get(templates::tags))
        .route(
            "/templates/{id}",
            get(templates::info)
                .post(absent_pushed_images)
                .patch(templates::change)
                .delete(templates::remove),
        )
        .route("/v2/templates/{id}", patch(templates::change))
        .route("/v3/templates", post(builds::ask))
        .route("/templates/{id}/files/{hash}", get(builds::files))
        .route("/templates/{id}/builds/{build}", post(absent_pushed_images))
        .route("/v2/templates/{id}/builds/{build}", post(builds::begin))
        .route("/templates/{id}/builds/{build}/status", get(builds::status))
        .route("/templates/{id}/builds/{build}/logs", get(builds::logs))
        .route("/teams", get(templates::teams))
        .route("/volumes", any(absent_volumes))
        .route("/volumes/{*rest}", any(absent_volumes))
        .route("/secrets", any(absent_secrets))
        .route("/secrets/{*rest}", any(absent_secrets))
        .fallback(async || E2bRefusal::new(StatusCode::NOT_FOUND, "there is no such route"))
        .method_not_allowed_fallback(async || {
            E2bRefusal::new(StatusCode::METHOD_NOT_ALLOWED, "this route has no such method")
        })
        .layer(from_fn_with_state(app.clone(), extract::admit))
        // The URL itself is the permission: clients upload these files without a key.
        .route("/templates/{id}/files/{hash}", put(builds::upload))
}

async fn absent_volumes() -> E2bRefusal {
    E2bRefusal::absent("volumes")
}

async fn absent_pushed_images() -> E2bRefusal {
    E2bRefusal::absent("builds from a pushed image (version 1): use POST /v3/templates, as newer clients do")
}

async fn absent_secrets() -> E2bRefusal {
    E2bRefusal::absent("secrets")
}
