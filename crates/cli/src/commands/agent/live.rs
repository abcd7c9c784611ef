//! The part of the view that changes: the answer while it arrives, the calls that run, the plan and a status line.
//!
//! Trust: updates come from a driver of this user, and contain text of a model and of a Body. Everything is bounded here
//! and escaped by [`TextLine`].

use std::{collections::BTreeMap, time::Instant};

use brain::{
    agent::{AgentStatus, AgentView, CallStage, LiveUpdate, ResolvedEvent},
    model::ModelDelta,
};
use proto::{AgentId, EventData, event_data::DecodedEvent};

use super::{
    call_line::{main_argument, shorten, time},
    render::{plan_lines, spent, thought_line},
    style::{TextLine, Tone, wrap},
};

/// How many bytes of an answer are kept while it arrives.
const TEXT_LEN_MAX: usize = 16 << 10;
/// How many bytes of the newest output of a call are kept.
const OUTPUT_LEN_MAX: usize = 1 << 10;
/// The most calls of one answer that are shown.
const CALLS_SHOWN_MAX: usize = 8;
const SPINNER: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];

/// The answer that arrives, and the calls that run.
#[derive(Default)]
pub struct LiveAnswer {
    thought: String,
    text: String,
    /// The call whose arguments arrive: its tool, and how many bytes they have.
    writing: Option<(String, usize)>,
    /// The calls that run: when they began, and the newest line of their output.
    running: BTreeMap<String, (Instant, String)>,
    asked: Option<Instant>,
    sub_agents: BTreeMap<AgentId, SubAgentLine>,
}

/// A sub-agent at work.
struct SubAgentLine {
    /// The call that started it.
    call: String,
    role: String,
    activity: String,
}

impl LiveAnswer {
    /// Takes an update of the driver.
    pub fn update(&mut self, update: LiveUpdate) {
        match update {
            LiveUpdate::Asking { .. } => {
                self.end_answer();
                self.asked = Some(Instant::now());
            }
            LiveUpdate::Delta { delta } => self.extend(delta),
            LiveUpdate::Output { call, text } => {
                if let Some((_, line)) = self.running.get_mut(&call) {
                    push_bounded(line, &text, OUTPUT_LEN_MAX);
                }
            }
        }
    }

    fn extend(&mut self, delta: ModelDelta) {
        match delta {
            ModelDelta::Text { text } => push_bounded(&mut self.text, &text, TEXT_LEN_MAX),
            ModelDelta::Reasoning { text } => push_bounded(&mut self.thought, &text, TEXT_LEN_MAX),
            ModelDelta::CallStarted { name, .. } => self.writing = Some((shorten(&name, 64), 0)),
            ModelDelta::CallArguments { text, .. } => {
                if let Some((_, len)) = &mut self.writing {
                    *len += text.len();
                }
            }
        }
    }

    /// The sub-agents at work.
    pub fn sub_agents(&self) -> Vec<AgentId> {
        self.sub_agents.keys().cloned().collect()
    }

    /// Takes note of what a sub-agent does.
    pub fn note_activity(&mut self, agent: &AgentId, activity: String) {
        if let Some(line) = self.sub_agents.get_mut(agent) {
            line.activity = activity;
        }
    }

    fn end_answer(&mut self) {
        let (running, sub_agents) = (std::mem::take(&mut self.running), std::mem::take(&mut self.sub_agents));
        *self = Self { running, sub_agents, ..Self::default() };
    }

    /// Takes an event of the log, which says more than the updates before it.
    pub fn note(&mut self, resolved: &ResolvedEvent) {
        match resolved.event.decode() {
            DecodedEvent::Known(EventData::ModelAsked(_)) => self.asked = Some(Instant::now()),
            DecodedEvent::Known(EventData::ModelAnswered(_)) => self.end_answer(),
            DecodedEvent::Known(EventData::AgentPaused(_) | EventData::AgentDriven(_)) => {
                *self = Self::default()
            }
            DecodedEvent::Known(EventData::SubagentStarted(data)) => {
                let line = SubAgentLine { call: data.call, role: data.role, activity: String::new() };
                self.sub_agents.insert(data.agent, line);
            }
            DecodedEvent::Known(EventData::SubagentEnded(data)) => drop(self.sub_agents.remove(&data.agent)),
            DecodedEvent::Known(EventData::CallStarted(data)) => {
                self.running.insert(data.call, (Instant::now(), String::new()));
            }
            DecodedEvent::Known(EventData::CallEnded(data)) => drop(self.running.remove(&data.call)),
            _ => {}
        }
    }

    /// The lines below, for a terminal of this size.
    pub fn lines(&self, view: &AgentView, status: &StatusLine, rows: usize, columns: usize) -> Vec<TextLine> {
        let mut lines = Vec::new();
        if self.text.is_empty() && !self.thought.trim().is_empty() {
            lines.push(thought_line(last_words(&self.thought)));
        }
        if !self.text.trim().is_empty() {
            let wrapped = wrap(self.text.trim(), columns.saturating_sub(1));
            let shown = (rows / 2).max(1);
            let from = wrapped.len().saturating_sub(shown);
            lines.extend(wrapped[from..].iter().map(|line| TextLine::new(Tone::Normal, line)));
        }
        if let Some((tool, len)) = &self.writing {
            lines.push(TextLine::new(Tone::Faint, &format!("… {tool} ({len} bytes of arguments)")));
        }
        lines.extend(self.call_lines(view, status.spinner()));
        let room = rows.saturating_sub(lines.len() + 3).min(12);
        lines.extend(plan_lines(&view.todos, room));
        lines.push(status.line(view, self.asked, !self.text.is_empty() || self.writing.is_some()));
        lines
    }

    fn call_lines(&self, view: &AgentView, spinner: &str) -> Vec<TextLine> {
        let started = view.calls.iter().filter_map(|state| match &state.stage {
            CallStage::Started(started) => Some((started, self.running.get(&state.call.id))),
            _ => None,
        });
        let mut lines = Vec::new();
        for (started, running) in started.take(CALLS_SHOWN_MAX) {
            let argument = main_argument(&started.arguments);
            let mut line = TextLine::new(Tone::Notice, &format!("{spinner} "))
                .add(Tone::Strong, &started.tool)
                .add(Tone::Normal, &format!(" {argument}"));
            if let Some((since, output)) = running {
                line = line.add(Tone::Faint, &format!("  {}", seconds(*since)));
                let newest = output.trim_end().lines().next_back().unwrap_or_default();
                line = line.add(Tone::Faint, &format!("  {}", shorten(newest, 120)));
            }
            lines.push(line);
            let own = self.sub_agents.values().filter(|sub_agent| sub_agent.call == started.call);
            lines.extend(own.map(|sub_agent| {
                TextLine::new(Tone::Faint, &format!("  └ {}: ", shorten(&sub_agent.role, 24)))
                    .add(Tone::Faint, &shorten(&sub_agent.activity, 120))
            }));
        }
        lines
    }
}

/// The last line of the view.
pub struct StatusLine {
    /// When the work on the newest message began, as far as this process knows.
    pub since: Instant,
    /// Counts the drawings.
    pub frame: usize,
    /// Whether the model is a script, which costs nothing.
    pub is_script: bool,
    /// The number of sub-agents at work.
    pub sub_agents: usize,
    /// A short message that replaces the keys.
    pub notice: Option<&'static str>,
}

impl StatusLine {
    fn spinner(&self) -> &'static str {
        SPINNER[self.frame % SPINNER.len()]
    }

    fn line(&self, view: &AgentView, asked: Option<Instant>, is_writing: bool) -> TextLine {
        let is_working = view.status() == AgentStatus::Working;
        let doing = match (asked, view.open_calls().next().is_some()) {
            (_, true) => "working".to_owned(),
            _ if is_writing => "answering".to_owned(),
            (Some(asked), false) if is_working => format!("thinking {}", seconds(asked)),
            _ => "working".to_owned(),
        };
        let mut parts = vec![format!("turn {}", view.turn + u64::from(asked.is_some()))];
        if let Some((_, Some(phase))) = &view.phase {
            parts.push(format!("phase {}", shorten(phase, 24)));
        }
        match self.sub_agents {
            0 => {}
            1 => parts.push("1 sub-agent".to_owned()),
            many => parts.push(format!("{many} sub-agents")),
        }
        parts.extend(spent(&view.totals, self.is_script));
        parts.push(seconds(self.since));
        let keys = self.notice.unwrap_or("Ctrl-C stops the turn, d leaves it at work");
        TextLine::new(Tone::Notice, &format!("{} ", self.spinner()))
            .add(Tone::Strong, &doing)
            .add(Tone::Faint, &format!(" · {} · {keys}", parts.join(" · ")))
    }
}

fn seconds(since: Instant) -> String {
    let seconds = since.elapsed().as_secs();
    if seconds < 60 { format!("{seconds}s") } else { time(seconds * 1000) }
}

/// The last sentence or so of a thought that goes on.
fn last_words(text: &str) -> &str {
    let from = text.len().saturating_sub(400);
    let from = (from..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let tail = &text[from..];
    tail.trim_end().rsplit_once('\n').map_or(tail, |(_, line)| line)
}

/// Appends text, and drops the beginning of what is too long.
fn push_bounded(text: &mut String, more: &str, most: usize) {
    text.push_str(more);
    if text.len() > 2 * most {
        let from = (text.len() - most..text.len()).find(|at| text.is_char_boundary(*at));
        text.drain(..from.unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> StatusLine {
        StatusLine { since: Instant::now(), frame: 0, is_script: true, sub_agents: 0, notice: None }
    }

    fn shown(answer: &LiveAnswer) -> Vec<String> {
        let lines = answer.lines(&AgentView::default(), &status(), 10, 20);
        lines.iter().map(TextLine::to_text).collect()
    }

    #[test]
    fn a_new_attempt_voids_the_pieces_of_the_one_before() {
        let text = |text: &str| LiveUpdate::Delta { delta: ModelDelta::Text { text: text.into() } };
        let mut answer = LiveAnswer::default();
        answer.update(LiveUpdate::Asking { turn: 1 });
        answer.update(text("half an ans"));
        assert_eq!(shown(&answer)[0], "half an ans");
        answer.update(LiveUpdate::Asking { turn: 1 });
        assert!(shown(&answer)[0].contains("thinking"), "{:?}", shown(&answer));
        answer.update(text("a\x1b[2J"));
        assert_eq!(shown(&answer)[0], "a\\u{1b}[2J");
    }

    #[test]
    fn endless_answers_take_bounded_memory_and_rows() {
        let mut answer = LiveAnswer::default();
        for _ in 0..100 {
            let text = "ü line\n".repeat(1000);
            answer.update(LiveUpdate::Delta { delta: ModelDelta::Text { text } });
        }
        assert!(answer.text.len() <= 2 * TEXT_LEN_MAX);
        assert!(shown(&answer).len() <= 10, "{:?}", shown(&answer));
    }
}
