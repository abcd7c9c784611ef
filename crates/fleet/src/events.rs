//! The commands of a Body and their output, from the log.

use crate::Fleet;
use proto::{
    BodyId, Event, Failure,
    event_data::{ExecEnded, ExecOutcome, ExecOutput, ExecStarted},
};

/// One exec of a Body's past; its output may be cut at the Body's output limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecLogEntry {
    /// When it started.
    pub at: String,
    /// The command.
    pub argv: Vec<String>,
    /// How it ended, if it did.
    pub code: Option<i32>,
    /// What it said, standard output first.
    pub output: Vec<u8>,
    /// Whether some of that is missing.
    pub truncated: bool,
}

impl Fleet {
    /// What was run in a Body and what it said.
    pub fn logs(&self, id: &BodyId) -> Result<Vec<ExecLogEntry>, Failure> {
        let events = self.log.events(0, Some(id), usize::MAX)?;
        let ended: Vec<ExecEnded> = events.iter().filter_map(Event::data_as).collect();
        let started = events.iter().filter_map(|event| Some((event, event.data_as::<ExecStarted>()?)));
        Ok(started
            .map(|(event, start)| {
                let end = ended.iter().find(|end| end.exec == event.seq);
                self.log_entry(&event.at, start, end.map(|end| &end.outcome))
            })
            .collect())
    }

    fn log_entry(&self, at: &str, start: ExecStarted, outcome: Option<&ExecOutcome>) -> ExecLogEntry {
        let exit = match outcome {
            Some(ExecOutcome::Ended(exit)) => Some(exit),
            Some(ExecOutcome::NotStarted { .. }) | None => None,
        };
        let read = |output: Option<&ExecOutput>| {
            output.zip(self.log.artifacts().ok()).map_or((Vec::new(), false), |(output, store)| {
                crate::exec::recorder::read_back(store, output)
            })
        };
        let (mut output, cut_out) = read(exit.and_then(|exit| exit.stdout.as_ref()));
        let (errors, cut_err) = read(exit.and_then(|exit| exit.stderr.as_ref()));
        output.extend(errors);
        ExecLogEntry {
            at: at.to_owned(),
            argv: start.argv,
            code: exit.map(|exit| exit.code),
            output,
            truncated: cut_out || cut_err,
        }
    }
}
