//! The commands of a Body's past, and their output.
//!
//! Invariant: the cost follows the commands that are shown, not the length of the log.

use proto::{
    BodyId, Event, Failure,
    event_data::{EventKind, ExecEnded, ExecExit, ExecOutcome, ExecOutput, ExecStarted},
};
use store::{EventOrder, EventQuery, ExecFilter};

use super::{Execs, recorder};

/// Which commands of a Body to show, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogRange {
    /// All of them.
    All,
    /// The newest, at most so many.
    Newest(usize),
    /// Those behind a position, at most so many.
    After {
        /// A [`ExecLogEntry::position`], or 0.
        position: u64,
        /// At most so many.
        limit: usize,
    },
}

/// One command of a Body's past; its output may be cut at the Body's output limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecLogEntry {
    /// Position of its start in the log.
    pub position: u64,
    /// When it started.
    pub at: String,
    /// The command.
    pub argv: Vec<String>,
    /// Its exit code, if it ended.
    pub code: Option<i32>,
    /// Its output, standard output first.
    pub output: Vec<u8>,
    /// Whether some of that is missing.
    pub truncated: bool,
}

impl Execs<'_> {
    /// The commands of a Body and their output, oldest first.
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

    /// The `seq` of the newest command with that tag, and whether it has a terminal.
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
