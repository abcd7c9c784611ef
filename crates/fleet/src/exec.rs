//! Running a command in a Body: written down, started through the guest, recorded, written down again.

use std::{os::unix::net::UnixStream, sync::Arc, time::Instant};

use body::{
    Guest,
    dir::Seen,
    guest::{Asked, GuestError, Hear, Line, Stream, Unsaid},
};
use bytes::Bytes;
use proto::{
    BodyId, Draft, Failure, Kind, Layer,
    wire::process::{
        CloseStdinRequest, CloseStdinResponse, ConnectRequest, ListRequest, ListResponse, ProcessConfig,
        ProcessInput, ProcessSelector, Pty, SendInputRequest, SendInputResponse, SendSignalRequest,
        SendSignalResponse, StartRequest, UpdateRequest, UpdateResponse, process_event, process_input,
        process_selector, pty,
    },
};
use serde_json::json;
use tokio::sync::Mutex;

use crate::{
    Ended, ExecRequest, Fleet, Opened, Stdin, TtySize, failures, held,
    life::{Guests, Known},
    record::Recorder,
};

/// Exit code of a command that was killed at its timeout, as `timeout` has it.
pub(crate) const TIMED_OUT: i32 = 124;
/// How many guests are kept in touch with between commands; each line takes a descriptor here and a little memory there.
const LINES_MAX: usize = 64;
/// Exit code where the Body went away under the command.
const BODY_GONE: i32 = 137;

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
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
    seen: Seen,
    oom_before: u64,
    seq: u64,
    pid: u32,
    layer: Layer,
    stream: Stream,
    started: Instant,
    stdout: Recorder,
    stderr: Recorder,
    end: Option<process_event::EndEvent>,
    timed_out: bool,
    broken: bool,
    input: Arc<Mutex<Option<Line>>>,
    tty: bool,
}

/// How much of a command its guest has heard before it is written down.
enum Said {
    /// Nothing; it may have been connected to.
    Nothing(Option<UnixStream>),
    /// Nothing of this one, but the one before.
    Before(Line),
    /// All but the last byte.
    Nearly(Unsaid),
    /// All of it, and it is written down: the Body was made for it.
    First(First),
}

/// What is known of a command when it is first heard.
struct Found {
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
        check(&request)?;
        let opened = self.tethers().get_mut(id).and_then(|held| held.opened.take());
        let known = self.known(id)?;
        let said = match opened {
            Some(Opened::First(first)) => Said::First(first),
            Some(Opened::Line(made)) => self.knocked(id, &known, Some(made), &request),
            None => match self.take_line(id) {
                Some(line) => Said::Before(line),
                None => self.knocked(id, &known, None, &request),
            },
        };
        let (seen, guests) = match (known.running, &said) {
            (Some(running), _) => (Seen::new(None, running), Guests::Same),
            (None, Said::Nothing(None)) => (Seen::new(None, self.running(id)?), Guests::Other),
            (None, _) => self.seen_behind_door(id)?,
        };
        let said = match said {
            Said::Before(_) if guests == Guests::Other => Said::Nothing(None),
            said => said,
        };
        let oom_before = if matches!(said, Said::First(_)) { 0 } else { seen.oom_kills() };
        let first = match said {
            Said::First(first) => first,
            Said::Nearly(unsaid) => {
                let seq = self.append(started(id, &request))?.seq;
                First { seq, began: Instant::now(), to: To::Asked(unsaid.say()) }
            }
            Said::Nothing(Some(made)) => {
                self.announced(id, &request, self.guest(id).line_over(made).await)?
            }
            Said::Nothing(None) => self.announced(id, &request, self.guest(id).line().await)?,
            Said::Before(line) => self.announced(id, &request, Ok(line))?,
        };
        let (seq, began) = (first.seq, first.began);
        let (stream, pid) = match first.begin(self, id, &request).await {
            Ok(opened) => opened,
            Err(error) => return Err(self.never_ran(id, seq, error)),
        };
        let found = Found { seq, pid, layer: known.layer, tty: request.tty.is_some(), oom_before, began };
        Ok(self.follow(id, seen, known.output_max, stream, found))
    }

    /// A line that an earlier command left.
    fn take_line(&self, id: &BodyId) -> Option<Line> {
        held(&self.lines).remove(id).filter(Line::can_be_used)
    }

    /// For the next command, if there is room.
    fn leave_line(&self, id: &BodyId, line: Line) {
        let mut lines = held(&self.lines);
        lines.retain(|_, line| line.can_be_used());
        if lines.len() < LINES_MAX {
            lines.insert(id.clone(), line);
        }
    }

    /// Turns to a guest, which turns to us while we look whether the Body runs at all; one that does not hears no more
    /// than this.
    fn knocked(&self, id: &BodyId, known: &Known, made: Option<UnixStream>, request: &ExecRequest) -> Said {
        let guest = self.guest(id);
        let Some(made) = made.or_else(|| guest.knock().ok()) else { return Said::Nothing(None) };
        if known.layer == Layer::Microvm {
            // There every message is emulated, too: one instead of two.
            return Said::Nothing(Some(made));
        }
        let unsaid = guest.ask_nearly(made, &start_of(request), request.user.as_deref(), request.timeout);
        unsaid.map_or(Said::Nothing(None), Said::Nearly)
    }

    /// Listens to a command that was started with that tag, by whichever process; none if there is none.
    ///
    /// Of a terminal its newest output comes first, so that its screen can be rebuilt.
    pub async fn attach(&self, id: &BodyId, tag: &str) -> Result<Option<Exec<'_>>, Failure> {
        let known = self.known(id)?;
        let seen = Seen::new(None, known.running.map_or_else(|| self.running(id), Ok)?);
        let oom_before = seen.oom_kills();
        let began = Instant::now();
        let selector = ProcessSelector { selector: Some(process_selector::Selector::Tag(tag.to_owned())) };
        let opened = async {
            heard(self.guest(id).connect(&ConnectRequest { process: Some(selector) }, Hear::Recent).await?)
                .await
        };
        let (stream, pid) = match opened.await {
            Ok(opened) => opened,
            Err(GuestError::Refused { code, .. }) if code == "not_found" => return Ok(None),
            Err(error) => return Err(failures::guest(error)),
        };
        let events = self.events(0, Some(id), usize::MAX)?;
        let started =
            events.iter().rev().find(|event| event.kind == "exec.started" && event.data["tag"] == tag);
        let tty = started.is_some_and(|event| event.data["tty"] == true);
        let found = Found {
            seq: started.map_or(0, |event| event.seq),
            pid,
            layer: known.layer,
            tty,
            oom_before,
            began,
        };
        Ok(Some(self.follow(id, seen, known.output_max, stream, found)))
    }

    /// Tags of the commands that run in a Body, with their pids inside.
    pub async fn tagged(&self, id: &BodyId) -> Result<Vec<(String, u32)>, Failure> {
        self.running(id)?;
        let answer: ListResponse =
            self.guest(id).ask("/process.Process/List", &ListRequest {}).await.map_err(failures::guest)?;
        Ok(answer.processes.into_iter().filter_map(|process| Some((process.tag?, process.pid))).collect())
    }

    fn follow(&self, id: &BodyId, seen: Seen, output_max: u64, stream: Stream, found: Found) -> Exec<'_> {
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

    /// Writes a command down for a guest that has turned to us meanwhile.
    fn announced(
        &self,
        id: &BodyId,
        request: &ExecRequest,
        line: Result<Line, GuestError>,
    ) -> Result<First, Failure> {
        let line = line.map_err(|error| self.unheard(id, error))?;
        let seq = self.append(started(id, request))?.seq;
        Ok(First { seq, began: Instant::now(), to: To::Line(line) })
    }

    /// A guest that cannot be reached is most often the guest of a Body that does not run.
    fn unheard(&self, id: &BodyId, error: GuestError) -> Failure {
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

    fn never_ran(&self, id: &BodyId, seq: u64, error: GuestError) -> Failure {
        let failure = self.unheard(id, error);
        let _ = self.write("exec.ended", id, json!({ "exec": seq, "error": failure.to_string() }));
        failure
    }
}

fn check(request: &ExecRequest) -> Result<(), Failure> {
    if request.argv.is_empty() {
        return Err(Failure::new(Kind::Usage, "no command was given")
            .hint("write it after `--`: pal run -- uname -a"));
    }
    Ok(())
}

/// What is written down of a command before it is asked for.
fn started(id: &BodyId, request: &ExecRequest) -> Draft {
    let mut data = json!({
        "argv": request.argv, "user": request.user, "workdir": request.workdir, "tty": request.tty.is_some(),
        "env": request.env.keys().collect::<Vec<_>>(), "timeout_ms": request.timeout.map(|timeout| timeout.as_millis() as u64),
    });
    if let Some(tag) = &request.tag {
        data["tag"] = tag.as_str().into();
    }
    Draft::body("exec.started", id, data)
}

/// The same in the guest's words.
fn start_of(request: &ExecRequest) -> StartRequest {
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

/// A command that is written down.
#[derive(Debug)]
pub(crate) struct First {
    seq: u64,
    began: Instant,
    to: To,
}

/// How far it is on its way to the guest.
#[derive(Debug)]
enum To {
    /// It was sent.
    Asked(Asked),
    /// It can be.
    Line(Line),
    /// Nobody was there to take it.
    Nobody,
}

impl First {
    /// Writes down a Body and its first command, and asks its guest for that while the guest still comes up.
    pub(crate) fn ask(
        fleet: &Fleet,
        id: &BodyId,
        created: Draft,
        request: &ExecRequest,
    ) -> Result<Self, Failure> {
        check(request)?;
        let seq = fleet.append_all([created, started(id, request)])?.seq;
        let asked = fleet.guest(id).ask_ahead(&start_of(request), request.user.as_deref(), request.timeout);
        Ok(Self { seq, began: Instant::now(), to: asked.map_or(To::Nobody, To::Asked) })
    }

    /// Writes down that it did not come to that.
    pub(crate) fn never_ran(&self, fleet: &Fleet, id: &BodyId, why: &Failure) {
        let _ = fleet.write("exec.ended", id, json!({ "exec": self.seq, "error": why.to_string() }));
    }

    /// Waits for its first word: the command's pid.
    async fn begin(
        self,
        fleet: &Fleet,
        id: &BodyId,
        request: &ExecRequest,
    ) -> Result<(Stream, u32), GuestError> {
        let line = match self.to {
            To::Asked(asked) => return heard(asked.answer().await?).await,
            To::Line(line) => line,
            To::Nobody => fleet.guest(id).line().await?,
        };
        heard(line.start(&start_of(request), request.user.as_deref(), request.timeout).await?).await
    }
}

async fn heard(mut stream: Stream) -> Result<(Stream, u32), GuestError> {
    let pid = body::guest::in_time(first_word(&mut stream)).await??;
    Ok((stream, pid))
}

async fn first_word(stream: &mut Stream) -> Result<u32, GuestError> {
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
    pub async fn next(&mut self) -> Result<Option<Output>, Failure> {
        while self.end.is_none() && !self.timed_out && !self.broken {
            let event = match self.stream.next().await {
                Ok(event) => event.and_then(|event| event.event),
                Err(GuestError::Refused { code, .. }) if code == "deadline_exceeded" => {
                    self.timed_out = true;
                    break;
                }
                Err(error) => return self.broke(error).map(|()| None),
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
    fn broke(&mut self, error: GuestError) -> Result<(), Failure> {
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

    fn take(&mut self, output: process_event::data_event::Output) -> Result<Output, Failure> {
        use process_event::data_event::Output as From;
        let (recorder, output, bytes) = match output {
            From::Stdout(bytes) => (&mut self.stdout, Output::Stdout(bytes.clone()), bytes),
            From::Stderr(bytes) => (&mut self.stderr, Output::Stderr(bytes.clone()), bytes),
            From::Pty(bytes) => (&mut self.stdout, Output::Tty(bytes.clone()), bytes),
        };
        recorder.push(self.fleet.store()?, &bytes)?;
        Ok(output)
    }

    /// Hands that reach the command while output is read.
    pub fn control(&self) -> Control {
        Control {
            guest: self.fleet.guest(&self.body),
            pid: self.pid,
            line: self.input.clone(),
            tty: self.tty,
        }
    }

    /// After `next` gave none: how it ended. Writes that down.
    pub async fn finish(self) -> Result<Ended, Failure> {
        let (fleet, id, layer) = (self.fleet, self.body.clone(), self.layer);
        let (ended, stream) = self.ended(None)?;
        // What a machine has open when it is frozen, it has open in every copy of it.
        if layer != Layer::Microvm
            && ended.body_end.is_none()
            && let Some(line) = stream.into_line().await
        {
            fleet.leave_line(&id, line);
        }
        Ok(ended)
    }

    /// The same for the last command of a Body of a run, which goes while this is written down.
    pub async fn finish_last(self) -> Result<Ended, Failure> {
        let (fleet, id) = (self.fleet, self.body.clone());
        let (ended, _) = self.ended(Some(Draft::body("body.removed", &id, json!({}))))?;
        fleet.tethers().get_mut(&id).into_iter().for_each(|held| held.told = true);
        Ok(ended)
    }

    /// With the end of a Body that goes with it: that is written together with the command's.
    fn ended(self, removed: Option<Draft>) -> Result<(Ended, Stream), Failure> {
        self.fleet.has_run(&self.body);
        let body_end = if self.broken { body_end(self.fleet, &self.body) } else { None };
        // Before the Body goes, and its cgroups with it.
        let out_of_memory =
            self.seen.oom_kills() > self.oom_before || body_end == Some(proto::launch::End::Oom);
        if removed.is_some() {
            self.fleet.tethers().get_mut(&self.body).into_iter().for_each(|held| held.tether.cut());
        }
        let (code, signal) = match &self.end {
            _ if self.timed_out => (TIMED_OUT, None),
            Some(end) => exit_of(end),
            None => (BODY_GONE, None),
        };
        let ended = Ended { code, signal, out_of_memory, timed_out: self.timed_out, body_end };
        let mut data = json!(ended);
        data["exec"] = self.seq.into();
        data["duration_ms"] = (self.started.elapsed().as_millis() as u64).into();
        data["stdout"] = self.stdout.finish()?;
        data["stderr"] = self.stderr.finish()?;
        self.fleet.append_all([Draft::body("exec.ended", &self.body, data)].into_iter().chain(removed))?;
        Ok((ended, self.stream))
    }
}

fn body_end(fleet: &Fleet, id: &BodyId) -> Option<proto::launch::End> {
    match body::BodyDir::at(fleet.body_path(id)).condition().ok()? {
        body::Condition::Dead(end) => Some(end),
        _ => Some(proto::launch::End::Unknown),
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
pub struct Control {
    guest: Guest,
    pid: u32,
    line: Arc<Mutex<Option<Line>>>,
    tty: bool,
}

impl Control {
    /// Input; returns when the command's side has taken it.
    pub async fn send(&self, bytes: Bytes) -> Result<(), Failure> {
        let input =
            if self.tty { process_input::Input::Pty(bytes) } else { process_input::Input::Stdin(bytes) };
        let request =
            SendInputRequest { process: self.selector(), input: Some(ProcessInput { input: Some(input) }) };
        let mut line = self.line.lock().await;
        if line.is_none() {
            *line = Some(self.guest.line().await.map_err(failures::guest)?);
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
