//! Fork, rewind and replay of agents: conversation and Body together.

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use fleet::Fleet;
use proto::{AgentId, Failure, Kind, Spec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    agent_create::{COUNT_MAX, check_text},
    agent_models::{Agent, CreatedAgents},
    agents::{AgentParam, describe, describe_all, reached},
    bodies::own,
    error::{ErrorBody, V1Refusal},
    extract::{JsonBody as Sent, RunAccess},
    long_work,
    work_models::describe as describe_result,
};
use crate::{App, Caller, limits};

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(fork)).routes(routes!(rewind)).routes(routes!(replay))
}

/// How to fork an agent.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "count": 3, "message": "try it without the cache" }))]
struct AgentForkRequest {
    /// The turn whose checkpoint the forks begin with. If left out, they begin with the present state; while the agent
    /// works, with its newest checkpoint.
    #[schema(minimum = 0)]
    at: Option<u64>,
    /// The number of forks; 1 if left out.
    #[schema(minimum = 1, maximum = 100)]
    count: Option<u32>,
    /// A message for each fork. Without one, the forks wait for a message or `resume`.
    #[schema(min_length = 1, max_length = 131072)]
    message: Option<String>,
}

/// Create agents that go on from a turn of this one, each in a fork of its Body.
#[utoipa::path(post, path = "/agents/{agent}/fork", operation_id = "fork_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")), request_body = Option<AgentForkRequest>,
    responses((status = 201, description = "The new agents", body = CreatedAgents), (status = "default", description = "Refused", body = ErrorBody)))]
async fn fork(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    asked: Option<Sent<AgentForkRequest>>,
) -> Result<(StatusCode, Json<CreatedAgents>), V1Refusal> {
    let app = state.0;
    let AgentForkRequest { at, count, message } = asked.map(|Sent(asked)| asked).unwrap_or_default();
    let count = count.unwrap_or(1);
    if !(1..=COUNT_MAX).contains(&count) {
        return Err(Failure::new(Kind::Usage, format!("cannot create {count} forks in one request"))
            .hint(format!("ask for 1 to {COUNT_MAX}"))
            .into());
    }
    message.as_deref().map_or(Ok(()), |message| check_text("message", message))?;
    let spec = body_spec(&app, &caller, &id).await?;
    limits::admit_agents(&app, &caller, count as usize).await?;
    let admitted = limits::admit_forks(&app, &caller, &spec, count).await?;
    let forking = app.clone();
    let forks = app.blocking(async move |_: &Fleet| {
        let service = forking.agents();
        let records = service.agents().fork(&id, at, count, None).await?;
        drop(admitted);
        if let Some(message) = message {
            for id in records.iter().map(|record| &record.spec.id) {
                service.give(id, |agents| agents.send(id, message.clone()))?;
            }
        }
        describe_all(&forking, &records).await
    });
    Ok((StatusCode::CREATED, Json(CreatedAgents { items: forks.await? })))
}

/// The spec of the Body of an agent that the caller reaches.
async fn body_spec(app: &App, caller: &Caller, id: &AgentId) -> Result<Spec, Failure> {
    let record = reached(app, caller, id).await?;
    let (service, caller) = (app.agents().clone(), caller.clone());
    app.blocking(async move |fleet: &Fleet| {
        let id = &record.spec.id;
        let gone = || {
            Failure::new(Kind::Conflict, format!("the Body of agent {id} is gone"))
                .hint(format!("read its events: GET /v1/agents/{id}/export"))
        };
        let body = service.body_of(fleet, id)?.ok_or_else(gone)?;
        match own(fleet, &caller, &body) {
            Ok((view, _)) => Ok(view.spec),
            Err(failure) if failure.kind == Kind::NotFound => Err(gone()),
            Err(failure) => Err(failure),
        }
    })
    .await
}

/// The turn to go back to.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "turn": 3 }))]
struct RewindRequest {
    /// A turn with a checkpoint.
    #[schema(minimum = 0)]
    turn: u64,
}

/// Take an agent back to a checkpoint: its conversation, and in a new Body its files.
///
/// The agent must rest. The Body before stays, and the events after the checkpoint stay in the log.
#[utoipa::path(post, path = "/agents/{agent}/rewind", operation_id = "rewind_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")), request_body = RewindRequest,
    responses((status = 200, description = "The agent in its new Body", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn rewind(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    Sent(asked): Sent<RewindRequest>,
) -> Result<Json<Agent>, V1Refusal> {
    let app = state.0;
    let spec = body_spec(&app, &caller, &id).await?;
    if app.agents().is_driven(&id) {
        return Err(Failure::new(Kind::Conflict, format!("agent {id} works"))
            .hint(format!("interrupt it first: POST /v1/agents/{id}/interrupt"))
            .into());
    }
    let admitted = limits::admit_forks(&app, &caller, &spec, 1).await?;
    let service = app.agents().clone();
    let agent = app.blocking(async move |_: &Fleet| {
        service.agents().rewind(&id, asked.turn).await?;
        drop(admitted);
        describe(&service, &id).await
    });
    Ok(Json(agent.await?))
}

/// A call whose result differs from the recorded one.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
struct ReplayedCall {
    /// The turn.
    turn: u64,
    /// The tool.
    tool: String,
    /// The recorded result.
    recorded: String,
    /// The result of the replay.
    replayed: String,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The result of a replay.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
struct ReplayResult {
    /// Number of calls with the recorded result.
    same: u64,
    /// Number of calls that were not repeated.
    skipped: u64,
    /// The calls with another result.
    differences: Vec<ReplayedCall>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// Run the recorded calls of an agent again in a new Body, which is removed afterwards, and report the results that
/// differ.
///
/// With `Accept: text/event-stream` the response is a stream that ends with `done` or `failed`.
#[utoipa::path(post, path = "/agents/{agent}/replay", operation_id = "replay_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")),
    responses((status = 200, description = "The report, or a stream", content((ReplayResult = "application/json"), (String = "text/event-stream"))), (status = "default", description = "Refused", body = ErrorBody)))]
async fn replay(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    headers: HeaderMap,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    let spec = body_spec(&app, &caller, &id).await?;
    let admitted = limits::admit_forks(&app, &caller, &spec, 1).await?;
    let service = app.agents().clone();
    let act = async move |_: &Fleet, _: long_work::Report<'_>| {
        let report = service.host().replay(&id).await?;
        drop(admitted);
        describe_result::<ReplayResult>(&report)
    };
    long_work::answer(&app, &caller, &headers, StatusCode::OK, act).await
}
