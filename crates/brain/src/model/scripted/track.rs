//! The turn that a conversation has reached, and the answer of that turn.

use crate::model::{ContentBlock, ModelRequest, Speaker, StopReason, TokenUsage};

use super::script::{Script, ScriptFault, ScriptStop, ScriptTurn};

const SEEN_CHARS_MAX: usize = 2000;

/// A conversation as a script sees it.
#[derive(Debug, Clone, PartialEq, Hash, Default)]
pub(super) struct Conversation {
    /// The role, if the caller names one.
    pub role: Option<String>,
    pub system: String,
    /// The messages: the speaker and the text.
    pub messages: Vec<(Speaker, String)>,
    /// How many answers there were, if the caller knows better than the messages.
    pub turn: Option<usize>,
}

impl Conversation {
    pub fn of(request: &ModelRequest) -> Self {
        let messages = request.messages.iter().map(|message| {
            let texts: Vec<String> = message.blocks.iter().map(to_text).collect();
            (message.speaker, texts.join("\n"))
        });
        let messages: Vec<_> = messages.collect();
        let answers = messages.iter().filter(|(speaker, _)| *speaker == Speaker::Assistant).count();
        Self {
            role: request.role.clone(),
            system: request.system.join("\n\n"),
            turn: Some(request.turn.unwrap_or(answers)),
            messages,
        }
    }

    /// The first message of the user.
    fn task(&self) -> &str {
        let first = self.messages.iter().find(|(speaker, _)| *speaker == Speaker::User);
        first.map_or("", |(_, text)| text)
    }

    /// Everything since the newest answer.
    fn newest(&self) -> String {
        let after = self.messages.iter().rposition(|(speaker, _)| *speaker == Speaker::Assistant);
        let newest = &self.messages[after.map_or(0, |at| at + 1)..];
        newest.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n")
    }

    /// The number of answers. Neighbouring messages of the assistant are parts of one answer.
    fn answers(&self) -> usize {
        let begins = |at: usize| {
            self.messages[at].0 == Speaker::Assistant
                && (at == 0 || self.messages[at - 1].0 != Speaker::Assistant)
        };
        self.turn.unwrap_or_else(|| (0..self.messages.len()).filter(|at| begins(*at)).count())
    }

    fn input_bytes(&self) -> usize {
        self.system.len() + self.messages.iter().map(|(_, text)| text.len()).sum::<usize>()
    }
}

fn to_text(block: &ContentBlock) -> String {
    match block {
        ContentBlock::Text { text } => text.clone(),
        ContentBlock::ToolResult(result) => result.to_text(),
        ContentBlock::ToolCall(call) => format!("{} {}", call.name, call.arguments.to_text()),
        ContentBlock::Image(_) | ContentBlock::Opaque(_) => String::new(),
    }
}

/// The answer of a turn, before any wire format.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlannedAnswer {
    pub think: Option<String>,
    pub text: String,
    pub calls: Vec<PlannedCall>,
    pub stop: StopReason,
    pub usage: TokenUsage,
    pub pause_ms: u64,
    /// The fault, if it hits this conversation, and how many attempts it hits.
    pub fault: Option<(ScriptFault, Option<usize>)>,
}

/// A call of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlannedCall {
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl PlannedAnswer {
    /// The fault that hits an attempt, counted from 1.
    pub fn fault_at(&self, attempt: usize) -> Option<ScriptFault> {
        self.fault.filter(|(_, times)| times.is_none_or(|times| attempt <= times)).map(|(fault, _)| fault)
    }
}

impl Script {
    /// The answer to a conversation, or the reason why the script has none.
    pub(super) fn plan(&self, conversation: &Conversation) -> Result<PlannedAnswer, String> {
        let role = self.find_role(conversation)?;
        let label = role.unwrap_or("main");
        let answers = conversation.answers();
        let turn = self.find_turn(role, conversation, answers)?;
        let newest = conversation.newest();
        if let Some(missing) = turn.expect.iter().find(|text| !newest.contains(text.as_str())) {
            let seen: String = newest.chars().take(SEEN_CHARS_MAX).collect();
            return Err(format!(
                "turn {} of role {label} expects `{missing}`, but saw:\n{seen}",
                answers + 1
            ));
        }
        Ok(plan_answer(turn, label, answers, conversation))
    }

    fn find_role<'a>(&'a self, conversation: &'a Conversation) -> Result<Option<&'a str>, String> {
        let Some(role) = &conversation.role else {
            let mut known = self.roles.iter().filter(|(_, text)| conversation.system.contains(text.as_str()));
            return Ok(known.next().map(|(role, _)| role.as_str()));
        };
        if self.turns.iter().any(|turn| turn.role.as_ref() == Some(role)) {
            Ok(Some(role))
        } else {
            Err(format!("the script has no turns for role {role}"))
        }
    }

    fn find_turn(
        &self,
        role: Option<&str>,
        conversation: &Conversation,
        answers: usize,
    ) -> Result<&ScriptTurn, String> {
        let fits = |turn: &&ScriptTurn| {
            turn.role.as_deref() == role
                && turn.task.as_ref().is_none_or(|task| conversation.task().contains(task.as_str()))
        };
        let mut left = answers;
        for turn in self.turns.iter().filter(fits) {
            match turn.repeat.limit() {
                Some(times) if left >= times => left -= times,
                _ => return Ok(turn),
            }
        }
        let label = role.unwrap_or("main");
        Err(format!(
            "the script has {} turns for role {label}, and this would be turn {}",
            answers - left,
            answers + 1
        ))
    }
}

fn plan_answer(turn: &ScriptTurn, label: &str, answers: usize, conversation: &Conversation) -> PlannedAnswer {
    let stem: String =
        label.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
    let calls: Vec<PlannedCall> = (1..)
        .zip(&turn.calls)
        .map(|(number, call)| PlannedCall {
            id: format!("call_{stem}_{}_{number}", answers + 1),
            name: call.tool.clone(),
            arguments: call.arguments.to_text(),
        })
        .collect();
    let stop = match turn.stop {
        ScriptStop::MaxTokens => StopReason::MaxTokens,
        ScriptStop::Natural if calls.is_empty() => StopReason::EndTurn,
        ScriptStop::Natural => StopReason::ToolUse,
    };
    let fault = turn
        .fault
        .filter(|fault| *fault != ScriptFault::Overflow || conversation.messages.len() > turn.over_messages);
    let slow = if turn.fault == Some(ScriptFault::Slow) { 100 } else { 0 };
    let usage = turn.usage.unwrap_or_else(|| estimate_usage(turn, &calls, conversation));
    PlannedAnswer {
        think: turn.think.clone().filter(|text| !text.is_empty()),
        text: turn.text.clone(),
        calls,
        stop,
        usage,
        pause_ms: turn.pause_ms.unwrap_or(slow),
        fault: fault.map(|fault| match fault {
            ScriptFault::Overflow | ScriptFault::Refusal | ScriptFault::Slow => (fault, None),
            _ => (fault, turn.times.limit()),
        }),
    }
}

/// Four bytes are counted as one token.
fn estimate_usage(turn: &ScriptTurn, calls: &[PlannedCall], conversation: &Conversation) -> TokenUsage {
    let tokens = |bytes: usize| bytes.div_ceil(4) as u64;
    let calls: usize = calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
    let output = turn.text.len() + turn.think.as_ref().map_or(0, String::len) + calls;
    TokenUsage { input: tokens(conversation.input_bytes()), output: tokens(output), ..TokenUsage::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ChatMessage, ToolResult};

    fn script() -> Script {
        Script::parse(
            r#"
            roles.tester = "You test."
            [[turns]]
            text = "one"
            calls = [{ tool = "a" }, { tool = "b" }]
            [[turns]]
            text = "two"
            repeat = 2
            [[turns]]
            expect = ["green"]
            text = "three"
            [[turns]]
            role = "tester"
            task = "unit"
            text = "unit one"
            [[turns]]
            role = "tester"
            text = "tester last"
            "#,
        )
        .unwrap()
    }

    fn after(answers: usize, newest: &str) -> ModelRequest {
        let mut messages = vec![ChatMessage::from_user("do it")];
        for number in 0..answers {
            messages.push(ChatMessage::from_model(vec![ContentBlock::text("x")]));
            let text = if number + 1 == answers { newest } else { "old green" };
            messages.push(ChatMessage::from_results([ToolResult::from_text("1", text)]));
        }
        ModelRequest { messages, ..ModelRequest::default() }
    }

    #[test]
    fn the_conversation_decides_the_turn() {
        let script = script();
        let say = |request: &ModelRequest| script.plan(&Conversation::of(request)).map(|answer| answer.text);
        for (answers, text) in ["one", "two", "two", "three"].iter().enumerate() {
            assert_eq!(say(&after(answers, "all green")).as_deref(), Ok(*text));
        }
        let error = say(&after(4, "")).unwrap_err();
        assert!(error.contains("4 turns for role main") && error.contains("turn 5"), "{error}");
        let error = say(&after(3, "all red")).unwrap_err();
        assert!(error.contains("`green`") && error.contains("all red") && !error.contains("old"), "{error}");
        // A summary replaced messages; the log knows the position.
        let short = ModelRequest { turn: Some(3), ..after(1, "green") };
        assert_eq!(say(&short).as_deref(), Ok("three"));
    }

    #[test]
    fn a_role_and_a_task_choose_their_own_turns() {
        let script = script();
        let say = |request: &ModelRequest| script.plan(&Conversation::of(request)).map(|answer| answer.text);
        let named = |request: ModelRequest| ModelRequest { role: Some("tester".into()), ..request };
        assert_eq!(say(&named(after(0, ""))).as_deref(), Ok("tester last"));
        let mut unit = after(0, "");
        unit.messages[0] = ChatMessage::from_user("run the unit tests");
        assert_eq!(say(&named(unit.clone())).as_deref(), Ok("unit one"));
        unit.system = vec!["Hello. You test. Bye.".into()];
        assert_eq!(say(&unit).as_deref(), Ok("unit one"), "the system prompt names the role too");
        let error = say(&ModelRequest { role: Some("cook".into()), ..after(0, "") }).unwrap_err();
        assert!(error.contains("role cook"), "{error}");
    }

    #[test]
    fn ids_of_calls_follow_from_role_and_turn() {
        let answer = script().plan(&Conversation::of(&after(0, ""))).unwrap();
        let ids: Vec<&str> = answer.calls.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["call_main_1_1", "call_main_1_2"]);
        assert_eq!(answer.stop, StopReason::ToolUse);
        assert_eq!(answer.usage, TokenUsage { input: 2, output: 3, ..TokenUsage::default() });
    }
}
