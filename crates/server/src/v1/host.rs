//! Routes for the host and for API keys: version, doctor, garbage collection, and key management.

use axum::{Json, extract::State, http::StatusCode};
use fleet::{Fleet, GcMode};
use proto::{Failure, Kind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, JsonBody as Sent, NameParam, ReadAccess},
    models::MechanismState,
};
use crate::{
    App, Scope,
    keys::{KeyRecord, Quota},
};

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(version))
        .routes(routes!(doctor))
        .routes(routes!(gc))
        .routes(routes!(keys, make_key))
        .routes(routes!(revoke))
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

/// The scope of a key. Each scope includes those before it.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum KeyScope {
    /// Read-only requests.
    Read,
    /// Create, use and remove Bodies.
    #[default]
    Run,
    /// Create and revoke keys, and use Bodies of every key.
    Admin,
}

impl From<KeyScope> for Scope {
    fn from(scope: KeyScope) -> Self {
        match scope {
            KeyScope::Read => Self::Read,
            KeyScope::Run => Self::Run,
            KeyScope::Admin => Self::Admin,
        }
    }
}

impl From<Scope> for KeyScope {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Read => Self::Read,
            Scope::Run => Self::Run,
            Scope::Admin => Self::Admin,
        }
    }
}

/// An API key, without its secret.
#[derive(Debug, Serialize, ToSchema)]
struct Key {
    /// The id of the key.
    id: String,
    /// The name of the key.
    name: String,
    /// The scope of the key.
    scope: KeyScope,
    /// The quota of all Bodies of this key together.
    quota: Quota,
    /// When the key was created, RFC 3339.
    created_at: String,
    /// When the key was revoked, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    revoked_at: Option<String>,
    /// The secret that callers send. The server returns it only once, in the response that creates the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    secret: Option<String>,
}

impl Key {
    fn new(record: KeyRecord, secret: Option<String>) -> Self {
        let KeyRecord { id, name, scope, quota, created_at, revoked_at, .. } = record;
        Self { id, name, scope: scope.into(), quota, created_at, revoked_at, secret }
    }
}

/// All API keys.
#[derive(Debug, Serialize, ToSchema)]
struct KeyList {
    /// Every key that was ever created, oldest first.
    items: Vec<Key>,
}

/// List the keys.
#[utoipa::path(get, path = "/keys", operation_id = "list_keys", tag = "keys",
    responses((status = 200, description = "All keys", body = KeyList), (status = "default", description = "Refused", body = ErrorBody)))]
async fn keys(state: State<App>, _: AdminAccess) -> Result<Json<KeyList>, V1Refusal> {
    let records = state.0.keys().all()?;
    Ok(Json(KeyList { items: records.into_iter().map(|record| Key::new(record, None)).collect() }))
}

/// The key to create.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewKey {
    /// A name for the key.
    #[schema(min_length = 1, max_length = 64)]
    name: String,
    /// The scope of the key.
    #[serde(default)]
    scope: KeyScope,
    /// The quota of all Bodies of this key together.
    #[serde(default)]
    quota: Quota,
}

/// Create a key. Its secret is returned only in this response.
#[utoipa::path(post, path = "/keys", operation_id = "create_key", tag = "keys", request_body = NewKey,
    responses((status = 201, description = "The new key with its secret", body = Key), (status = "default", description = "Refused", body = ErrorBody)))]
async fn make_key(
    state: State<App>,
    _: AdminAccess,
    Sent(asked): Sent<NewKey>,
) -> Result<(StatusCode, Json<Key>), V1Refusal> {
    check_quota(&asked.quota)?;
    let made = state.0.keys().make_with(&asked.name, asked.scope.into(), asked.quota)?;
    let record = state.0.keys().all()?.into_iter().find(|record| record.id == made.id);
    let record =
        record.ok_or_else(|| Failure::new(Kind::Internal, "the new key is missing from the key store"))?;
    Ok((StatusCode::CREATED, Json(Key::new(record, Some(made.secret)))))
}

fn check_quota(quota: &Quota) -> Result<(), Failure> {
    let all = [quota.bodies, quota.cpu_milli, quota.memory_bytes, quota.disk_bytes];
    if all.into_iter().flatten().all(|most| i64::try_from(most).is_ok()) {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, "a quota is too large").hint("leave out a limit to have none"))
}

/// Revoke a key; the server refuses it from the next request on.
#[utoipa::path(delete, path = "/keys/{key}", operation_id = "revoke_key", tag = "keys", params(("key" = String, Path, description = "The id of the key")),
    responses((status = 204, description = "Revoked"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn revoke(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    NameParam(key): NameParam,
) -> Result<StatusCode, V1Refusal> {
    if caller.key == key {
        return Err(Failure::new(Kind::Conflict, "a key does not revoke itself")
            .hint("use another key of scope admin, or: pal keys revoke")
            .into());
    }
    state.0.keys().revoke(&key)?;
    Ok(StatusCode::NO_CONTENT)
}
