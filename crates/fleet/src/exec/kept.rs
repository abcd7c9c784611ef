//! Kept commands: the guest knows them by their tag, with their newest output and their end, whatever becomes of the
//! process that started them.
//!
//! Invariant: a tag is started once in one life of the guest. A second start follows the first command.
//! Invariant: the log has one `exec.started` and one `exec.ended` for a command, whichever processes start, follow
//! and read it.
//! Trust: the guest is hostile. Its numbers are checked, and its output has a limit.

use std::time::{Duration, Instant};

use base64::{Engine, engine::general_purpose::STANDARD};
use body::{dir::ObservedGuest, guest::GuestError};
use proto::{
    BodyId, Draft, Event, Failure,
    connect::{Code, ConnectError},
    event_data::{BodyStarted, EventKind, ExecEnded, ExecStarted},
    guest::{KEPT_WAIT_MS_MAX, KeptEnd, KeptRead, KeptState},
    wire::process::{ConnectRequest, ProcessSelector, process_event::EndEvent, process_selector::Selector},
};
use store::{EventOrder, EventQuery, ExecFilter};

use super::{
    Exec, ExecControl, Execs, Following, StartError, StartedExec, await_pid,
    control::InputConnection,
    exit::{TIMED_OUT, exit_of},
};
use crate::{ExecRequest, blocking::run_blocking, failures};

/// Output of a kept command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptOutput {
    /// Standard output and standard error in the order of their arrival.
    pub bytes: Vec<u8>,
    /// The number of bytes that the command wrote before these. It is higher than the caller asked for if the guest
    /// keeps only newer ones.
    pub from: u64,
    /// The `from` of the next read.
    pub next: u64,
    /// The exit code, if the command has ended and no byte follows.
    pub exit_code: Option<i32>,
}

/// A command with a tag, as the log has it.
struct LoggedExec {
    seq: u64,
    argv: Vec<String>,
    /// Whether the log has its end.
    ended: bool,
    /// Whether the Body has started since.
    earlier_life: bool,
}

impl<'a> Execs<'a> {
    /// Reads output of a kept command after its byte `from`. Waits at most `wait` for such a byte or the end of the
    /// command. `None` if the guest knows no kept command with this tag.
    ///
    /// The log gets the command's end from the first read that sees it.
    pub async fn read_kept(
        &self,
        id: &BodyId,
        tag: &str,
        from: u64,
        wait: Duration,
    ) -> Result<Option<KeptOutput>, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let began = Instant::now();
        loop {
            let left = wait.saturating_sub(began.elapsed());
            let wait_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX).min(KEPT_WAIT_MS_MAX);
            let Some(state) = self.ask_kept(id, tag, from, wait_ms).await? else { return Ok(None) };
            let output = output_of(state).map_err(failures::guest)?;
            if output.exit_code.is_some() {
                self.record_kept_end(id, tag).await?;
            }
            if !output.bytes.is_empty() || output.exit_code.is_some() || began.elapsed() >= wait {
                return Ok(Some(output));
            }
        }
    }

    /// Controls a kept command: input, signals and terminal size. They fail once it has ended. `None` if the guest
    /// knows no kept command with this tag.
    pub async fn kept_control(&self, id: &BodyId, tag: &str) -> Result<Option<ExecControl>, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let known = self.ask_kept(id, tag, u64::MAX, 0).await?;
        Ok(known.map(|state| ExecControl {
            guest: self.fleet.guest(id),
            process: Selector::Tag(tag.to_owned()),
            input: InputConnection::default(),
            tty: state.tty,
        }))
    }

    /// Starts a kept command, or follows the one that has its tag.
    pub(super) async fn start_kept(
        &self,
        id: &BodyId,
        request: &ExecRequest,
    ) -> Result<Exec<'a>, StartError> {
        super::check_request(request).map_err(StartError::Unreachable)?;
        let tag = request.tag.as_deref().unwrap_or_default();
        let logged = run_blocking(|| self.find_logged_tag(id, tag)).map_err(StartError::NotRecorded)?;
        // The guest cannot know a command whose start was never recorded.
        if let Some(logged) = &logged {
            let followed = self.follow_kept(id, tag, logged.seq).await.map_err(StartError::Unreachable)?;
            if let Some(exec) = followed {
                return if logged.argv == request.argv { Ok(exec) } else { Err(taken(tag)) };
            }
        }
        let unstarted =
            logged.filter(|logged| !logged.ended && !logged.earlier_life).map(|logged| logged.seq);
        let (stream, started) = self.open(id, request, Following::ToItsEnd, unstarted).await?;
        Ok(Exec::new(*self, id, stream, started))
    }

    /// Follows a kept command from its first kept byte; `None` if the guest does not know it.
    async fn follow_kept(&self, id: &BodyId, tag: &str, seq: u64) -> Result<Option<Exec<'a>>, Failure> {
        let (target, guest) = run_blocking(|| -> Result<_, Failure> {
            let target = self.fleet.exec_target(id)?;
            let running = target.running.clone().map_or_else(|| self.fleet.running(id), Ok)?;
            Ok((target, ObservedGuest::new(None, running)))
        })?;
        let oom_before = guest.oom_kills();
        let Some(state) = self.ask_kept(id, tag, u64::MAX, 0).await? else { return Ok(None) };
        let now = Instant::now();
        let began = now.checked_sub(Duration::from_millis(state.age_ms)).unwrap_or(now);
        let selector = ProcessSelector { selector: Some(Selector::Tag(tag.to_owned())) };
        let request = ConnectRequest { process: Some(selector) };
        let opened = async { await_pid(self.fleet.guest(id).follow_kept(&request).await?).await };
        let (stream, pid) = match opened.await {
            Ok(opened) => opened,
            Err(GuestError::Refused { code, .. }) if code == "not_found" => return Ok(None),
            Err(error) => return Err(self.guest_failure(id, error).await),
        };
        let started = StartedExec {
            seq,
            shared: true,
            skipped: state.first,
            pid,
            layer: target.layer,
            output_max: target.output_max,
            tty: state.tty,
            guest,
            oom_before,
            began,
        };
        Ok(Some(Exec::new(*self, id, stream, started)))
    }

    /// Records the end of a kept command that has ended, unless the log has it.
    async fn record_kept_end(&self, id: &BodyId, tag: &str) -> Result<(), Failure> {
        let logged = run_blocking(|| self.find_logged_tag(id, tag))?;
        let Some(logged) = logged.filter(|logged| !logged.ended && !logged.earlier_life) else {
            return Ok(());
        };
        let Some(mut exec) = self.follow_kept(id, tag, logged.seq).await? else { return Ok(()) };
        while exec.next().await?.is_some() {}
        exec.finish().await.map(drop)
    }

    /// Appends the end of a command unless the log has it.
    pub(super) fn append_end_once(&self, id: &BodyId, seq: u64, ending: &Draft) -> Result<(), Failure> {
        self.fleet.log().append_once(id, ending, || self.has_end(id, seq)).map(drop)
    }

    fn has_end(&self, id: &BodyId, seq: u64) -> Result<bool, Failure> {
        let kinds = ExecEnded::NAMES.to_vec();
        let query = EventQuery { kinds, limit: 1, ..EventQuery::of_exec(id, seq) };
        Ok(!self.fleet.log().read(&query)?.is_empty())
    }

    /// The newest command with this tag in the log.
    fn find_logged_tag(&self, id: &BodyId, tag: &str) -> Result<Option<LoggedExec>, Failure> {
        let newest = |query: EventQuery| -> Result<Option<Event>, Failure> {
            let query = EventQuery { order: EventOrder::NewestFirst, limit: 1, ..query };
            Ok(self.fleet.log().read(&query)?.into_iter().next())
        };
        let tagged = EventQuery { exec: Some(ExecFilter::Tag(tag.to_owned())), ..EventQuery::of_body(id) };
        let Some(start) = newest(tagged)? else { return Ok(None) };
        let lives = EventQuery { kinds: BodyStarted::NAMES.to_vec(), ..EventQuery::of_body(id) };
        let earlier_life = newest(lives)?.is_some_and(|life| life.pos > start.pos);
        let argv = start.data_as::<ExecStarted>().map(|start| start.argv).unwrap_or_default();
        Ok(Some(LoggedExec { seq: start.seq, argv, ended: self.has_end(id, start.seq)?, earlier_life }))
    }

    async fn ask_kept(
        &self,
        id: &BodyId,
        tag: &str,
        from: u64,
        wait_ms: u64,
    ) -> Result<Option<KeptState>, Failure> {
        let read = KeptRead { tag: tag.to_owned(), from, wait_ms };
        match self.fleet.guest(id).read_kept(&read).await {
            Ok(state) => Ok(state),
            Err(GuestError::Refused { code, .. }) if code == "404" => {
                Err(failures::old_guest(id, "keep commands"))
            }
            Err(error) => Err(self.guest_failure(id, error).await),
        }
    }
}

fn taken(tag: &str) -> StartError {
    let message = format!("another command is kept with the tag {tag}");
    StartError::Refused(ConnectError::new(Code::AlreadyExists, message))
}

/// Checks what the guest says about a command.
fn output_of(state: KeptState) -> Result<KeptOutput, GuestError> {
    let bytes = STANDARD.decode(&state.base64).map_err(|error| GuestError::Protocol(error.to_string()))?;
    if state.from.checked_add(bytes.len() as u64) != Some(state.next) {
        return Err(GuestError::Protocol("the output of a kept command has another length".into()));
    }
    let exit_code = state.end.map(exit_code);
    Ok(KeptOutput { bytes, from: state.from, next: state.next, exit_code })
}

fn exit_code(end: KeptEnd) -> i32 {
    if end.timed_out {
        return TIMED_OUT;
    }
    let KeptEnd { exited, exit_code, status, .. } = end;
    exit_of(&EndEvent { exit_code, exited, status, error: None }).0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(base64: &str, from: u64, next: u64, end: Option<KeptEnd>) -> KeptState {
        KeptState { pid: 1, tty: false, age_ms: 0, first: 0, base64: base64.into(), from, next, end }
    }

    #[test]
    fn a_guest_that_lies_about_its_output_is_refused() {
        let good = output_of(state("aGk=", 3, 5, None)).unwrap();
        assert_eq!(good, KeptOutput { bytes: b"hi".to_vec(), from: 3, next: 5, exit_code: None });
        for bad in [state("aGk=", 3, 6, None), state("aGk=", u64::MAX, 1, None), state("?", 0, 0, None)] {
            assert!(output_of(bad).is_err());
        }
    }

    #[test]
    fn ends_have_the_codes_of_a_shell() {
        let end = |exited, exit_code, status: &str, timed_out| KeptEnd {
            exited,
            exit_code,
            status: status.into(),
            timed_out,
        };
        assert_eq!(exit_code(end(true, 7, "exit status 7", false)), 7);
        assert_eq!(exit_code(end(false, -1, "signal: killed", false)), 137);
        assert_eq!(exit_code(end(false, -1, "signal: killed", true)), 124);
    }
}
