//! The sessions of `exec_command`: processes that go on between turns, by their number.
//!
//! Invariant: the number of a session is its place among all calls of `exec_command` in the agent's log, those of the
//! agents that it was forked from included. So a later driver knows the same numbers, and no number is used twice.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use fleet::{EventQuery, Fleet};
use proto::{
    AgentId, ChainId, Event, Failure, Kind,
    event_data::{AgentPosition, CallStarted, EventKind},
};

use super::exec_command::NAME;
use crate::{Agents, guest_key};

/// A process that `exec_command` started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The tag by which the guest knows it.
    pub tag: String,
    /// Whether it has a terminal.
    pub tty: bool,
}

/// The sessions of one agent.
#[derive(Clone)]
pub struct Sessions(Arc<SessionsShared>);

struct SessionsShared {
    fleet: Arc<Fleet>,
    agent: AgentId,
    state: Mutex<SessionsState>,
}

#[derive(Default)]
struct SessionsState {
    /// The position of the newest call that was read; none before the first read.
    pos: Option<u64>,
    sessions: Vec<Session>,
    /// How many bytes of a session the model has seen.
    seen: BTreeMap<u64, u64>,
}

impl Sessions {
    /// The sessions of an agent.
    pub fn new(fleet: Arc<Fleet>, agent: AgentId) -> Self {
        Self(Arc::new(SessionsShared { fleet, agent, state: Mutex::default() }))
    }

    /// The number of the session that a call started.
    pub async fn number(&self, key: &str) -> Result<u64, Failure> {
        let tag = guest_key(key);
        let place =
            self.read(move |sessions| sessions.iter().rposition(|session| session.tag == tag)).await?;
        let place = place.ok_or_else(|| Failure::new(Kind::Internal, "the log does not have the call"))?;
        Ok(place as u64 + 1)
    }

    /// The session of a number.
    pub async fn find(&self, number: u64) -> Result<Option<Session>, Failure> {
        let place = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
        let Some(place) = place else { return Ok(None) };
        self.read(move |sessions| sessions.get(place).cloned()).await
    }

    /// How many bytes of a session the model has seen.
    pub fn seen(&self, number: u64) -> u64 {
        self.0.state().seen.get(&number).copied().unwrap_or(0)
    }

    /// Notes how many bytes of a session the model has seen.
    pub fn note_seen(&self, number: u64, bytes: u64) {
        self.0.state().seen.insert(number, bytes);
    }

    async fn read<T: Send + 'static>(
        &self,
        find: impl FnOnce(&[Session]) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let shared = Arc::clone(&self.0);
        let read = tokio::task::spawn_blocking(move || {
            let mut state = shared.state();
            shared.read_on(&mut state)?;
            Ok(find(&state.sessions))
        });
        read.await.unwrap_or_else(|error| {
            Err(Failure::new(Kind::Internal, "reading the agent's log was interrupted").because(error))
        })
    }
}

impl SessionsShared {
    fn state(&self) -> MutexGuard<'_, SessionsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the calls since the last read.
    fn read_on(&self, state: &mut SessionsState) -> Result<(), Failure> {
        if state.pos.is_none() {
            let agents = Agents::new(Arc::clone(&self.fleet));
            let record = agents.get(&self.agent)?;
            for AgentPosition { agent, through } in agents.origins(&record)? {
                let events = self.read_calls(&agent, 0)?;
                state
                    .sessions
                    .extend(events.iter().filter(|event| event.seq <= through).filter_map(session_of));
            }
        }
        let events = self.read_calls(&self.agent, state.pos.unwrap_or(0))?;
        state.sessions.extend(events.iter().filter_map(session_of));
        state.pos = events.last().map(|event| event.pos).or(state.pos).or(Some(0));
        Ok(())
    }

    fn read_calls(&self, agent: &AgentId, after: u64) -> Result<Vec<Event>, Failure> {
        let chain = ChainId::Agent(agent.clone());
        let kinds = CallStarted::NAMES.to_vec();
        self.fleet.log().read(&EventQuery { after, kinds, ..EventQuery::of_chain(&chain) })
    }
}

fn session_of(event: &Event) -> Option<Session> {
    let call = event.data_as::<CallStarted>().filter(|call| call.tool == NAME)?;
    let tty = super::exec_command::wants_tty(&call.arguments);
    Some(Session { tag: guest_key(&call.key), tty })
}
