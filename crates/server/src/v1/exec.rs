//! Commands in a Body: one answer for short ones, a stream for the rest, and what was said before.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use axum::{
    Json,
    http::{HeaderMap, header},
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
    extract::{BodyParam, JsonBody as Sent, QueryParams, ReadAccess, RunAccess},
    models::end_word,
    page::{Page, PageQuery},
};
use crate::{
    App,
    exec_tasks::{ExecUpdate, FollowedExec},
};

/// Output of each stream that stands in one answer; more needs the stream.
const ANSWER_LEN_MAX: usize = 1 << 20;
/// How long a command may take whose answer is waited for.
const ANSWER_WAIT: Duration = Duration::from_secs(60);
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(exec)).routes(routes!(logs))
}

/// A command to be run in a Body.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Command {
    /// The program and its arguments.
    #[schema(min_items = 1, max_items = 4096)]
    argv: Vec<String>,
    /// Environment beyond the Body's.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Who runs it.
    user: Option<String>,
    /// Where it runs.
    workdir: Option<String>,
    /// What it reads, as text.
    stdin: Option<String>,
    /// When it is killed; 60000 where one answer is waited for.
    #[schema(minimum = 1, maximum = 86400000)]
    timeout_ms: Option<u64>,
}

/// What a command did.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct CommandResult {
    /// How it ended.
    #[serde(flatten)]
    ended: CommandEnd,
    /// What it wrote; what is no text is replaced.
    stdout: String,
    /// What it complained.
    stderr: String,
    /// Whether some of that is missing, because it was more than 1 MiB of one of them.
    truncated: bool,
}

/// How a command ended.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CommandEnd {
    /// Its exit code, as a shell would give it: 128 + signal when a signal ended it, 124 at its timeout.
    pub code: i32,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub signal: Option<i32>,
    /// The kernel killed in this Body for want of memory while it ran.
    pub out_of_memory: bool,
    /// It was killed at its timeout.
    pub timed_out: bool,
    /// Why the Body itself ended under it, if it did.
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
/// With `Accept: text/event-stream` the answer is a stream: events `started` (`{"pid"}`), `stdout` and `stderr`
/// (`{"base64"}`), then `ended` (as in the one answer) or `failed` (as an error). Who leaves the stream leaves the
/// command running; it is recorded to its end. A command that the Body does not have is refused with 422.
#[utoipa::path(post, path = "/bodies/{id}/exec", operation_id = "exec", tag = "exec", params(("id" = String, Path, description = "Which Body")), request_body = Command,
    responses((status = 200, description = "It ran, or runs", content((CommandResult = "application/json"), (String = "text/event-stream"))),
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
    let wants_stream = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/event-stream"));
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
            return Err(Failure::new(Kind::Usage, "that is no timeout for a command")
                .hint("ask for 1 to 86400000 ms"));
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
    Err(Failure::new(Kind::Internal, "the command's task was lost"))
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
            let said = ErrorBody {
                kind: failure.kind.into(),
                status: failure.kind.http_status(),
                message: failure.message,
                hints: failure.hints,
            };
            Event::default().event("failed").data(serde_json::json!(said).to_string())
        }
    }
}

/// One command of a Body's past.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct LogEntry {
    /// When it started.
    at: String,
    /// The command.
    argv: Vec<String>,
    /// How it ended, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    code: Option<i32>,
    /// What it said, standard output first; what is no text is replaced.
    output: String,
    /// Whether some of that is missing.
    truncated: bool,
}

/// Show what was run in a Body and what it said, oldest first.
#[utoipa::path(get, path = "/bodies/{id}/logs", operation_id = "list_logs", tag = "exec", params(("id" = String, Path, description = "Which Body"), PageQuery),
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
        // One more than a page holds says whether there is a next page.
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
