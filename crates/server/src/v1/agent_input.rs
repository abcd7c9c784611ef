//! Inputs of people to agents: messages, approvals, answers, interruptions, more budget.
//!
//! Invariant: an input is an event of the agent's chain before the request is answered; the driver, now or later, reads
//! it there. So a killed server loses none.
//! Invariant: only a key of scope `admin` makes an approval a rule: a rule holds for all agents of the host.

use std::time::Duration;

use axum::{Json, extract::State};
use bridge::{AgentStatus, AgentView, CallStage};
use proto::{
    AgentId, EventData, Failure, Kind,
    event_data::{
        AgentBudgeted, AgentInterrupted, AgentPause, AgentResumed, ApprovalDecision, ApprovalGiven,
        ApprovalScope, QuestionAnswered,
    },
};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    agent_create::check_text,
    agent_models::{Agent, BudgetRequest},
    agents::{AgentParam, change},
    error::{ErrorBody, V1Refusal},
    extract::{JsonBody as Sent, RunAccess, read_object_or_null},
};
use crate::{App, Scope, agents::AgentService};

/// How long a request waits until an interrupted agent rests.
const REST_WAIT: Duration = Duration::from_secs(10);
const REST_LOOK: Duration = Duration::from_millis(50);

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(send))
        .routes(routes!(approve))
        .routes(routes!(answer))
        .routes(routes!(interrupt))
        .routes(routes!(stop))
        .routes(routes!(resume))
}

/// A message to an agent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "text": "also look at the other tests" }))]
struct MessageRequest {
    /// The message.
    #[schema(min_length = 1, max_length = 131072)]
    text: String,
}

/// Give an agent a message. An agent that waits or has finished goes on with it.
#[utoipa::path(post, path = "/agents/{agent}/messages", operation_id = "send_to_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")), request_body = MessageRequest,
    responses((status = 200, description = "The agent, which has the message", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn send(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    Sent(asked): Sent<MessageRequest>,
) -> Result<Json<Agent>, V1Refusal> {
    check_text("text", &asked.text)?;
    let act = async move |service: &AgentService, record: &bridge::AgentRecord| {
        let id = &record.spec.id;
        service.give(id, |agents| agents.send(id, asked.text))
    };
    change(&state.0, caller, id, act).await
}

/// A decision about a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum DecisionWord {
    /// Carry it out.
    Approve,
    /// Carry it out with other arguments.
    Edit,
    /// Do not carry it out.
    Reject,
    /// Do not carry it out; the model gets the message as the answer.
    Answer,
}

/// How long a decision holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum DecisionScope {
    /// For the call.
    #[default]
    Once,
    /// For all calls of this agent that the same rule asks about.
    Agent,
    /// As a rule of the host; only for keys of scope `admin`.
    Rule,
}

/// A decision about the tool calls of an agent that wait for approval.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "decision": "approve" }))]
struct ApprovalRequest {
    /// The decision.
    decision: DecisionWord,
    /// The id of the call; all calls that wait if left out.
    #[schema(max_length = 256)]
    call: Option<String>,
    /// The arguments to carry out instead; only for `edit`.
    #[serde(default, deserialize_with = "read_object_or_null")]
    #[schema(value_type = Option<Object>)]
    arguments: Option<serde_json::Map<String, Value>>,
    /// The reason of a rejection, or the answer instead of the tool's.
    #[schema(max_length = 131072)]
    message: Option<String>,
    /// How long the decision holds; `once` if left out.
    #[serde(default)]
    scope: DecisionScope,
}

impl ApprovalRequest {
    fn check(&self, scope: Scope) -> Result<(), Failure> {
        let wrong = |text: &str, hint: &str| Err(Failure::new(Kind::Usage, text).hint(hint));
        if (self.decision == DecisionWord::Edit) != self.arguments.is_some() {
            return wrong("`arguments` belong to the decision `edit`", "write both, or neither");
        }
        if self.arguments.is_some() && self.call.is_none() {
            return wrong("`arguments` are those of one call", "name the call: \"call\": \"ID\"");
        }
        let approves = matches!(self.decision, DecisionWord::Approve | DecisionWord::Edit);
        if self.message.is_some() && approves {
            return wrong("an approval has no `message`", "leave it out, or POST a message");
        }
        if self.message.is_none() && self.decision == DecisionWord::Answer {
            return wrong("the decision `answer` needs a `message`", "write what the model gets");
        }
        if let Some(message) = &self.message {
            check_text("message", message)?;
        }
        if self.scope != DecisionScope::Once && !approves {
            return wrong("only an approval holds for more than one call", "leave `scope` out");
        }
        if self.scope == DecisionScope::Rule && scope < Scope::Admin {
            return Err(Failure::new(Kind::Denied, "only a key of scope admin may make rules of the host")
                .hint("approve with the scope `once` or `agent`"));
        }
        Ok(())
    }

    fn event(&self, call: String) -> ApprovalGiven {
        ApprovalGiven {
            call,
            decision: match self.decision {
                DecisionWord::Approve => ApprovalDecision::Approve,
                DecisionWord::Edit => ApprovalDecision::Edit,
                DecisionWord::Reject => ApprovalDecision::Reject,
                DecisionWord::Answer => ApprovalDecision::Answer,
            },
            arguments: self.arguments.clone().map(Value::Object),
            message: self.message.clone(),
            scope: match self.scope {
                DecisionScope::Once => ApprovalScope::Once,
                DecisionScope::Agent => ApprovalScope::Agent,
                DecisionScope::Rule => ApprovalScope::Rule,
            },
        }
    }
}

/// Decide about tool calls that wait for approval: approve, edit, reject, or answer instead of the tool.
#[utoipa::path(post, path = "/agents/{agent}/approvals", operation_id = "approve_calls", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")), request_body = ApprovalRequest,
    responses((status = 200, description = "The agent, which has the decision", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn approve(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    Sent(asked): Sent<ApprovalRequest>,
) -> Result<Json<Agent>, V1Refusal> {
    asked.check(caller.scope)?;
    let act = async move |service: &AgentService, record: &bridge::AgentRecord| {
        let id = &record.spec.id;
        let view = service.agents().load(id).await?.view;
        let waits = |stage: &CallStage| matches!(stage, CallStage::Asked(_));
        let calls = waiting_calls(&view, asked.call.as_deref(), waits);
        if calls.is_empty() {
            return Err(Failure::new(
                Kind::Conflict,
                format!("no such call of agent {id} waits for an approval"),
            )
            .hint(format!("see `approvals` of GET /v1/agents/{id}")));
        }
        if asked.scope == DecisionScope::Rule {
            service.host().keep_rules(&view, asked.call.as_deref())?;
        }
        let events = calls.into_iter().map(|call| EventData::from(asked.event(call)));
        service.give(id, |agents| agents.note(id, events))
    };
    change(&state.0, caller, id, act).await
}

/// The calls in a stage, or the one of them with this id.
fn waiting_calls(view: &AgentView, call: Option<&str>, waits: impl Fn(&CallStage) -> bool) -> Vec<String> {
    let waiting = view.calls.iter().filter(|state| waits(&state.stage));
    let named = waiting.filter(|state| call.is_none_or(|call| state.call.id == call));
    named.map(|state| state.call.id.clone()).collect()
}

/// An answer to a question of an agent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "answer": "the second one" }))]
struct AnswerRequest {
    /// The answer.
    #[schema(min_length = 1, max_length = 131072)]
    answer: String,
    /// The id of the call that asks; the oldest question if left out.
    #[schema(max_length = 256)]
    call: Option<String>,
}

/// Answer a question of an agent.
#[utoipa::path(post, path = "/agents/{agent}/answers", operation_id = "answer_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")), request_body = AnswerRequest,
    responses((status = 200, description = "The agent, which has the answer", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn answer(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    Sent(asked): Sent<AnswerRequest>,
) -> Result<Json<Agent>, V1Refusal> {
    check_text("answer", &asked.answer)?;
    let act = async move |service: &AgentService, record: &bridge::AgentRecord| {
        let id = &record.spec.id;
        let view = service.agents().load(id).await?.view;
        let asks = |stage: &CallStage| *stage == CallStage::Questioned;
        let Some(call) = waiting_calls(&view, asked.call.as_deref(), asks).into_iter().next() else {
            return Err(Failure::new(Kind::Conflict, format!("agent {id} asks no such question"))
                .hint(format!("see `questions` of GET /v1/agents/{id}, or POST a message")));
        };
        let answered = QuestionAnswered { call, answer: asked.answer };
        service.give(id, |agents| agents.note(id, [EventData::from(answered)]))
    };
    change(&state.0, caller, id, act).await
}

/// Interrupt the turn of an agent. A message or `resume` lets it go on.
///
/// The answer comes when the agent rests, and at the latest after 10 seconds. An agent that does not work stays as it is.
#[utoipa::path(post, path = "/agents/{agent}/interrupt", operation_id = "interrupt_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")),
    responses((status = 200, description = "The agent", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn interrupt(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
) -> Result<Json<Agent>, V1Refusal> {
    let act = async |service: &AgentService, record: &bridge::AgentRecord| {
        rest(service, &record.spec.id, AgentInterrupted { stop: false }).await
    };
    change(&state.0, caller, id, act).await
}

/// Interrupt an agent, and end the processes that it started in the background.
///
/// The answer comes when the agent rests, and at the latest after 10 seconds. An agent that does not work stays as it is.
#[utoipa::path(post, path = "/agents/{agent}/stop", operation_id = "stop_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")),
    responses((status = 200, description = "The agent", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn stop(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
) -> Result<Json<Agent>, V1Refusal> {
    let act = async |service: &AgentService, record: &bridge::AgentRecord| {
        rest(service, &record.spec.id, AgentInterrupted { stop: true }).await
    };
    change(&state.0, caller, id, act).await
}

async fn works(service: &AgentService, id: &AgentId) -> Result<bool, Failure> {
    Ok(service.agents().load(id).await?.view.status() == AgentStatus::Working)
}

/// Interrupts an agent that works, and waits until it rests.
async fn rest(service: &AgentService, id: &AgentId, interrupted: AgentInterrupted) -> Result<(), Failure> {
    if !works(service, id).await? {
        return Ok(());
    }
    service.give(id, |agents| agents.note(id, [EventData::from(interrupted)]))?;
    let patience = tokio::time::Instant::now() + REST_WAIT;
    while works(service, id).await? && tokio::time::Instant::now() < patience {
        tokio::time::sleep(REST_LOOK).await;
    }
    Ok(())
}

/// How an agent goes on.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "budget": { "dollars": 5 } }))]
struct ResumeRequest {
    /// New limits; those that are left out stay.
    #[serde(default, deserialize_with = "read_object_or_null")]
    budget: Option<BudgetRequest>,
}

/// Let an agent go on: after a pause, with another budget, or after its driver ended.
#[utoipa::path(post, path = "/agents/{agent}/resume", operation_id = "resume_agent", tag = "agents", params(("agent" = String, Path, description = "The id of the agent")), request_body = Option<ResumeRequest>,
    responses((status = 200, description = "The agent", body = Agent), (status = "default", description = "Refused", body = ErrorBody)))]
async fn resume(
    state: State<App>,
    RunAccess(caller): RunAccess,
    AgentParam(id): AgentParam,
    asked: Option<Sent<ResumeRequest>>,
) -> Result<Json<Agent>, V1Refusal> {
    let budget = asked.and_then(|Sent(asked)| asked.budget);
    let act = async move |service: &AgentService, record: &bridge::AgentRecord| {
        let id = &record.spec.id;
        let view = service.agents().load(id).await?.view;
        let raised = budget.as_ref().map(|budget| budget.over(&view.budget)).transpose()?;
        let mut events: Vec<EventData> = Vec::new();
        let is_new = raised.as_ref().is_some_and(|raised| *raised != view.budget);
        events.extend(raised.map(|budget| AgentBudgeted { budget }.into()));
        events.extend(resuming(id, &view.status(), is_new)?);
        service.give(id, |agents| agents.note(id, events))
    };
    change(&state.0, caller, id, act).await
}

/// The event that ends a pause; a refusal if the agent needs something else.
fn resuming(id: &AgentId, status: &AgentStatus, has_new_budget: bool) -> Result<Option<EventData>, Failure> {
    let refused = |text: String, hint: String| Err(Failure::new(Kind::Conflict, text).hint(hint));
    match status {
        AgentStatus::Working => Ok(None),
        AgentStatus::Finished => refused(
            format!("agent {id} has finished"),
            format!("give it another message: POST /v1/agents/{id}/messages"),
        ),
        AgentStatus::Paused { reason: AgentPause::Approval, .. } => refused(
            format!("agent {id} waits for an approval"),
            format!("decide: POST /v1/agents/{id}/approvals"),
        ),
        AgentStatus::Paused { reason: AgentPause::Question, .. } => refused(
            format!("agent {id} waits for an answer"),
            format!("answer: POST /v1/agents/{id}/answers"),
        ),
        AgentStatus::Paused { reason: AgentPause::Budget, .. } if !has_new_budget => refused(
            format!("agent {id} has used up its budget"),
            "raise it: {\"budget\": {\"dollars\": 5}}".to_owned(),
        ),
        AgentStatus::Paused { .. } => Ok(Some(AgentResumed {}.into())),
    }
}
