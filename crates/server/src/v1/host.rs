//! Routes for the host: version, doctor and garbage collection.

use axum::{Json, extract::State};
use fleet::{Fleet, GcMode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, JsonBody as Sent, ReadAccess},
    models::MechanismState,
};
use crate::App;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(version)).routes(routes!(doctor)).routes(routes!(gc))
}

/// The version of this server.
#[derive(Debug, Serialize, ToSchema)]
struct Version {
    /// The version number.
    version: String,
}

/// Show the server's version.
#[utoipa::path(get, path = "/version", operation_id = "get_version", tag = "host",
    responses((status = 200, description = "The version", body = Version), (status = "default", description = "Refused", body = ErrorBody)))]
async fn version(_: ReadAccess) -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").into() })
}

/// The result of one check of this host.
#[derive(Debug, Serialize, ToSchema)]
struct Finding {
    /// The name of the check.
    name: String,
    /// How well it works.
    state: MechanismState,
    /// Details of the result.
    detail: String,
    /// A command that fixes the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    fix: Option<String>,
}

/// One isolation layer on this host.
#[derive(Debug, Serialize, ToSchema)]
struct LayerReport {
    /// The name of the layer.
    layer: String,
    /// Whether a Body can start on it now.
    usable: bool,
    /// The requirements that the host does not meet.
    lacks: Vec<String>,
}

/// The results of all checks.
#[derive(Debug, Serialize, ToSchema)]
struct Doctor {
    /// The result of each check.
    findings: Vec<Finding>,
    /// The state of each layer.
    layers: Vec<LayerReport>,
}

/// Check by trial what this host supports.
#[utoipa::path(post, path = "/doctor", operation_id = "doctor", tag = "host",
    responses((status = 200, description = "The results of the checks", body = Doctor), (status = "default", description = "Refused", body = ErrorBody)))]
async fn doctor(state: State<App>, _: AdminAccess) -> Result<Json<Doctor>, V1Refusal> {
    let found = state.0.blocking(async |fleet: &Fleet| fleet.doctor().await).await?;
    let finding = |found: fleet::DoctorFinding| Finding {
        name: found.name,
        state: found.state.into(),
        detail: found.detail,
        fix: found.fix,
    };
    let layer = |found: fleet::LayerCheck| LayerReport {
        layer: found.layer.to_string(),
        usable: found.usable,
        lacks: found.lacks,
    };
    Ok(Json(Doctor {
        findings: found.findings.into_iter().map(finding).collect(),
        layers: found.layers.into_iter().map(layer).collect(),
    }))
}

/// How to collect garbage.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "dry_run": true }))]
struct GcRequest {
    /// List what would be removed, and remove nothing.
    #[serde(default)]
    dry_run: bool,
}

/// An unused item on disk.
#[derive(Debug, Serialize, ToSchema)]
struct Garbage {
    /// The kind of item.
    kind: String,
    /// Its name.
    name: String,
    /// Its size on disk.
    bytes: u64,
    /// Why it is unused.
    why: String,
}

/// The items that were removed, or would be.
#[derive(Debug, Serialize, ToSchema)]
struct GcResult {
    /// The items.
    items: Vec<Garbage>,
}

/// Remove unused data, or list it.
#[utoipa::path(post, path = "/gc", operation_id = "gc", tag = "host", request_body = Option<GcRequest>,
    responses((status = 200, description = "The items that were removed, or would be", body = GcResult), (status = "default", description = "Refused", body = ErrorBody)))]
async fn gc(
    state: State<App>,
    _: AdminAccess,
    asked: Option<Sent<GcRequest>>,
) -> Result<Json<GcResult>, V1Refusal> {
    let sweep = if asked.is_some_and(|Sent(asked)| asked.dry_run) { GcMode::DryRun } else { GcMode::Remove };
    let found = state.0.blocking(async move |fleet: &Fleet| fleet.garbage().collect(sweep).await).await?;
    let shown = |found: fleet::GarbageItem| Garbage {
        kind: found.kind.into(),
        name: found.name,
        bytes: found.bytes,
        why: found.why,
    };
    Ok(Json(GcResult { items: found.into_iter().map(shown).collect() }))
}
