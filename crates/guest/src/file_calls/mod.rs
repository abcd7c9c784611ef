//! Operations on files for agents: `POST /v1/files/call`.
//!
//! Each operation runs on a thread of its own with the rights of the Body's user, as a command of that user would.
//!
//! Invariant: an operation that changes files runs to its end, also if its caller leaves; with a key, its answer is
//! then in the ledger.
//! Invariant: at most [`THREADS_MAX`] operations run at once; lengths, counts and times have limits.
//! Trust: paths, patterns and texts come from a model, and the files from programs that it ran.

mod ledger;
mod open;
mod place;
mod read;
mod search;
mod walk;
mod write;

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use http_body_util::{BodyExt, Limited};
use hyper::{Request, StatusCode, body::Incoming};
use proto::file_call::{CONTENT_LEN_MAX, FileAnswer, FileCall, FileError, FileOperation, MESSAGE_LEN_MAX};
use tokio::sync::{Semaphore, oneshot};

use ledger::{Admission, CallLedger, CallOutcome, await_outcome};
use open::CheckedPath;

use crate::{
    connect::ConnectError,
    drain,
    process::credentials,
    reply::{self, HttpReply, PlainRefusal},
    server::GuestServer,
    users::{self, GuestUser},
};

/// The most operations at once; each has a thread and may hold the content of a file.
const THREADS_MAX: usize = 8;
const THREAD_STACK_LEN: usize = 256 << 10;
/// How long a call waits for a thread.
const THREAD_WAIT: Duration = Duration::from_secs(20);
/// How long a search or the reading of a file may take.
const SEARCH_WAIT: Duration = Duration::from_secs(10);
/// How long a caller may take to send a call.
const MESSAGE_WAIT: Duration = Duration::from_secs(60);
/// The longest path in an answer.
const ANSWER_PATH_LEN_MAX: usize = 4095;

/// The state of the operations on files.
#[derive(Debug)]
pub struct FileCalls {
    ledger: CallLedger,
    threads: Semaphore,
}

impl Default for FileCalls {
    fn default() -> Self {
        Self { ledger: CallLedger::default(), threads: Semaphore::new(THREADS_MAX) }
    }
}

/// Why an operation was not carried out, and the path that it concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFault {
    reason: FileError,
    path: String,
}

impl FileFault {
    fn new(reason: FileError, path: &str) -> Self {
        let end = path.floor_char_boundary(path.len().min(ANSWER_PATH_LEN_MAX));
        Self { reason, path: path[..end].to_owned() }
    }
}

/// Answers a call.
pub async fn answer(guest: Rc<GuestServer>, mut request: Request<Incoming>) -> HttpReply {
    let call = match read_call(request.body_mut()).await {
        Ok(call) => call,
        Err(refusal) => {
            drain::read_on(request.into_body());
            return refusal.reply();
        }
    };
    let path = path_of(&call.operation).to_owned();
    match carry_out(guest, call).await {
        Ok(answer) => {
            let reply = reply::json(&answer);
            if is_too_long(&reply) { reply::json(&too_long(&answer, path)) } else { reply }
        }
        Err(refusal) => refusal.reply(),
    }
}

/// The answer instead of one that does not fit into a message.
fn too_long(answer: &FileAnswer, path: String) -> FileAnswer {
    let len = match answer {
        FileAnswer::Text { content, .. } => content.len(),
        _ => MESSAGE_LEN_MAX,
    };
    FileAnswer::Error { reason: FileError::TooLarge { len: len as u64 }, path }
}

fn is_too_long(reply: &HttpReply) -> bool {
    hyper::body::Body::size_hint(reply.body()).lower() > MESSAGE_LEN_MAX as u64
}

async fn read_call(body: &mut Incoming) -> Result<FileCall, PlainRefusal> {
    let read = Limited::new(body, MESSAGE_LEN_MAX).collect();
    let message = match tokio::time::timeout(MESSAGE_WAIT, read).await {
        Ok(Ok(message)) => message.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            let message = format!("a call may hold {MESSAGE_LEN_MAX} bytes");
            return Err(PlainRefusal::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        Ok(Err(error)) => return Err(PlainRefusal::bad(format!("the request was cut: {error}"))),
        Err(_) => {
            return Err(PlainRefusal::new(StatusCode::REQUEST_TIMEOUT, "the request did not arrive in time"));
        }
    };
    serde_json::from_slice(&message).map_err(|error| PlainRefusal::bad(error.to_string()))
}

/// Carries out a call, or finds the outcome that it had before.
async fn carry_out(guest: Rc<GuestServer>, call: FileCall) -> CallOutcome {
    if let FileOperation::Recall { key } = &call.operation {
        return match guest.file_calls.ledger.find(key) {
            Some(known) => await_outcome(known).await,
            None => Ok(FileAnswer::Unknown),
        };
    }
    if guest.is_ending() {
        return Err(PlainRefusal::new(StatusCode::SERVICE_UNAVAILABLE, "the Body is ending"));
    }
    if !call.operation.changes_files() {
        return run(&guest, call.operation).await;
    }
    let Some(key) = call.key else { return run_to_end(guest, call.operation).await };
    match guest.file_calls.ledger.admit(&key, &call.operation)? {
        Admission::Known(known) => await_outcome(known).await,
        Admission::New => {
            let running = guest.clone();
            let settled = key.clone();
            tokio::task::spawn_local(async move {
                let outcome = run(&running, call.operation).await;
                running.file_calls.ledger.settle(&settled, outcome);
            });
            match guest.file_calls.ledger.find(&key) {
                Some(known) => await_outcome(known).await,
                None => Err(PlainRefusal::internal("the operation was abandoned")),
            }
        }
    }
}

/// Runs an operation that does not stop when its caller leaves.
async fn run_to_end(guest: Rc<GuestServer>, operation: FileOperation) -> CallOutcome {
    let running = tokio::task::spawn_local(async move { run(&guest, operation).await });
    running.await.unwrap_or_else(|error| Err(PlainRefusal::internal(error.to_string())))
}

/// Runs an operation on a thread that has the rights of the Body's user.
async fn run(guest: &GuestServer, operation: FileOperation) -> CallOutcome {
    let plain = |fault: ConnectError| PlainRefusal::new(crate::connect::status_of(fault.code), fault.message);
    let user = users::known(&guest.config().user).map_err(plain)?;
    users::check_reachable(&user).map_err(plain)?;
    let busy = || {
        let message = format!("{THREADS_MAX} operations on files are running already");
        PlainRefusal::new(StatusCode::SERVICE_UNAVAILABLE, message)
    };
    let turn = tokio::time::timeout(THREAD_WAIT, guest.file_calls.threads.acquire()).await;
    let _turn = turn.map_err(|_| busy())?.map_err(|_| busy())?;
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::Builder::new().name("pal-guest-file".into()).stack_size(THREAD_STACK_LEN);
    thread.spawn(move || sender.send(run_as(&user, &operation))).map_err(|error| {
        PlainRefusal::new(StatusCode::SERVICE_UNAVAILABLE, format!("cannot create a thread: {error}"))
    })?;
    receiver.await.unwrap_or_else(|_| Err(PlainRefusal::internal("the operation was abandoned")))
}

/// Gives the thread the user's rights, for the rest of its life, and does the operation.
fn run_as(user: &GuestUser, operation: &FileOperation) -> CallOutcome {
    if let Some(ids) = credentials(user) {
        sys::thread_rights::limit_to_user(ids.uid, ids.gid, &ids.groups).map_err(|error| {
            PlainRefusal::new(
                StatusCode::FORBIDDEN,
                format!("cannot take the rights of user {}: {error}", user.name),
            )
        })?;
    }
    Ok(operate(operation).unwrap_or_else(|FileFault { reason, path }| FileAnswer::Error { reason, path }))
}

/// Does one operation with the rights of this thread.
fn operate(operation: &FileOperation) -> Result<FileAnswer, FileFault> {
    let until = Instant::now() + SEARCH_WAIT;
    let len = operation.content_len();
    if len > CONTENT_LEN_MAX {
        return Err(FileFault::new(FileError::TooLarge { len: len as u64 }, path_of(operation)));
    }
    let at = |act: &dyn Fn(&CheckedPath) -> Result<FileAnswer, FileError>| {
        let path = path_of(operation);
        CheckedPath::parse(path).and_then(|path| act(&path)).map_err(|reason| FileFault::new(reason, path))
    };
    match operation {
        FileOperation::List { .. } => at(&read::list),
        FileOperation::Read { offset, limit, .. } => at(&|path| read::read(path, *offset, *limit, until)),
        FileOperation::Write { files } => write::write(files),
        FileOperation::Edit { old, new, replace_all, .. } => {
            at(&|path| write::edit(path, old, new, *replace_all))
        }
        FileOperation::Delete { .. } => at(&write::delete),
        FileOperation::Glob { pattern, .. } => at(&|path| search::glob(pattern, path, until)),
        FileOperation::Grep { pattern, glob, limit, .. } => {
            at(&|path| search::grep(pattern, path, glob.as_deref(), *limit, until))
        }
        FileOperation::Recall { .. } => Ok(FileAnswer::Unknown),
    }
}

/// The path that an operation names.
fn path_of(operation: &FileOperation) -> &str {
    match operation {
        FileOperation::List { path }
        | FileOperation::Read { path, .. }
        | FileOperation::Edit { path, .. }
        | FileOperation::Delete { path }
        | FileOperation::Glob { path, .. }
        | FileOperation::Grep { path, .. } => path,
        FileOperation::Write { files } => files.first().map_or("", |file| &file.path),
        FileOperation::Recall { .. } => "",
    }
}

#[cfg(test)]
mod tests;
