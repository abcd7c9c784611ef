//! The interface of the event log: [`EventLog`], its requests and its results.
//!
//! The log consists of many chains: one for each Body, each agent and each node. An append names its chain
//! and the head that it expects there; all of its events become visible together. All events of a store have
//! a position in the order of storing, so that a reader can follow the chains as one feed.
//!
//! Invariant: an [`Append`] that was stored once is not stored again, however often its caller retries it.
//! Invariant: the node's chain seals the others: [`LogSealed`](proto::event_data::LogSealed) names their
//! heads, so that the log reveals a chain that is missing or lost its end.
//! Absent on purpose: an order between chains that a hash proves. `pos` is the order in which one store saw
//! the events; the hashes prove each chain, and the seals prove that the chains existed.

use std::{error::Error, fmt, time::Duration};

use proto::{ChainHead, ChainId, Draft, Event, NodeId};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::{clock, query::EventQuery};

/// The longest append: all of its events as JSON. It fits into one message of a message broker.
pub const APPEND_LEN_MAX: usize = 768 * 1024;
/// The deepest nesting of an event's data. JSON parsers stop at 128, and the event itself adds levels.
pub const DEPTH_MAX: usize = 100;
/// The longest type and the longest Brain, in bytes.
pub const LABEL_LEN_MAX: usize = 1024;
/// How old the last seal may be before an append writes the next one.
pub const SEAL_EVERY: Duration = Duration::from_secs(60);
/// How many times [`EventLog::append_at_end`] retries when another writer was faster.
const CONFLICTS_MAX: usize = 100;

/// A log of events in many chains.
pub trait EventLog: Send + Sync {
    /// The node whose chain has the seals and the events about no Body and no agent.
    fn node(&self) -> Result<NodeId, ReadError>;

    /// The end of a chain. The next append to it must expect this head.
    fn head(&self, chain: &ChainId) -> Result<ChainHead, ReadError>;

    /// Stores all events of an append, or none of them. An append that is already stored returns its first
    /// result; an append that expects another head than the chain has is an [`AppendError::Conflict`].
    fn append(&self, append: &Append) -> Result<Vec<Event>, AppendError>;

    /// Appends after the last event of a chain, whatever it is.
    fn append_at_end(&self, chain: &ChainId, drafts: Vec<Draft>) -> Result<Vec<Event>, AppendError> {
        let mut expected = self.head(chain).map_err(|error| AppendError::Backend(error.into()))?;
        for _ in 0..CONFLICTS_MAX {
            let append = Append::new(chain.clone(), expected, drafts.clone())?;
            match self.append(&append) {
                Err(AppendError::Conflict { head, .. }) => expected = head,
                done => return done,
            }
        }
        Err(AppendError::Busy)
    }

    /// The events of a query. This does not check their hashes; [`EventLog::verify`] does.
    fn read(&self, query: &EventQuery) -> Result<Vec<Event>, ReadError>;

    /// The next events of a query. If there are none yet, waits for them, at most for `wait`.
    fn follow(&self, query: &EventQuery, wait: Duration) -> Result<Vec<Event>, ReadError>;

    /// The chains whose last event is of none of these types. The cost depends on the number of chains.
    fn chains_not_ending_in(&self, kinds: &[&str]) -> Result<Vec<ChainId>, ReadError>;

    /// The position of the last event of the log; 0 in an empty log.
    fn last_pos(&self) -> Result<u64, ReadError>;

    /// Seals all chains that changed since the last seal, if that is at least `age_min` old. Returns whether
    /// there was something to seal. Appends also seal, with [`SEAL_EVERY`]; a long-lived process calls this
    /// for an idle log.
    fn seal(&self, age_min: Duration) -> Result<bool, AppendError>;

    /// Reads the whole log as of one moment, and checks every chain against its hashes and against the seals.
    fn verify(&self) -> Result<LogVerdict, ReadError>;
}

/// One append: events that become visible together, at one place of one chain.
///
/// Its events have their time and hash from the beginning, so a retry stores the same bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Append {
    chain: ChainId,
    expected: ChainHead,
    events: Vec<Event>,
}

impl Append {
    /// Places drafts after the head that the caller expects the chain to have.
    pub fn new(chain: ChainId, expected: ChainHead, drafts: Vec<Draft>) -> Result<Self, AppendError> {
        let mut head = expected.clone();
        let mut events = Vec::with_capacity(drafts.len());
        for draft in check(&chain, drafts)? {
            let event = Event::place(draft, chain.clone(), &head, clock::now());
            head = event.head();
            events.push(event);
        }
        Ok(Self { chain, expected, events })
    }

    /// The chain.
    pub fn chain(&self) -> &ChainId {
        &self.chain
    }

    /// The head that the chain must have.
    pub fn expected(&self) -> &ChainHead {
        &self.expected
    }

    /// The events, in their order; their `pos` is 0.
    pub fn events(&self) -> &[Event] {
        &self.events
    }
}

/// Why events could not be appended. None of them was stored.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// Another writer was faster, or the caller's head is outdated.
    #[error("chain {chain} ends at {head}, and not where the append expects; the event was not stored")]
    Conflict {
        /// The chain.
        chain: ChainId,
        /// Its actual head.
        head: ChainHead,
    },
    /// The disk is full.
    #[error("the disk of the event log is full; the event was not stored")]
    DiskFull,
    /// Another process kept the write lock, or was faster each time.
    #[error("the event log stayed locked by another process; the event was not stored")]
    Busy,
    /// The log was opened for reading only.
    #[error("the event log was opened for reading only")]
    ReadOnly,
    /// The chain belongs to an earlier version.
    #[error("the chain of an earlier version takes no new events")]
    Closed,
    /// An event exceeds a limit.
    #[error("the {field} of event {kind:?} is {found}, and {max} is the most")]
    TooLarge {
        /// The type of the event, shortened.
        kind: String,
        /// The part that is too large, with its unit.
        field: &'static str,
        /// Its size.
        found: usize,
        /// The largest size.
        max: usize,
    },
    /// The log cannot be continued.
    #[error("the event log is damaged: {0}; the event was not stored")]
    Damaged(String),
    /// Another failure of the store.
    #[error("cannot append to the event log")]
    Backend(#[source] Box<dyn Error + Send + Sync>),
}

/// Why events could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// One event cannot be read.
    #[error("the event at position {pos} cannot be read: {why}")]
    Event {
        /// Its position.
        pos: u64,
        /// The reason.
        why: String,
    },
    /// The log is damaged.
    #[error("the event log is damaged: {0}")]
    Damaged(String),
    /// Another failure of the store.
    #[error("cannot read the event log")]
    Backend(#[source] Box<dyn Error + Send + Sync>),
}

/// The result of verifying the whole log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "log", rename_all = "lowercase")]
pub enum LogVerdict {
    /// The whole log is as it was written.
    Whole {
        /// The number of events.
        events: u64,
        /// The number of chains.
        chains: u64,
        /// Hash of the last event of the node's chain. Its seals name the heads of all other chains.
        head: String,
    },
    /// The log is damaged.
    Broken {
        /// The chain; none where the damage belongs to no chain.
        #[serde(skip_serializing_if = "Option::is_none")]
        chain: Option<String>,
        /// The first wrong sequence number in the chain.
        #[serde(skip_serializing_if = "Option::is_none")]
        seq: Option<u64>,
        /// The kind of damage.
        why: ChainBreach,
    },
}

/// How a log is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChainBreach {
    /// The event is missing.
    Missing,
    /// Another event is in its place.
    Misplaced {
        /// The sequence number of that event.
        found: u64,
    },
    /// The event is not the one that was hashed.
    Changed,
    /// The event does not follow the one before it.
    Unchained,
    /// The row is not a valid event.
    Unreadable(String),
    /// The event precedes an earlier one of its chain in the order of storing.
    Position,
    /// The index columns of the event do not match the event.
    Index,
    /// The head does not name the last event of the chain.
    Head,
    /// A seal names the chain, and the chain is missing.
    Vanished {
        /// The sequence number of the seal in the node's chain.
        seal: u64,
        /// The sequence number of the chain's end at that time.
        sealed: u64,
    },
    /// A seal names an event after the chain's last one.
    Cut {
        /// The sequence number of the seal in the node's chain.
        seal: u64,
        /// The sequence number of the chain's end at that time.
        sealed: u64,
    },
    /// The event has another hash than the seal names.
    Resealed {
        /// The sequence number of the seal in the node's chain.
        seal: u64,
    },
    /// The last seal is missing.
    Seal,
    /// The log has more or fewer events than were stored.
    Count {
        /// The number of events in the log.
        found: u64,
        /// The number of events that were stored.
        stored: u64,
    },
    /// The tables differ from ours.
    Schema,
    /// The database itself is damaged.
    Database(String),
}

impl fmt::Display for ChainBreach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChainBreach::Missing => f.write_str("the event is missing"),
            ChainBreach::Misplaced { found } => write!(f, "event {found} stands in its place"),
            ChainBreach::Changed => f.write_str("the event was changed"),
            ChainBreach::Unchained => f.write_str("the event does not follow the one before it"),
            ChainBreach::Unreadable(why) => write!(f, "the event cannot be read: {why}"),
            ChainBreach::Position => f.write_str("the event was moved in the order of storing"),
            ChainBreach::Index => f.write_str("the columns by which the event is found were changed"),
            ChainBreach::Head => f.write_str("the head of the chain does not name its last event"),
            ChainBreach::Vanished { seal, sealed } => {
                write!(f, "the whole chain is missing; seal {seal} of the node names its event {sealed}")
            }
            ChainBreach::Cut { seal, sealed } => {
                write!(f, "the end of the chain is missing; seal {seal} of the node names its event {sealed}")
            }
            ChainBreach::Resealed { seal } => {
                write!(f, "the event is not the one that seal {seal} of the node names")
            }
            ChainBreach::Seal => f.write_str("the last seal of the log is missing"),
            ChainBreach::Count { found, stored } => {
                write!(f, "there are {found} events, and {stored} were stored")
            }
            ChainBreach::Schema => f.write_str("the tables of the log were changed"),
            ChainBreach::Database(why) => write!(f, "the database is damaged: {why}"),
        }
    }
}

impl Serialize for ChainBreach {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Checks that this chain accepts these drafts together.
pub(crate) fn check(chain: &ChainId, drafts: Vec<Draft>) -> Result<Vec<Draft>, AppendError> {
    if *chain == ChainId::OneChain {
        return Err(AppendError::Closed);
    }
    let mut len = 0;
    for draft in &drafts {
        let within = |field, found, max| {
            let kind = || draft.kind.chars().take(64).collect();
            if found <= max { Ok(()) } else { Err(AppendError::TooLarge { kind: kind(), field, found, max }) }
        };
        within("length of the type in bytes", draft.kind.len(), LABEL_LEN_MAX)?;
        within("length of the brain in bytes", draft.brain.as_ref().map_or(0, String::len), LABEL_LEN_MAX)?;
        within("depth of the data", depth(&draft.data, 0), DEPTH_MAX)?;
        len += draft_len(draft);
        within("length of the append in bytes", len, APPEND_LEN_MAX)?;
    }
    Ok(drafts)
}

/// The largest size of an event as JSON: its data, its labels with every character escaped, and the envelope.
fn draft_len(draft: &Draft) -> usize {
    const ENVELOPE_LEN: usize = 512;
    let labels = draft.kind.len() + draft.brain.as_ref().map_or(0, String::len);
    draft.data.to_string().len() + 6 * labels + ENVELOPE_LEN
}

/// The nesting depth of a value; stops at the first level that is too deep.
fn depth(value: &Value, around: usize) -> usize {
    if around > DEPTH_MAX {
        return around;
    }
    match value {
        Value::Array(items) => items.iter().map(|item| depth(item, around + 1)).max().unwrap_or(around + 1),
        Value::Object(items) => {
            items.values().map(|item| depth(item, around + 1)).max().unwrap_or(around + 1)
        }
        _ => around,
    }
}
