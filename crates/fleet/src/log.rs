//! The event log of a data directory, as the fleet and its callers use it.
//!
//! Invariant: an event of an agent goes to that agent's chain, any other event about a Body to that Body's chain; every
//! other event goes to the node's chain.
//! Invariant: a Body has at most one end in the log, whichever processes record it: [`Log::append_end`].
//! Invariant: the decisions of egress proxies that wait in a spool are imported into the log before a caller reads it.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use proto::{
    AgentId, BodyId, ChainHead, ChainId, Draft, Event, EventData, Failure, Kind,
    event_data::{BodyCreated, BodyFailed, BodyRemoved, EventKind},
};
use store::{
    Append, AppendError, ArtifactRef, Artifacts, Durability, EventLog, EventQuery, LogVerdict, SEAL_EVERY,
    Store,
};

use crate::failures;

/// How many times an append is repeated that another process got ahead of.
const CONFLICTS_MAX: usize = 100;

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

    /// The end of a chain.
    pub fn head(&self, chain: &ChainId) -> Result<ChainHead, Failure> {
        self.events_store()?.head(chain).map_err(failures::read)
    }

    /// Appends events to an agent's chain behind the head that the caller expects; `None` if the chain has another
    /// head.
    pub fn append_to_agent(
        &self,
        agent: &AgentId,
        expected: ChainHead,
        drafts: Vec<Draft>,
    ) -> Result<Option<Vec<Event>>, Failure> {
        let append =
            Append::new(ChainId::Agent(agent.clone()), expected, drafts).map_err(failures::append)?;
        match self.events_store()?.append(&append) {
            Ok(events) => Ok(Some(events)),
            Err(AppendError::Conflict { .. }) => Ok(None),
            Err(error) => Err(failures::append(error)),
        }
    }

    /// Appends events at the end of an agent's chain, whatever it is.
    pub fn note_to_agent(&self, agent: &AgentId, drafts: Vec<Draft>) -> Result<Vec<Event>, Failure> {
        let chain = ChainId::Agent(agent.clone());
        self.events_store()?.append_at_end(&chain, drafts).map_err(failures::append)
    }

    /// Stores bytes that are too long for an event.
    pub fn put_artifact(&self, bytes: &[u8]) -> Result<ArtifactRef, Failure> {
        self.artifacts()?.put_artifact(bytes).map_err(|error| {
            Failure::new(Kind::Host, "cannot store content that is too long for an event").because(error)
        })
    }

    /// Reads such bytes, and verifies them.
    pub fn get_artifact(&self, wanted: &ArtifactRef) -> Result<Vec<u8>, Failure> {
        self.artifacts()?.get_artifact(wanted).map_err(|error| {
            Failure::new(Kind::Host, "cannot read content that is too long for an event").because(error)
        })
    }

    /// Appends the end of a Body, `body.removed` or `body.failed`, unless the log has one already. The event `before`, if
    /// given, precedes it in the same transaction and is appended in any case.
    pub(crate) fn append_end(
        &self,
        id: &BodyId,
        before: Option<Draft>,
        end: impl Into<EventData>,
    ) -> Result<(), Failure> {
        let log = self.events_store()?;
        let chain = ChainId::Body(id.clone());
        let end = Draft::about(id, end);
        for _ in 0..CONFLICTS_MAX {
            // The head comes first: an end that another process appends after it makes this append a conflict.
            let head = log.head(&chain).map_err(failures::read)?;
            let end = (!self.has_ended(id)?).then_some(&end);
            let drafts: Vec<Draft> = before.iter().chain(end).cloned().collect();
            if drafts.is_empty() {
                return Ok(());
            }
            let append = Append::new(chain.clone(), head, drafts).map_err(failures::append)?;
            match log.append(&append) {
                Err(AppendError::Conflict { .. }) => {}
                done => return done.map(drop).map_err(failures::append),
            }
        }
        Err(failures::append(AppendError::Busy))
    }

    /// Appends an event about a Body unless `is_recorded` finds it in the log, also if other processes append it at the
    /// same time. Returns the event that was appended.
    pub(crate) fn append_once(
        &self,
        id: &BodyId,
        draft: &Draft,
        is_recorded: impl Fn() -> Result<bool, Failure>,
    ) -> Result<Option<Event>, Failure> {
        let log = self.events_store()?;
        let chain = ChainId::Body(id.clone());
        for _ in 0..CONFLICTS_MAX {
            // The head comes first: an event that another process appends after it makes this append a conflict.
            let head = log.head(&chain).map_err(failures::read)?;
            if is_recorded()? {
                return Ok(None);
            }
            let append = Append::new(chain.clone(), head, vec![draft.clone()]).map_err(failures::append)?;
            match log.append(&append) {
                Err(AppendError::Conflict { .. }) => {}
                done => return done.map(|events| events.into_iter().next()).map_err(failures::append),
            }
        }
        Err(failures::append(AppendError::Busy))
    }

    /// Whether the log has the creation of a Body.
    pub(crate) fn has_begun(&self, id: &BodyId) -> Result<bool, Failure> {
        self.knows(id, BodyCreated::NAMES)
    }

    /// Whether the log has the end of a Body.
    pub(crate) fn has_ended(&self, id: &BodyId) -> Result<bool, Failure> {
        self.knows(id, &end_kinds())
    }

    /// Whether the log has an event of one of these types about a Body.
    fn knows(&self, id: &BodyId, kinds: &[&'static str]) -> Result<bool, Failure> {
        let query = EventQuery { kinds: kinds.to_vec(), limit: 1, ..EventQuery::of_body(id) };
        Ok(!self.read(&query)?.is_empty())
    }

    /// Bodies whose last event is not their end. An event may still follow the end, so some of them have one.
    pub(crate) fn bodies_without_end(&self) -> Result<Vec<BodyId>, Failure> {
        let chains = self.events_store()?.chains_not_ending_in(&end_kinds()).map_err(failures::read)?;
        let body = |chain| match chain {
            ChainId::Body(id) => Some(id),
            _ => None,
        };
        Ok(chains.into_iter().filter_map(body).collect())
    }

    /// Appends an event that is not about a Body.
    pub fn note(&self, data: impl Into<EventData>) -> Result<(), Failure> {
        self.append(Draft::new(data)).map(drop)
    }

    /// Appends an event about a Body that another act does not record.
    pub fn note_about(&self, id: &BodyId, data: impl Into<EventData>) -> Result<(), Failure> {
        self.append(Draft::about(id, data)).map(drop)
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

/// The types of events that end a Body.
fn end_kinds() -> Vec<&'static str> {
    [BodyRemoved::NAMES, BodyFailed::NAMES].concat()
}
