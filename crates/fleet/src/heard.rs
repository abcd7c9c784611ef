//! Commands that are started over the guest's own protocol, by whoever has a Body's token: the log has them too.
//!
//! Whoever passes such a request on says so before, and says how it ended if that was to be heard. What such a command
//! wrote is not recorded: it belongs to whoever listens.

use std::time::Duration;

use proto::{
    BodyId, Draft, EventData, Failure,
    event_data::{ExecDetached, ExecEnded, ExecExit, ExecOutcome, ExecStarted, StartedBy},
    wire::process::{StartRequest, process_event::EndEvent},
};

use crate::{
    Fleet,
    exec::{TIMED_OUT, exit_of},
};

/// What was heard of a command's end.
#[derive(Debug, Clone, PartialEq)]
pub enum ExecReport {
    /// It ended.
    End(EndEvent),
    /// It was killed at its timeout.
    TimedOut,
    /// The guest did not start it, for that reason.
    Refused(String),
    /// Whoever listened went away; it may run on.
    Nothing,
}

impl Fleet {
    /// Writes down a command that is about to be started; gives the place of that event.
    pub fn note_started(
        &self,
        id: &BodyId,
        start: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<u64, Failure> {
        let process = start.process.clone().unwrap_or_default();
        let argv: Vec<String> = std::iter::once(process.cmd).chain(process.args).collect();
        let mut names: Vec<String> = process.envs.into_keys().collect();
        names.sort();
        let data = ExecStarted {
            argv,
            user: user.map(str::to_owned),
            workdir: process.cwd,
            tty: start.pty.is_some(),
            env: names,
            timeout_ms: timeout.map(|timeout| timeout.as_millis() as u64),
            tag: start.tag.clone(),
            by: Some(StartedBy::Envd),
            detached: false,
        };
        Ok(self.append(Draft::about(id, data))?.seq)
    }

    /// Writes down what was heard of its end.
    pub fn note_ended(
        &self,
        id: &BodyId,
        exec: u64,
        heard: &ExecReport,
        took: Duration,
    ) -> Result<(), Failure> {
        let over = |code: i32, signal: Option<i32>, timed_out: bool| {
            let exit = ExecExit {
                code,
                signal,
                out_of_memory: None,
                timed_out,
                body_end: None,
                duration_ms: took.as_millis() as u64,
                stdout: None,
                stderr: None,
            };
            EventData::from(ExecEnded { exec, outcome: ExecOutcome::Ended(exit) })
        };
        let data = match heard {
            ExecReport::End(end) => {
                let (code, signal) = exit_of(end);
                over(code, signal, false)
            }
            ExecReport::TimedOut => over(TIMED_OUT, None, true),
            ExecReport::Refused(why) => {
                ExecEnded { exec, outcome: ExecOutcome::NotStarted { error: why.clone() } }.into()
            }
            ExecReport::Nothing => ExecDetached { exec }.into(),
        };
        self.write(id, data)
    }
}
