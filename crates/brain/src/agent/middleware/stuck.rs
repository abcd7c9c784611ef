//! Stuck detection: an agent that repeats the same failing call, or the same words, pauses.

use proto::event_data::AgentPause;

use super::{Continuation, Middleware};
use crate::{
    agent::view::AgentView,
    model::{ChatMessage, ContentBlock, Speaker},
};

/// How many equal turns in a row count as stuck.
const REPEATS_MAX: usize = 5;
/// How many turns in a row in which every call failed count as stuck.
const FAILURES_MAX: usize = 12;

/// Pauses an agent that goes round in circles.
#[derive(Debug, Default)]
pub struct StuckDetector;

impl Middleware for StuckDetector {
    fn name(&self) -> &'static str {
        "stuck"
    }

    fn check(&self, view: &AgentView) -> Continuation {
        let turns = turns(&view.messages);
        let why = if ends_with_equals(&turns) {
            format!("the agent made the same calls with the same results {REPEATS_MAX} times in a row")
        } else if turns.len() >= FAILURES_MAX
            && turns[turns.len() - FAILURES_MAX..].iter().all(|turn| turn.failed)
        {
            format!("every call of the last {FAILURES_MAX} turns failed")
        } else {
            return Continuation::Continue;
        };
        Continuation::Pause { reason: AgentPause::Stuck, why }
    }
}

/// One turn since the newest message of a person: the calls and the results, as text.
struct TurnText {
    text: String,
    failed: bool,
}

fn turns(messages: &[ChatMessage]) -> Vec<TurnText> {
    let spoken = |message: &ChatMessage| {
        message.speaker == Speaker::User
            && message.blocks.iter().any(|block| matches!(block, ContentBlock::Text { .. }))
    };
    let begin = messages.iter().rposition(spoken).map_or(0, |index| index + 1);
    let mut turns = Vec::new();
    for pair in messages[begin..].chunks_exact(2) {
        let calls = pair[0].blocks.iter().filter_map(|block| match block {
            ContentBlock::ToolCall(call) => Some(format!("{} {}", call.name, call.arguments.to_text())),
            _ => None,
        });
        let results: Vec<_> = pair[1]
            .blocks
            .iter()
            .filter_map(|block| match block {
                ContentBlock::ToolResult(result) => Some(result),
                _ => None,
            })
            .collect();
        let mut text: Vec<String> = calls.collect();
        text.extend(results.iter().map(|result| result.to_text()));
        let failed = !results.is_empty() && results.iter().all(|result| result.is_error);
        turns.push(TurnText { text: text.join("\u{1f}"), failed });
    }
    turns
}

fn ends_with_equals(turns: &[TurnText]) -> bool {
    let Some(newest) = turns.len().checked_sub(REPEATS_MAX) else { return false };
    turns[newest..].windows(2).all(|pair| pair[0].text == pair[1].text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ToolArguments, ToolCall, ToolResult};

    fn turn(id: usize, path: &str, result: &str, is_error: bool) -> [ChatMessage; 2] {
        let arguments = ToolArguments::parse(&format!("{{\"path\":\"{path}\"}}"));
        let call = ToolCall { id: id.to_string(), name: "ls".into(), arguments };
        let result = ToolResult { is_error, ..ToolResult::from_text(id.to_string(), result) };
        [ChatMessage::from_model(vec![ContentBlock::ToolCall(call)]), ChatMessage::from_results([result])]
    }

    fn check(turns: impl IntoIterator<Item = [ChatMessage; 2]>) -> bool {
        let messages = std::iter::once(ChatMessage::from_user("go")).chain(turns.into_iter().flatten());
        let view = AgentView { messages: messages.collect(), ..AgentView::default() };
        StuckDetector.check(&view) != Continuation::Continue
    }

    #[test]
    fn equal_turns_and_endless_failures_are_stuck() {
        assert!(!check((0..4).map(|id| turn(id, "/a", "x", false))));
        assert!(check((0..5).map(|id| turn(id, "/a", "x", false))));
        assert!(!check((0..9).map(|id| turn(id, &format!("/{id}"), "x", false))));
        assert!(!check((0..11).map(|id| turn(id, &format!("/{id}"), "no", true))));
        assert!(check((0..12).map(|id| turn(id, &format!("/{id}"), "no", true))));
    }
}
