//! The events of an agent in pages, and what is read from them: the export, the cost, long content.
//!
//! Invariant: a page is bounded; no request holds the whole log of an agent in memory.

use std::{collections::VecDeque, io};

use axum::{
    Json,
    body::Body as HttpBody,
    extract::{FromRequestParts, Path, State},
    http::{header, request::Parts},
};
use bridge::{AgentRecord, Agents};
use bytes::Bytes;
use fleet::{ArtifactRef, EventQuery, Fleet};
use futures_util::stream;
use proto::{
    AgentId, ChainId, Event, Failure, Kind,
    event_data::{AgentInstructed, CallEnded, EventKind, ModelAnswered},
};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    agent_models::Tokens,
    agents::{AgentParam, reached},
    error::{ErrorBody, V1Refusal},
    events::EventBody,
    extract::ReadAccess,
};
use crate::{
    App,
    agents::{AgentService, no_agent},
    limits::StreamPermit,
};

/// Events that one query reads.
const READ_MAX: usize = 256;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(export)).routes(routes!(cost)).routes(routes!(artifact))
}

/// A reader of the events that count for an agent: those of the agents that it was forked from, then its own.
#[derive(Debug, Clone)]
pub struct AgentLog {
    /// The chains that are not read yet, and the last event of each that counts.
    chains: VecDeque<(ChainId, Option<u64>)>,
    /// The position up to which the log was read.
    after: u64,
    kinds: Vec<&'static str>,
}

impl AgentLog {
    /// Reads events after a position.
    pub fn open(agents: &Agents, record: &AgentRecord, after: u64) -> Result<Self, Failure> {
        let origins = agents.origins(record)?.into_iter();
        let mut chains: VecDeque<_> =
            origins.map(|origin| (ChainId::Agent(origin.agent), Some(origin.through))).collect();
        chains.push_back((ChainId::Agent(record.spec.id.clone()), None));
        Ok(Self { chains, after, kinds: Vec::new() })
    }

    /// Reads only events of the agent's own chain.
    fn own(id: &AgentId) -> Self {
        let chains = VecDeque::from([(ChainId::Agent(id.clone()), None)]);
        Self { chains, after: 0, kinds: Vec::new() }
    }

    /// Reads only events of these types.
    fn only(self, kinds: &[&[&'static str]]) -> Self {
        Self { kinds: kinds.concat(), ..self }
    }

    /// The position up to which the log was read.
    pub fn after(&self) -> u64 {
        self.after
    }

    /// Says that the agent has no event up to a position.
    pub fn skip_to(&mut self, pos: u64) {
        self.after = self.after.max(pos);
    }

    /// The next events; none if there is none yet.
    pub fn next_page(&mut self, fleet: &Fleet) -> Result<Vec<Event>, Failure> {
        while let Some((chain, through)) = self.chains.front() {
            let query = EventQuery {
                after: self.after,
                kinds: self.kinds.clone(),
                limit: READ_MAX,
                ..EventQuery::of_chain(chain)
            };
            let mut events = fleet.log().read(&query)?;
            let read = events.len();
            events.retain(|event| through.is_none_or(|through| event.seq <= through));
            let is_read = through.is_some() && (events.len() < read || read < READ_MAX);
            if is_read {
                self.chains.pop_front();
            }
            if let Some(last) = events.last() {
                self.after = last.pos;
            }
            if !events.is_empty() || !is_read {
                return Ok(events);
            }
        }
        Ok(Vec::new())
    }
}

/// The fields in which an event has content, or the artifact that holds it.
const STORED: [&str; 3] = ["message", "result", "system"];

/// The artifact that holds the content of an event.
fn artifact_of(event: &Event) -> Option<ArtifactRef> {
    let stored = STORED.iter().find_map(|field| event.data.get(field))?;
    let sha256 = stored.get("artifact")?.as_str()?.to_owned();
    Some(ArtifactRef { sha256, bytes: stored.get("artifact_bytes")?.as_u64()? })
}

/// Export the events of an agent as JSON lines, oldest first: those of the agents that it was forked from, then its own.
///
/// Content that an event only refers to is beside it, as `content`.
#[utoipa::path(get, path = "/agents/{agent}/export", operation_id = "export_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")),
    responses((status = 200, description = "One event in each line", body = String, content_type = "application/x-ndjson"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn export(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    AgentParam(id): AgentParam,
) -> Result<([(header::HeaderName, &'static str); 1], HttpBody), V1Refusal> {
    let app = state.0;
    let record = reached(&app, &caller, &id).await?;
    let permit = app.services().limits().stream(&caller.key)?;
    let service = app.agents().clone();
    let log = app.blocking(async move |_: &Fleet| AgentLog::open(service.agents(), &record, 0)).await?;
    let lines = stream::unfold(Some((app, log, permit)), async |export| {
        let (app, log, permit) = export?;
        next_lines(app, log, permit).await
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], HttpBody::from_stream(lines)))
}

/// A page of an export, and the state for the next one.
type ExportPage = (Result<Bytes, io::Error>, Option<(App, AgentLog, StreamPermit)>);

async fn next_lines(app: App, mut log: AgentLog, permit: StreamPermit) -> Option<ExportPage> {
    let read = app.blocking(async move |fleet: &Fleet| {
        let mut lines = Vec::new();
        for event in log.next_page(fleet)? {
            let artifact = artifact_of(&event);
            let mut line = serde_json::json!(EventBody::from(event));
            if let Some(artifact) = artifact {
                let bytes = fleet.log().get_artifact(&artifact)?;
                line["content"] = serde_json::from_slice(&bytes).unwrap_or_default();
            }
            lines.extend(line.to_string().into_bytes());
            lines.push(b'\n');
        }
        Ok((Bytes::from(lines), log))
    });
    match read.await {
        Ok((lines, _)) if lines.is_empty() => None,
        Ok((lines, log)) => Some((Ok(lines), Some((app, log, permit)))),
        // The status is sent already: the client sees that the answer is cut.
        Err(failure) => Some((Err(io::Error::other(failure.to_string())), None)),
    }
}

/// The tokens, the cost and the times of one agent.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
struct AgentCostItem {
    /// The agent.
    agent: String,
    /// The agent that started it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    parent: Option<String>,
    #[serde(flatten)]
    sums: CostSums,
}

/// Sums over answers of a model and tool calls.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
struct CostSums {
    /// Answers of the model.
    answers: u64,
    /// Answers whose price is not known.
    unpriced_answers: u64,
    /// The tokens.
    tokens: Tokens,
    /// The cost in millionths of a dollar, of the answers whose price is known.
    cost_microdollars: u64,
    /// How long the model took, in milliseconds.
    model_ms: u64,
    /// Tool calls that ended.
    calls: u64,
    /// How long the tools took, in milliseconds.
    tool_ms: u64,
}

impl CostSums {
    fn add_event(&mut self, event: &Event) {
        if let Some(answered) = event.data_as::<ModelAnswered>() {
            let usage = answered.usage;
            self.answers += 1;
            self.tokens.input += usage.input;
            self.tokens.output += usage.output;
            self.tokens.cache_read += usage.cache_read;
            self.tokens.cache_write += usage.cache_write;
            self.model_ms += answered.took_ms;
            self.cost_microdollars += answered.cost_microdollars.unwrap_or(0);
            self.unpriced_answers += u64::from(answered.cost_microdollars.is_none());
        }
        if let Some(ended) = event.data_as::<CallEnded>() {
            self.calls += 1;
            self.tool_ms += ended.took_ms;
        }
    }

    fn add(&mut self, other: &Self) {
        self.answers += other.answers;
        self.unpriced_answers += other.unpriced_answers;
        self.tokens.input += other.tokens.input;
        self.tokens.output += other.tokens.output;
        self.tokens.cache_read += other.tokens.cache_read;
        self.tokens.cache_write += other.tokens.cache_write;
        self.cost_microdollars += other.cost_microdollars;
        self.model_ms += other.model_ms;
        self.calls += other.calls;
        self.tool_ms += other.tool_ms;
    }
}

/// The cost of an agent and its sub-agents.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
struct CostReport {
    /// The agent, then its sub-agents.
    items: Vec<AgentCostItem>,
    /// All of them together.
    total: CostSums,
}

/// Show the tokens, the cost and the times of an agent and of each of its sub-agents.
///
/// A fork does not count the answers of the agent that it came from.
#[utoipa::path(get, path = "/agents/{agent}/cost", operation_id = "cost_of_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")),
    responses((status = 200, description = "The cost", body = CostReport), (status = "default", description = "Refused", body = ErrorBody)))]
async fn cost(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    AgentParam(id): AgentParam,
) -> Result<Json<CostReport>, V1Refusal> {
    let app = state.0;
    reached(&app, &caller, &id).await?;
    let service = app.agents().clone();
    let report = app.blocking(async move |fleet: &Fleet| sum_costs(&service, fleet, &id));
    Ok(Json(report.await?))
}

fn sum_costs(service: &AgentService, fleet: &Fleet, id: &AgentId) -> Result<CostReport, Failure> {
    let mut report = CostReport::default();
    for id in service.agents().family(id)? {
        let parent = service.agents().get(&id)?.spec.parent.map(|parent| parent.agent.to_string());
        let mut sums = CostSums::default();
        let mut log = AgentLog::own(&id).only(&[ModelAnswered::NAMES, CallEnded::NAMES]);
        loop {
            let events = log.next_page(fleet)?;
            if events.is_empty() {
                break;
            }
            events.iter().for_each(|event| sums.add_event(event));
        }
        report.total.add(&sums);
        report.items.push(AgentCostItem { agent: id.to_string(), parent, sums });
    }
    Ok(report)
}

/// An agent and the name of an artifact, in the path.
struct ArtifactParam(AgentId, String);

impl FromRequestParts<App> for ArtifactParam {
    type Rejection = V1Refusal;
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, V1Refusal> {
        let read = Path::<(String, String)>::from_request_parts(parts, app).await;
        let Path((agent, artifact)) = read.map_err(|_| no_agent(""))?;
        Ok(Self(agent.parse().map_err(|_| no_agent(&agent))?, artifact))
    }
}

/// Read content that an event of an agent only refers to: the blocks of a long answer or a long result.
#[utoipa::path(get, path = "/agents/{agent}/artifacts/{sha256}", operation_id = "artifact_of_agent", tag = "agents",
    params(("agent" = String, Path, description = "The id of the agent"), ("sha256" = String, Path, description = "`artifact` of the event")),
    responses((status = 200, description = "The blocks", body = Vec<Object>), (status = "default", description = "Refused", body = ErrorBody)))]
async fn artifact(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    ArtifactParam(id, sha256): ArtifactParam,
) -> Result<([(header::HeaderName, &'static str); 1], HttpBody), V1Refusal> {
    let app = state.0;
    let record = reached(&app, &caller, &id).await?;
    let service = app.agents().clone();
    let bytes = app.blocking(async move |fleet: &Fleet| {
        let kinds = [ModelAnswered::NAMES, CallEnded::NAMES, AgentInstructed::NAMES];
        let mut log = AgentLog::open(service.agents(), &record, 0)?.only(&kinds);
        loop {
            let events = log.next_page(fleet)?;
            if events.is_empty() {
                return Err(Failure::new(Kind::NotFound, "no event of the agent refers to such content")
                    .hint("take `artifact` of an event"));
            }
            // Content of another agent does not become readable by knowing its hash.
            let named = |artifact: &ArtifactRef| artifact.sha256 == sha256;
            if let Some(artifact) = events.iter().filter_map(artifact_of).find(named) {
                return fleet.log().get_artifact(&artifact);
            }
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/json")], HttpBody::from(bytes.await?)))
}
