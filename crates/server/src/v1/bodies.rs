//! Routes for Bodies: create, list, start, stop, pause, resume, fork, remove, and choose access to ports.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    Json,
    http::{HeaderMap, StatusCode},
};
use fleet::{BodyView, Create, Fleet, Force, Lease, Then};
use proto::{
    BodyId, BodyName, Failure, Kind, Spec,
    body_name::BodyNameError,
    spec::{Access, Mount},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    error::{ErrorBody, V1Refusal},
    extract::{
        BodyParam, JsonBody as Sent, QueryParams, ReadAccess, RunAccess, no_body, read_object_or_null,
        read_objects,
    },
    models::{Body, BodyStatus, LayerRequest, LimitsRequest, Ports, TimeoutAction},
    network::NetworkTerms,
    page::{self, Page, PageQuery},
};
use crate::{App, Caller, Scope, authz, idempotency::KeyedRequest, limits};

const METADATA_MAX: usize = 64;
const METADATA_LEN_MAX: usize = 4096;
/// One year.
const TIMEOUT_MS_MAX: u64 = 365 * 24 * 3600 * 1000;
const GRACE: Duration = Duration::from_secs(5);
const GRACE_MAX: Duration = Duration::from_secs(60);

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(get, remove))
        .routes(routes!(start))
        .routes(routes!(stop))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(fork))
        .routes(routes!(access))
}

/// The Body to create.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "template": "host", "metadata": { "team": "web" }, "timeout_ms": 600000 }))]
pub struct NewBody {
    /// The name of the Body, by which requests may name it instead of its id. No other Body may have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", max_length = 63)]
    pub name: Option<String>,
    /// The template of the Body: `host`, a template, or the id or name of a snapshot.
    #[schema(min_length = 1, max_length = 128, default = "host")]
    pub template: Option<String>,
    /// The isolation layer; if left out, the strongest layer that this host runs at interactive speed.
    pub layer: Option<LayerRequest>,
    /// Limits that differ from the host's defaults.
    #[serde(default, deserialize_with = "read_object_or_null")]
    pub limits: Option<LimitsRequest>,
    /// Environment variables of every process in the Body.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Files and directories of the host that the Body sees. Only a key of scope `admin` may ask for mounts.
    #[serde(default, deserialize_with = "read_objects")]
    #[schema(max_items = 64)]
    pub mounts: Vec<MountRequest>,
    /// The working directory of commands.
    #[schema(max_length = 4095)]
    pub workdir: Option<String>,
    /// The user that runs commands.
    #[schema(max_length = 64)]
    pub user: Option<String>,
    /// Labels that the caller gives the Body.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Milliseconds until the Body's deadline; if left out, the Body is kept until a client removes it.
    #[schema(minimum = 1, maximum = 31536000000u64)]
    pub timeout_ms: Option<u64>,
    /// The action at the deadline.
    #[serde(default)]
    pub on_timeout: TimeoutAction,
    /// Access to the Body's ports.
    #[serde(default)]
    pub ports: Ports,
    /// The network; if left out, the Body reaches only itself. Keys of scope `run` may ask for one if the server's
    /// operator allows it.
    #[serde(default, deserialize_with = "read_object_or_null", skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkTerms>,
    /// Names of the secrets that the Body may use. Only a key of scope `admin` may give a Body secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub secrets: Vec<String>,
}

/// A directory or file of the host that the Body sees.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MountRequest {
    /// Its path on the host.
    pub source: String,
    /// Its path inside the Body.
    pub target: String,
    /// Whether the Body may change it; git directories stay read-only.
    #[serde(default)]
    pub writable: bool,
    /// Whether the Body may change git directories, too. Git on the host then runs code that the Body wrote
    /// there.
    #[serde(default)]
    pub unprotected: bool,
}

impl MountRequest {
    fn access(&self) -> Result<Access, Failure> {
        match (self.writable, self.unprotected) {
            (false, false) => Ok(Access::ReadOnly),
            (true, false) => Ok(Access::ReadWrite),
            (true, true) => Ok(Access::Unprotected),
            (false, true) => {
                Err(Failure::new(Kind::Usage, "a mount that is not writable needs no `unprotected`")
                    .hint("say `\"writable\": true` too, or leave `unprotected` out"))
            }
        }
    }
}

/// Which Bodies to list.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// The largest number of items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    pub limit: Option<u16>,
    /// The cursor of the page: `next` of the page before it.
    #[param(max_length = 256)]
    pub cursor: Option<String>,
    /// Only Bodies with this status.
    #[param(inline)]
    pub status: Option<BodyStatus>,
}

/// List the Bodies that this key reaches, oldest first.
#[utoipa::path(get, path = "/bodies", operation_id = "list_bodies", tag = "bodies", params(ListQuery),
    responses((status = 200, description = "A page of Bodies", body = Page<Body>), (status = "default", description = "Refused", body = ErrorBody)))]
async fn list(
    state: axum::extract::State<App>,
    ReadAccess(caller): ReadAccess,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Json<Page<Body>>, V1Refusal> {
    let app = state.0;
    let bodies = app.blocking(async move |fleet: &Fleet| {
        let views =
            fleet.list()?.into_iter().map(|view| (fleet.leases().get(view.id()).ok().flatten(), view));
        Ok(views
            .filter(|(lease, _)| authz::may_reach(&caller, lease.as_ref()))
            .map(|(lease, view)| Body::new(view, lease).shown_to(&caller))
            .collect::<Vec<_>>())
    });
    let bodies = bodies
        .await?
        .into_iter()
        .filter(|body| query.status.is_none_or(|status| body.status == status))
        .collect();
    let query = PageQuery { limit: query.limit, cursor: query.cursor };
    Ok(Json(page::page(bodies, &query, |body: &Body| format!("{} {}", body.created_at, body.id))?))
}

/// Create a Body and start it.
///
/// With an `Idempotency-Key`, a repeated request with the same key returns the Body that the first request
/// created.
#[utoipa::path(post, path = "/bodies", operation_id = "create_body", tag = "bodies", request_body = Option<NewBody>,
    params(("Idempotency-Key" = Option<String>, Header, description = "Marks repetitions of one request: requests with the same key create one Body", min_length = 1, max_length = 255, pattern = "^[A-Za-z0-9_.:-]{1,255}$")),
    responses((status = 201, description = "The new Body", body = Body), (status = 200, description = "The Body that an earlier request with the same key created", body = Body),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn create(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    headers: HeaderMap,
    wanted: Option<Sent<NewBody>>,
) -> Result<(StatusCode, Json<Body>), V1Refusal> {
    let app = state.0;
    let wanted = wanted.map(|Sent(wanted)| wanted).unwrap_or_default();
    let said = serde_json::to_vec(&wanted).unwrap_or_default();
    let request = KeyedRequest::of(&headers, &caller, &said).map_err(Failure::from)?;
    // A repetition of a request that is in progress waits for the first one.
    let mut turn = match &request {
        Some(request) => Some(app.turns().take(request).await),
        None => None,
    };
    if let (Some(request), Some(turn)) = (&request, &turn)
        && let Some((view, lease)) = request.find_made(&app, turn).await.map_err(Failure::from)?
    {
        return Ok((StatusCode::OK, Json(Body::new(view, lease))));
    }
    let create = wanted.into_create(&app, &caller, request.map(|request| request.mark()))?;
    if let Some(layer) = create.layer {
        // A client cannot set up the layer, but may choose another one.
        app.fleet()
            .creator()
            .readiness(layer)
            .map_err(|failure| Failure { kind: Kind::Conflict, ..failure })?;
    }
    let (asking, template) = (caller.clone(), create.template.clone());
    app.blocking(async move |fleet: &Fleet| authz::usable(fleet, &asking, &template)).await?;
    let admitted = limits::admit(&app, &caller, &create).await?;
    let lease = create.lease.clone();
    let made = app.blocking(async move |fleet: &Fleet| {
        let view = fleet.create(create).await;
        drop(admitted);
        view
    });
    let view = made.await?;
    if let Some(turn) = &mut turn {
        **turn = Some(view.id().clone());
    }
    if let Some(lease) = &lease {
        app.timer().note(view.id(), lease);
    }
    Ok((StatusCode::CREATED, Json(Body::new(view, lease))))
}

impl NewBody {
    /// The request to the fleet, for this caller. `request` marks repetitions of one request.
    pub fn into_create(self, app: &App, caller: &Caller, request: Option<String>) -> Result<Create, Failure> {
        let network = self.network.map(|network| network.into_request(app, caller)).transpose()?;
        if !self.mounts.is_empty() && caller.scope < Scope::Admin {
            return Err(Failure::new(
                Kind::Denied,
                "only a key of scope admin may mount files of the host in a Body",
            )
            .hint("leave `mounts` out"));
        }
        if !self.secrets.is_empty() && caller.scope < Scope::Admin {
            return Err(Failure::new(Kind::Denied, "only a key of scope admin may give a Body secrets")
                .hint("leave `secrets` out"));
        }
        check_metadata(&self.metadata)?;
        let then = match self.on_timeout {
            TimeoutAction::Remove => Then::Kill,
            TimeoutAction::Pause => Then::Pause(fleet::Rest::Memory),
        };
        let mut lease = match self.timeout_ms {
            Some(timeout) if timeout == 0 || timeout > TIMEOUT_MS_MAX => {
                return Err(Failure::new(Kind::Usage, "`timeout_ms` is out of range")
                    .hint(format!("ask for 1 to {TIMEOUT_MS_MAX} ms, or leave it out")));
            }
            Some(timeout) => Lease::new(Duration::from_millis(timeout), then),
            None => Lease::endless(),
        };
        lease.owner = Some(caller.key.clone());
        lease.metadata = self.metadata;
        lease.request = request;
        lease.traffic_token = token_for(self.ports)?;
        let mount = |mount: MountRequest| -> Result<Mount, Failure> {
            let access = mount.access()?;
            Ok(Mount { source: mount.source.into(), target: mount.target.into(), access })
        };
        Ok(Create {
            name: self.name.as_deref().map(read_name).transpose()?,
            layer: self.layer.map(Into::into),
            template: self.template.unwrap_or_else(|| "host".into()),
            limits: self.limits.unwrap_or_default().into(),
            env: self.env,
            mounts: self.mounts.into_iter().map(mount).collect::<Result<_, _>>()?,
            workdir: self.workdir,
            user: self.user,
            egress: network.unwrap_or_default().policy(&[])?,
            secrets: self.secrets,
            lease: Some(lease),
            ..Create::kept()
        })
    }
}

fn read_name(text: &str) -> Result<BodyName, Failure> {
    text.parse().map_err(|error: BodyNameError| Failure::new(Kind::Usage, error.to_string()))
}

fn token_for(ports: Ports) -> Result<Option<String>, Failure> {
    match ports {
        Ports::Public => Ok(None),
        Ports::Private => fleet::lease::new_traffic_token().map(Some),
    }
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), Failure> {
    let bytes: usize = metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    if metadata.len() <= METADATA_MAX && bytes <= METADATA_LEN_MAX {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, "`metadata` is too large")
        .hint(format!("at most {METADATA_MAX} pairs and {METADATA_LEN_MAX} bytes together")))
}

/// Finds a Body that this caller reaches. To other callers the Body does not exist.
pub fn own(fleet: &Fleet, caller: &Caller, id: &BodyId) -> Result<(BodyView, Option<Lease>), Failure> {
    let view = fleet
        .view(id)
        .map_err(|failure| if failure.kind == Kind::NotFound { no_body(id.as_str()) } else { failure })?;
    let lease = fleet.leases().get(id)?;
    if !authz::may_reach(caller, lease.as_ref()) {
        return Err(no_body(id.as_str()));
    }
    Ok((view, lease))
}

/// Checks that this caller reaches a Body.
pub async fn owned(app: &App, caller: &Caller, id: &BodyId) -> Result<Spec, Failure> {
    let (caller, id) = (caller.clone(), id.clone());
    app.blocking(async move |fleet: &Fleet| own(fleet, &caller, &id).map(|(view, _)| view.spec)).await
}

/// Changes a Body that this caller reaches, and returns its new state.
pub async fn change<F>(app: &App, caller: Caller, id: BodyId, act: F) -> Result<Json<Body>, V1Refusal>
where
    F: AsyncFnOnce(&Fleet, &BodyId) -> Result<BodyView, Failure> + Send + 'static,
{
    let body = app.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        let view = act(fleet, &id).await?;
        let lease = fleet.leases().get(&id)?;
        Ok(Body::new(view, lease))
    });
    Ok(Json(body.await?))
}

/// Show a Body with all its properties and its enforcement record.
#[utoipa::path(get, path = "/bodies/{id}", operation_id = "get_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The Body", body = Body), (status = "default", description = "Refused", body = ErrorBody)))]
async fn get(
    state: axum::extract::State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<Body>, V1Refusal> {
    let body = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id).map(|(view, lease)| Body::new(view, lease).shown_to(&caller))
    });
    Ok(Json(body.await?))
}

/// How to remove a Body.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RemoveQuery {
    /// Stop the Body first if it runs.
    #[serde(default)]
    force: bool,
}

/// Remove a Body and its files.
#[utoipa::path(delete, path = "/bodies/{id}", operation_id = "remove_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body"), RemoveQuery),
    responses((status = 204, description = "Removed"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn remove(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<RemoveQuery>,
) -> Result<StatusCode, V1Refusal> {
    let force = if query.force { Force::Yes } else { Force::No };
    let removed = state.0.blocking(async move |fleet: &Fleet| {
        own(fleet, &caller, &id)?;
        fleet.remove(&id, force).await
    });
    removed.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Start a Body that is stopped, dead or interrupted.
#[utoipa::path(post, path = "/bodies/{id}/start", operation_id = "start_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The running Body", body = Body), (status = "default", description = "Refused", body = ErrorBody)))]
async fn start(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<Body>, V1Refusal> {
    change(&state.0, caller, id, async |fleet, id| fleet.start(id).await).await
}

/// How to stop a Body.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "grace_ms": 1000 }))]
struct StopRequest {
    /// Milliseconds that processes have to exit before they are killed; 5000 if left out.
    #[schema(minimum = 0, maximum = 60000)]
    grace_ms: Option<u64>,
}

/// End every process of a Body and keep its files.
#[utoipa::path(post, path = "/bodies/{id}/stop", operation_id = "stop_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = Option<StopRequest>,
    responses((status = 200, description = "The stopped Body", body = Body), (status = "default", description = "Refused", body = ErrorBody)))]
async fn stop(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    asked: Option<Sent<StopRequest>>,
) -> Result<Json<Body>, V1Refusal> {
    let grace = asked.and_then(|Sent(asked)| asked.grace_ms).map_or(GRACE, Duration::from_millis);
    if grace > GRACE_MAX {
        return Err(Failure::new(Kind::Usage, "the grace period is too long")
            .hint("at most 60000 ms")
            .into());
    }
    change(&state.0, caller, id, async move |fleet, id| fleet.stop(id, grace).await).await
}

/// Freeze every process of a Body.
#[utoipa::path(post, path = "/bodies/{id}/pause", operation_id = "pause_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The paused Body", body = Body), (status = "default", description = "Refused", body = ErrorBody)))]
async fn pause(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<Body>, V1Refusal> {
    change(&state.0, caller, id, async |fleet, id| fleet.pause(id).await).await
}

/// Let the processes of a paused Body continue.
#[utoipa::path(post, path = "/bodies/{id}/resume", operation_id = "resume_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")),
    responses((status = 200, description = "The running Body", body = Body), (status = "default", description = "Refused", body = ErrorBody)))]
async fn resume(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
) -> Result<Json<Body>, V1Refusal> {
    change(&state.0, caller, id, async |fleet, id| fleet.resume(id).await).await
}

/// How many forks to create, and their name.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "count": 2 }))]
struct ForkRequest {
    /// The number of forks; 1 if left out.
    #[schema(minimum = 1, maximum = 100)]
    count: Option<u32>,
    /// The name of the fork; several forks are named `NAME-1`, `NAME-2`, …
    #[serde(default)]
    #[schema(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", max_length = 63)]
    name: Option<String>,
}

/// Forks of a Body.
#[derive(Debug, Serialize, ToSchema)]
struct ForkedBodies {
    /// The new Bodies.
    items: Vec<Body>,
}

/// Create Bodies that start from the current state of this one.
#[utoipa::path(post, path = "/bodies/{id}/fork", operation_id = "fork_body", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = Option<ForkRequest>,
    responses((status = 201, description = "The new Bodies", body = ForkedBodies), (status = "default", description = "Refused", body = ErrorBody)))]
async fn fork(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    asked: Option<Sent<ForkRequest>>,
) -> Result<(StatusCode, Json<ForkedBodies>), V1Refusal> {
    let app = state.0;
    let asked = asked.map(|Sent(asked)| asked).unwrap_or_default();
    let name = asked.name.as_deref().map(read_name).transpose()?;
    let count = asked.count.unwrap_or(1);
    if !(1..=100).contains(&count) {
        return Err(Failure::new(Kind::Usage, format!("cannot create {count} forks in one request"))
            .hint("ask for 1 to 100")
            .into());
    }
    let spec = owned(&app, &caller, &id).await?;
    let admitted = limits::admit_forks(&app, &caller, &spec, count).await?;
    let forks = app.blocking(async move |fleet: &Fleet| {
        let terms = fleet.leases().terms_of_fork(&id)?;
        let views = fleet.snapshots().fork_leased(&id, count, name.as_ref(), terms).await?;
        drop(admitted);
        views
            .into_iter()
            .map(|view| fleet.leases().get(view.id()).map(|lease| Body::new(view, lease)))
            .collect()
    });
    Ok((StatusCode::CREATED, Json(ForkedBodies { items: forks.await? })))
}

/// Access to the ports of a Body.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "ports": "private" }))]
struct AccessRequest {
    /// The callers that may reach the ports.
    ports: Ports,
}

/// Choose which callers may reach the ports of a Body. Making the ports private creates a new traffic token.
#[utoipa::path(put, path = "/bodies/{id}/access", operation_id = "choose_access", tag = "bodies", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = AccessRequest,
    responses((status = 200, description = "The Body with its new access", body = Body), (status = "default", description = "Refused", body = ErrorBody)))]
async fn access(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    Sent(asked): Sent<AccessRequest>,
) -> Result<Json<Body>, V1Refusal> {
    let body = state.0.blocking(async move |fleet: &Fleet| {
        let (view, _) = own(fleet, &caller, &id)?;
        let token = token_for(asked.ports)?;
        let lease = fleet.leases().change(&id, |lease| lease.traffic_token = token.clone())?;
        Ok(Body::new(view, Some(lease)))
    });
    Ok(Json(body.await?))
}
