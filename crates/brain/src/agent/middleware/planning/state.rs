//! The plan and the phase of an agent, as its log has them.

use crate::{
    agent::view::AgentView,
    library::{PhaseTemplate, PlanTemplate},
};

/// The plan that an agent follows, and its place in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct PlanState {
    /// The plan, as it was adopted or changed last.
    pub(super) plan: Option<PlanTemplate>,
    /// The phase; none before the first and after the last one.
    pub(super) phase: Option<String>,
}

impl PlanState {
    /// The state that a view has. A plan of the log that is not valid counts as none.
    pub(super) fn of(view: &AgentView) -> Self {
        let plan = view.plan.clone().and_then(|plan| serde_json::from_value::<PlanTemplate>(plan).ok());
        let plan = plan.filter(|plan| plan.check().is_ok());
        let phase = view.phase.as_ref().and_then(|(_, phase)| phase.clone());
        Self { plan, phase }
    }

    /// The phase and its number, from 1.
    pub(super) fn current(&self) -> Option<(usize, &PhaseTemplate)> {
        self.plan.as_ref()?.phase(self.phase.as_deref()?)
    }

    /// Whether the agent is in a phase.
    pub(super) fn is_open(&self) -> bool {
        self.current().is_some()
    }

    /// The words for an agent that wants to finish while its plan has phases left; none if it may.
    pub(super) fn open_reminder(&self) -> Option<String> {
        let (plan, (number, phase)) = (self.plan.as_ref()?, self.current()?);
        let is_last = plan.phase_after(&phase.name).is_none();
        if is_last && phase.exit.is_none() {
            return None;
        }
        Some(format!(
            "Your plan {} is in phase {number} of {} ({}). If its goal is reached, call next_phase; otherwise go on with it. If the \
             rest of the plan is not needed, say why, and the work ends.",
            plan.name,
            plan.phases.len(),
            phase.name
        ))
    }
}

/// The plan and the phase in words, for an agent that forgot the conversation; none if it follows no plan.
pub(in crate::agent::middleware) fn show_state(view: &AgentView) -> Option<String> {
    let state = PlanState::of(view);
    let (plan, (number, phase)) = (state.plan.as_ref()?, state.current()?);
    let names: Vec<&str> = plan.phases.iter().map(|phase| phase.name.as_str()).collect();
    Some(format!(
        "You follow the plan {} ({}). {}",
        plan.name,
        names.join(" → "),
        show_phase(number, plan.phases.len(), phase)
    ))
}

/// A phase in words.
pub(super) fn show_phase(number: usize, count: usize, phase: &PhaseTemplate) -> String {
    let tools = match &phase.tools {
        Some(tools) => format!("\nTools of this phase: {}.", tools.join(", ")),
        None => String::new(),
    };
    let exit = match &phase.exit {
        Some(crate::library::PhaseCheck::Command(command)) => {
            format!("\nIt ends when `{command}` succeeds: call next_phase.")
        }
        Some(crate::library::PhaseCheck::Question(question)) => {
            format!("\nIt ends with next_phase and an answer to: {question}")
        }
        None => "\nIt ends with next_phase.".to_owned(),
    };
    format!("You are in phase {number} of {count}: {}.\nGoal: {}{tools}{exit}", phase.name, phase.goal.trim())
}
