//! Asks the person at the terminal: approvals, answers and messages.
//!
//! Invariant: a person sees the whole call before the keys are read, and a key that means nothing decides nothing.

use std::{io::Write, os::unix::fs::OpenOptionsExt, path::Path, process::Command};

use brain::{
    agent::{AgentView, CallStage, CallState},
    model::ToolArguments,
};
use bridge::Agents;
use proto::{
    AgentId, EventData, Failure, Kind,
    event_data::{ApprovalDecision, ApprovalGiven, ApprovalScope, QuestionAnswered, QuestionAsked},
    failure::WAITS_FOR_PERSON,
};
use serde_json::Value;

use super::{
    attach::print_lines,
    keyboard::Keyboard,
    render::choice_lines,
    style::{LineFit, TextLine, Tone},
};
use crate::{
    failure,
    output::{self, Format},
    session::{StopSignals, signals::SIGINT, stopped_code},
    settings::variable,
};

/// How many lines of the arguments of a call are shown.
const ARGUMENT_LINES_MAX: usize = 40;
/// The longest arguments that are read back from an editor.
const EDITED_LEN_MAX: usize = 4 << 20;
const KEYS: &str =
    "y once · a for this agent · r keep as a rule · n reject · e edit · i answer instead · q decide later";

/// How a question to the person ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptEnd {
    /// The agent can go on.
    Answered,
    /// The person has left; the exit code.
    Left(u8),
}

/// A decision about one call.
struct CallDecision {
    decision: ApprovalDecision,
    arguments: Option<Value>,
    message: Option<String>,
    scope: ApprovalScope,
}

impl CallDecision {
    fn new(decision: ApprovalDecision, scope: ApprovalScope) -> Self {
        Self { decision, arguments: None, message: None, scope }
    }
}

/// Asks about each call that waits for approval.
pub async fn ask_approvals(
    agents: &Agents,
    id: &AgentId,
    view: &AgentView,
    keyboard: &Keyboard,
    signals: &mut StopSignals,
) -> Result<PromptEnd, Failure> {
    for state in &view.calls {
        let CallStage::Asked(rule) = &state.stage else { continue };
        let arguments = arguments_of(state);
        print_lines(&call_lines(state, &arguments, rule))?;
        let decided = loop {
            let person = Person { agents, id, keyboard, signals: &mut *signals };
            match person.decide(view, state, &arguments).await {
                Ok(Some(decided)) => break decided,
                Ok(None) => return Ok(PromptEnd::Left(WAITS_FOR_PERSON)),
                Err(failure) => drop(failure::report(&failure, Format::Text)),
            }
        };
        let CallDecision { decision, arguments, message, scope } = decided;
        let given = ApprovalGiven { call: state.call.id.clone(), decision, arguments, message, scope };
        agents.note(id, [EventData::from(given)])?;
    }
    Ok(PromptEnd::Answered)
}

fn arguments_of(state: &CallState) -> Value {
    match &state.call.arguments {
        ToolArguments::Object(object) => Value::Object(object.clone()),
        ToolArguments::Invalid(text) => Value::String(text.clone()),
    }
}

/// The call with all its arguments, the rule that asks, and the keys.
fn call_lines(state: &CallState, arguments: &Value, rule: &str) -> Vec<TextLine> {
    let head = TextLine::new(Tone::Notice, "? ")
        .add(Tone::Strong, &state.call.name)
        .add(Tone::Normal, "  needs your approval");
    let mut lines = vec![
        TextLine::default(),
        head,
        TextLine::new(Tone::Faint, &format!("  because of {rule}")).fit(LineFit::Words),
    ];
    let shown = argument_lines(arguments);
    lines.extend(
        shown.iter().take(ARGUMENT_LINES_MAX).map(|line| TextLine::new(Tone::Normal, &format!("  {line}"))),
    );
    if shown.len() > ARGUMENT_LINES_MAX {
        let more = format!("  … {} more lines; e shows all of them", shown.len() - ARGUMENT_LINES_MAX);
        lines.push(TextLine::new(Tone::Notice, &more));
    }
    lines.push(TextLine::new(Tone::Faint, &format!("  {KEYS}")));
    lines
}

/// Each argument by its name; text of several lines as it is.
fn argument_lines(arguments: &Value) -> Vec<String> {
    let Some(object) = arguments.as_object() else { return vec![arguments.to_string()] };
    let mut lines = Vec::new();
    for (name, value) in object {
        match value.as_str() {
            Some(text) if !text.contains('\n') => lines.push(format!("{name}: {text}")),
            Some(text) => {
                lines.push(format!("{name}:"));
                lines.extend(text.lines().map(|line| format!("  | {line}")));
            }
            None => lines.push(format!("{name}: {value}")),
        }
    }
    lines
}

/// The person at the terminal, while one call is decided.
struct Person<'a> {
    agents: &'a Agents,
    id: &'a AgentId,
    keyboard: &'a Keyboard,
    signals: &'a mut StopSignals,
}

impl Person<'_> {
    /// Reads keys until one decides; `None` if the person leaves.
    async fn decide(
        mut self,
        view: &AgentView,
        state: &CallState,
        arguments: &Value,
    ) -> Result<Option<CallDecision>, Failure> {
        use ApprovalDecision::{Answer, Approve, Edit, Reject};
        loop {
            match self.key().await {
                Some(b'y') => return Ok(Some(CallDecision::new(Approve, ApprovalScope::Once))),
                Some(b'a') => return Ok(Some(CallDecision::new(Approve, ApprovalScope::Agent))),
                Some(b'r') => {
                    super::host(self.agents)?.keep_rules(view, Some(&state.call.id))?;
                    return Ok(Some(CallDecision::new(Approve, ApprovalScope::Rule)));
                }
                Some(b'n') => {
                    let Some(reason) = self.line("the reason, for the agent (may be empty): ").await else {
                        return Ok(None);
                    };
                    let message = (!reason.trim().is_empty()).then_some(reason);
                    return Ok(Some(CallDecision {
                        message,
                        ..CallDecision::new(Reject, ApprovalScope::Once)
                    }));
                }
                Some(b'i') => {
                    let Some(text) = self.line("the result, instead of the tool's: ").await else {
                        return Ok(None);
                    };
                    let message = Some(text);
                    return Ok(Some(CallDecision {
                        message,
                        ..CallDecision::new(Answer, ApprovalScope::Once)
                    }));
                }
                Some(b'e') => {
                    let edited = self.edit(arguments)?;
                    if edited == *arguments {
                        output::talk("the arguments are as before; y runs the call with them");
                        continue;
                    }
                    let arguments = Some(edited);
                    return Ok(Some(CallDecision {
                        arguments,
                        ..CallDecision::new(Edit, ApprovalScope::Once)
                    }));
                }
                Some(b'q' | 4) | None => return Ok(None),
                Some(_) => output::talk(KEYS),
            }
        }
    }

    async fn key(&mut self) -> Option<u8> {
        tokio::select! {
            biased;
            _ = self.signals.next() => None,
            key = self.keyboard.key() => key,
        }
    }

    async fn line(&mut self, prompt: &str) -> Option<String> {
        read_line(prompt, self.keyboard, self.signals).await
    }

    /// Lets the person change the arguments in an editor.
    fn edit(&mut self, arguments: &Value) -> Result<Value, Failure> {
        let path = self.agents.directory(self.id).join("arguments.json");
        let edited = self.keyboard.lend(|| edit_file(&path, arguments));
        let _ = std::fs::remove_file(&path);
        // The interrupt key was for the editor.
        *self.signals = StopSignals::listen()?;
        edited
    }
}

fn edit_file(path: &Path, arguments: &Value) -> Result<Value, Failure> {
    let cannot = |error: std::io::Error| Failure::new(Kind::Host, "cannot edit the arguments").because(error);
    let _ = std::fs::remove_file(path);
    let text = serde_json::to_string_pretty(arguments).unwrap_or_default();
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(cannot)?;
    file.write_all(format!("{text}\n").as_bytes()).map_err(cannot)?;
    drop(file);
    let editor = match variable("VISUAL")? {
        Some(editor) => editor,
        None => variable("EDITOR")?.unwrap_or_else(|| "vi".to_owned()),
    };
    let ended = Command::new("sh").arg("-c").arg(format!("{editor} \"$1\"")).arg("sh").arg(path).status();
    if !ended.map_err(cannot)?.success() {
        return Err(Failure::new(Kind::Usage, format!("the editor failed: {editor}"))
            .hint("name another one: export EDITOR=nano"));
    }
    let text = std::fs::read_to_string(path).map_err(cannot)?;
    if text.len() > EDITED_LEN_MAX {
        return Err(Failure::new(Kind::Limit, "the arguments are longer than 4 MiB"));
    }
    match serde_json::from_str(&text) {
        Ok(edited @ Value::Object(_)) => Ok(edited),
        Ok(_) => {
            Err(Failure::new(Kind::Usage, "the arguments are no JSON object").hint("press e to try again"))
        }
        Err(error) => Err(Failure::new(Kind::Usage, "the arguments are no JSON")
            .because(error)
            .hint("press e to try again")),
    }
}

/// Reads a line behind a prompt; `None` if the person leaves with an interrupt or the end of input.
async fn read_line(prompt: &str, keyboard: &Keyboard, signals: &mut StopSignals) -> Option<String> {
    output::draw(&format!("  {prompt}"));
    let line = tokio::select! {
        biased;
        _ = signals.next() => None,
        line = keyboard.line() => line,
    };
    if line.is_none() {
        output::draw("\n");
    }
    line
}

/// Asks for the answer to a question of the agent.
pub async fn ask_answer(
    agents: &Agents,
    id: &AgentId,
    asked: &QuestionAsked,
    keyboard: &Keyboard,
    signals: &mut StopSignals,
) -> Result<PromptEnd, Failure> {
    loop {
        let Some(line) = read_line("your answer: ", keyboard, signals).await else {
            return Ok(PromptEnd::Left(WAITS_FOR_PERSON));
        };
        if let Some(answer) = answer_of(&line, &asked.choices) {
            let call = asked.call.clone();
            agents.note(id, [EventData::from(QuestionAnswered { call, answer })])?;
            return Ok(PromptEnd::Answered);
        }
        print_lines(&choice_lines(&asked.choices))?;
    }
}

/// The answer that a line means: the number of a choice, or the text itself.
fn answer_of(line: &str, choices: &[String]) -> Option<String> {
    let line = line.trim();
    let number = line.parse::<usize>().ok().and_then(|number| choices.get(number.checked_sub(1)?));
    match number {
        Some(choice) => Some(choice.clone()),
        None => (!line.is_empty()).then(|| line.to_owned()),
    }
}

/// Asks for a message to an agent that was interrupted; an empty one leaves it as it is.
pub async fn ask_message(
    agents: &Agents,
    id: &AgentId,
    keyboard: &Keyboard,
    signals: &mut StopSignals,
) -> Result<PromptEnd, Failure> {
    let prompt = "a message to go on with (an empty one leaves it as it is): ";
    match read_line(prompt, keyboard, signals).await {
        Some(line) if !line.trim().is_empty() => {
            agents.send(id, line)?;
            Ok(PromptEnd::Answered)
        }
        Some(_) => Ok(PromptEnd::Left(WAITS_FOR_PERSON)),
        // The second interrupt.
        None => Ok(PromptEnd::Left(stopped_code(SIGINT))),
    }
}

#[cfg(test)]
mod tests {
    use brain::model::ToolCall;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_person_sees_the_whole_call_and_no_escape_sequence() {
        let arguments = json!({"command": "git push\nrm x\x1b[2K", "timeout": 5});
        let object = arguments.as_object().cloned().unwrap();
        let call =
            ToolCall { id: "1".into(), name: "execute".into(), arguments: ToolArguments::Object(object) };
        let state = CallState { call, stage: CallStage::New };
        let shown: Vec<String> =
            call_lines(&state, &arguments, "rule\x1b[2J").iter().map(TextLine::to_text).collect();
        let expected = [
            "",
            "? execute  needs your approval",
            "  because of rule\\u{1b}[2J",
            "  command:",
            "    | git push",
            "    | rm x\\u{1b}[2K",
            "  timeout: 5",
        ];
        assert_eq!(shown[..7], expected);
        let long = json!({"content": "x\n".repeat(100)});
        let shown = call_lines(&state, &long, "r");
        assert!(shown[43].to_text().contains("61 more lines"), "{}", shown[43].to_text());
    }

    #[test]
    fn a_number_is_a_choice_and_other_text_is_itself() {
        let choices = ["red".to_owned(), "blue".to_owned()];
        let answer = |line| answer_of(line, &choices);
        assert_eq!(answer(" 2 "), Some("blue".into()));
        assert_eq!(answer("3"), Some("3".into()));
        assert_eq!(answer("0"), Some("0".into()));
        assert_eq!(answer("green"), Some("green".into()));
        assert_eq!(answer("  "), None);
    }
}
