//! Queries for events.

use proto::{BodyId, ChainId};

/// Which events to read. All given conditions must be true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventQuery {
    /// Only events after this position; 0 is before the first.
    pub after: u64,
    /// Only events of this chain.
    pub chain: Option<ChainId>,
    /// Only events about this Body, in any chain.
    pub body: Option<BodyId>,
    /// Only events of one command, or of all commands.
    pub exec: Option<ExecFilter>,
    /// Only events of these types; empty means all types.
    /// [`EventKind::NAMES`](proto::event_data::EventKind::NAMES) has all names of a kind, including earlier
    /// ones.
    pub kinds: Vec<&'static str>,
    /// The order of the events.
    pub order: EventOrder,
    /// The largest number of events.
    pub limit: usize,
}

/// Which commands' events to read: `exec.started`, `exec.ended` and `exec.detached`. The store reads them
/// through an index when the query names a Body; the cost depends on the number of events found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecFilter {
    /// All commands.
    Any,
    /// The command whose `exec.started` has this `seq`.
    Number(u64),
    /// The `exec.started` events with this tag.
    Tag(String),
}

/// The order of the events of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EventOrder {
    /// In the order of storing.
    #[default]
    OldestFirst,
    /// The reverse of the order of storing: with a limit, the newest events.
    NewestFirst,
}

impl Default for EventQuery {
    fn default() -> Self {
        Self {
            after: 0,
            chain: None,
            body: None,
            exec: None,
            kinds: Vec::new(),
            order: EventOrder::OldestFirst,
            limit: usize::MAX,
        }
    }
}

impl EventQuery {
    /// All events about a Body.
    pub fn of_body(body: &BodyId) -> Self {
        Self { body: Some(body.clone()), ..Self::default() }
    }

    /// All events of a chain.
    pub fn of_chain(chain: &ChainId) -> Self {
        Self { chain: Some(chain.clone()), ..Self::default() }
    }

    /// The events of one command of a Body.
    pub fn of_exec(body: &BodyId, exec: u64) -> Self {
        Self { exec: Some(ExecFilter::Number(exec)), ..Self::of_body(body) }
    }
}
