//! The outcome of hooks: exit codes and the JSON that they may print.

use serde::Deserialize;

use super::{HookEvent, HookOutput};

/// The longest text of a hook that counts, in characters.
const TEXT_LEN_MAX: usize = 10_000;

/// The joint decision of the hooks of an event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct HookDecision {
    /// The reason for which things do not go on.
    pub(super) blocked: Option<String>,
    /// The reason for which a person is asked.
    pub(super) asked: Option<String>,
    /// Texts for the agent.
    pub(super) context: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct HookAnswer {
    decision: Option<String>,
    reason: Option<String>,
    #[serde(rename = "continue")]
    goes_on: Option<bool>,
    stop_reason: Option<String>,
    hook_specific_output: SpecificOutput,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct SpecificOutput {
    permission_decision: Option<String>,
    permission_decision_reason: Option<String>,
    additional_context: Option<String>,
}

impl HookDecision {
    /// Adds the outcome of one hook.
    pub(super) fn add(&mut self, event: HookEvent, output: Result<HookOutput, String>, command: &str) {
        match output {
            Ok(HookOutput { exit_code: 0, stdout, .. }) => self.add_success(event, &stdout),
            Ok(HookOutput { exit_code: 2, stderr, .. }) => {
                self.blocked = Some(shorten(&stderr).unwrap_or_else(|| format!("`{command}` ended with 2")));
            }
            // A failure of the hook itself is not a decision.
            Ok(_) => {}
            Err(why) if event == HookEvent::PreToolUse => {
                self.blocked = Some(format!("`{command}` could not be run: {why}"));
            }
            Err(_) => {}
        }
    }

    fn add_success(&mut self, event: HookEvent, stdout: &str) {
        let answer = match stdout.trim_start().starts_with('{') {
            true => serde_json::from_str::<HookAnswer>(stdout.trim()).ok(),
            false => None,
        };
        let Some(answer) = answer else {
            // Plain output is a text for the agent where Claude Code makes it one.
            if matches!(event, HookEvent::SessionStart | HookEvent::UserPromptSubmit) {
                self.context.extend(shorten(stdout));
            }
            return;
        };
        let specific = answer.hook_specific_output;
        let reason = |texts: [&Option<String>; 2]| {
            texts
                .into_iter()
                .flatten()
                .find_map(|text| shorten(text))
                .unwrap_or_else(|| "no reason was given".into())
        };
        let permission = specific.permission_decision.as_deref();
        if answer.decision.as_deref() == Some("block") || permission == Some("deny") {
            self.blocked = Some(reason([&specific.permission_decision_reason, &answer.reason]));
        } else if answer.goes_on == Some(false) {
            self.blocked = Some(reason([&answer.stop_reason, &answer.reason]));
        } else if permission == Some("ask") {
            self.asked = Some(reason([&specific.permission_decision_reason, &answer.reason]));
        }
        self.context.extend(specific.additional_context.as_deref().and_then(shorten));
    }
}

/// A text without white space at its ends and of bounded length; none if it is empty.
fn shorten(text: &str) -> Option<String> {
    let text: String = text.trim().chars().take(TEXT_LEN_MAX).collect();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decide(event: HookEvent, exit_code: i32, stdout: &str, stderr: &str) -> HookDecision {
        let mut decision = HookDecision::default();
        let output = HookOutput { exit_code, stdout: stdout.into(), stderr: stderr.into() };
        decision.add(event, Ok(output), "x");
        decision
    }

    #[test]
    fn exit_codes_decide() {
        let blocked = |event, code, stderr: &str| decide(event, code, "", stderr).blocked;
        assert_eq!(blocked(HookEvent::PreToolUse, 0, "noise"), None);
        assert_eq!(blocked(HookEvent::PreToolUse, 2, " no \n").as_deref(), Some("no"));
        assert_eq!(blocked(HookEvent::Stop, 2, "").as_deref(), Some("`x` ended with 2"));
        assert_eq!(blocked(HookEvent::PreToolUse, 1, "crash"), None);
        let failed = |event| {
            let mut decision = HookDecision::default();
            decision.add(event, Err("timeout".into()), "x");
            decision.blocked
        };
        assert_eq!(failed(HookEvent::PreToolUse).as_deref(), Some("`x` could not be run: timeout"));
        assert_eq!(failed(HookEvent::PostToolUse), None);
    }

    #[test]
    fn printed_json_decides() {
        let pre = |json: &str| decide(HookEvent::PreToolUse, 0, json, "");
        let deny = pre(
            r#"{"hookSpecificOutput":{"hookEventName":"PreToolUse","permissionDecision":"deny","permissionDecisionReason":"r"}}"#,
        );
        assert_eq!(deny.blocked.as_deref(), Some("r"));
        let ask = pre(r#"{"hookSpecificOutput":{"permissionDecision":"ask"}}"#);
        assert_eq!((ask.blocked, ask.asked.as_deref()), (None, Some("no reason was given")));
        assert_eq!(pre(r#"{"decision":"block","reason":"b"}"#).blocked.as_deref(), Some("b"));
        assert_eq!(pre(r#"{"continue":false,"stopReason":"s"}"#).blocked.as_deref(), Some("s"));
        assert_eq!(pre(r#"{"decision":"approve"}"#), HookDecision::default());
        assert_eq!(pre("{broken"), HookDecision::default());
        let context =
            decide(HookEvent::PostToolUse, 0, r#"{"hookSpecificOutput":{"additionalContext":" c "}}"#, "");
        assert_eq!(context.context, ["c"]);
    }

    #[test]
    fn plain_output_is_a_text_for_the_agent_at_two_events() {
        assert_eq!(
            decide(HookEvent::UserPromptSubmit, 0, "today is Monday\n", "").context,
            ["today is Monday"]
        );
        assert_eq!(
            decide(HookEvent::SessionStart, 0, &"x".repeat(20_000), "").context[0].len(),
            TEXT_LEN_MAX
        );
        assert!(decide(HookEvent::PreToolUse, 0, "noise", "").context.is_empty());
    }
}
