//! The lines that the events of an agent become, for the terminal, a pipe and a transcript.
//!
//! Invariant: pure. The same events give the same lines; nothing is read or printed here.
//! Invariant: every call of the model becomes one line, once it has a result.

use std::collections::HashMap;

use brain::{
    agent::{AgentTotals, ResolvedEvent},
    model::{ContentBlock, ResultBlock, ToolArguments},
};
use proto::{
    EventData,
    event_data::{
        AgentInterrupted, ApprovalDecision, ApprovalGiven, ApprovalScope, CallEnded, CallStarted,
        DecodedEvent, MessageReceived, MessageSource, ModelFailed, PhaseEntered, Todo, TodoStatus,
    },
};
use serde_json::Value;

use super::{
    call_line::{CallReport, is_success, main_argument, shorten, time},
    style::{LineFit, TextLine, Tone},
};

/// How many lines of one text of the model are shown while the agent works.
const TEXT_LINES_MAX: usize = 400;
/// How many lines of a message of a person are shown.
const MESSAGE_LINES_MAX: usize = 20;
/// How many characters of a thought are shown.
const THOUGHT_LEN: usize = 120;
/// How many characters of a message of Palisade are shown.
const NOTE_LEN: usize = 200;
/// The most calls whose arguments are remembered until they end.
const CALLS_MAX: usize = 4096;

/// The place of the plan in the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanPlace {
    /// Another part of the screen shows it.
    Elsewhere,
    /// It is among the lines.
    Lines,
}

/// Turns events into lines, one after the other.
pub struct EventLines {
    plan: PlanPlace,
    text_lines_max: usize,
    calls: HashMap<String, OpenCall>,
    todos: Vec<Todo>,
    /// The newest command that looks like a test, and whether it passed.
    pub newest_test: Option<(String, bool)>,
    /// The calls that failed.
    pub failed_calls: u64,
    /// Whether a prompt shows the calls that need approval.
    pub is_prompted: bool,
}

/// A call that the model made and that has no result yet.
#[derive(Debug, Clone)]
struct OpenCall {
    tool: String,
    arguments: Value,
}

impl EventLines {
    /// For a view of an agent at work.
    pub fn new(plan: PlanPlace) -> Self {
        let (calls, todos, newest_test) = (HashMap::new(), Vec::new(), None);
        Self {
            plan,
            text_lines_max: TEXT_LINES_MAX,
            calls,
            todos,
            newest_test,
            failed_calls: 0,
            is_prompted: false,
        }
    }

    /// For a transcript, which cuts no text of the model.
    pub fn whole() -> Self {
        Self { text_lines_max: usize::MAX, ..Self::new(PlanPlace::Lines) }
    }

    /// The lines of one event.
    pub fn of(&mut self, resolved: &ResolvedEvent) -> Vec<TextLine> {
        let DecodedEvent::Known(data) = resolved.event.decode() else { return Vec::new() };
        match data {
            EventData::MessageReceived(data) => message_lines(&data),
            EventData::ModelAnswered(_) => self.answer_lines(resolved.content_as()),
            EventData::ModelFailed(data) => vec![failure_line(&data)],
            EventData::CallStarted(data) => {
                self.remember(data.call, OpenCall { tool: data.tool, arguments: data.arguments });
                Vec::new()
            }
            EventData::CallEnded(data) => self.call_lines(&data, &resolved.content_as::<Vec<ResultBlock>>()),
            EventData::ApprovalAsked(_) if self.is_prompted => Vec::new(),
            EventData::ApprovalAsked(data) => {
                let call = format!("{} {}", data.tool, main_argument(&data.arguments));
                let line = TextLine::new(Tone::Notice, "? ").add(Tone::Strong, call.trim_end());
                vec![line.add(Tone::Normal, &format!("  needs approval: {}", shorten(&data.why, NOTE_LEN)))]
            }
            EventData::ApprovalGiven(data) => vec![decision_line(&data)],
            EventData::QuestionAsked(data) => {
                let mut lines = vec![TextLine::new(Tone::Notice, "? ").add(Tone::Strong, "the agent asks")];
                lines.extend(indented(&data.question, MESSAGE_LINES_MAX));
                lines.extend(choice_lines(&data.choices));
                lines
            }
            EventData::QuestionAnswered(data) => quoted(&data.answer),
            EventData::PlanChanged(data) if self.plan == PlanPlace::Lines => self.plan_changes(data.todos),
            EventData::PhaseEntered(data) => vec![phase_line(&data)],
            EventData::SubagentStarted(data) => {
                vec![note(&format!("sub-agent {} ({}) works in Body {}", data.agent, data.role, data.body))]
            }
            EventData::WorkMerged(data) => vec![note(&data.note)],
            EventData::HistoryCompacted(data) => {
                vec![note(&format!("a summary stands for {} older messages now", data.messages))]
            }
            EventData::AgentInterrupted(AgentInterrupted { stop }) => {
                vec![note(if stop { "a person stopped the agent" } else { "a person interrupted the agent" })]
            }
            // A view at work says this at its end.
            EventData::AgentPaused(data) if self.text_lines_max == usize::MAX => {
                vec![note(&format!("the agent waits: {}", data.why))]
            }
            EventData::AgentBudgeted(_) => vec![note("a person changed the budget")],
            EventData::AgentRewound(data) => vec![note(&format!("back to turn {}", data.turn))],
            _ => Vec::new(),
        }
    }

    /// The newest thing that an event says, in one line.
    pub fn activity(&mut self, resolved: &ResolvedEvent) -> Option<String> {
        let shown = self.of(resolved).iter().map(TextLine::to_text).find(|line| !line.is_empty());
        let started = resolved.event.data_as::<CallStarted>();
        let call = started.map(|call| format!("{} {}", call.tool, main_argument(&call.arguments)));
        call.or(shown)
    }

    /// The head of the plan, and the tasks that are new or have another state.
    fn plan_changes(&mut self, todos: Vec<Todo>) -> Vec<TextLine> {
        let mut lines = plan_lines(&todos, usize::MAX).into_iter();
        let head = lines.next();
        let before = std::mem::replace(&mut self.todos, todos);
        let changed = self.todos.iter().zip(lines).filter(|(todo, _)| !before.contains(todo));
        head.into_iter().chain(changed.map(|(_, line)| line)).collect()
    }

    fn remember(&mut self, id: String, call: OpenCall) {
        if self.calls.len() < CALLS_MAX {
            self.calls.insert(id, call);
        }
    }

    fn answer_lines(&mut self, blocks: Vec<ContentBlock>) -> Vec<TextLine> {
        let mut lines = Vec::new();
        for block in blocks {
            match block {
                ContentBlock::Text { text } if !text.trim().is_empty() => {
                    lines.push(TextLine::default());
                    lines.extend(text_lines(text.trim_end(), self.text_lines_max));
                }
                ContentBlock::Opaque(block) if !block.text.trim().is_empty() => {
                    lines.push(thought_line(&block.text));
                }
                ContentBlock::ToolCall(call) => {
                    let arguments = match call.arguments {
                        ToolArguments::Object(object) => Value::Object(object),
                        ToolArguments::Invalid(text) => Value::String(text),
                    };
                    self.remember(call.id, OpenCall { tool: call.name, arguments });
                }
                _ => {}
            }
        }
        lines
    }

    fn call_lines(&mut self, data: &CallEnded, blocks: &[ResultBlock]) -> Vec<TextLine> {
        let unknown = || OpenCall { tool: "call".into(), arguments: Value::Null };
        let call = self.calls.remove(&data.call).unwrap_or_else(unknown);
        let success = is_success(&data.outcome, data.exit_code);
        self.failed_calls += u64::from(!success);
        if data.exit_code.is_some() {
            let command = main_argument(&call.arguments);
            if command.to_lowercase().contains("test") {
                self.newest_test = Some((command, success));
            }
        }
        // The list of tasks is shown in full when it changes.
        if call.tool == "write_todos" && success {
            return Vec::new();
        }
        let report = CallReport {
            tool: &call.tool,
            arguments: &call.arguments,
            outcome: &data.outcome,
            blocks,
            exit_code: data.exit_code,
            took_ms: data.took_ms,
        };
        let lines = std::iter::once(report.line()).chain(report.edit_lines());
        lines.map(|line| line.fit(LineFit::Cut)).collect()
    }
}

/// A thought in one line.
pub fn thought_line(text: &str) -> TextLine {
    TextLine::new(Tone::Faint, &format!("· {}", shorten(text, THOUGHT_LEN))).fit(LineFit::Cut)
}

/// A line of Palisade itself.
fn note(text: &str) -> TextLine {
    TextLine::new(Tone::Faint, &format!("– {}", shorten(text, NOTE_LEN)))
}

fn failure_line(data: &ModelFailed) -> TextLine {
    let then = data.retry_ms.map_or(String::new(), |wait| format!("; asks again in {}", time(wait)));
    TextLine::new(Tone::Bad, "! ").add(Tone::Normal, &format!("{}{then}", shorten(&data.why, NOTE_LEN)))
}

fn decision_line(data: &ApprovalGiven) -> TextLine {
    let what = match &data.decision {
        ApprovalDecision::Approve => "a person approved the call",
        ApprovalDecision::Edit => "a person approved the call with other arguments",
        ApprovalDecision::Answer => "a person answered instead of the tool",
        ApprovalDecision::Reject | ApprovalDecision::Other(_) => "a person rejected the call",
    };
    let scope = match &data.scope {
        ApprovalScope::Agent => ", and those that the same rule asks about",
        ApprovalScope::Rule => ", and keeps that as a rule",
        ApprovalScope::Once | ApprovalScope::Other(_) => "",
    };
    let why = data.message.as_ref().map_or(String::new(), |text| format!(": {text}"));
    note(&format!("{what}{scope}{why}"))
}

fn phase_line(data: &PhaseEntered) -> TextLine {
    let check =
        data.check.as_ref().map_or(String::new(), |check| format!("  ({})", shorten(check, NOTE_LEN)));
    let phase = match &data.phase {
        Some(phase) => format!("phase {phase} of plan {}", data.plan),
        None => format!("plan {} is complete", data.plan),
    };
    TextLine::new(Tone::Strong, "▸ ").add(Tone::Strong, &shorten(&phase, NOTE_LEN)).add(Tone::Faint, &check)
}

fn message_lines(data: &MessageReceived) -> Vec<TextLine> {
    match &data.from {
        MessageSource::Palisade => vec![note(&data.text)],
        MessageSource::User | MessageSource::Parent | MessageSource::Other(_) => quoted(&data.text),
    }
}

/// Words of a person.
fn quoted(text: &str) -> Vec<TextLine> {
    let mut lines: Vec<TextLine> = vec![TextLine::default()];
    let all: Vec<&str> = text.trim_end().lines().collect();
    let shown = all.iter().take(MESSAGE_LINES_MAX);
    lines.extend(shown.map(|line| TextLine::new(Tone::Strong, &format!("> {line}"))));
    if all.len() > MESSAGE_LINES_MAX {
        let more = format!("> … {} more lines", all.len() - MESSAGE_LINES_MAX);
        lines.push(TextLine::new(Tone::Strong, &more));
    }
    lines
}

fn indented(text: &str, most: usize) -> Vec<TextLine> {
    text.trim().lines().take(most).map(|line| TextLine::new(Tone::Normal, &format!("  {line}"))).collect()
}

/// The answers that a question offers.
pub fn choice_lines(choices: &[String]) -> Vec<TextLine> {
    let line = |(index, choice): (usize, &String)| {
        TextLine::new(Tone::Normal, &format!("  {}. {}", index + 1, shorten(choice, NOTE_LEN)))
    };
    choices.iter().enumerate().map(line).collect()
}

fn text_lines(text: &str, most: usize) -> Vec<TextLine> {
    let mut all = text.lines();
    let mut lines: Vec<TextLine> =
        all.by_ref().take(most).map(|line| TextLine::new(Tone::Normal, line).fit(LineFit::Words)).collect();
    let more = all.count();
    if more > 0 {
        lines.push(TextLine::new(Tone::Faint, &format!("… {more} more lines; pal agent show --log has all")));
    }
    lines
}

/// The list of tasks. If it is longer than `most` lines, those around the current one are shown.
pub fn plan_lines(todos: &[Todo], most: usize) -> Vec<TextLine> {
    let done = todos.iter().filter(|todo| todo.status == TodoStatus::Completed).count();
    if todos.is_empty() || most < 2 {
        return Vec::new();
    }
    let shown = most - 1;
    let current = todos.iter().position(|todo| todo.status != TodoStatus::Completed).unwrap_or(0);
    let first = current.saturating_sub(shown / 2).min(todos.len().saturating_sub(shown));
    let head = format!("plan  {done} of {} done", todos.len());
    let items = todos.iter().skip(first).take(shown).map(|todo| {
        let (sign, tone) = match todo.status {
            TodoStatus::Completed => ("  [x] ", Tone::Faint),
            TodoStatus::InProgress => ("  [>] ", Tone::Strong),
            TodoStatus::Pending | TodoStatus::Other(_) => ("  [ ] ", Tone::Normal),
        };
        TextLine::new(tone, sign).add(tone, &shorten(&todo.content, NOTE_LEN))
    });
    std::iter::once(TextLine::new(Tone::Strong, &head)).chain(items).collect()
}

/// The tokens and the cost so far.
pub fn spent(totals: &AgentTotals, is_script: bool) -> Vec<String> {
    let input = totals.usage.total_input();
    let mut parts = vec![format!("{} tokens", count(input + totals.usage.output))];
    if totals.usage.cache_read > 0 && input > 0 {
        let share = totals.usage.cache_read.saturating_mul(100) / input;
        parts[0] += &format!(" ({share}% cached)");
    }
    if totals.unpriced_answers == 0 && totals.answers > 0 {
        parts.push(dollars(totals.cost_microdollars));
    } else if totals.cost_microdollars > 0 {
        parts.push(format!("at least {}", dollars(totals.cost_microdollars)));
    } else if totals.answers > 0 && !is_script {
        parts.push("cost unknown".to_owned());
    }
    parts
}

/// A number of things: `1 turn`, `2 turns`.
pub fn plural(count: u64, one: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") }
}

/// A number of tokens: `950`, `12.4k`, `3.1M`.
pub fn count(number: u64) -> String {
    match number {
        0..1_000 => number.to_string(),
        1_000..1_000_000 => format!("{}.{}k", number / 1_000, number % 1_000 / 100),
        _ => format!("{}.{}M", number / 1_000_000, number % 1_000_000 / 100_000),
    }
}

/// An amount of money: `$0.0421`, `$12.50`.
pub fn dollars(micro: u64) -> String {
    if micro < 1_000_000 {
        format!("$0.{:04}", micro / 100)
    } else {
        format!("${}.{:02}", micro / 1_000_000, micro % 1_000_000 / 10_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn todo(content: &str, status: TodoStatus) -> Todo {
        Todo { content: content.into(), status }
    }

    #[test]
    fn a_long_plan_shows_the_tasks_around_the_current_one() {
        let mut todos: Vec<Todo> = (0..9).map(|n| todo(&n.to_string(), TodoStatus::Completed)).collect();
        todos.push(todo("now\x1b[2J", TodoStatus::InProgress));
        todos.extend((0..9).map(|n| todo(&format!("later {n}"), TodoStatus::Pending)));
        let shown: Vec<String> = plan_lines(&todos, 5).iter().map(TextLine::to_text).collect();
        assert_eq!(
            shown,
            ["plan  9 of 19 done", "  [x] 7", "  [x] 8", "  [>] now\\u{1b}[2J", "  [ ] later 0"]
        );
        assert_eq!(plan_lines(&todos, usize::MAX).len(), 20);
        assert!(plan_lines(&[], 5).is_empty() && plan_lines(&todos, 1).is_empty());
    }

    #[test]
    fn a_plan_that_changes_shows_its_changes() {
        let mut lines = EventLines::new(PlanPlace::Lines);
        let mut changes =
            |todos: Vec<Todo>| lines.plan_changes(todos).iter().map(TextLine::to_text).collect::<Vec<_>>();
        let (a, b) = (todo("a", TodoStatus::InProgress), todo("b", TodoStatus::Pending));
        assert_eq!(changes(vec![a, b.clone()]), ["plan  0 of 2 done", "  [>] a", "  [ ] b"]);
        let done = todo("a", TodoStatus::Completed);
        assert_eq!(changes(vec![done, b]), ["plan  1 of 2 done", "  [x] a"]);
        assert_eq!(changes(Vec::new()), Vec::<String>::new());
    }

    #[test]
    fn money_is_exact_and_unknown_cost_is_not_zero() {
        assert_eq!(
            [421, 42_100, 999_999, 12_500_000].map(dollars),
            ["$0.0004", "$0.0421", "$0.9999", "$12.50"]
        );
        let mut totals = AgentTotals { answers: 2, cost_microdollars: 42_100, ..AgentTotals::default() };
        totals.usage.input = 2_000;
        totals.usage.cache_read = 8_000;
        totals.usage.output = 2_400;
        assert_eq!(spent(&totals, false), ["12.4k tokens (80% cached)", "$0.0421"]);
        totals.unpriced_answers = 1;
        assert_eq!(spent(&totals, false)[1], "at least $0.0421");
        totals.cost_microdollars = 0;
        assert_eq!(spent(&totals, false)[1], "cost unknown");
        assert_eq!(spent(&totals, true).len(), 1);
    }
}
