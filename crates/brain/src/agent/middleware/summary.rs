//! Summaries: when the conversation gets too long for the model, a summary stands for its older part.
//!
//! Invariant: nothing is lost: the log keeps every event, and the older messages are written to a file that the agent can
//! read.
//! Invariant: a call and its result stay on the same side of the cut.

use std::{fmt::Write as _, sync::Arc};

use proto::{
    EventData,
    event_data::{AgentPause, HistoryCompacted, ModelUsage, TodoStatus},
};

use super::{AgentFiles, Continuation, Middleware, planning};
use crate::{
    agent::{journal::BoxFuture, view::AgentView},
    model::{Answer, ChatMessage, ContentBlock, Model, ModelCatalog, ModelError, ModelRequest, Speaker},
};

/// The context window of a model without a known one, in tokens.
const WINDOW_DEFAULT: u64 = 200_000;
/// At which share of the window a summary is made.
const TRIGGER_PERCENT: u64 = 85;
/// From which share the agent may ask for one.
const WISH_PERCENT: u64 = 42;
/// How many of the newest messages stay as they are.
const KEEP_MESSAGES: usize = 6;
/// The longest text of one message in the question for a summary, in characters.
const QUOTE_LEN_MAX: usize = 4_000;
/// The longest text of one message in the file of older messages, in characters.
const FILED_LEN_MAX: usize = 1_000_000;
/// How many characters of the question count as one token of the window. Less than the usual four: the summary must fit.
const CHARACTERS_PER_TOKEN: u64 = 2;
const QUESTION: &str = "Summarise the conversation above for yourself, so that you can go on with the task after it is \
    gone. Keep: the task and every instruction of the user, decisions and their reasons, files that were read or changed and \
    what matters in them, commands that were run and their results, errors that are not solved, and the next steps. \
    Answer with the summary only.";

/// Summarises long conversations.
pub struct Summarizer {
    model: Arc<dyn Model>,
    files: Arc<dyn AgentFiles>,
    catalog: Arc<ModelCatalog>,
    window_tokens: u64,
    /// The file for the older messages. Each summary has one of its own: the turn is put before the extension.
    file: String,
}

impl Summarizer {
    /// Summarises with this model, and writes older messages to this file.
    pub fn new(
        model: Arc<dyn Model>,
        files: Arc<dyn AgentFiles>,
        window_tokens: Option<u64>,
        file: impl Into<String>,
    ) -> Self {
        let window_tokens = window_tokens.unwrap_or(WINDOW_DEFAULT);
        Self { model, files, catalog: Arc::default(), window_tokens, file: file.into() }
    }

    /// Finds the price of summaries here.
    #[must_use]
    pub fn with_prices(self, catalog: Arc<ModelCatalog>) -> Self {
        Self { catalog, ..self }
    }

    /// Whether a summary is made before the next request. `overflow` says that the request before was too long.
    pub fn is_due(&self, view: &AgentView, overflow: bool) -> bool {
        let share = view.context_tokens.saturating_mul(100) / self.window_tokens.max(1);
        let is_wanted =
            overflow || share >= TRIGGER_PERCENT || (view.compact_wanted && share >= WISH_PERCENT);
        is_wanted && cut_before(&view.messages, KEEP_MESSAGES).is_some()
    }

    async fn summarize(&self, view: &AgentView) -> Option<HistoryCompacted> {
        let cut = cut_before(&view.messages, KEEP_MESSAGES)?;
        let older = &view.messages[..cut];
        let answer = self.ask(view, &transcript(older, QUOTE_LEN_MAX)).await;
        let path = file_of_turn(&self.file, view.turn);
        let saved = self.files.write(&path, &transcript(older, FILED_LEN_MAX)).await.is_ok();
        let file = saved.then_some(path);
        let usage = answer.as_ref().ok().map(|answer| answer.usage);
        let cost = usage.and_then(|usage| self.catalog.cost(self.model.address(), &usage));
        let summary = match answer {
            Ok(answer) => answer.text(),
            // Without a summary the agent still has the task and the file.
            Err(_) => format!("No summary could be made. {}", first_task(older)),
        };
        let place = match &file {
            Some(file) => format!("The full conversation before this point was saved to {file}."),
            None => "The full conversation before this point could not be saved to a file.".to_owned(),
        };
        let state = show_work(view).map(|state| format!("\n\n{state}")).unwrap_or_default();
        let summary = format!(
            "You are in the middle of a conversation that has been summarized.\n\n{place}\n\n\
             A condensed summary follows:\n\n<summary>\n{summary}\n</summary>{state}"
        );
        let usage = usage.map(|usage| ModelUsage {
            input: usage.input,
            output: usage.output,
            cache_read: usage.cache_read,
            cache_write: usage.cache_write,
        });
        let cost_microdollars = cost.map(|cost| cost.0);
        Some(HistoryCompacted { messages: cut as u64, summary, file, usage, cost_microdollars })
    }

    async fn ask(&self, view: &AgentView, text: &str) -> Result<Answer, ModelError> {
        let room = self.window_tokens.saturating_mul(CHARACTERS_PER_TOKEN);
        let text = cut_middle(text, usize::try_from(room).unwrap_or(usize::MAX));
        let request = ModelRequest {
            messages: vec![ChatMessage::from_user(format!(
                "<conversation>\n{text}</conversation>\n\n{QUESTION}"
            ))],
            conversation: view.spec.as_ref().map(|spec| format!("{}-summary", spec.id)),
            role: Some("summarizer".into()),
            ..ModelRequest::default()
        };
        self.model.answer(&request, &|_| ()).await
    }
}

impl Middleware for Summarizer {
    fn name(&self) -> &'static str {
        "summary"
    }

    fn before_request<'a>(&'a self, view: &'a AgentView, overflow: bool) -> BoxFuture<'a, Vec<EventData>> {
        Box::pin(async move {
            if !self.is_due(view, overflow) {
                return Vec::new();
            }
            self.summarize(view).await.map(EventData::from).into_iter().collect()
        })
    }

    fn check(&self, view: &AgentView) -> Continuation {
        let full = view.context_tokens >= self.window_tokens;
        if full && cut_before(&view.messages, KEEP_MESSAGES).is_none() {
            return Continuation::Pause {
                reason: AgentPause::Model,
                why: "the newest messages alone fill the context of the model".to_owned(),
            };
        }
        Continuation::Continue
    }
}

/// The index before which the conversation can be cut: a message of the model, so that no result loses its call.
fn cut_before(messages: &[ChatMessage], keep: usize) -> Option<usize> {
    let newest = messages.len().checked_sub(keep).filter(|_| !messages.is_empty())?;
    (1..=newest.min(messages.len() - 1)).rev().find(|index| messages[*index].speaker == Speaker::Assistant)
}

/// The path of the file for one summary.
fn file_of_turn(file: &str, turn: u64) -> String {
    let name_at = file.rfind('/').map_or(0, |slash| slash + 1);
    match file[name_at..].rfind('.').filter(|dot| *dot > 0) {
        Some(dot) => format!("{}-{turn}{}", &file[..name_at + dot], &file[name_at + dot..]),
        None => format!("{file}-{turn}"),
    }
}

/// The beginning and the end of a text that is too long.
fn cut_middle(text: &str, len_max: usize) -> String {
    let count = text.chars().count();
    if count <= len_max {
        return text.to_owned();
    }
    let half = len_max / 2;
    let head: String = text.chars().take(half).collect();
    let tail: String = text.chars().skip(count - half).collect();
    format!("{head}\n\n[{} characters left out]\n\n{tail}", count - 2 * half)
}

/// The plan and the tasks of the agent, which are not in the conversation any more; none if there are none.
fn show_work(view: &AgentView) -> Option<String> {
    let todos: Vec<String> = view
        .todos
        .iter()
        .map(|todo| {
            let mark = match &todo.status {
                TodoStatus::Completed => "done",
                TodoStatus::InProgress => "in progress",
                TodoStatus::Pending | TodoStatus::Other(_) => "open",
            };
            format!("- [{mark}] {}", todo.content)
        })
        .collect();
    let todos = (!todos.is_empty()).then(|| format!("Your list of tasks:\n{}", todos.join("\n")));
    let parts: Vec<String> = planning::show_state(view).into_iter().chain(todos).collect();
    (!parts.is_empty()).then(|| parts.join("\n\n"))
}

/// The text of messages, for a summary and for the file.
fn transcript(messages: &[ChatMessage], len_max: usize) -> String {
    let mut text = String::new();
    for message in messages {
        let name = if message.speaker == Speaker::User { "user" } else { "assistant" };
        for block in &message.blocks {
            let (kind, content) = match block {
                ContentBlock::Text { text } => (name.to_owned(), text.clone()),
                ContentBlock::ToolCall(call) => (format!("call {}", call.name), call.arguments.to_text()),
                ContentBlock::ToolResult(result) => ("result".to_owned(), result.to_text()),
                ContentBlock::Image(_) => (name.to_owned(), "[image]".to_owned()),
                ContentBlock::Opaque(_) => continue,
            };
            let shown: String = content.chars().take(len_max).collect();
            let rest = if shown.len() < content.len() { " …" } else { "" };
            let _ = writeln!(text, "[{kind}]\n{shown}{rest}\n");
        }
    }
    text
}

fn first_task(messages: &[ChatMessage]) -> String {
    let first = messages.first().map(|message| transcript(std::slice::from_ref(message), QUOTE_LEN_MAX));
    format!("The conversation began with:\n{}", first.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ToolArguments, ToolCall, ToolResult};

    fn conversation(turns: usize) -> Vec<ChatMessage> {
        let mut messages = vec![ChatMessage::from_user("task")];
        for turn in 0..turns {
            let call =
                ToolCall { id: turn.to_string(), name: "ls".into(), arguments: ToolArguments::parse("{}") };
            messages.push(ChatMessage::from_model(vec![ContentBlock::ToolCall(call)]));
            messages.push(ChatMessage::from_results([ToolResult::from_text(turn.to_string(), "x")]));
        }
        messages
    }

    #[test]
    fn a_cut_never_parts_a_call_from_its_result() {
        for turns in 0..12 {
            let messages = conversation(turns);
            for keep in 0..14 {
                let Some(cut) = cut_before(&messages, keep) else { continue };
                assert!(cut > 0 && messages.len() - cut >= keep);
                assert_eq!(messages[cut].speaker, Speaker::Assistant);
            }
        }
        assert_eq!(cut_before(&conversation(1), 6), None);
        assert_eq!(cut_before(&conversation(6), 6), Some(7));
    }

    #[test]
    fn each_summary_has_a_file_of_its_own() {
        assert_eq!(file_of_turn("/a.b/history.md", 7), "/a.b/history-7.md");
        assert_eq!(file_of_turn("/a.b/history", 7), "/a.b/history-7");
        assert_eq!(file_of_turn("/a/.history", 7), "/a/.history-7");
    }

    #[test]
    fn a_long_text_keeps_both_ends() {
        assert_eq!(cut_middle("äbcdef", 6), "äbcdef");
        assert_eq!(cut_middle("äbcdef", 4), "äb\n\n[2 characters left out]\n\nef");
    }
}
