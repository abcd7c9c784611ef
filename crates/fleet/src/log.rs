//! The event log of a data directory, as the fleet and its callers use it.
//!
//! Invariant: an event about a Body goes to that Body's chain; every other event goes to the node's.
//! Invariant: decisions of egress proxies that wait in a spool are taken into the log before a caller reads it.

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
    /// Opened when it is first needed.
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

    /// Opens the log, and creates it where there is none.
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

    /// Output that is too long for an event.
    pub(crate) fn artifacts(&self) -> Result<&dyn Artifacts, Failure> {
        Ok(self.store()?)
    }

    /// Appends an event to the chain of its Body, or of the node.
    pub(crate) fn append(&self, draft: Draft) -> Result<Event, Failure> {
        self.append_all([draft])
    }

    /// Appends events about one Body, or all about none, so that they become visible together; gives the last one.
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

    /// Appends an event that is about no Body.
    pub fn note(&self, data: impl Into<EventData>) -> Result<(), Failure> {
        self.append(Draft::new(data)).map(drop)
    }

    /// Events behind position `after`, in the order of storing, at most `limit`.
    pub fn events(&self, after: u64, body: Option<&BodyId>, limit: usize) -> Result<Vec<Event>, Failure> {
        self.follow(after, body, limit, Duration::ZERO)
    }

    /// Events behind position `after`, in the order of storing, at most `limit`. Where there are none yet, waits for
    /// them, at most so long.
    pub fn follow(
        &self,
        after: u64,
        body: Option<&BodyId>,
        limit: usize,
        wait: Duration,
    ) -> Result<Vec<Event>, Failure> {
        // Where the log cannot be written, the lines wait in their spool, and the log can still be read.
        let _ = match body {
            Some(body) => self.drain_egress(body),
            None => self.drain_all_egress(),
        };
        let query = EventQuery { after, body: body.cloned(), limit, ..EventQuery::default() };
        self.events_store()?.follow(&query, wait).map_err(failures::read)
    }

    /// Events that are in the log already. The cost follows the events found where the query names a Body.
    pub fn read(&self, query: &EventQuery) -> Result<Vec<Event>, Failure> {
        self.events_store()?.read(query).map_err(failures::read)
    }

    /// The position of the newest event.
    pub fn last_pos(&self) -> Result<u64, Failure> {
        self.events_store()?.last_pos().map_err(failures::read)
    }

    /// Seals the chains that changed, if the last seal is old. A process that stays calls this now and then.
    pub fn seal(&self) -> Result<(), Failure> {
        self.events_store()?.seal(SEAL_EVERY).map(drop).map_err(failures::append)
    }

    /// Looks at the whole log.
    pub fn verify(&self) -> Result<LogVerdict, Failure> {
        self.events_store()?.verify().map_err(failures::read)
    }

    /// Does what makes the next open cheap, if much was written.
    pub(crate) fn tidy(&self) -> Result<(), Failure> {
        self.store()?.tidy();
        Ok(())
    }
}
