//! Reading the log.

use proto::{
    BodyId, Draft, Event, EventData, Failure,
    event_data::{ExecEnded, ExecStarted},
};
use serde::Serialize;
use store::EventQuery;

use crate::{Fleet, LogRange, failures};

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

    /// The starts of commands of a Body, oldest first.
    pub(crate) fn exec_starts(
        &self,
        id: &BodyId,
        range: LogRange,
    ) -> Result<Vec<(Event, ExecStarted)>, Failure> {
        let events = self.read_events(&EventQuery { after: 0, body: Some(id.clone()), limit: usize::MAX })?;
        let starts = events.into_iter().filter_map(|event| {
            let start = event.data_as::<ExecStarted>()?;
            Some((event, start))
        });
        let mut starts: Vec<_> = starts.collect();
        match range {
            LogRange::All => {}
            LogRange::Newest(count) => drop(starts.drain(..starts.len().saturating_sub(count))),
            LogRange::After { position, limit } => {
                starts.retain(|(event, _)| event.seq > position);
                starts.truncate(limit);
            }
        }
        Ok(starts)
    }

    pub(crate) fn find_exec_end(&self, id: &BodyId, exec: u64) -> Result<Option<ExecEnded>, Failure> {
        let events =
            self.read_events(&EventQuery { after: exec, body: Some(id.clone()), limit: usize::MAX })?;
        Ok(events.iter().filter_map(Event::data_as::<ExecEnded>).find(|end| end.exec == exec))
    }

    pub(crate) fn find_tagged_exec(&self, id: &BodyId, tag: &str) -> Result<Option<(u64, bool)>, Failure> {
        let starts = self.exec_starts(id, LogRange::All)?;
        let found = starts.into_iter().rev().find(|(_, start)| start.tag.as_deref() == Some(tag));
        Ok(found.map(|(event, start)| (event.seq, start.tty)))
    }
}
