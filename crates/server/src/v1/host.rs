//! The host and the keys: what it can do, what nobody needs, who may call.

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

/// Which server this is.
#[derive(Debug, Serialize, ToSchema)]
struct Version {
    /// Its version.
    version: String,
}

/// Say which version serves.
#[utoipa::path(get, path = "/version", operation_id = "get_version", tag = "host",
    responses((status = 200, description = "The version", body = Version), (status = "default", description = "Refused", body = ErrorBody)))]
async fn version(_: ReadAccess) -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").into() })
}

/// One thing that was tried on this host.
#[derive(Debug, Serialize, ToSchema)]
struct Finding {
    /// What.
    name: String,
    /// How far it works.
    state: MechanismState,
    /// What was seen.
    detail: String,
    /// The command that helps.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    fix: Option<String>,
}

/// One layer on this host.
#[derive(Debug, Serialize, ToSchema)]
struct LayerReport {
    /// Which.
    layer: String,
    /// Whether a Body can be started on it now.
    usable: bool,
    /// What it lacks.
    lacks: Vec<String>,
}

/// All that was found.
#[derive(Debug, Serialize, ToSchema)]
struct Doctor {
    /// Each thing that was tried.
    findings: Vec<Finding>,
    /// Each layer.
    layers: Vec<LayerReport>,
}

/// Find out what this host can do, by trying it.
#[utoipa::path(post, path = "/doctor", operation_id = "doctor", tag = "host",
    responses((status = 200, description = "What was found", body = Doctor), (status = "default", description = "Refused", body = ErrorBody)))]
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

/// How to sweep.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct GcRequest {
    /// Only say what would go.
    #[serde(default)]
    dry_run: bool,
}

/// Something that nobody needs.
#[derive(Debug, Serialize, ToSchema)]
struct Garbage {
    /// What it is.
    kind: String,
    /// Its name.
    name: String,
    /// What it takes.
    bytes: u64,
    /// Why nobody needs it.
    why: String,
}

/// What was or would be removed.
#[derive(Debug, Serialize, ToSchema)]
struct GcResult {
    /// All of it.
    items: Vec<Garbage>,
}

/// Remove what nobody needs, or say what that would be.
#[utoipa::path(post, path = "/gc", operation_id = "gc", tag = "host", request_body = Option<GcRequest>,
    responses((status = 200, description = "What went, or would", body = GcResult), (status = "default", description = "Refused", body = ErrorBody)))]
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

/// What a key is good for; each includes those before it.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum KeyScope {
    /// Look.
    Read,
    /// Make, use and end Bodies.
    #[default]
    Run,
    /// Make and revoke keys, and use Bodies of every key.
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

/// A key, without what callers send.
#[derive(Debug, Serialize, ToSchema)]
struct Key {
    /// Which.
    id: String,
    /// What somebody called it.
    name: String,
    /// What it is good for.
    scope: KeyScope,
    /// How much its Bodies may use together.
    quota: Quota,
    /// When it was made, RFC 3339.
    created_at: String,
    /// When it was revoked.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    revoked_at: Option<String>,
    /// What callers send; shown once, when it is made.
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

/// All keys.
#[derive(Debug, Serialize, ToSchema)]
struct KeyList {
    /// Every key that was ever made, oldest first.
    items: Vec<Key>,
}

/// List the keys.
#[utoipa::path(get, path = "/keys", operation_id = "list_keys", tag = "keys",
    responses((status = 200, description = "All keys", body = KeyList), (status = "default", description = "Refused", body = ErrorBody)))]
async fn keys(state: State<App>, _: AdminAccess) -> Result<Json<KeyList>, V1Refusal> {
    let records = state.0.keys().all()?;
    Ok(Json(KeyList { items: records.into_iter().map(|record| Key::new(record, None)).collect() }))
}

/// A key to be made.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewKey {
    /// What to call it.
    #[schema(min_length = 1, max_length = 64)]
    name: String,
    /// What it is good for.
    #[serde(default)]
    scope: KeyScope,
    /// How much its Bodies may use together.
    #[serde(default)]
    quota: Quota,
}

/// Make a key. It is shown once.
#[utoipa::path(post, path = "/keys", operation_id = "create_key", tag = "keys", request_body = NewKey,
    responses((status = 201, description = "Made", body = Key), (status = "default", description = "Refused", body = ErrorBody)))]
async fn make_key(
    state: State<App>,
    _: AdminAccess,
    Sent(asked): Sent<NewKey>,
) -> Result<(StatusCode, Json<Key>), V1Refusal> {
    check_quota(&asked.quota)?;
    let made = state.0.keys().make_with(&asked.name, asked.scope.into(), asked.quota)?;
    let record = state.0.keys().all()?.into_iter().find(|record| record.id == made.id);
    let record = record.ok_or_else(|| Failure::new(Kind::Internal, "a key was made and is not there"))?;
    Ok((StatusCode::CREATED, Json(Key::new(record, Some(made.secret)))))
}

fn check_quota(quota: &Quota) -> Result<(), Failure> {
    let all = [quota.bodies, quota.cpu_milli, quota.memory_bytes, quota.disk_bytes];
    if all.into_iter().flatten().all(|most| i64::try_from(most).is_ok()) {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, "no key can have that much").hint("leave out what is not to be bounded"))
}

/// Make a key worthless, from the next request on.
#[utoipa::path(delete, path = "/keys/{key}", operation_id = "revoke_key", tag = "keys", params(("key" = String, Path, description = "Its id")),
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
