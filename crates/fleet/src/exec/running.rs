//! A running command: its output while it arrives, and its end.

use std::time::Instant;

use body::{
    BodyDir, ProcessState,
    dir::ObservedGuest,
    driver::Capability,
    guest::{ExecStream, GuestError},
};
use bytes::Bytes;
use proto::{
    BodyId, Draft, Failure, Layer,
    event_data::{BodyRemoved, ExecDetached, ExecEnded, ExecExit, ExecOutcome},
    launch::GuestEnd,
    wire::process::{process_event, process_selector::Selector},
};

use super::{
    ExecControl, Execs, StartedExec,
    control::InputConnection,
    exit::{BODY_GONE, TIMED_OUT, exit_of},
    recorder::Recorder,
    wait_end,
};
use crate::{ExecEnd, Fleet, blocking::run_blocking, failures};

/// A chunk of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputChunk {
    /// Chunk of standard output.
    Stdout(Bytes),
    /// Chunk of standard error.
    Stderr(Bytes),
    /// Chunk of terminal output.
    Tty(Bytes),
}

/// A running command.
pub struct Exec<'a> {
    execs: Execs<'a>,
    body: BodyId,
    guest: ObservedGuest,
    oom_before: u64,
    seq: u64,
    /// Whether another process may record the end of the command too.
    shared: bool,
    pid: u32,
    layer: Layer,
    stream: ExecStream,
    started: Instant,
    stdout: Recorder,
    stderr: Recorder,
    end: Option<process_event::EndEvent>,
    timed_out: bool,
    broken: bool,
    input: InputConnection,
    tty: bool,
}

impl<'a> Exec<'a> {
    pub(super) fn new(execs: Execs<'a>, id: &BodyId, stream: ExecStream, started: StartedExec) -> Self {
        let mut stdout = Recorder::new(started.output_max);
        stdout.skip(started.skipped);
        Self {
            execs,
            body: id.clone(),
            guest: started.guest,
            oom_before: started.oom_before,
            seq: started.seq,
            shared: started.shared,
            pid: started.pid,
            layer: started.layer,
            stream,
            started: started.began,
            stdout,
            stderr: Recorder::new(started.output_max),
            end: None,
            timed_out: false,
            broken: false,
            input: InputConnection::default(),
            tty: started.tty,
        }
    }

    fn fleet(&self) -> &'a Fleet {
        self.execs.fleet
    }

    /// The pid inside the Body.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the next chunk of output; `None` after the end. Cancel-safe: a dropped call loses no output.
    pub async fn next(&mut self) -> Result<Option<OutputChunk>, Failure> {
        while self.end.is_none() && !self.timed_out && !self.broken {
            let event = match self.stream.next().await {
                Ok(event) => event.and_then(|event| event.event),
                Err(GuestError::Refused { code, .. }) if code == "deadline_exceeded" => {
                    self.timed_out = true;
                    break;
                }
                Err(error) => {
                    // A stream that broke because the Body ended is the command's end; any other broken stream is a
                    // failure.
                    if !wait_end(self.guest.running()).await {
                        return Err(failures::guest(error));
                    }
                    self.broken = true;
                    break;
                }
            };
            match event {
                Some(process_event::Event::Data(data)) => {
                    if let Some(output) = data.output {
                        return self.record(output).map(Some);
                    }
                }
                Some(process_event::Event::End(end)) => self.end = Some(end),
                Some(_) => {}
                None => self.broken = true,
            }
        }
        Ok(None)
    }

    fn record(&mut self, output: process_event::data_event::Output) -> Result<OutputChunk, Failure> {
        use process_event::data_event::Output as From;
        let (recorder, output, bytes) = match output {
            From::Stdout(bytes) => (&mut self.stdout, OutputChunk::Stdout(bytes.clone()), bytes),
            From::Stderr(bytes) => (&mut self.stderr, OutputChunk::Stderr(bytes.clone()), bytes),
            From::Pty(bytes) => (&mut self.stdout, OutputChunk::Tty(bytes.clone()), bytes),
        };
        recorder.push(self.execs.fleet.log().artifacts()?, &bytes)?;
        Ok(output)
    }

    /// Returns a handle that controls the command while its output is read.
    pub fn control(&self) -> ExecControl {
        ExecControl {
            guest: self.fleet().guest(&self.body),
            process: Selector::Pid(self.pid),
            input: self.input.clone(),
            tty: self.tty,
        }
    }

    /// The end event from the guest, after `next` returned `None`; `None` if the guest sent none.
    pub fn end_event(&self) -> Option<&process_event::EndEvent> {
        self.end.as_ref().filter(|_| !self.timed_out)
    }

    /// Records that the client that started the command has disconnected.
    pub fn record_detached(&self) -> Result<(), Failure> {
        run_blocking(|| self.fleet().write(&self.body, ExecDetached { exec: self.seq }))
    }

    /// Records how the command ended, after `next` returned `None`.
    pub async fn finish(self) -> Result<ExecEnd, Failure> {
        let (execs, id, layer) = (self.execs, self.body.clone(), self.layer);
        let (ended, stream) = run_blocking(|| self.record_end(None))?;
        // A memory snapshot would restore an open connection in every copy, so such a layer keeps none open.
        let saves_memory =
            execs.fleet.drivers.get(layer)?.capabilities().contains(Capability::MemorySnapshots);
        if !saves_memory
            && ended.body_end.is_none()
            && let Some(connection) = stream.into_connection().await
        {
            execs.connections.keep(&id, connection);
        }
        Ok(ended)
    }

    /// Records the end of a `pal run` Body's last command, and the removal of the Body with it.
    pub async fn finish_last(self) -> Result<ExecEnd, Failure> {
        let (fleet, id) = (self.fleet(), self.body.clone());
        let removed = BodyRemoved { by: None, discarded: false };
        let (ended, _) = run_blocking(|| self.record_end(Some(removed)))?;
        fleet.supervisors.owned().get_mut(&id).into_iter().for_each(|held| held.recorded = true);
        Ok(ended)
    }

    /// Appends the end of the command in one transaction, together with the removal of its Body if `removed` is given.
    fn record_end(self, removed: Option<BodyRemoved>) -> Result<(ExecEnd, ExecStream), Failure> {
        let fleet = self.fleet();
        if let Some(pool) = fleet.pool() {
            pool.note_exec(&self.body);
        }
        let body_end = if self.broken { body_end(fleet, &self.body) } else { None };
        // Read before the Body's cgroups are removed.
        let out_of_memory = self.guest.oom_kills() > self.oom_before || body_end == Some(GuestEnd::Oom);
        if removed.is_some() {
            let mut owned = fleet.supervisors.owned();
            owned.get_mut(&self.body).into_iter().for_each(|held| held.supervisor.terminate());
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
        let ending = Draft::about(&self.body, data);
        match removed {
            Some(removed) => fleet.log().append_end(&self.body, Some(ending), removed)?,
            None if self.shared => self.execs.append_end_once(&self.body, self.seq, &ending)?,
            None => fleet.append(ending).map(drop)?,
        }
        Ok((ended, self.stream))
    }
}

fn body_end(fleet: &Fleet, id: &BodyId) -> Option<GuestEnd> {
    match BodyDir::at(fleet.body_path(id)).condition().ok()? {
        ProcessState::Dead(end) => Some(end),
        _ => Some(GuestEnd::Unknown),
    }
}
