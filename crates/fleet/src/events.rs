//! Reading the log.

use proto::{
    BodyId, Draft, Event, EventData, Failure,
    event_data::{ExecEnded, ExecOutcome, ExecOutput, ExecStarted},
};
use serde::Serialize;
use store::EventQuery;

use crate::{Fleet, failures};

/// What a look at the whole log found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "log", rename_all = "lowercase")]
pub enum LogVerdict {
    /// It is as it was written.
    Whole {
        /// How many events.
        events: u64,
        /// Hash of the last one.
        head: String,
    },
    /// It is not.
    Broken {
        /// The first place that is wrong.
        seq: u64,
        /// What is wrong there.
        why: String,
    },
}

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
    /// Events after `after`, oldest first, at most `limit`.
    pub fn events(&self, after: u64, body: Option<&BodyId>, limit: usize) -> Result<Vec<Event>, Failure> {
        // Where the log cannot be written, the lines wait in their spool, and the log can still be read.
        let _ = match body {
            Some(body) => self.egress().drain(body),
            None => self.egress().drain_all(),
        };
        self.read_events(&EventQuery { after, body: body.cloned(), limit })
    }

    /// Events that are in the log already.
    pub(crate) fn read_events(&self, query: &EventQuery) -> Result<Vec<Event>, Failure> {
        self.store()?.events(query).map_err(failures::read)
    }

    /// Appends an event that is about no Body.
    pub fn note(&self, data: impl Into<EventData>) -> Result<(), Failure> {
        self.append(Draft::new(data)).map(drop)
    }

    /// Place of the newest event.
    pub fn last_event(&self) -> Result<u64, Failure> {
        self.store()?.last_seq().map_err(failures::read)
    }

    /// Looks at the whole log.
    pub fn verify_events(&self) -> Result<LogVerdict, Failure> {
        Ok(match self.store()?.verify().map_err(failures::read)? {
            store::ChainVerdict::Whole { events, head } => LogVerdict::Whole { events, head },
            store::ChainVerdict::Broken { seq, why } => LogVerdict::Broken { seq, why: why.to_string() },
        })
    }

    /// What was run in a Body and what it said.
    pub fn logs(&self, id: &BodyId) -> Result<Vec<ExecLogEntry>, Failure> {
        let events = self.events(0, Some(id), usize::MAX)?;
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
            output.zip(self.store.get()).map_or((Vec::new(), false), |(output, store)| {
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
