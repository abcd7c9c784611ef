//! Commands in Bodies: recorded in the log, started through the guest, followed, and recorded again at their end.
//!
//! Every command goes through [`Execs::start`], from every caller: the command line, both APIs, envd clients and
//! terminals. The log contains the start before the guest receives the request, and the output and exit code after the
//! end.
//!
//! Invariant: a command whose start cannot be recorded does not start.
//! Invariant: functions here that block on the disk do so in [`run_blocking`], so they never delay a server's other
//! tasks.

mod connections;
mod control;
mod exit;
mod kept;
mod log;
mod recorder;
mod running;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use body::{
    BodyDir,
    dir::ObservedGuest,
    guest::{ExecStream, GuestConnection, GuestError, ReplayFrom, StartOptions},
};
use proto::{
    BodyId, Draft, Failure, Kind, Layer,
    connect::{Code, ConnectError},
    event_data::{ExecEnded, ExecOutcome, ExecStarted},
    guest::KEPT_TAG_LEN_MAX,
    launch::RunRecord,
    wire::process::{
        ConnectRequest, ListRequest, ListResponse, ProcessConfig, ProcessSelector, Pty, StartRequest,
        process_event, process_selector, pty::Size,
    },
};

use crate::{Disconnect, ExecRequest, Fleet, Stdin, TtySize, blocking::run_blocking, failures};

pub(crate) use connections::GuestConnections;
use connections::GuestIdentity;
pub use control::ExecControl;
pub(crate) use exit::exit_of;
pub use kept::KeptOutput;
pub use log::{ExecLogEntry, LogRange};
pub use running::{Exec, OutputChunk};

/// How long to wait for the supervisor to report the end of a guest whose connection broke.
const END_WAIT: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Starts and follows commands in Bodies.
#[derive(Debug, Clone, Copy)]
pub struct Execs<'a> {
    pub(crate) fleet: &'a Fleet,
    pub(crate) connections: &'a GuestConnections,
}

/// Why a command did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The guest refused it, with this message.
    #[error("{}", .0.message)]
    Refused(ConnectError),
    /// The log could not record its start.
    #[error(transparent)]
    NotRecorded(Failure),
    /// The Body does not run, or its guest gave no valid answer.
    #[error(transparent)]
    Unreachable(Failure),
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Refused(ConnectError { code, message, reason }) => {
                failures::guest(GuestError::Refused { code: code.word().to_owned(), message, reason })
            }
            StartError::NotRecorded(failure) | StartError::Unreachable(failure) => failure,
        }
    }
}

/// Whether the process that starts a command follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Following {
    ToItsEnd,
    No,
}

/// The facts about a command at the time of its first event.
struct StartedExec {
    /// The `seq` of its `exec.started` event; 0 if the log has none.
    seq: u64,
    /// Whether another process may follow it to its end as well.
    shared: bool,
    /// How many bytes of its output are lost.
    skipped: u64,
    pid: u32,
    layer: Layer,
    output_max: u64,
    tty: bool,
    guest: ObservedGuest,
    oom_before: u64,
    began: Instant,
}

impl<'a> Execs<'a> {
    /// Starts a command in a running Body.
    pub async fn start(&self, id: &BodyId, request: ExecRequest) -> Result<Exec<'a>, StartError> {
        if request.keep {
            return self.start_kept(id, &request).await;
        }
        let (stream, started) = self.open(id, &request, Following::ToItsEnd, None).await?;
        Ok(Exec::new(*self, id, stream, started))
    }

    /// Starts a command without following it: the log gets its start, but neither its output nor its end.
    pub async fn start_detached(&self, id: &BodyId, request: ExecRequest) -> Result<(), StartError> {
        if request.keep {
            let refused = Failure::new(Kind::Usage, "a command whose end is not recorded cannot be kept");
            return Err(StartError::Unreachable(refused));
        }
        self.open(id, &request, Following::No, None).await.map(drop)
    }

    /// Starts a command. The log has its start already if `recorded` is its `seq`.
    async fn open(
        &self,
        id: &BodyId,
        request: &ExecRequest,
        following: Following,
        recorded: Option<u64>,
    ) -> Result<(ExecStream, StartedExec), StartError> {
        check_request(request).map_err(StartError::Unreachable)?;
        let target = run_blocking(|| self.fleet.exec_target(id)).map_err(StartError::Unreachable)?;
        let reached = self.reach_guest(id, target.running).await;
        let (guest, connection) = reached.map_err(StartError::Unreachable)?;
        let recorded = run_blocking(|| -> Result<(u64, u64), Failure> {
            let oom_before = guest.oom_kills();
            let seq = match recorded {
                Some(seq) => seq,
                None => self.fleet.append(started_event(id, request, following))?.seq,
            };
            Ok((oom_before, seq))
        });
        let (oom_before, seq) = recorded.map_err(StartError::NotRecorded)?;
        let began = Instant::now();
        let start = start_request(request, target.secrets);
        let options = StartOptions {
            user: request.user.as_deref(),
            timeout: request.timeout,
            hang_up: request.on_disconnect == Disconnect::HangUp,
            keep: request.keep,
        };
        let opened = async { await_pid(connection.start(&start, options).await?).await };
        let (stream, pid) = match opened.await {
            Ok(opened) => opened,
            Err(error) => return Err(self.record_refusal(id, seq, error, request.keep).await),
        };
        let (layer, output_max, tty) = (target.layer, target.output_max, request.tty.is_some());
        let (shared, skipped) = (request.keep, 0);
        let started =
            StartedExec { seq, shared, skipped, pid, layer, output_max, tty, guest, oom_before, began };
        Ok((stream, started))
    }

    /// Follows a running command by its tag, also if another process started it; `None` if no such command runs.
    ///
    /// A terminal's most recent output comes first, so that the caller can rebuild its screen.
    pub async fn attach(&self, id: &BodyId, tag: &str) -> Result<Option<Exec<'a>>, Failure> {
        let (target, guest) = run_blocking(|| -> Result<_, Failure> {
            let target = self.fleet.exec_target(id)?;
            let running = target.running.clone().map_or_else(|| self.fleet.running(id), Ok)?;
            Ok((target, ObservedGuest::new(None, running)))
        })?;
        let oom_before = guest.oom_kills();
        let began = Instant::now();
        let selector = ProcessSelector { selector: Some(process_selector::Selector::Tag(tag.to_owned())) };
        let request = ConnectRequest { process: Some(selector) };
        let opened =
            async { await_pid(self.fleet.guest(id).connect(&request, ReplayFrom::Recent).await?).await };
        let (stream, pid) = match opened.await {
            Ok(opened) => opened,
            Err(GuestError::Refused { code, .. }) if code == "not_found" => return Ok(None),
            Err(error) => return Err(failures::guest(error)),
        };
        let (seq, tty) = run_blocking(|| self.find_tagged(id, tag))?.unwrap_or((0, false));
        let (layer, output_max) = (target.layer, target.output_max);
        let (shared, skipped) = (true, 0);
        let started =
            StartedExec { seq, shared, skipped, pid, layer, output_max, tty, guest, oom_before, began };
        Ok(Some(Exec::new(*self, id, stream, started)))
    }

    /// Lists the tagged commands that run in a Body, with their pids inside.
    pub async fn tagged(&self, id: &BodyId) -> Result<Vec<(String, u32)>, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let guest = self.fleet.guest(id);
        let answer: ListResponse =
            guest.ask("/process.Process/List", &ListRequest {}).await.map_err(failures::guest)?;
        Ok(answer.processes.into_iter().filter_map(|process| Some((process.tag?, process.pid))).collect())
    }

    /// Looks up where a Body runs and connects to its guest. Reuses the last command's connection if it leads to the
    /// same guest. The caller passes `running` if no lookup is needed.
    pub(crate) async fn reach_guest(
        &self,
        id: &BodyId,
        running: Option<RunRecord>,
    ) -> Result<(ObservedGuest, GuestConnection), Failure> {
        let idle = self.connections.take(id);
        let (guest, identity) = match running {
            Some(running) => (ObservedGuest::new(None, running), GuestIdentity::Same),
            None => run_blocking(|| {
                let dir = BodyDir::at(self.fleet.body_path(id));
                self.connections.observe(id, &dir, || self.fleet.running(id))
            })?,
        };
        let connection = match idle.filter(|_| identity == GuestIdentity::Same) {
            Some(connection) => connection,
            None => match self.fleet.guest(id).connect_http().await {
                Ok(connection) => connection,
                Err(error) => return Err(self.guest_failure(id, error).await),
            },
        };
        Ok((guest, connection))
    }

    /// Explains why a guest cannot be reached: most often its Body does not run.
    pub(crate) async fn guest_failure(&self, id: &BodyId, error: GuestError) -> Failure {
        match error {
            error @ (GuestError::Connect(_) | GuestError::Broken(_)) => {
                // A guest that shuts down closes its socket shortly before its process ends.
                if let Ok(running) = run_blocking(|| self.fleet.running(id)) {
                    wait_end(&running).await;
                }
                run_blocking(|| self.fleet.running(id)).err().unwrap_or_else(|| failures::guest(error))
            }
            error => failures::guest(error),
        }
    }

    /// Records that the guest did not start a command.
    async fn record_refusal(&self, id: &BodyId, seq: u64, error: GuestError, keep: bool) -> StartError {
        let error = match error {
            GuestError::Refused { code, .. } if keep && code == "404" => {
                StartError::Unreachable(failures::old_guest(id, "keep commands"))
            }
            // envd's plain HTTP paths return a number as code; Connect returns a word.
            GuestError::Refused { code, message, reason } if code.parse::<u16>().is_err() => {
                StartError::Refused(ConnectError { code: Code::from_word(&code), message, reason })
            }
            error => StartError::Unreachable(self.guest_failure(id, error).await),
        };
        let outcome = ExecOutcome::NotStarted { error: error.to_string() };
        let _ = run_blocking(|| self.fleet.write(id, ExecEnded { exec: seq, outcome }));
        error
    }
}

/// Waits briefly for the end of a guest whose connection broke. Returns whether the guest has ended.
async fn wait_end(running: &RunRecord) -> bool {
    let ended = async {
        while body::dir::alive(running.pid, running.ticks).is_some() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(END_WAIT, ended).await.is_ok()
}

fn check_request(request: &ExecRequest) -> Result<(), Failure> {
    if request.argv.is_empty() {
        return Err(Failure::new(Kind::Usage, "no command was given")
            .hint("write it after `--`: pal run -- uname -a"));
    }
    match &request.tag {
        _ if !request.keep => Ok(()),
        Some(tag) if !tag.is_empty() && tag.len() <= KEPT_TAG_LEN_MAX => Ok(()),
        _ => Err(Failure::new(
            Kind::Usage,
            format!("a kept command needs a tag of 1 to {KEPT_TAG_LEN_MAX} bytes"),
        )),
    }?;
    if request.keep && request.on_disconnect == Disconnect::HangUp {
        return Err(Failure::new(Kind::Usage, "a kept command is not hung up when its caller leaves"));
    }
    Ok(())
}

/// The event that announces the start of a command.
fn started_event(id: &BodyId, request: &ExecRequest, following: Following) -> Draft {
    let data = ExecStarted {
        argv: request.argv.clone(),
        user: request.user.clone(),
        workdir: request.workdir.clone(),
        tty: request.tty.is_some(),
        env: request.env.keys().cloned().collect(),
        timeout_ms: request.timeout.map(|timeout| timeout.as_millis() as u64),
        tag: request.tag.clone(),
        by: request.by.clone(),
        detached: following == Following::No,
    };
    Draft::about(id, data)
}

/// The start request for the guest. A variable of the request wins over one of a secret.
fn start_request(request: &ExecRequest, mut secrets: BTreeMap<String, String>) -> StartRequest {
    if request.env.keys().any(|name| name.starts_with("GIT_CONFIG_")) {
        secrets.retain(|name, _| !name.starts_with("GIT_CONFIG_"));
    }
    secrets.extend(request.env.clone());
    let (command, arguments) = request
        .argv
        .split_first()
        .map_or((String::new(), Vec::new()), |(command, rest)| (command.clone(), rest.to_vec()));
    StartRequest {
        process: Some(ProcessConfig {
            cmd: command,
            args: arguments,
            envs: secrets.into_iter().collect(),
            cwd: request.workdir.clone(),
        }),
        pty: request.tty.map(pty),
        tag: request.tag.clone(),
        stdin: Some(request.stdin == Stdin::Open),
    }
}

async fn await_pid(mut stream: ExecStream) -> Result<(ExecStream, u32), GuestError> {
    let pid = body::guest::with_timeout(read_pid(&mut stream)).await??;
    Ok((stream, pid))
}

async fn read_pid(stream: &mut ExecStream) -> Result<u32, GuestError> {
    loop {
        match stream.next().await?.and_then(|event| event.event) {
            Some(process_event::Event::Start(start)) => return Ok(start.pid),
            Some(process_event::Event::Keepalive(_)) => {}
            _ => return Err(GuestError::Protocol("the first event is not a start".into())),
        }
    }
}

fn pty(size: TtySize) -> Pty {
    Pty { size: Some(Size { cols: size.cols.into(), rows: size.rows.into() }) }
}
