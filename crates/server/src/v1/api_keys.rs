//! Routes for API keys: list, create and revoke.

use axum::{Json, extract::State, http::StatusCode};
use fleet::Fleet;
use proto::{Failure, Kind, egress::EgressRule, event_data::KeyRevoked};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, JsonBody as Sent, NameParam, read_object},
    network::{NetworkRule, NetworkTerms},
};
use crate::{
    App, KeyTerms, Scope,
    keys::{KeyRecord, Quota},
};

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(keys, make_key)).routes(routes!(revoke))
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
    /// The Bodies that the key reaches besides its own: `own` (no others), `all` or `label=NAME=VALUE`.
    reach: String,
    /// The quota of all Bodies of this key together.
    quota: Quota,
    /// The ceiling of their networks: every connection must be allowed by these rules, too. None if it is empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    network: Vec<NetworkRule>,
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
        let reach = record.full_reach().to_string();
        let KeyRecord { id, name, scope, quota, network, created_at, revoked_at, .. } = record;
        let network = network.into_iter().map(Into::into).collect();
        Self { id, name, scope: scope.into(), reach, quota, network, created_at, revoked_at, secret }
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
#[schema(example = json!({ "name": "dashboard", "scope": "read", "reach": "label=team=web" }))]
struct NewKey {
    /// A name for the key.
    #[schema(min_length = 1, max_length = 64)]
    name: String,
    /// The scope of the key.
    #[serde(default)]
    scope: KeyScope,
    /// The Bodies that the key reaches besides its own: `own` (no others), `all` or `label=NAME=VALUE`, for Bodies whose
    /// metadata has that pair. If left out, `all` for the scope `admin`, `own` for the others.
    #[schema(pattern = "^(own|all|label=[^=]+=.*)$", max_length = 1024)]
    reach: Option<String>,
    /// The quota of all Bodies of this key together.
    #[serde(default)]
    quota: Quota,
    /// The ceiling of their networks, for a key of scope `run`.
    #[serde(default, deserialize_with = "read_object")]
    network: CeilingTerms,
}

/// The ceiling of a key: its Bodies may have a network, whatever `pal serve --internet` says, and every connection must be
/// allowed by these rules, too. Denials alone give no right to a network, and hold in every network.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "preset": ["registries"], "allow": ["api.example.org:443"] }))]
struct CeilingTerms {
    /// Presets: `closed`, `registries`, `models`, `research` or `open`.
    #[serde(default)]
    #[schema(max_items = 8)]
    preset: Vec<String>,
    /// Targets that are allowed, as `HOST[:PORTS][+MARK]`.
    #[serde(default)]
    #[schema(max_items = 256)]
    allow: Vec<String>,
    /// Targets that are denied, whatever allows them.
    #[serde(default)]
    #[schema(max_items = 256)]
    deny: Vec<String>,
}

impl CeilingTerms {
    fn rules(self) -> Result<Vec<EgressRule>, Failure> {
        let terms = NetworkTerms {
            preset: self.preset,
            allow: self.allow,
            deny: self.deny,
            ..NetworkTerms::default()
        };
        terms.unchecked_request()?.ceiling()
    }
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
    let reach = asked.reach.as_deref().map(str::parse).transpose()?;
    let network = asked.network.rules()?;
    let terms = KeyTerms { name: asked.name, scope: asked.scope.into(), reach, quota: asked.quota, network };
    let (record, made) = state.0.keys().make(&terms)?;
    let created = record.created_event();
    state.0.blocking(async move |fleet: &Fleet| fleet.log().note(created)).await?;
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
    state.0.blocking(async move |fleet: &Fleet| fleet.log().note(KeyRevoked { key })).await?;
    Ok(StatusCode::NO_CONTENT)
}
