//! Reads the past commands of a Body and their output.
//!
//! Invariant: the cost depends on the number of commands shown, not on the length of the log.

use proto::{
    BodyId, Event, Failure,
    event_data::{EventKind, ExecEnded, ExecExit, ExecOutcome, ExecOutput, ExecStarted},
};
use store::{EventOrder, EventQuery, ExecFilter};

use super::{Execs, recorder};

/// The past commands to show, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogRange {
    /// All commands.
    All,
    /// The newest commands, at most this many.
    Newest(usize),
    /// The commands after a position.
    After {
        /// A [`ExecLogEntry::position`], or 0.
        position: u64,
        /// Most commands to return.
        limit: usize,
    },
}

/// A past command of a Body. Its output may be truncated at the Body's output limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecLogEntry {
    /// Position of the start event in the log.
    pub position: u64,
    /// The start time.
    pub at: String,
    /// The command and its arguments.
    pub argv: Vec<String>,
    /// The exit code, if the command has ended.
    pub code: Option<i32>,
    /// The output: standard output first, then standard error.
    pub output: Vec<u8>,
    /// Whether some of the output is missing.
    pub truncated: bool,
}

impl Execs<'_> {
    /// Finds a Body, or by its whole id one that was removed and is still in the log.
    pub fn find_logged(&self, key: &str) -> Result<BodyId, Failure> {
        self.fleet.find(key).map(|view| view.spec.id).or_else(|failure| {
            let removed: Option<BodyId> = key.parse().ok();
            let log = self.fleet.log();
            let known = |id: &BodyId| log.events(0, Some(id), 1).is_ok_and(|events| !events.is_empty());
            removed.filter(known).ok_or(failure)
        })
    }

    /// Returns past commands of a Body and their output, oldest first.
    pub fn logs(&self, id: &BodyId, range: LogRange) -> Result<Vec<ExecLogEntry>, Failure> {
        let (after, order, limit) = match range {
            LogRange::All => (0, EventOrder::OldestFirst, usize::MAX),
            LogRange::Newest(count) => (0, EventOrder::NewestFirst, count),
            LogRange::After { position, limit } => (position, EventOrder::OldestFirst, limit),
        };
        let kinds = ExecStarted::NAMES.to_vec();
        let exec = Some(ExecFilter::Any);
        let query = EventQuery { after, exec, kinds, order, limit, ..EventQuery::of_body(id) };
        let mut starts = self.fleet.log().read(&query)?;
        if order == EventOrder::NewestFirst {
            starts.reverse();
        }
        let known = starts.iter().filter_map(|event| Some((event, event.data_as::<ExecStarted>()?)));
        known.map(|(event, start)| self.log_entry(id, event, start)).collect()
    }

    /// Finds the newest command with this tag: its `seq`, and whether it has a terminal.
    pub(super) fn find_tagged(&self, id: &BodyId, tag: &str) -> Result<Option<(u64, bool)>, Failure> {
        let exec = Some(ExecFilter::Tag(tag.to_owned()));
        let order = EventOrder::NewestFirst;
        let newest =
            self.fleet.log().read(&EventQuery { exec, order, limit: 1, ..EventQuery::of_body(id) })?;
        let start = newest.first().and_then(|event| Some((event.seq, event.data_as::<ExecStarted>()?.tty)));
        Ok(start)
    }

    fn log_entry(&self, id: &BodyId, event: &Event, start: ExecStarted) -> Result<ExecLogEntry, Failure> {
        let exit = self.exit_of(id, event.seq)?;
        let artifacts = self.fleet.log().artifacts()?;
        let read = |output: Option<&ExecOutput>| {
            output.map_or((Vec::new(), false), |output| recorder::read_back(artifacts, output))
        };
        let (mut output, cut_out) = read(exit.as_ref().and_then(|exit| exit.stdout.as_ref()));
        let (errors, cut_err) = read(exit.as_ref().and_then(|exit| exit.stderr.as_ref()));
        output.extend(errors);
        Ok(ExecLogEntry {
            position: event.pos,
            at: event.at.clone(),
            argv: start.argv,
            code: exit.map(|exit| exit.code),
            output,
            truncated: cut_out || cut_err,
        })
    }

    fn exit_of(&self, id: &BodyId, exec: u64) -> Result<Option<ExecExit>, Failure> {
        let kinds = ExecEnded::NAMES.to_vec();
        let ended =
            self.fleet.log().read(&EventQuery { kinds, limit: 1, ..EventQuery::of_exec(id, exec) })?;
        let ended = ended.first().and_then(Event::data_as::<ExecEnded>);
        Ok(ended.and_then(|ended| match ended.outcome {
            ExecOutcome::Ended(exit) => Some(exit),
            ExecOutcome::NotStarted { .. } => None,
        }))
    }
}
