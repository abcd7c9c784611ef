//! `pal agent show`.

use brain::agent::{AgentStatus, CallStage};
use bridge::{Agents, LoadedAgent};
use proto::{BodyId, Failure, event_data::AgentBudget};
use serde_json::json;

use super::{
    call_line::{main_argument, shorten, time},
    find,
    follow::{AgentFollower, open_question},
    list::{agent_json, state_word},
    render::{EventLines, choice_lines, count, dollars, plan_lines, plural, spent},
    style::{TextLine, Tone},
};
use crate::{
    age,
    args::AgentShowArgs,
    output::{self, Format},
};

/// How wide the names of the facts are.
const NAME_WIDTH: usize = 13;
/// How many characters of the reason of a pause are shown.
const WHY_LEN: usize = 400;

/// Shows an agent, or its whole conversation.
pub async fn show(agents: &Agents, args: &AgentShowArgs, format: Format) -> Result<u8, Failure> {
    let id = find(agents, args.of.agent.as_deref())?.spec.id;
    if args.log {
        return show_log(agents, &AgentFollower::open(agents, &id).await?, format);
    }
    let loaded = agents.load(&id).await?;
    let is_driven = agents.is_driven(&id);
    let lines = match format {
        Format::Json => {
            let mut object = agent_json(&loaded.record, &loaded.view, is_driven);
            object["waiting"] = json!(waiting(&loaded));
            object["question"] = json!(open_question(&loaded.view, loaded.events.iter()));
            object["checkpoints"] = json!(loaded.view.checkpoints);
            output::json(&object)?;
            return Ok(0);
        }
        Format::Text => agent_lines(&loaded, is_driven),
    };
    super::attach::print_lines(&lines)?;
    Ok(0)
}

fn show_log(_: &Agents, follower: &AgentFollower, format: Format) -> Result<u8, Failure> {
    let mut lines = EventLines::whole();
    for event in &follower.events {
        match format {
            Format::Json => output::json(&event.event)?,
            Format::Text => super::attach::print_lines(&lines.of(event))?,
        }
    }
    Ok(0)
}

/// The calls that wait for a person.
fn waiting(loaded: &LoadedAgent) -> Vec<serde_json::Value> {
    let calls = loaded.view.calls.iter().filter_map(|state| match &state.stage {
        CallStage::Asked(rule) => {
            let (call, tool) = (&state.call.id, &state.call.name);
            Some(json!({ "call": call, "tool": tool, "arguments": state.call.arguments, "rule": rule }))
        }
        _ => None,
    });
    calls.collect()
}

fn agent_lines(loaded: &LoadedAgent, is_driven: bool) -> Vec<TextLine> {
    let (view, record) = (&loaded.view, &loaded.record);
    let spec = view.spec.as_ref().unwrap_or(&record.spec);
    let fact = |name: &str, value: &str| {
        TextLine::new(Tone::Faint, &format!("{name:<NAME_WIDTH$}")).add(Tone::Normal, value)
    };
    let mut lines = vec![TextLine::new(Tone::Strong, &format!("agent {}", spec.id))];
    let state = match view.status() {
        AgentStatus::Paused { why, .. } => {
            format!("{}: {}", state_word(loaded, is_driven), shorten(&why, WHY_LEN))
        }
        _ => state_word(loaded, is_driven),
    };
    lines.push(fact("state", &state));
    lines.push(fact("task", &spec.title));
    lines.push(fact("model", &spec.model));
    let optional = [("role", spec.role.as_deref()), ("plan", spec.plan.as_deref())];
    lines.extend(optional.iter().filter_map(|(name, value)| Some(fact(name, (*value)?))));
    lines.push(fact("approvals", &String::from(spec.mode.clone())));
    lines.push(fact("Body", view.body.as_ref().map_or("-", BodyId::as_str)));
    lines.push(fact("age", &age::since(&record.created_at)));
    if let Some(origin) = &record.forked_from {
        lines.push(fact("forked from", origin.agent.as_str()));
    }
    if let Some(parent) = &spec.parent {
        lines.push(fact("sub-agent of", parent.agent.as_str()));
    }
    let mut sums = vec![plural(view.totals.answers, "turn"), plural(view.totals.calls, "call")];
    sums.extend(spent(&view.totals, spec.model.starts_with("script:")));
    sums.push(format!("model {}, tools {}", time(view.totals.model_ms), time(view.totals.tool_ms)));
    lines.push(fact("spent", &sums.join(", ")));
    let limits = limits(&view.budget);
    if !limits.is_empty() {
        lines.push(fact("budget", &limits.join(", ")));
    }
    let turns: Vec<String> = view.checkpoints.iter().map(|one| one.turn.to_string()).collect();
    if !turns.is_empty() {
        lines.push(fact("checkpoints", &format!("turns {}", turns.join(", "))));
    }
    lines.extend(plan_lines(&view.todos, usize::MAX));
    lines.extend(open_lines(loaded));
    lines
}

fn limits(budget: &AgentBudget) -> Vec<String> {
    let limits = [
        budget.turns.map(|turns| format!("{turns} turns")),
        budget.tokens.map(|tokens| format!("{} tokens", count(tokens))),
        budget.cost_microdollars.map(dollars),
        budget.wall_ms.map(time),
    ];
    limits.into_iter().flatten().collect()
}

/// The calls and the question that wait for a person, and the last words of an agent that has finished.
fn open_lines(loaded: &LoadedAgent) -> Vec<TextLine> {
    let (view, id) = (&loaded.view, &loaded.record.spec.id);
    let mut lines = Vec::new();
    for state in &view.calls {
        let CallStage::Asked(rule) = &state.stage else { continue };
        let arguments = match &state.call.arguments {
            brain::model::ToolArguments::Object(object) => serde_json::Value::Object(object.clone()),
            brain::model::ToolArguments::Invalid(text) => serde_json::Value::String(text.clone()),
        };
        lines.push(
            TextLine::new(Tone::Notice, "? ")
                .add(Tone::Strong, &format!("{} {}", state.call.name, main_argument(&arguments)))
                .add(Tone::Normal, &format!("  needs approval: {rule}")),
        );
        let command = format!("  pal agent approve {id} --call {}", state.call.id);
        lines.push(TextLine::new(Tone::Faint, &command));
    }
    if let Some(asked) = open_question(view, loaded.events.iter()) {
        lines.push(TextLine::new(Tone::Notice, "? ").add(Tone::Strong, &asked.question));
        lines.extend(choice_lines(&asked.choices));
        lines.push(TextLine::new(Tone::Faint, &format!("  pal agent answer {id} \"…\"")));
    }
    if let Some(summary) = view.summary.as_ref().filter(|_| view.status() == AgentStatus::Finished) {
        lines.push(TextLine::default());
        lines.extend(summary.lines().map(|line| TextLine::new(Tone::Normal, line)));
    }
    lines
}
