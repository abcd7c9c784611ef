//! Routes for secrets: store, list and remove them, and let Bodies use them. No answer has a value.

use axum::{Json, extract::State, http::StatusCode};
use fleet::{Fleet, Force, GrantedSecret, SecretOrigin, SecretTerms, SecretView, Zeroizing};
use proto::{
    BodyId,
    egress::{SecretFields, SshLogin},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::own,
    error::{ErrorBody, V1Refusal},
    extract::{AdminAccess, JsonBody as Sent, NameParam, PairParam, QueryParams, find_body, read_object},
};
use crate::App;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(secrets))
        .routes(routes!(set_secret, remove_secret))
        .routes(routes!(grant, revoke))
}

/// A secret, without its value.
#[derive(Debug, Serialize, ToSchema)]
struct Secret {
    /// The name of the secret.
    name: String,
    /// The kind of its source: `stored`, `file`, `env` or `command`.
    source: String,
    /// The hosts to which it may go, over TLS.
    hosts: Vec<String>,
    /// The parts of a request in which it may stand.
    fields: SecretPlaces,
    /// The variables that hold its placeholder in a Body.
    env: Vec<String>,
    /// Whether git gets it as the password for its hosts.
    git: bool,
    /// How it logs in, if it is a private key of ssh; then it stands in no request and no variable.
    #[serde(skip_serializing_if = "Option::is_none")]
    ssh: Option<SshTerms>,
    /// The Bodies that may use it.
    bodies: Vec<String>,
    /// When it was last set, RFC 3339.
    created_at: String,
}

/// The parts of a request in which a secret may stand.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SecretPlaces {
    /// Headers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 32)]
    headers: Vec<String>,
    /// The user or the password of `Authorization: Basic`.
    #[serde(default)]
    basic: bool,
    /// The query of the URL.
    #[serde(default)]
    query: bool,
    /// The body.
    #[serde(default)]
    body: bool,
    /// Signatures of AWS, which are made anew; the value is `ID:SECRET` or JSON.
    #[serde(default)]
    sigv4: bool,
}

/// How a private key of ssh logs in.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SshTerms {
    /// The users of the hosts as whom it logs in; `git` if none is named.
    #[serde(default)]
    #[schema(max_items = 8)]
    users: Vec<String>,
    /// The keys of the hosts, each as a line of `known_hosts`; the server's own list has those that are not named.
    #[serde(default)]
    #[schema(max_items = 32)]
    host_keys: Vec<String>,
}

impl From<SshLogin> for SshTerms {
    fn from(SshLogin { users, host_keys }: SshLogin) -> Self {
        Self { users, host_keys }
    }
}

impl From<SecretFields> for SecretPlaces {
    fn from(fields: SecretFields) -> Self {
        let SecretFields { headers, basic, query, body, sigv4 } = fields;
        Self { headers, basic, query, body, sigv4 }
    }
}

impl From<SecretPlaces> for SecretFields {
    fn from(places: SecretPlaces) -> Self {
        let SecretPlaces { headers, basic, query, body, sigv4 } = places;
        Self { headers, basic, query, body, sigv4 }
    }
}

impl From<SecretView> for Secret {
    fn from(view: SecretView) -> Self {
        let SecretView { name, source, hosts, fields, env, git, ssh, bodies, created_at } = view;
        let bodies = bodies.iter().map(BodyId::to_string).collect();
        let (source, fields, ssh) = (source.to_owned(), fields.into(), ssh.map(SshTerms::from));
        Self { name, source, hosts, fields, env, git, ssh, bodies, created_at }
    }
}

/// All secrets.
#[derive(Debug, Serialize, ToSchema)]
struct SecretList {
    /// Every secret, by name.
    items: Vec<Secret>,
}

/// List the secrets, without their values.
#[utoipa::path(get, path = "/secrets", operation_id = "list_secrets", tag = "secrets",
    responses((status = 200, description = "All secrets", body = SecretList), (status = "default", description = "Refused", body = ErrorBody)))]
async fn secrets(state: State<App>, _: AdminAccess) -> Result<Json<SecretList>, V1Refusal> {
    let views = state.0.blocking(async move |fleet: &Fleet| fleet.secrets().list()).await?;
    Ok(Json(SecretList { items: views.into_iter().map(Secret::from).collect() }))
}

/// The secret to store.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "value": "sk_test_…", "hosts": ["api.stripe.com"], "env": ["STRIPE_KEY"] }))]
struct NewSecret {
    /// The value; no answer ever has it.
    #[schema(min_length = 1, max_length = 16384)]
    value: String,
    /// A known service, such as `github`, which adds hosts, places and variables.
    #[schema(max_length = 64)]
    service: Option<String>,
    /// The hosts to which it may go, as `HOST[:PORTS]` or a pattern of names.
    #[serde(default)]
    #[schema(max_items = 32)]
    hosts: Vec<String>,
    /// The parts of a request in which it may stand; the header `authorization` if none is named.
    #[serde(default, deserialize_with = "read_object")]
    fields: SecretPlaces,
    /// The variables that hold its placeholder in a Body; if none is named, one with the name of the secret in upper case.
    #[serde(default)]
    #[schema(max_items = 32)]
    env: Vec<String>,
    /// Whether git gets it as the password for its hosts.
    #[serde(default)]
    git: bool,
    /// The beginning of its placeholders, for programs that check the shape of a key.
    #[schema(max_length = 32)]
    prefix: Option<String>,
    /// For a private key of ssh in the format of OpenSSH: how it logs in. Such a secret has only hosts beside it.
    ssh: Option<SshTerms>,
}

/// Store a secret, or replace it. Bodies that may use it get the new value at once.
#[utoipa::path(put, path = "/secrets/{secret}", operation_id = "set_secret", tag = "secrets", params(("secret" = String, Path, description = "The name of the secret")), request_body = NewSecret,
    responses((status = 200, description = "The secret, without its value", body = Secret), (status = "default", description = "Refused", body = ErrorBody)))]
async fn set_secret(
    state: State<App>,
    _: AdminAccess,
    NameParam(name): NameParam,
    Sent(asked): Sent<NewSecret>,
) -> Result<Json<Secret>, V1Refusal> {
    let terms = SecretTerms {
        service: asked.service,
        hosts: asked.hosts,
        fields: asked.fields.into(),
        env: asked.env,
        git: asked.git,
        prefix: asked.prefix,
        ssh: asked.ssh.map(|SshTerms { users, host_keys }| SshLogin { users, host_keys }),
        ..SecretTerms::new(name, SecretOrigin::Value(Zeroizing::new(asked.value)))
    };
    let view = state.0.blocking(async move |fleet: &Fleet| fleet.secrets().set(terms)).await?;
    Ok(Json(view.into()))
}

/// How a secret is removed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SecretRemoval {
    /// Also take it from the Bodies that may use it.
    #[serde(default)]
    force: bool,
}

/// Remove a secret. Without `force`, no Body may have it.
#[utoipa::path(delete, path = "/secrets/{secret}", operation_id = "remove_secret", tag = "secrets", params(("secret" = String, Path, description = "The name of the secret"), SecretRemoval),
    responses((status = 204, description = "Removed"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn remove_secret(
    state: State<App>,
    _: AdminAccess,
    NameParam(name): NameParam,
    QueryParams(removal): QueryParams<SecretRemoval>,
) -> Result<StatusCode, V1Refusal> {
    let force = if removal.force { Force::Yes } else { Force::No };
    state.0.blocking(async move |fleet: &Fleet| fleet.secrets().remove(&name, force)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The secrets of a Body.
#[derive(Debug, Serialize, ToSchema)]
struct BodySecrets {
    /// The secrets that the Body may use now.
    items: Vec<BodySecret>,
}

/// A secret that a Body may use.
#[derive(Debug, Serialize, ToSchema)]
pub struct BodySecret {
    /// Its name.
    name: String,
    /// The text that stands for it in the Body.
    placeholder: String,
    /// The hosts to which it may go; none if the secret was removed.
    hosts: Vec<String>,
}

impl From<GrantedSecret> for BodySecret {
    fn from(GrantedSecret { name, placeholder, hosts }: GrantedSecret) -> Self {
        Self { name, placeholder, hosts }
    }
}

/// Let a Body use a secret: at once if it runs with an egress process, otherwise from its next start on.
#[utoipa::path(put, path = "/bodies/{id}/secrets/{secret}", operation_id = "grant_secret", tag = "secrets", params(("id" = String, Path, description = "The id or the name of the Body"), ("secret" = String, Path, description = "The name of the secret")),
    responses((status = 200, description = "The secrets of the Body", body = BodySecrets), (status = "default", description = "Refused", body = ErrorBody)))]
async fn grant(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    PairParam(body, name): PairParam,
) -> Result<Json<BodySecrets>, V1Refusal> {
    let id = find_body(&state.0, &caller, &body).await?;
    let granted = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        fleet.secrets().grant(&id, &name)
    });
    Ok(Json(BodySecrets { items: granted.await?.secrets.into_iter().map(BodySecret::from).collect() }))
}

/// Take a secret from a Body, at once.
#[utoipa::path(delete, path = "/bodies/{id}/secrets/{secret}", operation_id = "revoke_secret", tag = "secrets", params(("id" = String, Path, description = "The id or the name of the Body"), ("secret" = String, Path, description = "The name of the secret")),
    responses((status = 204, description = "The Body has it no more"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn revoke(
    state: State<App>,
    AdminAccess(caller): AdminAccess,
    PairParam(body, name): PairParam,
) -> Result<StatusCode, V1Refusal> {
    let id = find_body(&state.0, &caller, &body).await?;
    let revoked = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        fleet.secrets().revoke(&id, &name)
    });
    revoked.await?;
    Ok(StatusCode::NO_CONTENT)
}
