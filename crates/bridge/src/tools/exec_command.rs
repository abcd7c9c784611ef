//! `exec_command` and `write_stdin`: processes that may go on between turns, with codex's parameters and texts.
//!
//! Invariant: a process is a kept command of the guest, so that it outlives its call, its turn and its driver.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult, LiveSink},
    model::ToolSchema,
};
use bytes::Bytes;
use fleet::{ExecRequest, Stdin, TtySize};
use proto::Failure;
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    command::{KillGuard, shell_argv},
    live::LiveOutput,
    output::OutputExcerpt,
    session::{Session, Sessions},
};
use crate::{
    Workplace, explain,
    files::{BodyLife, resolve},
    guest_key,
};

pub(super) const NAME: &str = "exec_command";
const WRITE_NAME: &str = "write_stdin";
const YIELD_MS: i64 = 10_000;
const YIELD_MS_MIN: i64 = 250;
const YIELD_MS_MAX: i64 = 30_000;
const POLL_MS_MIN: i64 = 5_000;
const POLL_MS_MAX: i64 = 300_000;
const TOKENS: i64 = 10_000;
/// The most tokens of one result: longer ones would be moved to a file.
const TOKENS_MAX: i64 = 19_000;
/// How long one question about output waits.
const READ_WAIT: Duration = Duration::from_secs(20);
/// The size of a terminal.
const TTY: TtySize = TtySize { cols: 120, rows: 30 };
/// The letter that a terminal's interrupt key sends.
const INTERRUPT: &str = "\u{3}";
const SIGINT: i32 = 2;

/// Starts processes.
pub struct ExecCommandTool {
    workplace: Arc<Workplace>,
    sessions: Sessions,
    live: Arc<dyn LiveSink>,
}

/// Writes to processes and reads their output.
pub struct WriteStdinTool {
    workplace: Arc<Workplace>,
    sessions: Sessions,
    live: Arc<dyn LiveSink>,
}

/// Whether the arguments of an `exec_command` ask for a terminal.
pub(super) fn wants_tty(arguments: &Value) -> bool {
    arguments.as_object().is_some_and(|arguments| ArgumentReader::new(NAME, arguments).flag("tty"))
}

struct ExecArguments {
    command: String,
    workdir: String,
    tty: bool,
    wait: Duration,
    tokens: usize,
}

fn number_schema(description: &str) -> Value {
    json!({"type": "number", "description": description})
}

const TOKENS_DESCRIPTION: &str =
    "Output token budget. Defaults to 10000 tokens; larger requests may be capped by policy.";

fn read_tokens(read: &mut ArgumentReader<'_>) -> usize {
    let tokens = read.optional_integer("max_output_tokens").unwrap_or(TOKENS);
    usize::try_from(tokens.clamp(1, TOKENS_MAX)).unwrap_or(1)
}

fn millis(value: i64, least: i64, most: i64) -> Duration {
    Duration::from_millis(u64::try_from(value.clamp(least, most)).unwrap_or(0))
}

impl ExecCommandTool {
    /// Starts processes in this place.
    pub fn new(workplace: Arc<Workplace>, sessions: Sessions, live: Arc<dyn LiveSink>) -> Self {
        Self { workplace, sessions, live }
    }

    fn read(&self, arguments: &Map<String, Value>) -> Result<ExecArguments, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let command = read.text("cmd").to_owned();
        let workdir = read.optional_text("workdir").filter(|path| !path.is_empty());
        let tty = read.flag("tty");
        let wait =
            millis(read.optional_integer("yield_time_ms").unwrap_or(YIELD_MS), YIELD_MS_MIN, YIELD_MS_MAX);
        let tokens = read_tokens(&mut read);
        read.finish()?;
        let workdir = match workdir {
            Some(path) => {
                resolve(self.workplace.workdir(), path).map_err(|error| format!("Error: {error}"))?
            }
            None => self.workplace.workdir().to_owned(),
        };
        Ok(ExecArguments { command, workdir, tty, wait, tokens })
    }

    async fn start(&self, context: &CallContext, asked: &ExecArguments) -> Result<CallResult, Failure> {
        let argv = match shell_argv(&asked.command) {
            Ok(argv) => argv,
            Err(text) => return Ok(CallResult::error(text)),
        };
        let number = self.sessions.number(&context.key).await?;
        let session = Session { tag: guest_key(&context.key), tty: asked.tty };
        let request = ExecRequest {
            workdir: Some(asked.workdir.clone()),
            tty: asked.tty.then_some(TTY),
            stdin: if asked.tty { Stdin::Open } else { Stdin::Null },
            tag: Some(session.tag.clone()),
            keep: true,
            ..ExecRequest::new(argv)
        };
        let guard = KillGuard::new(&self.workplace, &session.tag);
        // The stream is not followed: the guest keeps the output.
        drop(self.workplace.start(request).await.map_err(Failure::from)?);
        let live = LiveOutput::new(&self.live, &context.call);
        let result =
            read_session(&self.workplace, &self.sessions, number, &session, asked.wait, live).await?;
        guard.disarm();
        Ok(result.show(number, asked.tokens))
    }
}

impl AgentTool for ExecCommandTool {
    fn schema(&self) -> ToolSchema {
        let text = |description: &str| json!({"type": "string", "description": description});
        ToolSchema {
            name: NAME.into(),
            description: "Runs a command in a PTY, returning output or a session ID for ongoing interaction."
                .into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "cmd": text("Shell command to execute."),
                    "workdir": text("Working directory for the command. Defaults to the turn cwd."),
                    "tty": {
                        "type": "boolean",
                        "description": "True allocates a PTY for the command; false or omitted uses plain pipes.",
                    },
                    "yield_time_ms": number_schema(
                        "Wait before yielding output. Defaults to 10000 ms; effective range is 250-30000 ms.",
                    ),
                    "max_output_tokens": number_schema(TOKENS_DESCRIPTION),
                },
                "required": ["cmd"],
                "additionalProperties": false,
            }),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let asked = self.read(arguments)?;
        shell_argv(&asked.command)?;
        Ok(CallPlan::working(NAME))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            let asked = match self.read(&context.arguments) {
                Ok(asked) => asked,
                Err(text) => return CallResult::error(text),
            };
            let done = self.start(&context, &asked).await;
            done.unwrap_or_else(|failure| {
                CallResult::error(format!("exec_command failed: {}", explain(&failure)))
            })
        })
    }

    /// A start with the key of a process that runs or has ended follows that process.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move {
            match self.workplace.find_life(&context).await.ok()? {
                BodyLife::Same => Some(self.run(context).await),
                BodyLife::Another => None,
            }
        })
    }
}

struct WriteArguments {
    number: u64,
    chars: String,
    wait: Duration,
    tokens: usize,
}

impl WriteStdinTool {
    /// Writes to processes of this place.
    pub fn new(workplace: Arc<Workplace>, sessions: Sessions, live: Arc<dyn LiveSink>) -> Self {
        Self { workplace, sessions, live }
    }

    async fn write(&self, context: &CallContext, asked: &WriteArguments) -> Result<CallResult, Failure> {
        let unknown =
            || CallResult::error(format!("write_stdin failed: Unknown process id {}", asked.number));
        let Some(session) = self.sessions.find(asked.number).await? else { return Ok(unknown()) };
        let Some(control) = self.workplace.control_kept(&session.tag).await? else { return Ok(unknown()) };
        if session.tty && !asked.chars.is_empty() {
            // A process that has ended reads nothing; its output says how it ended.
            let _ = control.send(Bytes::from(asked.chars.clone())).await;
        } else if asked.chars == INTERRUPT {
            let _ = control.signal(SIGINT).await;
        } else if !asked.chars.is_empty() {
            return Ok(CallResult::error(
                "write_stdin failed: stdin is closed for this session; rerun exec_command with tty=true to keep stdin open",
            ));
        }
        let live = LiveOutput::new(&self.live, &context.call);
        let result =
            read_session(&self.workplace, &self.sessions, asked.number, &session, asked.wait, live).await?;
        Ok(result.show(asked.number, asked.tokens))
    }
}

fn read_write(arguments: &Map<String, Value>) -> Result<WriteArguments, String> {
    let mut read = ArgumentReader::new(WRITE_NAME, arguments);
    let number = u64::try_from(read.integer("session_id")).unwrap_or(0);
    let chars = read.optional_text("chars").unwrap_or_default().to_owned();
    let wait = read.optional_integer("yield_time_ms");
    let tokens = read_tokens(&mut read);
    read.finish()?;
    let wait = match chars.is_empty() {
        true => millis(wait.unwrap_or(POLL_MS_MIN), POLL_MS_MIN, POLL_MS_MAX),
        false => millis(wait.unwrap_or(YIELD_MS_MIN), YIELD_MS_MIN, YIELD_MS_MAX),
    };
    Ok(WriteArguments { number, chars, wait, tokens })
}

impl AgentTool for WriteStdinTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: WRITE_NAME.into(),
            description: "Writes characters to an existing unified exec session and returns recent output."
                .into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "session_id": number_schema("Identifier of the running unified exec session."),
                    "chars": {
                        "type": "string",
                        "description": "Bytes to write to stdin. Defaults to empty, which polls without writing.",
                    },
                    "yield_time_ms": number_schema(
                        "Wait before yielding output. Non-empty writes default to 250 ms and cap at 30000 ms; empty polls wait 5000-300000 ms by default.",
                    ),
                    "max_output_tokens": number_schema(TOKENS_DESCRIPTION),
                },
                "required": ["session_id"],
                "additionalProperties": false,
            }),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let asked = read_write(arguments)?;
        let plan = CallPlan::working(WRITE_NAME);
        // Two writes to one process in one answer have no order.
        Ok(CallPlan { writes: vec![format!("session {}", asked.number)], ..plan })
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            let asked = match read_write(&context.arguments) {
                Ok(asked) => asked,
                Err(text) => return CallResult::error(text),
            };
            let done = self.write(&context, &asked).await;
            done.unwrap_or_else(|failure| {
                CallResult::error(format!("write_stdin failed: {}", explain(&failure)))
            })
        })
    }

    /// Input that was sent cannot be told from input that was not; a call that only reads is repeated.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move {
            let asked = read_write(&context.arguments).ok()?;
            if asked.chars.is_empty() { Some(self.run(context).await) } else { None }
        })
    }
}

/// The news of a session.
struct SessionNews {
    output: OutputExcerpt,
    took: Duration,
    exit_code: Option<i32>,
}

/// Reads the output of a session that the model has not seen, until its end or for a time.
async fn read_session(
    workplace: &Workplace,
    sessions: &Sessions,
    number: u64,
    session: &Session,
    wait: Duration,
    mut live: LiveOutput,
) -> Result<SessionNews, Failure> {
    let began = Instant::now();
    let first = sessions.seen(number);
    let (mut from, mut output, mut exit_code) = (first, OutputExcerpt::starting_at(first), None);
    loop {
        let left = wait.saturating_sub(began.elapsed());
        let Some(piece) = workplace.read_kept(&session.tag, from, left.min(READ_WAIT)).await? else { break };
        live.push(&piece.bytes);
        output.push_at(piece.from, &piece.bytes);
        from = piece.next;
        if piece.exit_code.is_some() {
            exit_code = piece.exit_code;
            break;
        }
        if began.elapsed() >= wait {
            break;
        }
    }
    sessions.note_seen(number, from);
    Ok(SessionNews { output, took: began.elapsed(), exit_code })
}

impl SessionNews {
    fn show(self, number: u64, tokens: usize) -> CallResult {
        let mut lines = vec![format!("Wall time: {:.4} seconds", self.took.as_secs_f64())];
        match self.exit_code {
            Some(code) => lines.push(format!("Process exited with code {code}")),
            None => lines.push(format!("Process running with session ID {number}")),
        }
        let text = self.output.into_text();
        lines.push(format!("Original token count: {}", text.len().div_ceil(4)));
        lines.push("Output:".to_owned());
        lines.push(fit_tokens(text, tokens));
        CallResult { exit_code: self.exit_code, ..CallResult::text(lines.join("\n")) }
    }
}

/// A text within a budget of tokens of four bytes each; the middle of a longer one is left out.
fn fit_tokens(text: String, tokens: usize) -> String {
    let budget = tokens.saturating_mul(4);
    if text.len() <= budget {
        return text;
    }
    let head = text.floor_char_boundary(budget / 2);
    let tail = text.ceil_char_boundary(text.len() - (budget - budget / 2)).max(head);
    let removed = (tail - head).div_ceil(4);
    format!(
        "Warning: truncated output (original token count: {})\nTotal output lines: {}\n\n{}…{removed} tokens truncated…{}",
        text.len().div_ceil(4),
        text.lines().count(),
        &text[..head],
        &text[tail..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_codex() {
        let mut output = OutputExcerpt::default();
        output.push(b"hi\n");
        let ended = SessionNews { output, took: Duration::from_millis(12), exit_code: Some(3) };
        assert_eq!(
            ended.show(1, 100).blocks[0].as_text().unwrap(),
            "Wall time: 0.0120 seconds\nProcess exited with code 3\nOriginal token count: 1\nOutput:\nhi\n"
        );
        let running =
            SessionNews { output: OutputExcerpt::default(), took: Duration::from_secs(1), exit_code: None };
        assert_eq!(
            running.show(7, 100).blocks[0].as_text().unwrap(),
            "Wall time: 1.0000 seconds\nProcess running with session ID 7\nOriginal token count: 0\nOutput:\n"
        );
        assert_eq!(
            fit_tokens("example output".into(), 1),
            "Warning: truncated output (original token count: 4)\nTotal output lines: 1\n\nex…3 tokens truncated…ut"
        );
        assert_eq!(fit_tokens("éééé".into(), 1).matches('é').count(), 2);
    }

    #[test]
    fn times_and_budgets_have_bounds() {
        let write = |value: Value| read_write(value.as_object().unwrap()).unwrap();
        assert_eq!(write(json!({"session_id": 1})).wait, Duration::from_secs(5));
        assert_eq!(write(json!({"session_id": 1, "yield_time_ms": 1e9})).wait, Duration::from_secs(300));
        let fed = write(
            json!({"session_id": "2", "chars": "x\n", "yield_time_ms": 99999, "max_output_tokens": 1e9}),
        );
        assert_eq!((fed.number, fed.wait, fed.tokens), (2, Duration::from_secs(30), 19_000));
        assert!(read_write(&Map::new()).is_err());
        assert!(wants_tty(&json!({"cmd": "x", "tty": true})) && !wants_tty(&json!({"cmd": "x"})));
    }
}
