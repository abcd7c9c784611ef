//! Plan templates at work: the phase of the agent, its tools, and the checks between phases.
//!
//! Invariant: the plan and the phase are events. A plan is copied into the log when it is adopted, so that a file that
//! changes later does not change a running agent.
//! Invariant: a phase ends only when its check holds: a command that ends with 0, or an answer to its question. The agent
//! may change the rest of its plan, but not remove a phase that a command checks.
//! Invariant: the tools that the model sees stay the same in all phases, so that the prefix of its requests does; a tool
//! that the phase does not allow is refused when it is called.

mod state;
mod tools;

use std::sync::Arc;

use proto::{
    EventData,
    event_data::{MessageReceived, MessageSource, PhaseEntered, PlanAdopted},
};
use tokio::sync::Mutex;

use super::{Continuation, Judgement, Middleware};
use crate::{
    agent::{call::CallPlan, journal::BoxFuture, tool::AgentTool, view::AgentView},
    library::{PhaseCheck, PlanTemplate},
    model::{ContentBlock, Speaker, ToolCall},
};
use state::PlanState;
pub(super) use state::show_state;

/// Tools that every phase allows: they only change the agent's own log, or ask a person.
const ALWAYS_ALLOWED: &[&str] =
    &["adopt_plan", "next_phase", "amend_plan", "write_todos", "ask_user", "compact_conversation"];
/// How much of the output of a check the agent sees, in characters, from its end.
const OUTPUT_LEN_MAX: usize = 4_000;

/// Runs the checks of phases.
pub trait PhaseChecks: Send + Sync {
    /// Runs a command in the Body, in the agent's working directory. The same key never runs twice. An error is a text.
    fn run<'a>(&'a self, command: &'a str, key: &'a str) -> BoxFuture<'a, Result<CheckResult, String>>;
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckResult {
    /// The exit code of the command.
    pub exit_code: i32,
    /// Its output.
    pub output: String,
}

/// Follows a plan: a middleware, and the tools that move it.
pub struct Planning {
    plans: Vec<PlanTemplate>,
    checks: Arc<dyn PhaseChecks>,
    state: Mutex<PlanState>,
}

impl Planning {
    /// Follows plans of this list for an agent with this view.
    pub fn new(
        plans: impl IntoIterator<Item = PlanTemplate>,
        checks: Arc<dyn PhaseChecks>,
        view: &AgentView,
    ) -> Arc<Self> {
        let state = Mutex::new(PlanState::of(view));
        Arc::new(Self { plans: plans.into_iter().collect(), checks, state })
    }

    /// The tools by which the agent adopts, follows and changes a plan.
    pub fn tools(self: &Arc<Self>) -> Vec<Arc<dyn AgentTool>> {
        tools::make_tools(self)
    }

    /// Runs a check that is a command. The text says how it ended.
    async fn run_check(&self, command: &str, key: &str) -> Result<String, String> {
        match self.checks.run(command, key).await {
            Ok(result) if result.exit_code == 0 => Ok(format!("`{command}` ended with 0")),
            Ok(result) => {
                let skipped = result.output.chars().count().saturating_sub(OUTPUT_LEN_MAX);
                let output: String = result.output.chars().skip(skipped).collect();
                Err(format!("`{command}` ended with {}:\n{output}", result.exit_code))
            }
            Err(error) => Err(format!("`{command}` could not be run: {error}")),
        }
    }

    /// Begins the plan that the agent was created with.
    async fn begin(&self, view: &AgentView) -> Vec<EventData> {
        let spec = view.spec.as_ref();
        let wanted = spec.and_then(|spec| spec.plan.as_deref()).filter(|_| view.phase.is_none());
        let plan = wanted.and_then(|name| self.plans.iter().find(|plan| plan.name == name));
        let Some((plan, first)) = plan.and_then(|plan| plan.phases.first().map(|first| (plan, first))) else {
            return Vec::new();
        };
        let mut events = adoption_events(plan, None);
        let mut check = None;
        if let Some(PhaseCheck::Command(command)) = &first.entry {
            let key = spec.map(|spec| format!("{}-plan", spec.id)).unwrap_or_default();
            match self.run_check(command, &key).await {
                Ok(text) => check = Some(text),
                Err(text) => {
                    let text = format!("The check before phase {} does not hold yet: {text}", first.name);
                    check = Some(text.clone());
                    events.push(MessageReceived { from: MessageSource::Palisade, text }.into());
                }
            }
        }
        events.push(PhaseEntered { plan: plan.name.clone(), phase: Some(first.name.clone()), check }.into());
        events
    }
}

impl Middleware for Planning {
    fn name(&self) -> &'static str {
        "planning"
    }

    fn before_request<'a>(&'a self, view: &'a AgentView, overflow: bool) -> BoxFuture<'a, Vec<EventData>> {
        let _ = overflow;
        Box::pin(self.begin(view))
    }

    fn judge<'a>(
        &'a self,
        view: &'a AgentView,
        call: &'a ToolCall,
        plan: &'a CallPlan,
    ) -> BoxFuture<'a, Judgement> {
        let _ = plan;
        Box::pin(async move {
            let mut state = self.state.lock().await;
            *state = PlanState::of(view);
            match state.current() {
                Some((number, phase))
                    if !phase.allows_tool(&call.name) && !ALWAYS_ALLOWED.contains(&call.name.as_str()) =>
                {
                    Judgement::Deny(format!(
                        "{} is not allowed in phase {number} ({}) of the plan; it allows {}. Reach the goal of the phase and \
                         call next_phase first, or change the plan with amend_plan.",
                        call.name,
                        phase.name,
                        phase.tools.as_deref().unwrap_or_default().join(", ")
                    ))
                }
                _ => Judgement::Allow,
            }
        })
    }

    fn finish<'a>(&'a self, view: &'a AgentView) -> BoxFuture<'a, Continuation> {
        Box::pin(async move {
            let state = PlanState::of(view);
            match state.open_reminder() {
                Some(text) if !was_reminded(view, &text) => Continuation::Remind(text),
                _ => Continuation::Continue,
            }
        })
    }

    fn after_turn<'a>(&'a self, view: &'a AgentView) -> BoxFuture<'a, Vec<EventData>> {
        Box::pin(async move {
            let state = PlanState::of(view);
            let ends = view.calls.is_empty() && state.is_open() && state.open_reminder().is_none();
            let Some(plan) = state.plan.filter(|_| ends) else { return Vec::new() };
            let check = Some("the agent finished".to_owned());
            vec![PhaseEntered { plan: plan.name, phase: None, check }.into()]
        })
    }
}

/// The event that fixes a plan in the log.
fn adoption_events(plan: &PlanTemplate, why: Option<String>) -> Vec<EventData> {
    let template = serde_json::to_value(plan).unwrap_or_default();
    vec![PlanAdopted { plan: plan.name.clone(), template, why }.into()]
}

/// Whether the newest message to the agent has this text.
fn was_reminded(view: &AgentView, text: &str) -> bool {
    let newest = view.messages.iter().rev().find(|message| message.speaker == Speaker::User);
    let is_text = |block: &ContentBlock| matches!(block, ContentBlock::Text { text: found } if found == text);
    newest.is_some_and(|message| message.blocks.iter().any(is_text))
}
