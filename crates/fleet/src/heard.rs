//! Commands that are started over the guest's own protocol, by whoever has a Body's token: the log has them too.
//!
//! Whoever passes such a request on says so before, and says how it ended if that was to be heard. What such a command
//! wrote is not recorded: it belongs to whoever listens.

use std::time::Duration;

use proto::{
    BodyId, Draft, Failure,
    wire::process::{StartRequest, process_event::EndEvent},
};
use serde_json::{Value, json};

use crate::{
    Fleet,
    exec::{TIMED_OUT, exit_of},
};

/// What was heard of a command's end.
#[derive(Debug, Clone, PartialEq)]
pub enum Heard {
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
        let mut data = json!({
            "argv": argv, "user": user, "workdir": process.cwd, "tty": start.pty.is_some(), "env": names,
            "timeout_ms": timeout.map(|timeout| timeout.as_millis() as u64), "by": "envd",
        });
        if let Some(tag) = &start.tag {
            data["tag"] = tag.as_str().into();
        }
        Ok(self.append(Draft::body("exec.started", id, data))?.seq)
    }

    /// Writes down what was heard of its end.
    pub fn note_ended(&self, id: &BodyId, exec: u64, heard: &Heard, took: Duration) -> Result<(), Failure> {
        let over = |code: i32, signal: Option<i32>, timed_out: bool| -> (&str, Value) {
            (
                "exec.ended",
                json!({ "exec": exec, "code": code, "signal": signal, "timed_out": timed_out, "duration_ms": took.as_millis() as u64 }),
            )
        };
        let (kind, data) = match heard {
            Heard::End(end) => {
                let (code, signal) = exit_of(end);
                over(code, signal, false)
            }
            Heard::TimedOut => over(TIMED_OUT, None, true),
            Heard::Refused(why) => ("exec.ended", json!({ "exec": exec, "error": why })),
            Heard::Nothing => ("exec.left", json!({ "exec": exec })),
        };
        self.write(kind, id, data)
    }
}
