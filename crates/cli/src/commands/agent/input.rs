//! Inputs of a person to an agent: messages, approvals, answers, interruptions.

use std::time::{Duration, Instant};

use brain::agent::{AgentStatus, AgentView, CallStage};
use bridge::Agents;
use proto::{
    AgentId, EventData, Failure, Kind,
    event_data::{
        AgentBudget, AgentBudgeted, AgentInterrupted, AgentPause, ApprovalDecision, ApprovalGiven,
        ApprovalScope, QuestionAnswered,
    },
};
use serde_json::Value;

use super::{
    attach::{self, WatchFrom},
    driver, find,
    follow::open_question,
    run::text_of,
};
use crate::{
    args::{AgentAnswerArgs, AgentApproveArgs, AgentArg, AgentDenyArgs, AgentResumeArgs, AgentSendArgs},
    output::{self, Format},
};

/// How long an interrupted agent may take until it rests.
const REST_WAIT: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Gives an agent a message.
pub async fn send(agents: &Agents, args: AgentSendArgs, format: Format) -> Result<u8, Failure> {
    let id = agents.find(&args.agent)?.spec.id;
    let from = agents.load(&id).await?.view.seq;
    agents.send(&id, text_of(&args.message)?)?;
    driver::wake(agents, &id)?;
    if args.detach {
        return done(&id, "got the message", format);
    }
    attach::attach(agents, &id, WatchFrom::After(from), format).await
}

/// Approves calls.
pub async fn approve(agents: &Agents, args: AgentApproveArgs, format: Format) -> Result<u8, Failure> {
    let id = find(agents, args.of.agent.as_deref())?.spec.id;
    let edited = args.edit.as_deref().map(serde_json::from_str::<Value>).transpose().map_err(|error| {
        Failure::new(Kind::Usage, "the arguments are no JSON")
            .because(error)
            .hint("write an object: '{\"command\": …}'")
    })?;
    let decision = if edited.is_some() { ApprovalDecision::Edit } else { ApprovalDecision::Approve };
    let scope = match args.always.as_deref() {
        Some("rule") => ApprovalScope::Rule,
        Some(_) => ApprovalScope::Agent,
        None => ApprovalScope::Once,
    };
    let view = agents.load(&id).await?.view;
    if scope == ApprovalScope::Rule {
        super::host(agents)?.keep_rules(&view, args.call.as_deref())?;
    }
    decide(agents, &id, &view, args.call.as_deref(), |call| ApprovalGiven {
        call,
        decision: decision.clone(),
        arguments: edited.clone(),
        message: None,
        scope: scope.clone(),
    })?;
    done(&id, "goes on", format)
}

/// Denies calls, or answers in their place.
pub async fn deny(agents: &Agents, args: AgentDenyArgs, format: Format) -> Result<u8, Failure> {
    let id = agents.find(&args.agent)?.spec.id;
    let view = agents.load(&id).await?.view;
    let (decision, message) = match args.instead {
        Some(text) => (ApprovalDecision::Answer, Some(text)),
        None => (ApprovalDecision::Reject, args.reason),
    };
    decide(agents, &id, &view, args.call.as_deref(), |call| ApprovalGiven {
        call,
        decision: decision.clone(),
        arguments: None,
        message: message.clone(),
        scope: ApprovalScope::Once,
    })?;
    done(&id, "goes on", format)
}

/// The calls of an agent that wait for an approval.
fn waiting_calls(view: &AgentView) -> Vec<String> {
    let waits = |stage: &CallStage| matches!(stage, CallStage::Asked(_));
    view.calls.iter().filter(|state| waits(&state.stage)).map(|state| state.call.id.clone()).collect()
}

fn decide(
    agents: &Agents,
    id: &AgentId,
    view: &AgentView,
    call: Option<&str>,
    given: impl Fn(String) -> ApprovalGiven,
) -> Result<(), Failure> {
    let mut calls = waiting_calls(view);
    if let Some(call) = call {
        calls.retain(|waiting| waiting == call);
    }
    if calls.is_empty() {
        return Err(Failure::new(Kind::Conflict, format!("no call of agent {id} waits for an approval"))
            .hint(format!("see what it does: pal agent show {id}")));
    }
    agents.note(id, calls.into_iter().map(|call| EventData::from(given(call))))?;
    driver::wake(agents, id)
}

/// Answers a question.
pub async fn answer(agents: &Agents, args: AgentAnswerArgs, format: Format) -> Result<u8, Failure> {
    let id = agents.find(&args.agent)?.spec.id;
    let loaded = agents.load(&id).await?;
    let Some(asked) = open_question(&loaded.view, loaded.events.iter()) else {
        return Err(Failure::new(Kind::Conflict, format!("agent {id} asks no question"))
            .hint(format!("give it a message: pal agent send {id} \"…\"")));
    };
    agents.note(
        &id,
        [EventData::from(QuestionAnswered { call: asked.call, answer: text_of(&args.answer)? })],
    )?;
    driver::wake(agents, &id)?;
    done(&id, "goes on", format)
}

/// Interrupts an agent, and waits until its driver has ended; a stop ends the agent's processes, too.
pub async fn interrupt(agents: &Agents, args: &AgentArg, stop: bool, format: Format) -> Result<u8, Failure> {
    let id = find(agents, args.agent.as_deref())?.spec.id;
    let is_idle = agents.load(&id).await?.view.status() != AgentStatus::Working;
    if !is_idle {
        agents.note(&id, [EventData::from(AgentInterrupted { stop })])?;
        driver::wake(agents, &id)?;
        await_rest(agents, &id).await?;
    }
    if stop {
        super::host(agents)?.end_processes(&id).await?;
        return done(&id, "is stopped", format);
    }
    done(&id, if is_idle { "does nothing now" } else { "is interrupted" }, format)
}

/// Waits until an agent rests, and no process drives it.
async fn await_rest(agents: &Agents, id: &AgentId) -> Result<(), Failure> {
    let deadline = Instant::now() + REST_WAIT;
    while Instant::now() < deadline {
        if agents.load(id).await?.view.status() != AgentStatus::Working && !agents.is_driven(id) {
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Err(Failure::new(Kind::Host, format!("agent {id} has not stopped within {} s", REST_WAIT.as_secs()))
        .hint(format!("see what it does: pal agent show {id}")))
}

/// Lets an agent go on.
pub async fn resume(agents: &Agents, args: &AgentResumeArgs, format: Format) -> Result<u8, Failure> {
    let id = find(agents, args.of.agent.as_deref())?.spec.id;
    let view = agents.load(&id).await?.view;
    let from = view.seq;
    let raised = AgentBudget {
        turns: args.max_turns.or(view.budget.turns),
        tokens: args.max_tokens.or(view.budget.tokens),
        cost_microdollars: args.budget.or(view.budget.cost_microdollars),
        wall_ms: args
            .timeout
            .map(|wall| u64::try_from(wall.as_millis()).unwrap_or(u64::MAX))
            .or(view.budget.wall_ms),
    };
    if raised != view.budget {
        agents.note(&id, [EventData::from(AgentBudgeted { budget: raised })])?;
    } else {
        go_on(agents, &id, &view)?;
    }
    driver::wake(agents, &id)?;
    if args.detach {
        return done(&id, "goes on", format);
    }
    attach::attach(agents, &id, WatchFrom::After(from), format).await
}

/// Ends a pause that needs no answer.
fn go_on(agents: &Agents, id: &AgentId, view: &AgentView) -> Result<(), Failure> {
    match view.status() {
        AgentStatus::Working => Ok(()),
        AgentStatus::Finished => Err(Failure::new(Kind::Conflict, format!("agent {id} has finished"))
            .hint(format!("give it another message: pal agent send {id} \"…\""))),
        AgentStatus::Paused { reason: AgentPause::Approval, .. } => {
            Err(Failure::new(Kind::Conflict, format!("agent {id} waits for an approval"))
                .hint(format!("pal agent approve {id}, or pal agent deny {id} \"the reason\"")))
        }
        AgentStatus::Paused { reason: AgentPause::Question, .. } => {
            Err(Failure::new(Kind::Conflict, format!("agent {id} waits for an answer"))
                .hint(format!("pal agent answer {id} \"…\"")))
        }
        AgentStatus::Paused { reason: AgentPause::Budget, .. } => {
            Err(Failure::new(Kind::Conflict, format!("agent {id} has used up its budget")).hint(format!(
                "raise it: pal agent resume {id} --budget DOLLARS, --max-turns, --max-tokens or --timeout"
            )))
        }
        AgentStatus::Paused { .. } => agents.note(id, [EventData::from(proto::event_data::AgentResumed {})]),
    }
}

fn done(id: &AgentId, state: &str, format: Format) -> Result<u8, Failure> {
    match format {
        Format::Json => output::json(&serde_json::json!({ "agent": id }))?,
        Format::Text => output::line(format!("agent {id} {state}"))?,
    }
    Ok(0)
}
