//! Which agents a caller reaches: those whose Body it reaches.
//!
//! Invariant: an agent that a caller does not reach does not exist for that caller.

use std::{collections::HashMap, sync::PoisonError};

use bridge::AgentRecord;
use fleet::{EventOrder, EventQuery, Fleet};
use proto::{
    AgentId, BodyId, ChainId, Event, Failure, Kind,
    event_data::{AgentEmbodied, EventKind},
};

use super::{AgentService, RequestOrigin};
use crate::{Caller, authz};

/// Agents whose Body is remembered.
const KNOWN_MAX: usize = 10_000;

/// The Bodies of agents, so that a request reads only what is new in the chain of its agent.
#[derive(Debug, Default)]
pub struct LastBodies(HashMap<AgentId, LastBody>);

#[derive(Debug, Clone)]
struct LastBody {
    body: Option<BodyId>,
    /// The position in the log up to which this is known.
    through: u64,
}

impl AgentService {
    /// The Body in which an agent works.
    pub fn body_of(&self, fleet: &Fleet, id: &AgentId) -> Result<Option<BodyId>, Failure> {
        let known = {
            let known = self.0.bodies.lock().unwrap_or_else(PoisonError::into_inner);
            known.0.get(id).cloned().unwrap_or(LastBody { body: None, through: 0 })
        };
        // The position comes first: an event behind it is read by the next request.
        let through = fleet.log().last_pos()?;
        let query = EventQuery {
            after: known.through,
            kinds: AgentEmbodied::NAMES.to_vec(),
            order: EventOrder::NewestFirst,
            limit: 1,
            ..EventQuery::of_chain(&ChainId::Agent(id.clone()))
        };
        let newest = fleet.log().read(&query)?;
        let newest = newest.first().and_then(Event::data_as::<AgentEmbodied>).map(|data| data.body);
        let body = newest.or(known.body);
        let mut known = self.0.bodies.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0.len() >= KNOWN_MAX {
            known.0.clear();
        }
        known.0.insert(id.clone(), LastBody { body: body.clone(), through });
        Ok(body)
    }

    /// Whether a caller reaches an agent.
    pub fn is_reached(&self, fleet: &Fleet, caller: &Caller, record: &AgentRecord) -> Result<bool, Failure> {
        let lease = match self.body_of(fleet, &record.spec.id)? {
            Some(body) => fleet.leases().get(&body)?,
            None => None,
        };
        let is_own = || RequestOrigin::of(record).is_some_and(|origin| origin.owner == caller.key);
        Ok(authz::may_reach(caller, lease.as_ref()) || (lease.is_none() && is_own()))
    }

    /// The agent of an id, if the caller reaches it.
    pub fn reached(&self, fleet: &Fleet, caller: &Caller, id: &AgentId) -> Result<AgentRecord, Failure> {
        let missing = |failure: Failure| match failure.kind {
            Kind::NotFound => no_agent(id.as_str()),
            _ => failure,
        };
        let record = self.agents().get(id).map_err(missing)?;
        if self.is_reached(fleet, caller, &record)? { Ok(record) } else { Err(no_agent(id.as_str())) }
    }
}

/// The agent does not exist, or this caller may not see it.
pub fn no_agent(name: &str) -> Failure {
    Failure::new(Kind::NotFound, format!("there is no agent {}", proto::text::visible(name)))
        .hint("list them: GET /v1/agents")
}
