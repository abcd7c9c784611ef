//! Running a command in a Body: written down, started through the guest, recorded, written down again.

pub(crate) mod recorder;

use std::{sync::Arc, time::Instant};

use body::{
    GuestClient,
    dir::ObservedGuest,
    driver::Capability,
    guest::{ExecStream, GuestConnection, GuestError, ReplayFrom},
};
use bytes::Bytes;
use proto::{
    BodyId, Draft, Event, Failure, Kind, Layer,
    event_data::{BodyRemoved, ExecEnded, ExecExit, ExecOutcome, ExecStarted},
    launch::RunRecord,
    wire::process::{
        CloseStdinRequest, CloseStdinResponse, ConnectRequest, ListRequest, ListResponse, ProcessConfig,
        ProcessInput, ProcessSelector, Pty, SendInputRequest, SendInputResponse, SendSignalRequest,
        SendSignalResponse, StartRequest, UpdateRequest, UpdateResponse, process_event, process_input,
        process_selector, pty,
    },
};
use tokio::sync::Mutex;

use crate::{
    ExecEnd, ExecRequest, Fleet, Stdin, TtySize, exec::recorder::Recorder, failures,
    lifecycle::GuestIdentity, lock_mutex,
};

/// Exit code of a command that was killed at its timeout, as `timeout` has it.
pub(crate) const TIMED_OUT: i32 = 124;
/// How many guests are kept in touch with between commands; each line takes a descriptor here and a little memory there.
const LINES_MAX: usize = 64;
/// Exit code where the Body went away under the command.
const BODY_GONE: i32 = 137;

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputChunk {
    /// Standard output.
    Stdout(Bytes),
    /// Standard error.
    Stderr(Bytes),
    /// The terminal.
    Tty(Bytes),
}

/// A command that runs.
pub struct Exec<'a> {
    fleet: &'a Fleet,
    body: BodyId,
    seen: ObservedGuest,
    oom_before: u64,
    seq: u64,
    pid: u32,
    layer: Layer,
    stream: ExecStream,
    started: Instant,
    stdout: Recorder,
    stderr: Recorder,
    end: Option<process_event::EndEvent>,
    timed_out: bool,
    broken: bool,
    input: Arc<Mutex<Option<GuestConnection>>>,
    tty: bool,
}

/// What is known of a command when it is first heard.
struct ExecMeta {
    seq: u64,
    pid: u32,
    layer: Layer,
    tty: bool,
    oom_before: u64,
    began: Instant,
}

impl Fleet {
    /// Starts a command in a Body that runs.
    pub async fn exec(&self, id: &BodyId, request: ExecRequest) -> Result<Exec<'_>, Failure> {
        check_request(&request)?;
        let known = self.exec_target(id)?;
        let (seen, line) = self.reach_guest(id, known.running).await?;
        let oom_before = seen.oom_kills();
        let seq = self.append(started_event(id, &request))?.seq;
        let began = Instant::now();
        let opened = async {
            await_pid(line.start(&start_request(&request), request.user.as_deref(), request.timeout).await?)
                .await
        };
        let (stream, pid) = opened.await.map_err(|error| self.record_start_failed(id, seq, error))?;
        let found = ExecMeta { seq, pid, layer: known.layer, tty: request.tty.is_some(), oom_before, began };
        Ok(self.follow_exec(id, seen, known.output_max, stream, found))
    }

    /// Finds out where a Body runs, and connects to its guest, over the connection that the last command left if there is
    /// one to the same guest. `running` is given for a Body that is not looked up.
    async fn reach_guest(
        &self,
        id: &BodyId,
        running: Option<RunRecord>,
    ) -> Result<(ObservedGuest, GuestConnection), Failure> {
        let kept = self.take_connection(id);
        let (seen, guests) = match running {
            Some(running) => (ObservedGuest::new(None, running), GuestIdentity::Same),
            None => self.see_running(id)?,
        };
        let line = match kept.filter(|_| guests == GuestIdentity::Same) {
            Some(line) => line,
            None => self.guest(id).connect_http().await.map_err(|error| self.guest_failure(id, error))?,
        };
        Ok((seen, line))
    }

    /// A line that an earlier command left.
    fn take_connection(&self, id: &BodyId) -> Option<GuestConnection> {
        lock_mutex(&self.lines).remove(id).filter(GuestConnection::can_be_used)
    }

    /// For the next command, if there is room.
    fn keep_connection(&self, id: &BodyId, line: GuestConnection) {
        let mut lines = lock_mutex(&self.lines);
        lines.retain(|_, line| line.can_be_used());
        if lines.len() < LINES_MAX {
            lines.insert(id.clone(), line);
        }
    }

    /// Listens to a command that was started with that tag, by whichever process; none if there is none.
    ///
    /// Of a terminal its newest output comes first, so that its screen can be rebuilt.
    pub async fn attach(&self, id: &BodyId, tag: &str) -> Result<Option<Exec<'_>>, Failure> {
        let known = self.exec_target(id)?;
        let seen = ObservedGuest::new(None, known.running.map_or_else(|| self.running(id), Ok)?);
        let oom_before = seen.oom_kills();
        let began = Instant::now();
        let selector = ProcessSelector { selector: Some(process_selector::Selector::Tag(tag.to_owned())) };
        let opened = async {
            await_pid(
                self.guest(id)
                    .connect(&ConnectRequest { process: Some(selector) }, ReplayFrom::Recent)
                    .await?,
            )
            .await
        };
        let (stream, pid) = match opened.await {
            Ok(opened) => opened,
            Err(GuestError::Refused { code, .. }) if code == "not_found" => return Ok(None),
            Err(error) => return Err(failures::guest(error)),
        };
        let events = self.log.events(0, Some(id), usize::MAX)?;
        let tagged = |event: &Event| {
            let data = event.data_as::<ExecStarted>()?;
            (data.tag.as_deref() == Some(tag)).then_some((event.seq, data.tty))
        };
        let (seq, tty) = events.iter().rev().find_map(tagged).unwrap_or((0, false));
        let found = ExecMeta { seq, pid, layer: known.layer, tty, oom_before, began };
        Ok(Some(self.follow_exec(id, seen, known.output_max, stream, found)))
    }

    /// Tags of the commands that run in a Body, with their pids inside.
    pub async fn tagged_execs(&self, id: &BodyId) -> Result<Vec<(String, u32)>, Failure> {
        self.running(id)?;
        let answer: ListResponse =
            self.guest(id).ask("/process.Process/List", &ListRequest {}).await.map_err(failures::guest)?;
        Ok(answer.processes.into_iter().filter_map(|process| Some((process.tag?, process.pid))).collect())
    }

    fn follow_exec(
        &self,
        id: &BodyId,
        seen: ObservedGuest,
        output_max: u64,
        stream: ExecStream,
        found: ExecMeta,
    ) -> Exec<'_> {
        Exec {
            fleet: self,
            body: id.clone(),
            seen,
            oom_before: found.oom_before,
            seq: found.seq,
            pid: found.pid,
            layer: found.layer,
            stream,
            started: found.began,
            stdout: Recorder::new(output_max),
            stderr: Recorder::new(output_max),
            end: None,
            timed_out: false,
            broken: false,
            input: Arc::default(),
            tty: found.tty,
        }
    }

    /// A guest that cannot be reached is most often the guest of a Body that does not run.
    fn guest_failure(&self, id: &BodyId, error: GuestError) -> Failure {
        match error {
            error @ (GuestError::Connect(_) | GuestError::Broken(_)) => {
                // One that is ending has closed its door a moment before it is gone.
                if let Ok(running) = self.running(id) {
                    body::process::wait_end(&running, std::time::Duration::from_secs(2));
                }
                self.running(id).err().unwrap_or_else(|| failures::guest(error))
            }
            error => failures::guest(error),
        }
    }

    fn record_start_failed(&self, id: &BodyId, seq: u64, error: GuestError) -> Failure {
        let failure = self.guest_failure(id, error);
        let outcome = ExecOutcome::NotStarted { error: failure.to_string() };
        let _ = self.write(id, ExecEnded { exec: seq, outcome });
        failure
    }
}

fn check_request(request: &ExecRequest) -> Result<(), Failure> {
    if request.argv.is_empty() {
        return Err(Failure::new(Kind::Usage, "no command was given")
            .hint("write it after `--`: pal run -- uname -a"));
    }
    Ok(())
}

/// What is written down of a command before it is asked for.
fn started_event(id: &BodyId, request: &ExecRequest) -> Draft {
    let data = ExecStarted {
        argv: request.argv.clone(),
        user: request.user.clone(),
        workdir: request.workdir.clone(),
        tty: request.tty.is_some(),
        env: request.env.keys().cloned().collect(),
        timeout_ms: request.timeout.map(|timeout| timeout.as_millis() as u64),
        tag: request.tag.clone(),
        by: None,
        detached: false,
    };
    Draft::about(id, data)
}

/// What the guest is asked for.
fn start_request(request: &ExecRequest) -> StartRequest {
    let (command, arguments) = request
        .argv
        .split_first()
        .map_or((String::new(), Vec::new()), |(command, rest)| (command.clone(), rest.to_vec()));
    StartRequest {
        process: Some(ProcessConfig {
            cmd: command,
            args: arguments,
            envs: request.env.clone().into_iter().collect(),
            cwd: request.workdir.clone(),
        }),
        pty: request.tty.map(size),
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

fn size(size: TtySize) -> Pty {
    Pty { size: Some(pty::Size { cols: size.cols.into(), rows: size.rows.into() }) }
}

impl Exec<'_> {
    /// Its pid inside the Body.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The next piece of output; none when it has ended.
    pub async fn next(&mut self) -> Result<Option<OutputChunk>, Failure> {
        while self.end.is_none() && !self.timed_out && !self.broken {
            let event = match self.stream.next().await {
                Ok(event) => event.and_then(|event| event.event),
                Err(GuestError::Refused { code, .. }) if code == "deadline_exceeded" => {
                    self.timed_out = true;
                    break;
                }
                Err(error) => return self.stream_broke(error).map(|()| None),
            };
            match event {
                Some(process_event::Event::Data(data)) => {
                    if let Some(output) = data.output {
                        return self.take(output).map(Some);
                    }
                }
                Some(process_event::Event::End(end)) => self.end = Some(end),
                Some(_) => {}
                None => self.broken = true,
            }
        }
        Ok(None)
    }

    /// A stream that broke because the Body ended is an end; any other is a failure.
    fn stream_broke(&mut self, error: GuestError) -> Result<(), Failure> {
        body::process::wait_end(self.seen.running(), std::time::Duration::from_secs(2));
        let running = self.seen.running();
        match body::dir::alive(running.pid, running.ticks) {
            None => {
                self.broken = true;
                Ok(())
            }
            Some(_) => Err(failures::guest(error)),
        }
    }

    fn take(&mut self, output: process_event::data_event::Output) -> Result<OutputChunk, Failure> {
        use process_event::data_event::Output as From;
        let (recorder, output, bytes) = match output {
            From::Stdout(bytes) => (&mut self.stdout, OutputChunk::Stdout(bytes.clone()), bytes),
            From::Stderr(bytes) => (&mut self.stderr, OutputChunk::Stderr(bytes.clone()), bytes),
            From::Pty(bytes) => (&mut self.stdout, OutputChunk::Tty(bytes.clone()), bytes),
        };
        recorder.push(self.fleet.log().artifacts()?, &bytes)?;
        Ok(output)
    }

    /// Hands that reach the command while output is read.
    pub fn control(&self) -> ExecControl {
        ExecControl {
            guest: self.fleet.guest(&self.body),
            pid: self.pid,
            line: self.input.clone(),
            tty: self.tty,
        }
    }

    /// After `next` gave none: how it ended. Writes that down.
    pub async fn finish(self) -> Result<ExecEnd, Failure> {
        let (fleet, id, layer) = (self.fleet, self.body.clone(), self.layer);
        let (ended, stream) = self.record_end(None)?;
        // A connection that is open when memory is saved would be open in every restored copy.
        let saves_memory = fleet.drivers.get(layer)?.capabilities().contains(Capability::MemorySnapshots);
        if !saves_memory
            && ended.body_end.is_none()
            && let Some(line) = stream.into_connection().await
        {
            fleet.keep_connection(&id, line);
        }
        Ok(ended)
    }

    /// The same for the last command of a Body of a run, which goes while this is written down.
    pub async fn finish_last(self) -> Result<ExecEnd, Failure> {
        let (fleet, id) = (self.fleet, self.body.clone());
        let (ended, _) =
            self.record_end(Some(Draft::about(&id, BodyRemoved { by: None, discarded: false })))?;
        fleet.owned_bodies().get_mut(&id).into_iter().for_each(|held| held.told = true);
        Ok(ended)
    }

    /// With the end of a Body that goes with it: that is written together with the command's.
    fn record_end(self, removed: Option<Draft>) -> Result<(ExecEnd, ExecStream), Failure> {
        self.fleet.note_first_exec(&self.body);
        let body_end = if self.broken { body_end(self.fleet, &self.body) } else { None };
        // Before the Body goes, and its cgroups with it.
        let out_of_memory =
            self.seen.oom_kills() > self.oom_before || body_end == Some(proto::launch::GuestEnd::Oom);
        if removed.is_some() {
            self.fleet
                .owned_bodies()
                .get_mut(&self.body)
                .into_iter()
                .for_each(|held| held.supervisor.terminate());
        }
        let (code, signal) = match &self.end {
            _ if self.timed_out => (TIMED_OUT, None),
            Some(end) => exit_of(end),
            None => (BODY_GONE, None),
        };
        let ended = ExecEnd { code, signal, out_of_memory, timed_out: self.timed_out, body_end };
        let exit = ExecExit {
            code,
            signal,
            out_of_memory: Some(out_of_memory),
            timed_out: ended.timed_out,
            body_end: ended.body_end.clone(),
            duration_ms: self.started.elapsed().as_millis() as u64,
            stdout: Some(self.stdout.finish()?),
            stderr: Some(self.stderr.finish()?),
        };
        let data = ExecEnded { exec: self.seq, outcome: ExecOutcome::Ended(exit) };
        self.fleet.log().append_all([Draft::about(&self.body, data)].into_iter().chain(removed))?;
        Ok((ended, self.stream))
    }
}

fn body_end(fleet: &Fleet, id: &BodyId) -> Option<proto::launch::GuestEnd> {
    match body::BodyDir::at(fleet.body_path(id)).condition().ok()? {
        body::ProcessState::Dead(end) => Some(end),
        _ => Some(proto::launch::GuestEnd::Unknown),
    }
}

/// The code a shell would give, and the signal, if one ended it.
pub(crate) fn exit_of(end: &process_event::EndEvent) -> (i32, Option<i32>) {
    if end.exited {
        return (end.exit_code, None);
    }
    let signal = end.status.strip_prefix("signal: ").and_then(signal_number);
    (signal.map_or(BODY_GONE, |signal| 128 + signal), signal)
}

/// The guest names signals as envd does.
fn signal_number(name: &str) -> Option<i32> {
    const NAMES: [(&str, i32); 22] = [
        ("hangup", 1),
        ("interrupt", 2),
        ("quit", 3),
        ("illegal instruction", 4),
        ("trace/breakpoint trap", 5),
        ("aborted", 6),
        ("bus error", 7),
        ("floating point exception", 8),
        ("killed", 9),
        ("user defined signal 1", 10),
        ("segmentation fault", 11),
        ("user defined signal 2", 12),
        ("broken pipe", 13),
        ("alarm clock", 14),
        ("terminated", 15),
        ("stack fault", 16),
        ("CPU time limit exceeded", 24),
        ("file size limit exceeded", 25),
        ("virtual timer expired", 26),
        ("profiling timer expired", 27),
        ("power failure", 30),
        ("bad system call", 31),
    ];
    let name = name.trim_end_matches(" (core dumped)");
    let numbered = || name.strip_prefix("signal ").and_then(|number| number.parse().ok());
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number).or_else(numbered)
}

/// Hands that reach a command that runs.
#[derive(Clone)]
pub struct ExecControl {
    guest: GuestClient,
    pid: u32,
    line: Arc<Mutex<Option<GuestConnection>>>,
    tty: bool,
}

impl ExecControl {
    /// Input; returns when the command's side has taken it.
    pub async fn send(&self, bytes: Bytes) -> Result<(), Failure> {
        let input =
            if self.tty { process_input::Input::Pty(bytes) } else { process_input::Input::Stdin(bytes) };
        let request =
            SendInputRequest { process: self.selector(), input: Some(ProcessInput { input: Some(input) }) };
        let mut line = self.line.lock().await;
        if line.is_none() {
            *line = Some(self.guest.connect_http().await.map_err(failures::guest)?);
        }
        let Some(open) = line.as_mut() else { return Ok(()) };
        let answer: Result<SendInputResponse, _> = open.ask("/process.Process/SendInput", &request).await;
        if answer.is_err() {
            *line = None;
        }
        answer.map(drop).map_err(failures::guest)
    }

    /// The end of input.
    pub async fn close_stdin(&self) -> Result<(), Failure> {
        // After what is being sent.
        let _line = self.line.lock().await;
        let request = CloseStdinRequest { process: self.selector() };
        let answer: Result<CloseStdinResponse, _> =
            self.guest.ask("/process.Process/CloseStdin", &request).await;
        answer.map(drop).map_err(failures::guest)
    }

    /// A signal, by its number.
    pub async fn signal(&self, signal: i32) -> Result<(), Failure> {
        let request = SendSignalRequest { process: self.selector(), signal };
        let answer: Result<SendSignalResponse, _> =
            self.guest.ask("/process.Process/SendSignal", &request).await;
        answer.map(drop).map_err(failures::guest)
    }

    /// The terminal's new size.
    pub async fn resize(&self, to: TtySize) -> Result<(), Failure> {
        let request = UpdateRequest { process: self.selector(), pty: Some(size(to)) };
        let answer: Result<UpdateResponse, _> = self.guest.ask("/process.Process/Update", &request).await;
        answer.map(drop).map_err(failures::guest)
    }

    fn selector(&self) -> Option<ProcessSelector> {
        Some(ProcessSelector { selector: Some(process_selector::Selector::Pid(self.pid)) })
    }
}
