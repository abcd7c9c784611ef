//! Agents: create, list, show and remove them.
//!
//! Invariant: a key reaches the agents whose Body it reaches; to other keys they do not exist.
//! Invariant: this server drives the agents that its clients create; an answer never waits for a model.

use axum::{
    Json,
    extract::{FromRequestParts, State},
    http::{HeaderMap, StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use bridge::{AgentRecord, RemovedBody};
use fleet::Fleet;
use proto::{AgentId, Failure, Kind};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    agent_create::NewAgent,
    agent_models::{Agent, AgentSummary, CreatedAgents, Driven},
    error::{ErrorBody, V1Refusal},
    extract::{JsonBody as Sent, NameParam, QueryParams, ReadAccess, RunAccess},
    long_work,
    page::{self, Page, PageQuery},
};
use crate::{
    App, Caller,
    agents::{AgentService, no_agent},
    idempotency::KeyedRequest,
};

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(get, remove))
}

/// The agent in the path, by its id.
pub struct AgentParam(pub AgentId);

impl FromRequestParts<App> for AgentParam {
    type Rejection = V1Refusal;
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
        let NameParam(name) = NameParam::from_request_parts(parts, app).await?;
        name.parse().map(Self).map_err(|_| no_agent(&name).into())
    }
}

/// Finds an agent that the caller reaches.
pub async fn reached(app: &App, caller: &Caller, id: &AgentId) -> Result<AgentRecord, Failure> {
    let (service, caller, id) = (app.agents().clone(), caller.clone(), id.clone());
    app.blocking(async move |fleet: &Fleet| service.reached(fleet, &caller, &id)).await
}

/// The agent as clients see it.
pub async fn describe(service: &AgentService, id: &AgentId) -> Result<Agent, Failure> {
    let driven = driven(service, id);
    Ok(Agent::new(&service.agents().load(id).await?, driven))
}

fn driven(service: &AgentService, id: &AgentId) -> Driven {
    if service.is_driven(id) { Driven::Yes } else { Driven::No }
}

/// Changes an agent that the caller reaches, and returns its new state.
pub async fn change<F>(app: &App, caller: Caller, id: AgentId, act: F) -> Result<Json<Agent>, V1Refusal>
where
    F: AsyncFnOnce(&AgentService, &AgentRecord) -> Result<(), Failure> + Send + 'static,
{
    let service = app.agents().clone();
    let agent = app.blocking(async move |fleet: &Fleet| {
        let record = service.reached(fleet, &caller, &id)?;
        act(&service, &record).await?;
        describe(&service, &id).await
    });
    Ok(Json(agent.await?))
}

/// List the agents that this key reaches, oldest first; sub-agents, too.
#[utoipa::path(get, path = "/agents", operation_id = "list_agents", tag = "agents", params(PageQuery),
    responses((status = 200, description = "A page of agents", body = Page<AgentSummary>), (status = "default", description = "Refused", body = ErrorBody)))]
async fn list(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    QueryParams(query): QueryParams<PageQuery>,
) -> Result<Json<Page<AgentSummary>>, V1Refusal> {
    let service = state.0.agents().clone();
    let found = state.0.blocking(async move |fleet: &Fleet| {
        let mut records = Vec::new();
        for record in service.agents().list()? {
            if service.is_reached(fleet, &caller, &record)? {
                records.push(record);
            }
        }
        records.sort_by_key(place);
        let Page { items, next } = page::page(records, &query, place)?;
        let mut agents = Vec::new();
        for record in items {
            let id = &record.spec.id;
            agents.push(match service.agents().load(id).await {
                Ok(loaded) => AgentSummary::new(&loaded, driven(&service, id)),
                // It was removed since.
                Err(failure) if failure.kind == Kind::NotFound => continue,
                Err(_) => AgentSummary::unreadable(&record),
            });
        }
        Ok(Page { items: agents, next })
    });
    Ok(Json(found.await?))
}

/// The place of an agent in the list.
fn place(record: &AgentRecord) -> String {
    format!("{} {}", record.created_at, record.spec.id)
}

/// Create agents and let them work.
///
/// The answer comes as soon as the agents exist; they work on after it. With an `Idempotency-Key`, a repeated request
/// with the same key returns the agents of the first one. Preparing a new repository may take minutes: with
/// `Accept: text/event-stream` the response is a stream of events `progress` (`{"text"}`), then `done` or `failed`.
#[utoipa::path(post, path = "/agents", operation_id = "create_agents", tag = "agents", request_body = NewAgent,
    params(("Idempotency-Key" = Option<String>, Header, description = "Marks repetitions of one request: requests with the same key create the agents once", min_length = 1, max_length = 255, pattern = "^[A-Za-z0-9_.:-]{1,255}$")),
    responses((status = 201, description = "The new agents", body = CreatedAgents),
        (status = 200, description = "The agents that an earlier request with the same key created, or a stream of the progress", content((CreatedAgents = "application/json"), (String = "text/event-stream"))),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn create(
    state: State<App>,
    RunAccess(caller): RunAccess,
    headers: HeaderMap,
    Sent(wanted): Sent<NewAgent>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let said = serde_json::to_vec(&("agents", &wanted)).unwrap_or_default();
    let request = KeyedRequest::of(&headers, &caller, &said).map_err(Failure::from)?;
    // A repetition of a request that is in progress waits for the first one.
    let slot = match &request {
        Some(request) => Some(app.turns().take(request).await),
        None => None,
    };
    let creation = wanted.check(&app, &caller, request).await?;
    let looking = app.clone();
    let (creation, earlier) = app
        .blocking(async move |fleet: &Fleet| {
            let earlier = creation.find_earlier(&looking, fleet)?;
            Ok((creation, earlier))
        })
        .await?;
    if creation.is_complete(&earlier) {
        let items = describe_all(&app, &earlier.agents).await?;
        return Ok((StatusCode::OK, Json(CreatedAgents { items })).into_response());
    }
    let admitted = creation.admit(&app, &earlier).await?;
    let making = app.clone();
    let act = async move |fleet: &Fleet, report: long_work::Report<'_>| {
        let records = creation.carry_out(&making, fleet, earlier, admitted, report).await?;
        drop(slot);
        for record in &records {
            making.agents().wake(&record.spec.id)?;
        }
        Ok(CreatedAgents { items: describe_all(&making, &records).await? })
    };
    long_work::answer(&app, &caller, &headers, StatusCode::CREATED, act).await
}

/// Agents as clients see them.
pub async fn describe_all(app: &App, records: &[AgentRecord]) -> Result<Vec<Agent>, Failure> {
    let mut agents = Vec::new();
    for record in records {
        agents.push(describe(app.agents(), &record.spec.id).await?);
    }
    Ok(agents)
}

/// Show an agent: its status, tasks, sums, checkpoints, and the approvals and questions that wait.
#[utoipa::path(get, path = "/agents/{agent}", operation_id = "get_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")),
    responses((status = 200, description = "The agent", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn get(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    AgentParam(id): AgentParam,
) -> Result<Json<Agent>, V1Refusal> {
    change(&state.0, caller, id, async |_, _| Ok(())).await
}

/// How to remove an agent.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RemoveQuery {
    /// Remove its Body and those of its sub-agents, too, after their work is saved.
    #[serde(default)]
    body: bool,
    /// Remove the agent even if it works.
    #[serde(default)]
    force: bool,
}

/// Remove an agent, its sub-agents and their checkpoints. Its events stay in the log.
#[utoipa::path(delete, path = "/agents/{agent}", operation_id = "remove_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent"), RemoveQuery),
    responses((status = 204, description = "Removed"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn remove(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    QueryParams(query): QueryParams<RemoveQuery>,
) -> Result<StatusCode, V1Refusal> {
    let service = state.0.agents().clone();
    let removed = state.0.blocking(async move |fleet: &Fleet| {
        service.reached(fleet, &caller, &id)?;
        let body = if query.body { RemovedBody::Removed } else { RemovedBody::Kept };
        if body == RemovedBody::Removed {
            check_body_is_free(&service, fleet, &id)?;
        }
        for id in service.agents().family(&id)? {
            if query.force {
                service.end_driver(&id).await;
            } else if service.is_driven(&id) {
                return Err(Failure::new(Kind::Conflict, format!("agent {id} works"))
                    .hint(format!("stop it: POST /v1/agents/{id}/stop, or remove it with ?force=true")));
            }
        }
        service.agents().remove_whole(&id, body).await
    });
    removed.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Refuses to remove a Body in which another agent works.
fn check_body_is_free(service: &AgentService, fleet: &Fleet, id: &AgentId) -> Result<(), Failure> {
    let family = service.agents().family(id)?;
    let Some(body) = service.body_of(fleet, id)? else { return Ok(()) };
    for record in service.agents().list()?.iter().filter(|record| !family.contains(&record.spec.id)) {
        if service.body_of(fleet, &record.spec.id)?.as_ref() == Some(&body) {
            return Err(Failure::new(Kind::Conflict, format!("another agent works in Body {body}"))
                .hint("remove the agent without its Body"));
        }
    }
    Ok(())
}
