//! Events: each records one thing that happened, is appended once, and is chained by hash to the one before.
//!
//! Invariant: `hash` covers every other field but `pos`, `prev` included, so a changed, cut or reordered chain shows.
//! Invariant: the hash is over a canonical form (keys sorted, no blanks), never over the stored text.
//! Invariant: `pos` is the store's own count and is not hashed: a store gives it after the event has its hash.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{BodyId, ChainHead, ChainId};

/// The version of the envelope.
pub const VERSION: u32 = 2;
/// The version of the envelope of [`ChainId::OneChain`]: its hash does not cover the chain's name.
pub const VERSION_ONE_CHAIN: u32 = 1;
/// `prev` of the first event of a chain.
pub const GENESIS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// An event that has no position in a log yet.
///
/// Invariant: [`Draft::new`] and [`Draft::about`] make it from typed data, so that a log holds only known
/// kinds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Draft {
    /// A noun and a past participle: `body.started`.
    pub kind: String,
    /// The Body that it concerns.
    pub body: Option<BodyId>,
    /// The Brain that it concerns.
    pub brain: Option<String>,
    /// The data of the kind.
    pub data: Value,
}

/// One event, as it is stored, sent and printed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Version of the envelope.
    pub v: u32,
    /// Position among all events of the store, strictly rising in the order of storing; 0 before it is stored.
    pub pos: u64,
    /// The chain that the event is in.
    pub chain: ChainId,
    /// Place in the chain, from 1, without gaps. The chain of a Body or node that is older than its chain goes on
    /// counting from the end of [`ChainId::OneChain`].
    pub seq: u64,
    /// The time, RFC 3339 in UTC with microseconds.
    pub at: String,
    /// A noun and a past participle: `body.started`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The Body that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<BodyId>,
    /// The Brain that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brain: Option<String>,
    /// The data of the kind.
    pub data: Value,
    /// Hash of the event before this one in the chain.
    pub prev: String,
    /// Hash of this event.
    pub hash: String,
}

impl Event {
    /// Gives a draft its place behind `head` of `chain`.
    pub fn place(draft: Draft, chain: ChainId, head: &ChainHead, at: String) -> Self {
        let Draft { kind, body, brain, data } = draft;
        let mut event = Event {
            v: chain.envelope_version(),
            pos: 0,
            chain,
            seq: head.seq + 1,
            at,
            kind,
            body,
            brain,
            data,
            prev: head.hash.clone(),
            hash: String::new(),
        };
        event.hash = event.digest();
        event
    }

    /// The head of the chain once this event is its last.
    pub fn head(&self) -> ChainHead {
        ChainHead { seq: self.seq, hash: self.hash.clone() }
    }

    /// The hash that this event should have.
    pub fn digest(&self) -> String {
        let mut canonical = serde_json::json!({
            "v": self.v, "seq": self.seq, "at": self.at, "type": self.kind,
            "body": self.body, "brain": self.brain, "data": self.data, "prev": self.prev,
        });
        if self.v != VERSION_ONE_CHAIN {
            canonical["chain"] = self.chain.to_string().into();
        }
        hex(&Sha256::digest(canonical.to_string()))
    }
}

/// Lower-case hexadecimal digits of bytes.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_covers_every_field_and_survives_a_round_trip() {
        let draft = Draft {
            kind: "body.started".into(),
            body: None,
            brain: None,
            data: serde_json::json!({"b": 1, "a": [2.5]}),
        };
        let head = ChainHead { seq: 6, hash: GENESIS.to_owned() };
        let chain = "body/a".parse().unwrap();
        let event = Event::place(draft, chain, &head, "2026-01-01T00:00:00.000000Z".into());
        let again: Event = serde_json::from_str(&serde_json::to_string(&event).unwrap()).unwrap();
        assert_eq!(again.digest(), event.hash);
        let changes: [fn(&mut Event); 8] = [
            |e| e.v = 1,
            |e| e.chain = "body/b".parse().unwrap(),
            |e| e.seq = 8,
            |e| e.at.push('x'),
            |e| e.kind.push('x'),
            |e| e.body = Some("b".parse().unwrap()),
            |e| e.data = serde_json::json!({"b": 2, "a": [2.5]}),
            |e| e.prev = event_hash(),
        ];
        for change in changes {
            let mut changed = event.clone();
            change(&mut changed);
            assert_ne!(changed.digest(), event.hash);
        }
    }

    fn event_hash() -> String {
        hex(&[7; 32])
    }
}
