//! Commands in a Body: one response for short ones, a stream for long ones, and the recorded output of
//! earlier ones.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use axum::{
    Json,
    http::HeaderMap,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use fleet::{ExecEnd, ExecLogEntry, ExecRequest, Fleet, LogRange, OutputChunk, Stdin};
use proto::{Failure, Kind};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::owned,
    error::{ErrorBody, V1Refusal},
    extract::{BodyParam, JsonBody as Sent, QueryParams, ReadAccess, RunAccess, wants_stream},
    models::end_word,
    page::{Page, PageQuery},
};
use crate::{
    App,
    exec_tasks::{ExecUpdate, FollowedExec},
};

/// The largest output of stdout or stderr that one response holds; a client that wants more uses the stream.
const ANSWER_LEN_MAX: usize = 1 << 20;
/// The time limit of a command whose result comes in one response.
const ANSWER_WAIT: Duration = Duration::from_secs(60);
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(exec)).routes(routes!(logs))
}

/// A command to run in a Body.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "argv": ["uname", "-a"] }))]
struct Command {
    /// The program and its arguments.
    #[schema(min_items = 1, max_items = 4096)]
    argv: Vec<String>,
    /// Environment variables in addition to the Body's.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// The user that runs the command.
    user: Option<String>,
    /// The working directory of the command.
    workdir: Option<String>,
    /// The command's standard input, as text.
    stdin: Option<String>,
    /// Milliseconds until the command is killed; 60000 if left out and the result comes in one response.
    #[schema(minimum = 1, maximum = 86400000)]
    timeout_ms: Option<u64>,
}

/// The result of a command.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct CommandResult {
    /// How the command ended.
    #[serde(flatten)]
    ended: CommandEnd,
    /// Its standard output; bytes that are not UTF-8 are replaced.
    stdout: String,
    /// Its standard error; bytes that are not UTF-8 are replaced.
    stderr: String,
    /// Whether output is missing because stdout or stderr was longer than 1 MiB.
    truncated: bool,
}

/// How a command ended.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CommandEnd {
    /// Its exit code, as a shell reports it: 128 + signal when a signal ended the command, 124 at its
    /// timeout.
    pub code: i32,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub signal: Option<i32>,
    /// Whether the kernel killed a process of this Body for lack of memory while the command ran.
    pub out_of_memory: bool,
    /// Whether the command was killed at its timeout.
    pub timed_out: bool,
    /// Why the Body itself ended while the command ran, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub body_end: Option<String>,
}

impl From<ExecEnd> for CommandEnd {
    fn from(ended: ExecEnd) -> Self {
        Self {
            code: ended.code,
            signal: ended.signal,
            out_of_memory: ended.out_of_memory,
            timed_out: ended.timed_out,
            body_end: ended.body_end.as_ref().map(end_word),
        }
    }
}

/// Run a command in a Body.
///
/// With `Accept: text/event-stream` the response is a stream: events `started` (`{"pid"}`), `stdout` and
/// `stderr` (`{"base64"}`), then `ended` (with the fields of the single response) or `failed` (an error). If
/// the client closes the stream, the command keeps running and is recorded to its end. The server refuses a
/// command that the Body does not have with status 422.
#[utoipa::path(post, path = "/bodies/{id}/exec", operation_id = "exec", tag = "exec", params(("id" = String, Path, description = "The id or the name of the Body")), request_body = Command,
    responses((status = 200, description = "The result of the command, or a stream of its output", content((CommandResult = "application/json"), (String = "text/event-stream"))),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn exec(
    state: axum::extract::State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    headers: HeaderMap,
    Sent(command): Sent<Command>,
) -> Result<Response, V1Refusal> {
    let app = state.0;
    owned(&app, &caller, &id).await?;
    let wants_stream = wants_stream(&headers);
    let permit = app.services().limits().stream(&caller.key)?;
    let stdin = command.stdin.clone();
    let request = command.into_request(wants_stream)?;
    let started = app.exec_tasks().start(&app, &id, request, stdin.map(Bytes::from), permit).await;
    let followed = started.map_err(Failure::from)?;
    if wants_stream {
        return Ok(stream(followed).into_response());
    }
    Ok(Json(collect(followed.updates).await?).into_response())
}

impl Command {
    fn into_request(self, wants_stream: bool) -> Result<ExecRequest, Failure> {
        let timeout = self.timeout_ms.map(Duration::from_millis);
        if timeout.is_some_and(|timeout| timeout.is_zero() || timeout > TIMEOUT_MAX) {
            return Err(
                Failure::new(Kind::Usage, "`timeout_ms` is out of range").hint("ask for 1 to 86400000 ms")
            );
        }
        Ok(ExecRequest {
            env: self.env,
            user: self.user,
            workdir: self.workdir,
            stdin: if self.stdin.is_some() { Stdin::Open } else { Stdin::Null },
            timeout: timeout.or(Some(ANSWER_WAIT).filter(|_| !wants_stream)),
            ..ExecRequest::new(self.argv)
        })
    }
}

async fn collect(mut updates: mpsc::Receiver<ExecUpdate>) -> Result<CommandResult, Failure> {
    let (mut stdout, mut stderr, mut truncated) = (Vec::new(), Vec::new(), false);
    while let Some(update) = updates.recv().await {
        let (kept, bytes) = match update {
            ExecUpdate::Output(OutputChunk::Stdout(bytes) | OutputChunk::Tty(bytes)) => (&mut stdout, bytes),
            ExecUpdate::Output(OutputChunk::Stderr(bytes)) => (&mut stderr, bytes),
            ExecUpdate::Failed(failure) => return Err(failure),
            ExecUpdate::Ended(ended, _) => {
                let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
                return Ok(CommandResult {
                    ended: ended.into(),
                    stdout: text(stdout),
                    stderr: text(stderr),
                    truncated,
                });
            }
        };
        let room = ANSWER_LEN_MAX - kept.len();
        truncated |= bytes.len() > room;
        kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
    Err(Failure::new(Kind::Internal, "the task that follows the command ended unexpectedly"))
}

fn stream(followed: FollowedExec) -> impl IntoResponse {
    let started = serde_json::json!({ "pid": followed.pid });
    let first = Event::default().event("started").data(started.to_string());
    let events =
        futures_util::stream::unfold((Some(first), followed.updates), |(first, mut updates)| async move {
            if let Some(first) = first {
                return Some((Ok::<_, Infallible>(first), (None, updates)));
            }
            let update = updates.recv().await?;
            Some((Ok(event(update)), (None, updates)))
        });
    Sse::new(events).keep_alive(KeepAlive::default())
}

fn event(update: ExecUpdate) -> Event {
    let output = |name: &str, bytes: &[u8]| {
        Event::default().event(name).data(serde_json::json!({ "base64": STANDARD.encode(bytes) }).to_string())
    };
    match update {
        ExecUpdate::Output(OutputChunk::Stdout(bytes) | OutputChunk::Tty(bytes)) => output("stdout", &bytes),
        ExecUpdate::Output(OutputChunk::Stderr(bytes)) => output("stderr", &bytes),
        ExecUpdate::Ended(ended, _) => {
            Event::default().event("ended").data(serde_json::json!(CommandEnd::from(ended)).to_string())
        }
        ExecUpdate::Failed(failure) => {
            Event::default().event("failed").data(serde_json::json!(ErrorBody::from(failure)).to_string())
        }
    }
}

/// One recorded command of a Body.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct LogEntry {
    /// When the command started.
    at: String,
    /// The command.
    argv: Vec<String>,
    /// The exit code of the command, if it has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    code: Option<i32>,
    /// Its output, stdout before stderr; bytes that are not UTF-8 are replaced.
    output: String,
    /// Whether some of the output is missing.
    truncated: bool,
}

/// List the recorded commands of a Body with their output, oldest first.
#[utoipa::path(get, path = "/bodies/{id}/logs", operation_id = "list_logs", tag = "exec", params(("id" = String, Path, description = "The id or the name of the Body"), PageQuery),
    responses((status = 200, description = "A page of commands", body = Page<LogEntry>), (status = "default", description = "Refused", body = ErrorBody)))]
async fn logs(
    state: axum::extract::State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<PageQuery>,
) -> Result<Json<Page<LogEntry>>, V1Refusal> {
    let app = state.0;
    owned(&app, &caller, &id).await?;
    let (limit, after) = (query.limit()?, query.position()?);
    let entries = app.blocking(async move |fleet: &Fleet| {
        // One entry more than the page holds shows whether there is a next page.
        let entries = fleet.execs().logs(&id, LogRange::After { position: after, limit: limit + 1 })?;
        Ok(Page::cut(entries, limit, |entry| entry.position.to_string()))
    });
    let entries = entries.await?;
    Ok(Json(Page { items: entries.items.into_iter().map(LogEntry::from).collect(), next: entries.next }))
}

impl From<ExecLogEntry> for LogEntry {
    fn from(entry: ExecLogEntry) -> Self {
        let shown = &entry.output[..entry.output.len().min(ANSWER_LEN_MAX)];
        Self {
            at: entry.at,
            argv: entry.argv,
            code: entry.code,
            output: String::from_utf8_lossy(shown).into_owned(),
            truncated: entry.truncated || entry.output.len() > ANSWER_LEN_MAX,
        }
    }
}
