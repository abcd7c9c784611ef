//! Agents that this server serves: which callers reach them, which models they may ask, and the tasks that drive them.
//!
//! Invariant: a caller reaches the agents whose Body it reaches. Once the Body is gone, only the key that created the
//! agent, and keys that reach every Body, still do.
//! Invariant: keys of models come from the server's environment; no request names one.

mod drivers;
mod live;
mod models;
mod reach;

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use bridge::{AgentHost, AgentRecord, Agents};
use serde::{Deserialize, Serialize};

pub use live::LiveUpdates;
pub use models::{check_model, shown_model};
pub use reach::no_agent;

use crate::ServerBounds;

/// The agents of the data directory, and the tasks that drive them. Clones share them.
#[derive(Clone)]
pub struct AgentService(Arc<ServiceState>);

struct ServiceState {
    host: AgentHost,
    drivers: Mutex<drivers::DriverTable>,
    turns: drivers::DriverTurns,
    live: live::LiveChannels,
    bodies: Mutex<reach::LastBodies>,
}

impl AgentService {
    /// Serves the agents of this host, as many at once as the bounds say.
    pub fn new(host: AgentHost, bounds: &ServerBounds) -> Self {
        Self(Arc::new(ServiceState {
            host,
            drivers: Mutex::default(),
            turns: drivers::DriverTurns::new(bounds),
            live: live::LiveChannels::default(),
            bodies: Mutex::default(),
        }))
    }

    /// The agents.
    pub fn agents(&self) -> &Agents {
        self.0.host.agents()
    }

    /// The host that drives them.
    pub fn host(&self) -> &AgentHost {
        &self.0.host
    }
}

impl fmt::Debug for AgentService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentService").finish_non_exhaustive()
    }
}

/// The settings of an agent that a request to this server created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestOrigin {
    /// The API key of the request.
    pub owner: String,
    /// The mark of the request, if it had an idempotency key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

/// The name of these settings among those of the agent.
const ORIGIN: &str = "server";

impl RequestOrigin {
    /// The origin that a record holds; none if the command line created the agent.
    pub fn of(record: &AgentRecord) -> Option<Self> {
        serde_json::from_value(record.spec.settings.get(ORIGIN)?.clone()).ok()
    }

    /// Adds the origin to the settings of a new agent.
    pub fn write_to(&self, settings: &mut serde_json::Value) {
        if let Some(settings) = settings.as_object_mut() {
            settings.insert(ORIGIN.to_owned(), serde_json::json!(self));
        }
    }
}
