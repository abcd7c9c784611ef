//! Chains of the event log: which chain an event belongs to, and where a chain ends.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    AgentId, BodyId, NodeId,
    event::{self, GENESIS},
    id::IdError,
};

/// Names one chain of the log. As text: `body/ID`, `agent/ID`, `node/ID`, or `log`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ChainId {
    /// The events of one Body.
    Body(BodyId),
    /// The events of one agent.
    Agent(AgentId),
    /// The events of one node: those about no Body and no agent, and the seals.
    Node(NodeId),
    /// All events of a log that was written before there were chains. It takes no new events.
    OneChain,
}

/// Why a text names no chain.
#[derive(Debug, thiserror::Error)]
pub enum ChainIdError {
    /// The part before the slash is unknown.
    #[error("{0:?} is no chain: chains are body/ID, agent/ID, node/ID and log")]
    Kind(String),
    /// The part behind the slash is no id.
    #[error(transparent)]
    Id(#[from] IdError),
}

const ONE_CHAIN: &str = "log";

impl ChainId {
    /// The version of the envelope of this chain's events.
    pub fn envelope_version(&self) -> u32 {
        match self {
            ChainId::OneChain => event::VERSION_ONE_CHAIN,
            _ => event::VERSION,
        }
    }
}

impl fmt::Display for ChainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChainId::Body(id) => write!(f, "body/{id}"),
            ChainId::Agent(id) => write!(f, "agent/{id}"),
            ChainId::Node(id) => write!(f, "node/{id}"),
            ChainId::OneChain => f.write_str(ONE_CHAIN),
        }
    }
}

impl FromStr for ChainId {
    type Err = ChainIdError;
    fn from_str(text: &str) -> Result<Self, ChainIdError> {
        match text.split_once('/') {
            Some(("body", id)) => Ok(ChainId::Body(id.parse()?)),
            Some(("agent", id)) => Ok(ChainId::Agent(id.parse()?)),
            Some(("node", id)) => Ok(ChainId::Node(id.parse()?)),
            None if text == ONE_CHAIN => Ok(ChainId::OneChain),
            _ => Err(ChainIdError::Kind(text.chars().take(64).collect())),
        }
    }
}

impl TryFrom<String> for ChainId {
    type Error = ChainIdError;
    fn try_from(text: String) -> Result<Self, ChainIdError> {
        text.parse()
    }
}

impl From<ChainId> for String {
    fn from(chain: ChainId) -> String {
        chain.to_string()
    }
}

/// The last event of a chain, or the place before its first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainHead {
    /// Its `seq`.
    pub seq: u64,
    /// Its `hash`.
    pub hash: String,
}

impl ChainHead {
    /// The head of a chain that has no event.
    pub fn genesis() -> Self {
        Self { seq: 0, hash: GENESIS.to_owned() }
    }
}

impl fmt::Display for ChainHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event {} ({})", self.seq, self.hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_read_back_as_they_are_written() {
        for text in ["body/ab12", "agent/a", "node/0011aabb", "log"] {
            let chain: ChainId = text.parse().unwrap();
            assert_eq!((chain.to_string(), serde_json::json!(chain)), (text.to_owned(), text.into()));
        }
        for bad in ["", "body", "body/", "body/A", "body/a/b", "log/", "logs", "nodes/a"] {
            assert!(bad.parse::<ChainId>().is_err(), "{bad:?}");
        }
    }
}
