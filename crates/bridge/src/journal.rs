//! The chain of an agent in the fleet's event log, as its driver writes it.
//!
//! Invariant: the driver's events follow the head that the driver knows. Events of other writers in between are read
//! first; a newer driver among them ends this one.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use brain::agent::{AgentJournal, BoxFuture, JournalError};
use fleet::{ArtifactRef, EventQuery, Fleet};
use proto::{AgentId, ChainHead, ChainId, Draft, Event, Failure, event_data::AgentDriven};

/// How often a driver looks for events of other writers: a person waits that long for an interrupt.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The place up to which a driver knows its agent's chain.
#[derive(Debug)]
struct KnownEnd {
    head: ChainHead,
    pos: u64,
    /// The number of this driver; 0 before it wrote its first event.
    fence: u64,
}

/// The chain of one agent.
pub struct FleetJournal {
    fleet: Arc<Fleet>,
    agent: AgentId,
    end: Arc<Mutex<KnownEnd>>,
}

impl FleetJournal {
    /// Opens the chain of an agent, and returns its events.
    pub fn open(fleet: Arc<Fleet>, agent: &AgentId) -> Result<(Self, Vec<Event>), Failure> {
        let events = read_chain(&fleet, agent, 0)?;
        Ok((Self::after(fleet, agent, &events), events))
    }

    /// Opens the chain of an agent behind events that the caller has read: all of the chain, up to some event, and before
    /// them perhaps those of the agents that it was forked from.
    pub(crate) fn after(fleet: Arc<Fleet>, agent: &AgentId, events: &[Event]) -> Self {
        let chain = ChainId::Agent(agent.clone());
        let newest = events.last().filter(|event| event.chain == chain);
        let head = newest.map_or_else(ChainHead::genesis, Event::head);
        let pos = newest.map_or(0, |event| event.pos);
        let end = Arc::new(Mutex::new(KnownEnd { head, pos, fence: 0 }));
        Self { fleet, agent: agent.clone(), end }
    }

    fn known_end(&self) -> MutexGuard<'_, KnownEnd> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The events of an agent's own chain after a position.
pub fn read_chain(fleet: &Fleet, agent: &AgentId, after: u64) -> Result<Vec<Event>, Failure> {
    fleet.log().read(&chain_query(agent, after))
}

fn chain_query(agent: &AgentId, after: u64) -> EventQuery {
    EventQuery { after, ..EventQuery::of_chain(&ChainId::Agent(agent.clone())) }
}

impl KnownEnd {
    /// Takes note of events behind the known end.
    fn advance(&mut self, events: &[Event]) -> Result<(), JournalError> {
        for event in events {
            if let Some(driven) = event.data_as::<AgentDriven>()
                && self.fence != 0
                && driven.fence != self.fence
            {
                return Err(JournalError::Superseded);
            }
            self.head = event.head();
            self.pos = event.pos;
        }
        Ok(())
    }
}

fn append(
    fleet: &Fleet,
    agent: &AgentId,
    end: &mut KnownEnd,
    drafts: Vec<Draft>,
) -> Result<Vec<Event>, JournalError> {
    let mut seen = Vec::new();
    loop {
        let appended =
            fleet.log().append_to_agent(agent, end.head.clone(), drafts.clone()).map_err(store_error)?;
        if let Some(own) = appended {
            if let Some(driven) = own.iter().find_map(Event::data_as::<AgentDriven>) {
                end.fence = driven.fence;
            }
            end.advance(&own)?;
            seen.extend(own);
            return Ok(seen);
        }
        let others = read_chain(fleet, agent, end.pos).map_err(store_error)?;
        end.advance(&others)?;
        seen.extend(others);
    }
}

fn store_error(failure: Failure) -> JournalError {
    let causes = failure.causes();
    let text = std::iter::once(failure.message).chain(causes).collect::<Vec<_>>().join(": ");
    JournalError::Store(text)
}

/// Runs a blocking function of the log away from the driver's own task.
async fn away<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, JournalError> + Send + 'static,
) -> Result<T, JournalError> {
    let done = tokio::task::spawn_blocking(act).await;
    done.unwrap_or_else(|error| Err(JournalError::Store(error.to_string())))
}

impl AgentJournal for FleetJournal {
    fn append(&self, drafts: Vec<Draft>) -> BoxFuture<'_, Result<Vec<Event>, JournalError>> {
        let (fleet, agent, end) = (Arc::clone(&self.fleet), self.agent.clone(), Arc::clone(&self.end));
        Box::pin(away(move || {
            let mut end = end.lock().unwrap_or_else(PoisonError::into_inner);
            append(&fleet, &agent, &mut end, drafts)
        }))
    }

    fn follow(&self, wait: Duration) -> BoxFuture<'_, Result<Vec<Event>, JournalError>> {
        Box::pin(async move {
            let deadline = tokio::time::Instant::now() + wait;
            loop {
                let (fleet, agent) = (Arc::clone(&self.fleet), self.agent.clone());
                let from = self.known_end().pos;
                let new = away(move || read_chain(&fleet, &agent, from).map_err(store_error)).await?;
                // The end moves only here, with the events in hand: a caller that drops this future loses none.
                let new = {
                    let mut end = self.known_end();
                    let new = if end.pos == from { new } else { Vec::new() };
                    end.advance(&new)?;
                    new
                };
                if !new.is_empty() || tokio::time::Instant::now() >= deadline {
                    return Ok(new);
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        })
    }

    fn put_artifact(&self, bytes: Vec<u8>) -> BoxFuture<'_, Result<String, JournalError>> {
        let fleet = Arc::clone(&self.fleet);
        Box::pin(away(move || fleet.log().put_artifact(&bytes).map(|kept| kept.sha256).map_err(store_error)))
    }

    fn get_artifact<'a>(&'a self, sha256: &'a str, len: u64) -> BoxFuture<'a, Result<Vec<u8>, JournalError>> {
        let fleet = Arc::clone(&self.fleet);
        let wanted = ArtifactRef { sha256: sha256.to_owned(), bytes: len };
        Box::pin(away(move || fleet.log().get_artifact(&wanted).map_err(store_error)))
    }
}
