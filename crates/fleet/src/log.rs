//! The event log of a data directory, as the fleet and its callers use it.
//!
//! Invariant: an event about a Body goes to that Body's chain; every other event goes to the node's chain.
//! Invariant: the decisions of egress proxies that wait in a spool are imported into the log before a caller reads it.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use proto::{BodyId, ChainId, Draft, Event, EventData, Failure, Kind};
use store::{Artifacts, Durability, EventLog, EventQuery, LogVerdict, SEAL_EVERY, Store};

use crate::failures;

/// The event log and the artifacts beside it.
#[derive(Debug)]
pub struct Log {
    data: PathBuf,
    durability: Durability,
    /// The store, opened at first use.
    store: OnceLock<Store>,
}

impl Log {
    pub(crate) fn new(data: &Path, durability: Durability) -> Self {
        Self { data: data.to_owned(), durability, store: OnceLock::new() }
    }

    /// The data directory.
    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    /// Opens the log, and creates it if there is none.
    pub(crate) fn open(&self) -> Result<(), Failure> {
        self.store().map(drop)
    }

    fn store(&self) -> Result<&Store, Failure> {
        if let Some(store) = self.store.get() {
            return Ok(store);
        }
        let opened = Store::open(&self.data, self.durability).map_err(failures::open)?;
        Ok(self.store.get_or_init(|| opened))
    }

    fn events_store(&self) -> Result<&dyn EventLog, Failure> {
        Ok(self.store()?)
    }

    /// The store of artifacts, for output that is too long for an event.
    pub(crate) fn artifacts(&self) -> Result<&dyn Artifacts, Failure> {
        Ok(self.store()?)
    }

    /// Appends an event to the chain of its Body, or of the node.
    pub(crate) fn append(&self, draft: Draft) -> Result<Event, Failure> {
        self.append_all([draft])
    }

    /// Appends events, all about the same Body or all about none, in one transaction. Returns the last one.
    pub(crate) fn append_all(&self, drafts: impl IntoIterator<Item = Draft>) -> Result<Event, Failure> {
        let drafts: Vec<Draft> = drafts.into_iter().collect();
        let body = drafts.first().and_then(|draft| draft.body.clone());
        if drafts.iter().any(|draft| draft.body != body) {
            return Err(Failure::new(Kind::Internal, "events of several Bodies cannot be appended together"));
        }
        let log = self.events_store()?;
        let chain = match body {
            Some(body) => ChainId::Body(body),
            None => ChainId::Node(log.node().map_err(failures::read)?),
        };
        let written = log.append_at_end(&chain, drafts).map_err(failures::append)?;
        written
            .into_iter()
            .next_back()
            .ok_or_else(|| Failure::new(Kind::Internal, "an event was not written"))
    }

    /// Appends an event that is not about a Body.
    pub fn note(&self, data: impl Into<EventData>) -> Result<(), Failure> {
        self.append(Draft::new(data)).map(drop)
    }

    /// Returns at most `limit` events after position `after`, in the order in which they were stored.
    pub fn events(&self, after: u64, body: Option<&BodyId>, limit: usize) -> Result<Vec<Event>, Failure> {
        self.follow(after, body, limit, Duration::ZERO)
    }

    /// Returns at most `limit` events after position `after`, in the order in which they were stored. If there are
    /// none yet, waits for them up to the given time.
    pub fn follow(
        &self,
        after: u64,
        body: Option<&BodyId>,
        limit: usize,
        wait: Duration,
    ) -> Result<Vec<Event>, Failure> {
        // If the log cannot be written, the decisions stay in their spool, and reading the log still works.
        let _ = match body {
            Some(body) => self.drain_egress(body),
            None => self.drain_all_egress(),
        };
        let query = EventQuery { after, body: body.cloned(), limit, ..EventQuery::default() };
        self.events_store()?.follow(&query, wait).map_err(failures::read)
    }

    /// Returns events that are in the log. For one Body, the cost depends on the number of events found.
    pub fn read(&self, query: &EventQuery) -> Result<Vec<Event>, Failure> {
        self.events_store()?.read(query).map_err(failures::read)
    }

    /// The position of the newest event.
    pub fn last_pos(&self) -> Result<u64, Failure> {
        self.events_store()?.last_pos().map_err(failures::read)
    }

    /// Seals the changed chains if the last seal is old. A long-lived process calls this from time to time.
    pub fn seal(&self) -> Result<(), Failure> {
        self.events_store()?.seal(SEAL_EVERY).map(drop).map_err(failures::append)
    }

    /// Verifies the whole log.
    pub fn verify(&self) -> Result<LogVerdict, Failure> {
        self.events_store()?.verify().map_err(failures::read)
    }

    /// Writes the WAL back into the database if it has grown, so that the next open is cheap.
    pub(crate) fn tidy(&self) -> Result<(), Failure> {
        self.store()?.tidy();
        Ok(())
    }
}
