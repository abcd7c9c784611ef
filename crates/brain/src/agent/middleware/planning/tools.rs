//! The tools of plans: `adopt_plan`, `next_phase`, `amend_plan`. They change only the agent's log.

use std::sync::Arc;

use proto::{EventData, event_data::PhaseEntered};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Planning, adoption_events, state::show_phase};
use crate::{
    agent::{
        call::{CallPlan, CallResult},
        journal::BoxFuture,
        tool::{AgentTool, CallContext},
    },
    library::{PhaseCheck, PhaseTemplate, PlanTemplate},
    model::ToolSchema,
};

/// The longest text of an argument, in bytes.
const TEXT_LEN_MAX: usize = 8 << 10;
/// The most phases of one amendment.
const PHASES_MAX: usize = 32;

pub(super) fn make_tools(planning: &Arc<Planning>) -> Vec<Arc<dyn AgentTool>> {
    let tool = |kind| Arc::new(PlanTool { planning: Arc::clone(planning), kind }) as Arc<dyn AgentTool>;
    vec![tool(PlanToolKind::Adopt), tool(PlanToolKind::Next), tool(PlanToolKind::Amend)]
}

#[derive(Debug, Clone, Copy)]
enum PlanToolKind {
    Adopt,
    Next,
    Amend,
}

struct PlanTool {
    planning: Arc<Planning>,
    kind: PlanToolKind,
}

#[derive(Deserialize)]
struct AdoptArguments {
    plan: String,
}

#[derive(Deserialize)]
struct NextArguments {
    #[serde(default)]
    answer: Option<String>,
    #[serde(default)]
    entry_answer: Option<String>,
    #[serde(default)]
    phase: Option<String>,
}

#[derive(Deserialize)]
struct AmendArguments {
    phases: Vec<AmendedPhase>,
    reason: String,
}

#[derive(Deserialize)]
struct AmendedPhase {
    name: String,
    #[serde(default)]
    goal: Option<String>,
    #[serde(default)]
    exit_command: Option<String>,
    #[serde(default)]
    exit_question: Option<String>,
}

impl AgentTool for PlanTool {
    fn schema(&self) -> ToolSchema {
        match self.kind {
            PlanToolKind::Adopt => self.planning.adopt_schema(),
            PlanToolKind::Next => next_schema(),
            PlanToolKind::Amend => amend_schema(),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let value = Value::Object(arguments.clone());
        if value.to_string().len() > PHASES_MAX * TEXT_LEN_MAX {
            return Err("Error: the arguments are too long.".to_owned());
        }
        let checked = match self.kind {
            PlanToolKind::Adopt => serde_json::from_value::<AdoptArguments>(value).map(drop),
            PlanToolKind::Next => serde_json::from_value::<NextArguments>(value).map(drop),
            PlanToolKind::Amend => serde_json::from_value::<AmendArguments>(value).map(drop),
        };
        checked.map_err(|error| format!("Error: the arguments do not fit: {error}"))?;
        Ok(CallPlan::in_log("plans only change the agent's own log"))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            let value = Value::Object(context.arguments);
            let done = match self.kind {
                PlanToolKind::Adopt => match serde_json::from_value(value) {
                    Ok(arguments) => self.planning.adopt(arguments, &context.key).await,
                    Err(error) => Err(error.to_string()),
                },
                PlanToolKind::Next => match serde_json::from_value(value) {
                    Ok(arguments) => self.planning.next(arguments, &context.key).await,
                    Err(error) => Err(error.to_string()),
                },
                PlanToolKind::Amend => match serde_json::from_value(value) {
                    Ok(arguments) => self.planning.amend(arguments).await,
                    Err(error) => Err(error.to_string()),
                },
            };
            match done {
                Ok((text, events)) => CallResult { events, ..CallResult::text(text) },
                Err(text) => CallResult::error(format!("Error: {text}")),
            }
        })
    }

    /// Nothing but a check has run, and a check that has run is not run again.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move { Some(self.run(context).await) })
    }
}

/// The text for the model and the events of an act on the plan, or the reason for which nothing changed.
type PlanStep = Result<(String, Vec<EventData>), String>;

impl Planning {
    async fn adopt(&self, arguments: AdoptArguments, key: &str) -> PlanStep {
        let mut state = self.state.lock().await;
        let Some(plan) = self.plans.iter().find(|plan| plan.name == arguments.plan) else {
            let names: Vec<&str> = self.plans.iter().map(|plan| plan.name.as_str()).collect();
            let shown: String = arguments.plan.chars().take(64).collect();
            return Err(format!("there is no plan {shown:?}. The plans are: {}.", names.join(", ")));
        };
        let Some(first) = plan.phases.first() else { return Err("the plan has no phases".to_owned()) };
        let check = self.enter(first, None, key).await?;
        let mut events = adoption_events(plan, None);
        let phase = Some(first.name.clone());
        events.push(PhaseEntered { plan: plan.name.clone(), phase: phase.clone(), check }.into());
        let text = format!(
            "You follow the plan {} now.\n{}\n\n{}",
            plan.name,
            super::super::prompt::show_phases(plan),
            show_phase(1, plan.phases.len(), first)
        );
        (state.plan, state.phase) = (Some(plan.clone()), phase);
        Ok((text, events))
    }

    async fn next(&self, arguments: NextArguments, key: &str) -> PlanStep {
        let mut state = self.state.lock().await;
        let (Some(plan), Some((number, current))) = (&state.plan, state.current()) else {
            return Err("you follow no plan. Call adopt_plan first.".to_owned());
        };
        let (target, is_back) = find_target(plan, number, arguments.phase.as_deref())?;
        let mut notes = Vec::new();
        if !is_back {
            notes.extend(self.leave(current, arguments.answer.as_deref(), key).await?);
        }
        if let Some(target) = target {
            notes.extend(self.enter(target, arguments.entry_answer.as_deref(), key).await?);
        }
        let check = (!notes.is_empty()).then(|| notes.join("\n"));
        let phase = target.map(|target| target.name.clone());
        let event = PhaseEntered { plan: plan.name.clone(), phase: phase.clone(), check }.into();
        let text = match target.and_then(|target| plan.phase(&target.name)) {
            Some((number, target)) => show_phase(number, plan.phases.len(), target),
            None => format!("The plan {} is complete. End with your report.", plan.name),
        };
        state.phase = phase;
        Ok((text, vec![event]))
    }

    async fn amend(&self, arguments: AmendArguments) -> PlanStep {
        let mut state = self.state.lock().await;
        let (Some(plan), Some((number, _))) = (&state.plan, state.current()) else {
            return Err("you follow no plan. Call adopt_plan first.".to_owned());
        };
        if arguments.phases.len() > PHASES_MAX {
            return Err(format!("a plan has at most {PHASES_MAX} phases."));
        }
        let amended = amend_phases(plan, number, arguments.phases)?;
        amended.check().map_err(|(_, fault, mend)| format!("{fault}: {mend}."))?;
        let reason: String = arguments.reason.chars().take(1_000).collect();
        let events = adoption_events(&amended, Some(reason));
        let text = format!("The plan is now:\n{}", super::super::prompt::show_phases(&amended));
        state.plan = Some(amended);
        Ok((text, events))
    }

    /// The exit check of a phase; an error is the reason for which the phase does not end.
    async fn leave(
        &self,
        phase: &PhaseTemplate,
        answer: Option<&str>,
        key: &str,
    ) -> Result<Option<String>, String> {
        self.hold(phase.exit.as_ref(), answer, "answer", &format!("{key}-exit"))
            .await
            .map_err(|text| format!("phase {} is not done yet: {text}", phase.name))
    }

    /// The entry check of a phase; an error is the reason for which the phase does not begin.
    async fn enter(
        &self,
        phase: &PhaseTemplate,
        answer: Option<&str>,
        key: &str,
    ) -> Result<Option<String>, String> {
        self.hold(phase.entry.as_ref(), answer, "entry_answer", &format!("{key}-entry"))
            .await
            .map_err(|text| format!("phase {} cannot begin yet: {text}", phase.name))
    }

    async fn hold(
        &self,
        check: Option<&PhaseCheck>,
        answer: Option<&str>,
        argument: &str,
        key: &str,
    ) -> Result<Option<String>, String> {
        match check {
            None => Ok(None),
            Some(PhaseCheck::Command(command)) => self.run_check(command, key).await.map(Some),
            Some(PhaseCheck::Question(question)) => {
                match answer.map(str::trim).filter(|text| !text.is_empty()) {
                    Some(answer) => {
                        let answer: String = answer.chars().take(TEXT_LEN_MAX).collect();
                        Ok(Some(format!("{question}\n{answer}")))
                    }
                    None => Err(format!("give `{argument}` to this question: {question}")),
                }
            }
        }
    }

    fn adopt_schema(&self) -> ToolSchema {
        let plans: Vec<String> =
            self.plans.iter().map(|plan| format!("- {}: {}", plan.name, plan.description)).collect();
        ToolSchema {
            name: "adopt_plan".into(),
            description: format!(
                "Follow a plan: a tested way to do a kind of task, in phases with goals and checks. Use it at the beginning of a \
                 task that a plan fits. The plans are:\n{}",
                plans.join("\n")
            ),
            parameters: json!({
                "type": "object",
                "properties": {"plan": {"type": "string", "description": "The name of the plan."}},
                "required": ["plan"],
            }),
        }
    }
}

/// The phase to enter, and whether it lies behind. None is the end of the plan.
fn find_target<'a>(
    plan: &'a PlanTemplate,
    number: usize,
    wanted: Option<&str>,
) -> Result<(Option<&'a PhaseTemplate>, bool), String> {
    let Some(name) = wanted.map(str::trim).filter(|name| !name.is_empty()) else {
        return Ok((plan.phases.get(number), false));
    };
    match plan.phase(name) {
        Some((found, phase)) if found <= number + 1 => Ok((Some(phase), found <= number)),
        Some(_) => Err("a phase between cannot be skipped; change the plan with amend_plan.".to_owned()),
        None => {
            let names: Vec<&str> = plan.phases.iter().map(|phase| phase.name.as_str()).collect();
            Err(format!("there is no such phase. The phases are: {}.", names.join(", ")))
        }
    }
}

/// The plan with other phases behind the current one. A phase that is known keeps its checks and tools.
fn amend_phases(
    plan: &PlanTemplate,
    number: usize,
    wanted: Vec<AmendedPhase>,
) -> Result<PlanTemplate, String> {
    let is_checked = |phase: &&PhaseTemplate| matches!(phase.exit, Some(PhaseCheck::Command(_)));
    let is_kept = |phase: &PhaseTemplate| wanted.iter().any(|wanted| wanted.name == phase.name);
    let removed = plan.phases[number..].iter().filter(is_checked).find(|phase| !is_kept(phase));
    if let Some(phase) = removed {
        return Err(format!("phase {} has a check by a command and cannot be removed.", phase.name));
    }
    let mut phases = plan.phases[..number].to_vec();
    for wanted in wanted {
        let known = plan.phase(&wanted.name).map(|(_, phase)| phase.clone());
        phases.push(match (known, wanted.goal) {
            (Some(known), Some(goal)) => PhaseTemplate { goal, ..known },
            (Some(known), None) => known,
            (None, Some(goal)) => {
                let exit = wanted.exit_command.map(PhaseCheck::Command);
                let exit = exit.or(wanted.exit_question.map(PhaseCheck::Question));
                PhaseTemplate { name: wanted.name, goal, entry: None, exit, tools: None }
            }
            (None, None) => return Err(format!("the new phase {:?} needs a goal.", wanted.name)),
        });
    }
    Ok(PlanTemplate { phases, ..plan.clone() })
}

fn next_schema() -> ToolSchema {
    ToolSchema {
        name: "next_phase".into(),
        description: "End the current phase of your plan. Its check runs first: a command that must succeed, or a question that you \
             answer here. Then the next phase begins, or the plan is complete. To go back to an earlier phase, name it."
            .into(),
        parameters: json!({
            "type": "object",
            "properties": {
                "answer": {"type": "string", "description": "The answer to the question at the end of the phase: facts, with commands, files and results."},
                "entry_answer": {"type": "string", "description": "The answer to the question before the next phase, if it has one."},
                "phase": {"type": "string", "description": "An earlier phase to go back to. Leave it out to go on."},
            },
        }),
    }
}

fn amend_schema() -> ToolSchema {
    ToolSchema {
        name: "amend_plan".into(),
        description: "Change the phases of your plan that come after the current one. Give the whole list of them, in order. A phase of \
             the plan keeps its checks and tools; one that a command checks cannot be removed."
            .into(),
        parameters: json!({
            "type": "object",
            "properties": {
                "phases": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "description": "Small letters, digits and hyphens."},
                            "goal": {"type": "string", "description": "The goal; may be left out for a phase of the plan."},
                            "exit_command": {"type": "string", "description": "A command that must succeed at the end of a new phase."},
                            "exit_question": {"type": "string", "description": "A question to answer at the end of a new phase."},
                        },
                        "required": ["name"],
                    },
                },
                "reason": {"type": "string", "description": "The reason, for the user."},
            },
            "required": ["phases", "reason"],
        }),
    }
}
