//! `execute`: a shell command in the Body.
//!
//! Invariant: a command runs once for each call, also after a crash of the driver: it is a kept command whose tag is the
//! key of the call.
//! Invariant: a command that prints without end costs no more than its first and its last bytes: after the first ones
//! no process follows it, and the guest keeps the newest.
//! Invariant: the command of an interrupted call is killed with its process group.

use std::{sync::Arc, time::Duration};

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult, LiveSink},
    model::ToolSchema,
};
use fleet::ExecRequest;
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    command::{FinishedCommand, KillGuard, follow_command, read_to_end, shell_argv},
    live::LiveOutput,
};
use crate::{Workplace, explain, files::BodyLife, guest_key};

const NAME: &str = "execute";
const DESCRIPTION: &str = "Executes a shell command in an isolated sandbox and returns combined stdout/stderr with the exit code (truncated if very large).

Usage:
- Quote paths containing spaces (e.g. cd \"/path/with spaces\").
- Chain commands with ';' or '&&' (use '&&' when a command depends on the previous); do not use newlines except inside quoted strings.
- Use absolute paths and avoid `cd` so the working directory stays stable; use the optional timeout to override the default.
- You MUST avoid using search commands like find and grep. Instead use the grep, glob tools to search. Use read_file rather than cat/head/tail.
    - execute(command=\"find . -name '*.py'\")  # Use glob tool instead
    - execute(command=\"grep -r 'pattern' .\")  # Use grep tool instead

Only available on backends implementing SandboxBackendProtocol; otherwise it returns an error.

Commands run in bash if the sandbox has it, else in sh.";
/// How long a command may take unless the call says so.
const TIMEOUT_S: u64 = 120;
/// How long a command may take at most.
const TIMEOUT_S_MAX: i64 = 3600;

/// Runs a shell command.
pub struct ExecuteTool {
    workplace: Arc<Workplace>,
    live: Arc<dyn LiveSink>,
}

/// The arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ExecuteRequest {
    command: String,
    timeout: Timeout,
}

/// The time that a command has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Timeout {
    Default,
    Custom(u64),
}

impl Timeout {
    fn seconds(self) -> u64 {
        match self {
            Self::Default => TIMEOUT_S,
            Self::Custom(seconds) => seconds,
        }
    }
}

impl ExecuteTool {
    /// Runs commands in this place; their output goes to the watchers while it comes.
    pub fn new(workplace: Arc<Workplace>, live: Arc<dyn LiveSink>) -> Self {
        Self { workplace, live }
    }

    async fn execute(&self, context: &CallContext, asked: &ExecuteRequest) -> CallResult {
        let argv = match shell_argv(&asked.command) {
            Ok(argv) => argv,
            Err(text) => return CallResult::error(text),
        };
        let tag = guest_key(&context.key);
        let request = ExecRequest {
            workdir: Some(self.workplace.workdir().to_owned()),
            timeout: Some(Duration::from_secs(asked.timeout.seconds())),
            tag: Some(tag.clone()),
            keep: true,
            ..ExecRequest::new(argv)
        };
        let guard = KillGuard::new(&self.workplace, &tag);
        let live = LiveOutput::new(&self.live, &context.call);
        let ended = follow_command(&self.workplace, request, &tag, live).await;
        // A command whose output cannot be followed must not go on behind the model's back.
        if ended.is_ok() {
            guard.disarm();
        }
        show(asked, ended.map_err(|failure| explain(&failure)))
    }

    /// The result of a command that an earlier driver started, after its end.
    async fn await_end(&self, context: &CallContext, asked: &ExecuteRequest) -> Option<CallResult> {
        if self.workplace.find_life(context).await.ok()? == BodyLife::Another {
            return None;
        }
        let tag = guest_key(&context.key);
        let guard = KillGuard::new(&self.workplace, &tag);
        let ended = read_to_end(&self.workplace, &tag).await;
        if ended.is_ok() {
            guard.disarm();
        }
        match ended {
            Ok(Some(ended)) => Some(show(asked, Ok(ended))),
            // The guest does not know the command, so that it never began.
            Ok(None) => Some(self.execute(context, asked).await),
            Err(_) => None,
        }
    }
}

impl AgentTool for ExecuteTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "command": {
                        "type": "string",
                        "description": "Shell command to execute in the sandbox environment.",
                    },
                    "timeout": {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "default": null,
                        "description": "Optional timeout in seconds for this command. Overrides the default timeout.",
                    },
                },
                "required": ["command"],
            }),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let asked = read(arguments)?;
        shell_argv(&asked.command)?;
        Ok(CallPlan::working(NAME))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            match read(&context.arguments) {
                Ok(asked) => self.execute(&context, &asked).await,
                Err(text) => CallResult::error(text),
            }
        })
    }

    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move { self.await_end(&context, &read(&context.arguments).ok()?).await })
    }
}

fn read(arguments: &Map<String, Value>) -> Result<ExecuteRequest, String> {
    let mut read = ArgumentReader::new(NAME, arguments);
    let command = read.text("command").to_owned();
    let timeout = read.optional_integer("timeout");
    read.finish()?;
    let timeout = match timeout {
        None => Timeout::Default,
        Some(seconds) if seconds > TIMEOUT_S_MAX => {
            return Err(format!("Error: timeout {seconds}s exceeds maximum allowed ({TIMEOUT_S_MAX}s)."));
        }
        Some(0) => return Err("Error: Invalid parameter. timeout must be positive, got 0".to_owned()),
        Some(seconds) => match u64::try_from(seconds) {
            Ok(seconds) => Timeout::Custom(seconds),
            Err(_) => return Err(format!("Error: timeout must be non-negative, got {seconds}.")),
        },
    };
    Ok(ExecuteRequest { command, timeout })
}

fn show(asked: &ExecuteRequest, ended: Result<FinishedCommand, String>) -> CallResult {
    let end = match ended {
        Ok(end) => end,
        Err(why) => return CallResult::error(format!("Error executing command: {why}")),
    };
    let truncated = end.output.is_truncated();
    let mut text = end.output.into_text();
    if end.timed_out {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let seconds = asked.timeout.seconds();
        text.push_str(&match asked.timeout {
            Timeout::Custom(_) => format!(
                "Error: Command timed out after {seconds} seconds (custom timeout). The command may be stuck or require \
                 more time."
            ),
            Timeout::Default => format!(
                "Error: Command timed out after {seconds} seconds. For long-running commands, re-run using the timeout \
                 parameter."
            ),
        });
    }
    let word = if end.code == 0 { "succeeded" } else { "failed" };
    text.push_str(&format!("\n[Command {word} with exit code {}]", end.code));
    if truncated {
        text.push_str("\n[Output was truncated due to size limits]");
    }
    if let Some(why) = &end.body_end {
        text.push_str(&format!("\n[The sandbox ended while the command ran: {why}]"));
    } else if end.out_of_memory {
        text.push_str("\n[A process was killed because the sandbox was out of memory]");
    }
    CallResult { exit_code: Some(end.code), ..CallResult::text(text) }
}

#[cfg(test)]
mod tests {
    use super::{super::output::OutputExcerpt, *};

    fn asked(arguments: Value) -> Result<ExecuteRequest, String> {
        read(arguments.as_object().unwrap())
    }

    fn end(output: &str, code: i32, timed_out: bool) -> FinishedCommand {
        let mut excerpt = OutputExcerpt::default();
        excerpt.push(output.as_bytes());
        FinishedCommand { output: excerpt, code, timed_out, out_of_memory: false, body_end: None }
    }

    fn text(arguments: Value, end: FinishedCommand) -> String {
        show(&asked(arguments).unwrap(), Ok(end)).blocks[0].as_text().unwrap().to_owned()
    }

    /// Printed by Deep Agents 0.7.32.
    #[test]
    fn texts_are_those_of_deep_agents() {
        let call = || json!({"command": "x"});
        assert_eq!(text(call(), end("hi\n", 3, false)), "hi\n\n[Command failed with exit code 3]");
        assert_eq!(text(call(), end("", 0, false)), "\n[Command succeeded with exit code 0]");
        assert_eq!(
            text(call(), end("", 124, true)),
            "Error: Command timed out after 120 seconds. For long-running commands, re-run using the timeout parameter.\n[Command failed with exit code 124]"
        );
        assert_eq!(
            text(json!({"command": "x", "timeout": 5}), end("part", 124, true)),
            "part\nError: Command timed out after 5 seconds (custom timeout). The command may be stuck or require more time.\n[Command failed with exit code 124]"
        );
        let mut cut = end("", 0, false);
        cut.output.push_at(10, b"x\n");
        assert_eq!(
            text(call(), cut),
            "... [10 bytes truncated] ...\nx\n\n[Command succeeded with exit code 0]\n[Output was truncated due to size limits]"
        );
    }

    #[test]
    fn a_timeout_has_bounds() {
        let error = |timeout: i64| asked(json!({"command": "x", "timeout": timeout})).unwrap_err();
        assert_eq!(error(-1), "Error: timeout must be non-negative, got -1.");
        assert_eq!(error(9999), "Error: timeout 9999s exceeds maximum allowed (3600s).");
        assert_eq!(error(0), "Error: Invalid parameter. timeout must be positive, got 0");
        assert_eq!(asked(json!({"command": "x", "timeout": null})).unwrap().timeout, Timeout::Default);
    }
}
