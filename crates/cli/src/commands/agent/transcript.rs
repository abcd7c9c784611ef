//! `pal agent export`: the conversation of an agent, as events or as a page.
//!
//! Invariant: a page shows text of models and tools only inside of fences that the text cannot close, and no character
//! that a terminal would act on.

use std::fmt::Write as _;

use brain::{
    agent::ResolvedEvent,
    model::{ContentBlock, ResultBlock, ToolArguments},
};
use bridge::Agents;
use proto::{
    EventData, Failure,
    event_data::{ApprovalDecision, CallEnded, DecodedEvent, MessageSource, TodoStatus},
    text::visible,
};
use serde_json::{Value, json};

use super::{call_line::time, find, follow::AgentFollower, render::dollars};
use crate::{
    args::AgentExportArgs,
    output::{self, Format},
};

/// Prints the conversation of an agent.
pub async fn export(agents: &Agents, args: &AgentExportArgs, format: Format) -> Result<u8, Failure> {
    let id = find(agents, args.of.agent.as_deref())?.spec.id;
    let follower = AgentFollower::open(agents, &id).await?;
    if args.format == "markdown" {
        let page = page(&follower);
        match format {
            Format::Text => output::data(page.as_bytes())?,
            Format::Json => output::json(&json!({ "agent": id, "markdown": page }))?,
        }
        return Ok(0);
    }
    for event in &follower.events {
        output::json(&event_with_content(event))?;
    }
    Ok(0)
}

/// An event, and beside it the content that the event itself only refers to.
fn event_with_content(resolved: &ResolvedEvent) -> Value {
    let mut object = serde_json::to_value(&resolved.event).unwrap_or_default();
    let is_elsewhere = ["message", "result", "system"]
        .iter()
        .any(|field| resolved.event.data.get(field).and_then(|stored| stored.get("artifact")).is_some());
    if is_elsewhere {
        object["content"] = resolved.content.clone();
    }
    object
}

fn page(follower: &AgentFollower) -> String {
    let spec = &follower.record.spec;
    let mut page = format!("# {}\n\n", inline(&spec.title));
    let body = follower.view.body.as_ref().map_or(String::new(), |body| format!(", Body `{body}`"));
    let _ = writeln!(page, "Agent `{}`, model {}{body}.", spec.id, code(&spec.model));
    for event in &follower.events {
        push_event(&mut page, event);
    }
    let totals = &follower.view.totals;
    let cost = if totals.unpriced_answers == 0 {
        format!(", {}", dollars(totals.cost_microdollars))
    } else {
        String::new()
    };
    let _ = writeln!(
        page,
        "\n---\n\n{} answers, {} calls, {} tokens{cost}.",
        totals.answers,
        totals.calls,
        totals.usage.total_input() + totals.usage.output
    );
    page
}

fn push_event(page: &mut String, resolved: &ResolvedEvent) {
    let DecodedEvent::Known(data) = resolved.event.decode() else { return };
    let _ = match data {
        EventData::MessageReceived(data) => {
            let from = match &data.from {
                MessageSource::User => "User",
                MessageSource::Parent => "Parent",
                MessageSource::Palisade | MessageSource::Other(_) => "Palisade",
            };
            writeln!(page, "\n## {from}\n\n{}", fenced("text", &data.text))
        }
        EventData::ModelAnswered(data) => {
            push_answer(page, data.turn, resolved.content_as());
            Ok(())
        }
        EventData::CallEnded(data) => {
            push_result(page, &data, &resolved.content_as::<Vec<ResultBlock>>());
            Ok(())
        }
        EventData::ApprovalAsked(data) => {
            writeln!(page, "\nCall {} waits for approval: {}", code(&data.call), inline(&data.why))
        }
        EventData::ApprovalGiven(data) => {
            let decision = match &data.decision {
                ApprovalDecision::Approve => "approved",
                ApprovalDecision::Edit => "approved with other arguments",
                ApprovalDecision::Answer => "answered by a person",
                ApprovalDecision::Reject | ApprovalDecision::Other(_) => "rejected",
            };
            let why = data.message.as_deref().map_or(String::new(), |text| format!(": {}", inline(text)));
            writeln!(page, "\nCall {} was {decision}{why}", code(&data.call))
        }
        EventData::QuestionAsked(data) => {
            writeln!(page, "\n## Question\n\n{}", fenced("text", &data.question))
        }
        EventData::QuestionAnswered(data) => {
            writeln!(page, "\n## Answer\n\n{}", fenced("text", &data.answer))
        }
        EventData::PlanChanged(data) => {
            page.push('\n');
            for todo in &data.todos {
                let sign = if todo.status == TodoStatus::Completed { 'x' } else { ' ' };
                let _ = writeln!(page, "- [{sign}] {}", inline(&todo.content));
            }
            Ok(())
        }
        EventData::ModelFailed(data) => writeln!(page, "\nThe model failed: {}", inline(&data.why)),
        EventData::HistoryCompacted(data) => {
            writeln!(page, "\n## Summary of {} messages\n\n{}", data.messages, fenced("text", &data.summary))
        }
        EventData::AgentRewound(data) => writeln!(page, "\nThe agent went back to turn {}.", data.turn),
        EventData::AgentPaused(data) => writeln!(page, "\nThe agent waited: {}", inline(&data.why)),
        _ => Ok(()),
    };
}

fn push_answer(page: &mut String, turn: u64, blocks: Vec<ContentBlock>) {
    let _ = writeln!(page, "\n## Turn {turn}");
    for block in blocks {
        let _ = match block {
            ContentBlock::Text { text } => writeln!(page, "\n{}", fenced("markdown", &text)),
            ContentBlock::Opaque(block) if !block.text.trim().is_empty() => {
                writeln!(
                    page,
                    "\n<details><summary>thought</summary>\n\n{}\n\n</details>",
                    fenced("text", &block.text)
                )
            }
            ContentBlock::ToolCall(call) => {
                let arguments = match call.arguments {
                    ToolArguments::Object(object) => {
                        serde_json::to_string_pretty(&object).unwrap_or_default()
                    }
                    ToolArguments::Invalid(text) => text,
                };
                let head = format!("Call {} of {}", code(&call.id), code(&call.name));
                writeln!(page, "\n{head}:\n\n{}", fenced("json", &arguments))
            }
            _ => Ok(()),
        };
    }
}

fn push_result(page: &mut String, data: &CallEnded, blocks: &[ResultBlock]) {
    let exit = data.exit_code.map_or(String::new(), |code| format!(", exit code {code}"));
    let outcome = inline(&String::from(data.outcome.clone()));
    let _ = writeln!(page, "\nResult of {}: {outcome}{exit}, {}", code(&data.call), time(data.took_ms));
    for block in blocks {
        let _ = match block {
            ResultBlock::Text { text } => writeln!(page, "\n{}", fenced("text", text)),
            ResultBlock::Image(image) => writeln!(page, "\nA picture of type {}.", code(&image.media_type)),
        };
    }
}

/// Text in one line of a page, without the power of Markdown.
fn inline(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut escaped = String::new();
    for character in visible(&words.join(" ")).chars() {
        if "\\`*_[]<>#|!&".contains(character) {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// A short text as code.
fn code(text: &str) -> String {
    format!("`{}`", visible(text).replace('`', "'"))
}

/// Text between fences that are longer than any in the text.
fn fenced(kind: &str, text: &str) -> String {
    let longest = text.split(|character| character != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat((longest + 1).max(3));
    let lines: Vec<String> = text
        .trim_end()
        .lines()
        .map(|line| line.split('\t').map(visible).collect::<Vec<_>>().join("\t"))
        .collect();
    format!("{fence}{kind}\n{}\n{fence}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_closes_no_fence_and_controls_no_terminal() {
        assert_eq!(fenced("text", "a\n````\n# b\x1b[2J\n"), "`````text\na\n````\n# b\\u{1b}[2J\n`````");
        assert_eq!(fenced("text", "x\ty"), "```text\nx\ty\n```");
        assert_eq!(inline("<b>\n*x*"), "\\<b\\> \\*x\\*");
        assert_eq!(code("a`b\x07"), "`a'b\\u{7}`");
    }
}
