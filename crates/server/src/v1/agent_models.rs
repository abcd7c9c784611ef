//! The schema types of agents.
//!
//! Invariant: no schema type holds a path, a user id or a pid of the host.

use bridge::{AgentRecord, AgentStatus, AgentTotals, AgentView, CallStage, LoadedAgent, ToolArguments};
use proto::{
    Event, Failure, Kind,
    event_data::{AgentBudget, ApprovalMode, DecodedEvent, EventData, QuestionAsked},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::agents::shown_model;

/// The longest arguments of a call that an agent's description contains, as JSON.
const ARGUMENTS_LEN_MAX: usize = 64 << 10;
/// The largest budget in dollars.
const DOLLARS_MAX: f64 = 1e6;

/// The calls for which an agent needs a person's approval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApproveMode {
    /// The agent only reads; every other call is refused.
    Plan,
    /// Every call that changes something needs approval.
    Ask,
    /// Calls inside the Body need none; calls that leave it, land, spend or publish do.
    #[default]
    Auto,
    /// No person is asked; a call that would need approval is refused.
    Never,
}

impl From<ApproveMode> for ApprovalMode {
    fn from(mode: ApproveMode) -> Self {
        match mode {
            ApproveMode::Plan => Self::Plan,
            ApproveMode::Ask => Self::Ask,
            ApproveMode::Auto => Self::Auto,
            ApproveMode::Never => Self::Never,
        }
    }
}

/// Limits of an agent. At a limit the agent pauses.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "dollars": 2.5, "turns": 100 }))]
pub struct BudgetRequest {
    /// The highest cost in dollars, of the answers whose price is known.
    #[schema(minimum = 0, maximum = 1000000)]
    pub dollars: Option<f64>,
    /// The largest number of answers of the model.
    #[schema(minimum = 1)]
    pub turns: Option<u64>,
    /// The largest number of tokens, read and written.
    #[schema(minimum = 1)]
    pub tokens: Option<u64>,
    /// The longest working time in milliseconds.
    #[schema(minimum = 1)]
    pub wall_ms: Option<u64>,
}

impl BudgetRequest {
    /// The budget that has these limits, and otherwise those of another budget.
    pub fn over(&self, other: &AgentBudget) -> Result<AgentBudget, Failure> {
        let least = [self.turns, self.tokens, self.wall_ms].into_iter().flatten().min();
        let dollars = self.dollars.unwrap_or_default();
        if least == Some(0) || !(0.0..=DOLLARS_MAX).contains(&dollars) {
            return Err(Failure::new(Kind::Usage, "a limit of `budget` is out of range")
                .hint("a limit is at least 1, and `dollars` at most 1000000"));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the amount was checked to be from 0 to a million dollars"
        )]
        let cost = self.dollars.map(|dollars| (dollars * 1e6).round() as u64);
        Ok(AgentBudget {
            turns: self.turns.or(other.turns),
            tokens: self.tokens.or(other.tokens),
            cost_microdollars: cost.or(other.cost_microdollars),
            wall_ms: self.wall_ms.or(other.wall_ms),
        })
    }
}

/// The limits of an agent.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = AgentBudget)]
pub struct Budget {
    /// The highest cost in millionths of a dollar.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    cost_microdollars: Option<u64>,
    /// The largest number of answers of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    turns: Option<u64>,
    /// The largest number of tokens, read and written.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    tokens: Option<u64>,
    /// The longest working time in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    wall_ms: Option<u64>,
}

impl From<&AgentBudget> for Budget {
    fn from(budget: &AgentBudget) -> Self {
        let AgentBudget { turns, tokens, cost_microdollars, wall_ms } = budget.clone();
        Self { cost_microdollars, turns, tokens, wall_ms }
    }
}

/// The activity of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AgentState {
    /// It works, if a process drives it.
    Working,
    /// It waits for a person.
    Paused,
    /// It has finished its task.
    Finished,
    /// Its log cannot be read.
    Unreadable,
}

/// Why an agent waits.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Pause {
    /// `approval`, `question`, `budget`, `interrupted`, `stuck`, `model`, `body` or `stopped`.
    reason: String,
    /// The reason in words.
    why: String,
}

/// An agent in a list.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct AgentSummary {
    /// The id of the agent.
    #[schema(pattern = "^[a-z0-9]{1,32}$")]
    pub id: String,
    /// The first line of the task.
    pub title: String,
    /// The address or the alias of the model.
    pub model: String,
    /// The name of the role.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub role: Option<String>,
    /// The name of the plan template.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub plan: Option<String>,
    /// The calls that need a person's approval: `plan`, `ask`, `auto` or `never`.
    pub approve: String,
    /// The activity of the agent.
    pub status: AgentState,
    /// Why it waits, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub pause: Option<Pause>,
    /// Whether a process drives the agent now, or will as soon as it has a turn.
    pub driven: bool,
    /// The Body in which the agent works.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub body: Option<String>,
    /// When the agent was created, RFC 3339.
    pub created_at: String,
    /// The number of the newest answer of the model.
    pub turn: u64,
    /// The cost so far in millionths of a dollar, of the answers whose price is known.
    pub cost_microdollars: u64,
    /// The id that the agents of one request share.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub group: Option<String>,
    /// The agent that started this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub parent: Option<String>,
    /// The agent that this one was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub forked_from: Option<String>,
}

/// Whether a process drives the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driven {
    /// One does, or will as soon as it has a turn.
    Yes,
    /// None does.
    No,
}

impl AgentSummary {
    pub fn new(loaded: &LoadedAgent, driven: Driven) -> Self {
        let view = &loaded.view;
        let (status, pause) = match view.status() {
            AgentStatus::Working => (AgentState::Working, None),
            AgentStatus::Finished => (AgentState::Finished, None),
            AgentStatus::Paused { reason, why } => {
                (AgentState::Paused, Some(Pause { reason: reason.into(), why }))
            }
        };
        Self {
            status,
            pause,
            driven: driven == Driven::Yes,
            body: view.body.as_ref().map(ToString::to_string),
            turn: view.turn,
            cost_microdollars: view.totals.cost_microdollars,
            ..Self::unreadable(&loaded.record)
        }
    }

    /// An agent whose log cannot be read.
    pub fn unreadable(record: &AgentRecord) -> Self {
        let spec = &record.spec;
        Self {
            id: spec.id.to_string(),
            title: spec.title.clone(),
            model: shown_model(&spec.model),
            role: spec.role.clone(),
            plan: spec.plan.clone(),
            approve: spec.mode.clone().into(),
            status: AgentState::Unreadable,
            pause: None,
            driven: false,
            body: None,
            created_at: record.created_at.clone(),
            turn: 0,
            cost_microdollars: 0,
            group: spec.group.clone(),
            parent: spec.parent.as_ref().map(|parent| parent.agent.to_string()),
            forked_from: record.forked_from.as_ref().map(|origin| origin.agent.to_string()),
        }
    }
}

/// Sums over everything that an agent did.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Totals {
    /// Answers of the model.
    pub answers: u64,
    /// Answers whose price is not known.
    pub unpriced_answers: u64,
    /// Tool calls that ended.
    pub calls: u64,
    /// The tokens.
    pub tokens: Tokens,
    /// The cost in millionths of a dollar, of the answers whose price is known.
    pub cost_microdollars: u64,
    /// How long the model took, in milliseconds.
    pub model_ms: u64,
    /// How long the tools took, in milliseconds.
    pub tool_ms: u64,
}

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
pub struct Tokens {
    /// Read by the model, without those from its cache.
    pub input: u64,
    /// Written by the model.
    pub output: u64,
    /// Read from the model's cache.
    pub cache_read: u64,
    /// Written to the model's cache.
    pub cache_write: u64,
}

impl From<&AgentTotals> for Totals {
    fn from(totals: &AgentTotals) -> Self {
        let usage = totals.usage;
        Self {
            answers: totals.answers,
            unpriced_answers: totals.unpriced_answers,
            calls: totals.calls,
            tokens: Tokens {
                input: usage.input,
                output: usage.output,
                cache_read: usage.cache_read,
                cache_write: usage.cache_write,
            },
            cost_microdollars: totals.cost_microdollars,
            model_ms: totals.model_ms,
            tool_ms: totals.tool_ms,
        }
    }
}

/// One task of an agent's list.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Todo {
    /// The task.
    content: String,
    /// `pending`, `in_progress` or `completed`.
    status: String,
}

/// The phase of an agent's plan template.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Phase {
    /// The plan template.
    plan: String,
    /// The phase; absent after the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    phase: Option<String>,
}

/// A tool call that waits for a person's approval.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct WaitingApproval {
    /// The id of the call.
    call: String,
    /// The tool.
    tool: String,
    /// The arguments; absent if they are longer than 64 KiB: then the event `approval.asked` has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, value_type = Option<Object>)]
    arguments: Option<serde_json::Value>,
    /// The length of the arguments as JSON.
    arguments_bytes: u64,
    /// The rule that asks.
    why: String,
}

/// A question of the agent that waits for an answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct WaitingQuestion {
    /// The id of the call that asks.
    call: String,
    /// The question.
    question: String,
    /// Answers to choose from.
    choices: Vec<String>,
}

/// A place to which conversation and Body can go back.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct AgentCheckpoint {
    /// The last complete turn.
    turn: u64,
    /// The snapshot of the Body.
    snapshot: String,
}

/// An agent: a Brain that works in a Body.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Agent {
    #[serde(flatten)]
    pub listed: AgentSummary,
    /// The limits of the agent.
    pub budget: Budget,
    /// Sums over everything that the agent did, also in turns that were rewound.
    pub totals: Totals,
    /// The tokens of the newest request and its answer.
    pub context_tokens: u64,
    /// The tasks of the agent's list.
    pub todos: Vec<Todo>,
    /// The phase of its plan template.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub phase: Option<Phase>,
    /// The calls that wait for approval.
    pub approvals: Vec<WaitingApproval>,
    /// The questions that wait for an answer.
    pub questions: Vec<WaitingQuestion>,
    /// The places to which it can be rewound, oldest first.
    pub checkpoints: Vec<AgentCheckpoint>,
    /// The agent's last words, once it has finished.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub summary: Option<String>,
    /// The position of the agent's newest event; `after` of its events takes it.
    pub pos: u64,
}

impl Agent {
    pub fn new(loaded: &LoadedAgent, driven: Driven) -> Self {
        let view = &loaded.view;
        let checkpoint = |checkpoint: &bridge::Checkpoint| AgentCheckpoint {
            turn: checkpoint.turn,
            snapshot: checkpoint.snapshot.to_string(),
        };
        Self {
            listed: AgentSummary::new(loaded, driven),
            budget: (&view.budget).into(),
            totals: (&view.totals).into(),
            context_tokens: view.context_tokens,
            todos: view
                .todos
                .iter()
                .map(|todo| Todo { content: todo.content.clone(), status: todo.status.clone().into() })
                .collect(),
            phase: view.phase.clone().map(|(plan, phase)| Phase { plan, phase }),
            approvals: waiting_approvals(view),
            questions: waiting_questions(view, &loaded.events),
            checkpoints: view.checkpoints.iter().map(checkpoint).collect(),
            summary: view.summary.clone().filter(|_| view.status() == AgentStatus::Finished),
            pos: loaded.events.last().map_or(0, |event| event.pos),
        }
    }
}

fn waiting_approvals(view: &AgentView) -> Vec<WaitingApproval> {
    let waiting = view.calls.iter().filter_map(|state| match &state.stage {
        CallStage::Asked(why) => Some((&state.call, why)),
        _ => None,
    });
    waiting
        .map(|(call, why)| {
            let arguments = match &call.arguments {
                ToolArguments::Object(arguments) => serde_json::Value::Object(arguments.clone()),
                ToolArguments::Invalid(text) => serde_json::Value::String(text.clone()),
            };
            let bytes = arguments.to_string().len();
            WaitingApproval {
                call: call.id.clone(),
                tool: call.name.clone(),
                arguments: (bytes <= ARGUMENTS_LEN_MAX).then_some(arguments),
                arguments_bytes: bytes as u64,
                why: why.clone(),
            }
        })
        .collect()
}

/// The view knows which calls asked; the text is in their events.
fn waiting_questions(view: &AgentView, events: &[Event]) -> Vec<WaitingQuestion> {
    let waiting = view.calls.iter().filter(|state| state.stage == CallStage::Questioned);
    waiting
        .filter_map(|state| {
            let asked = events.iter().rev().find_map(|event| match event.decode() {
                DecodedEvent::Known(EventData::QuestionAsked(asked)) if asked.call == state.call.id => {
                    Some(asked)
                }
                _ => None,
            });
            let QuestionAsked { call, question, choices } = asked?;
            Some(WaitingQuestion { call, question, choices })
        })
        .collect()
}

/// Agents that one request created.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CreatedAgents {
    /// The new agents.
    pub items: Vec<Agent>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_changes_only_the_limits_that_it_names() {
        let before = AgentBudget { turns: Some(3), wall_ms: Some(9), ..AgentBudget::default() };
        let asked = BudgetRequest { dollars: Some(0.1 + 0.2), turns: Some(5), ..BudgetRequest::default() };
        let after = AgentBudget { turns: Some(5), cost_microdollars: Some(300_000), ..before.clone() };
        assert_eq!(asked.over(&before).unwrap(), after);
        let odd = |dollars, turns| BudgetRequest { dollars, turns, ..BudgetRequest::default() };
        for bad in
            [odd(Some(-0.1), None), odd(Some(1e7), None), odd(Some(f64::NAN), None), odd(None, Some(0))]
        {
            assert_eq!(bad.over(&before).unwrap_err().kind, Kind::Usage, "{bad:?}");
        }
    }
}
