//! Reading the log.

use proto::{BodyId, Draft, Event, Failure};
use serde::Serialize;
use serde_json::Value;
use store::Query;

use crate::{Fleet, failures, record};

/// What a look at the whole log found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "log", rename_all = "lowercase")]
pub enum Verdict {
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
pub struct LogEntry {
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
        self.store()?.events(&Query { after, body: body.cloned(), limit }).map_err(failures::read)
    }

    /// Appends an event that is about no Body.
    pub fn note(&self, kind: &str, data: Value) -> Result<(), Failure> {
        self.append(Draft { kind: kind.to_owned(), body: None, brain: None, data }).map(drop)
    }

    /// Place of the newest event.
    pub fn last_event(&self) -> Result<u64, Failure> {
        self.store()?.last_seq().map_err(failures::read)
    }

    /// Looks at the whole log.
    pub fn verify_events(&self) -> Result<Verdict, Failure> {
        Ok(match self.store()?.verify().map_err(failures::read)? {
            store::Verdict::Whole { events, head } => Verdict::Whole { events, head },
            store::Verdict::Broken { seq, why } => Verdict::Broken { seq, why: why.to_string() },
        })
    }

    /// What was run in a Body and what it said.
    pub fn logs(&self, id: &BodyId) -> Result<Vec<LogEntry>, Failure> {
        let events = self.events(0, Some(id), usize::MAX)?;
        let ended =
            |seq: u64| events.iter().find(|event| event.kind == "exec.ended" && event.data["exec"] == seq);
        let started = events.iter().filter(|event| event.kind == "exec.started");
        Ok(started.map(|start| self.log_entry(start, ended(start.seq))).collect())
    }

    fn log_entry(&self, start: &Event, ended: Option<&Event>) -> LogEntry {
        let argv = start.data["argv"].as_array().map(Vec::as_slice).unwrap_or_default();
        let said = |stream: &str| {
            ended
                .zip(self.store.get())
                .map_or((Vec::new(), false), |(end, store)| record::read_back(store, &end.data[stream]))
        };
        let ((mut output, cut_out), (errors, cut_err)) = (said("stdout"), said("stderr"));
        output.extend(errors);
        LogEntry {
            at: start.at.clone(),
            argv: argv.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            code: ended.and_then(|end| end.data["code"].as_i64()).map(|code| code as i32),
            output,
            truncated: cut_out || cut_err,
        }
    }
}
