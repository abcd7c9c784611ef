//! Commands that clients follow over HTTP. A separate task follows each command and records it to its end.
//!
//! Invariant: at most [`QUEUE_LEN`] chunks of output wait for a client; then the command blocks until its
//! client reads.
//! Invariant: a client that reads nothing for [`STALL_MAX`] while output waits counts as disconnected, so it
//! stalls the command and its recording no longer than that.
//! Invariant: a command whose client disconnects keeps running. The log records the disconnect at once, and
//! the output and end when the command ends, as long as this server runs.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use fleet::{ExecControl, ExecEnd, ExecRequest, OutputChunk, StartError};
use proto::{
    BodyId, Failure, Kind,
    connect::{Code, ConnectError},
    wire::process::process_event::EndEvent,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use crate::App;

/// Commands that are followed at the same time, with and without a client.
const FOLLOWED_MAX: u32 = 4096;
const QUEUE_LEN: usize = 16;
const STALL_MAX: Duration = Duration::from_secs(300);
/// How long the tasks have to record that their clients are disconnected when the server stops.
const STOP_WAIT: Duration = Duration::from_secs(2);

/// The commands that this server follows.
#[derive(Debug)]
pub struct ExecTasks {
    slots: Arc<Semaphore>,
    stopping: watch::Sender<bool>,
}

/// A command that was started, as its client sees it.
#[derive(Debug)]
pub struct FollowedExec {
    /// Its pid inside the Body.
    pub pid: u32,
    /// Its output and end. The channel closes without an end if the server gave up on the client.
    pub updates: mpsc::Receiver<ExecUpdate>,
}

/// An update about a command.
#[derive(Debug)]
pub enum ExecUpdate {
    /// The command wrote output.
    Output(OutputChunk),
    /// The command ended, and the log has recorded it; with the guest's own report, if there is one.
    Ended(ExecEnd, Option<EndEvent>),
    /// The server can no longer follow the command.
    Failed(Failure),
}

impl Default for ExecTasks {
    fn default() -> Self {
        Self { slots: Arc::new(Semaphore::new(FOLLOWED_MAX as usize)), stopping: watch::Sender::new(false) }
    }
}

impl ExecTasks {
    /// Starts a command with this input, and follows it. The task keeps `held` until the command has ended.
    pub async fn start(
        &self,
        app: &App,
        id: &BodyId,
        request: ExecRequest,
        stdin: Option<Bytes>,
        held: impl Send + 'static,
    ) -> Result<FollowedExec, StartError> {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            let message = format!("this server follows {FOLLOWED_MAX} commands already");
            return Err(StartError::Refused(ConnectError::new(Code::ResourceExhausted, message)));
        };
        let (started, answer) = oneshot::channel();
        let (sender, updates) = mpsc::channel(QUEUE_LEN);
        let task = ExecTask { app: app.clone(), body: id.clone(), client: Some(sender), _slot: slot };
        let stopping = self.stopping.subscribe();
        tokio::spawn(async move {
            let _held = held;
            task.run(request, stdin, started, stopping).await;
        });
        let lost = || {
            StartError::Unreachable(Failure::new(
                Kind::Internal,
                "the task that follows the command ended unexpectedly",
            ))
        };
        let pid = answer.await.map_err(|_| lost())??;
        Ok(FollowedExec { pid, updates })
    }

    /// Makes every task record that its client is disconnected, and end. The commands keep running.
    pub async fn stop(&self) {
        self.stopping.send_replace(true);
        let _ = tokio::time::timeout(STOP_WAIT, self.slots.acquire_many(FOLLOWED_MAX)).await;
    }
}

struct ExecTask {
    app: App,
    body: BodyId,
    /// None once the client has disconnected.
    client: Option<mpsc::Sender<ExecUpdate>>,
    _slot: OwnedSemaphorePermit,
}

impl ExecTask {
    async fn run(
        mut self,
        request: ExecRequest,
        stdin: Option<Bytes>,
        started: oneshot::Sender<Result<u32, StartError>>,
        mut stopping: watch::Receiver<bool>,
    ) {
        let app = self.app.clone();
        let mut exec = match app.fleet().execs().start(&self.body, request).await {
            Ok(exec) => exec,
            Err(error) => return drop(started.send(Err(error))),
        };
        // If the client is already disconnected, its channel is closed, which the loop below notices.
        let _ = started.send(Ok(exec.pid()));
        if let Some(stdin) = stdin {
            tokio::spawn(send_input(exec.control(), stdin));
        }
        let last = loop {
            let output = tokio::select! {
                biased;
                output = exec.next() => output,
                () = wait_gone(self.client.as_ref()) => {
                    self.client = None;
                    // The command keeps running whether or not this can be recorded.
                    let _ = exec.record_detached();
                    continue;
                }
                _ = stopping.wait_for(|stopping| *stopping) => {
                    if self.client.is_some() {
                        let _ = exec.record_detached();
                    }
                    return;
                }
            };
            match output {
                Ok(Some(output)) => {
                    if self.client.is_some() && !self.send(ExecUpdate::Output(output)).await {
                        self.client = None;
                        let _ = exec.record_detached();
                    }
                }
                Ok(None) => {
                    let report = exec.end_event().cloned();
                    let ended = exec.finish().await;
                    break ended.map_or_else(ExecUpdate::Failed, |ended| ExecUpdate::Ended(ended, report));
                }
                Err(failure) => {
                    if self.client.is_some() {
                        let _ = exec.record_detached();
                    }
                    break ExecUpdate::Failed(failure);
                }
            }
        };
        self.send(last).await;
    }

    /// Sends an update to the client; returns whether the client took it in time.
    async fn send(&self, update: ExecUpdate) -> bool {
        let Some(client) = &self.client else { return false };
        matches!(tokio::time::timeout(STALL_MAX, client.send(update)).await, Ok(Ok(())))
    }
}

async fn wait_gone(client: Option<&mpsc::Sender<ExecUpdate>>) {
    match client {
        Some(client) => client.closed().await,
        None => std::future::pending().await,
    }
}

async fn send_input(control: ExecControl, stdin: Bytes) {
    // A command may end before it has read all its input; that is not an error.
    let sent = control.send(stdin).await;
    let _ = sent.and(control.close_stdin().await);
}
