//! The data of events: one struct for each kind, in one table.
//!
//! Code writes data through a [`Draft`] and reads it with [`Event::decode`] or [`Event::data_as`]. The event itself keeps
//! its data as the JSON that was stored: the hash covers that.
//!
//! Invariant: a kind has one place: its entry in `kinds.rs` holds its name, its earlier names, its fields and their
//! documentation. docs/reference/events.md is generated from it.
//! Invariant: reading loses nothing. Kinds and fields that only a newer version knows stay in [`Event::data`].
//! Trust: a log may come from another version or another host. Data that does not match its kind is
//! [`DecodedEvent::Unknown`], never an error.

#[macro_use]
mod macros;
mod agents;
mod kinds;
mod records;
#[cfg(test)]
mod schema;
#[cfg(test)]
mod tests;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{AgentId, BodyId, Draft, Event};

pub use agents::*;
pub use kinds::*;
pub use records::*;

/// The data of one kind of event.
pub trait EventKind: Into<EventData> + DeserializeOwned {
    /// The `type` of such events, then its names in earlier versions.
    const NAMES: &[&str];
}

/// An event, as far as this version understands it.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "callers match on the data at once, through both enums; a box would end that"
)]
pub enum DecodedEvent<'a> {
    /// The typed data.
    Known(EventData),
    /// A newer version wrote the event: this version does not know the type, or the data does not match it.
    Unknown {
        /// The event's `type`.
        kind: &'a str,
        /// Its data, as stored.
        data: &'a Value,
    },
}

impl Draft {
    /// An event about a Body.
    pub fn about(body: &BodyId, data: impl Into<EventData>) -> Self {
        Self { body: Some(body.clone()), ..Self::new(data) }
    }

    /// An event of an agent. It goes to the agent's chain.
    pub fn of_agent(agent: &AgentId, data: impl Into<EventData>) -> Self {
        Self { brain: Some(agent.to_string()), ..Self::new(data) }
    }

    /// Names the Body that the event concerns.
    #[must_use]
    pub fn in_body(self, body: Option<&BodyId>) -> Self {
        Self { body: body.cloned(), ..self }
    }

    /// An event about no Body.
    pub fn new(data: impl Into<EventData>) -> Self {
        let data = data.into();
        #[expect(
            clippy::expect_used,
            reason = "the types of the table become JSON always: their maps have text as keys, and a spec has no path that is no text"
        )]
        let value = data.write().expect("event data is JSON");
        Self { kind: data.kind().to_owned(), body: None, brain: None, data: value }
    }
}

impl Event {
    /// The typed data of this event, if this version knows its kind.
    pub fn decode(&self) -> DecodedEvent<'_> {
        match EventData::read(&self.kind, &self.data) {
            Some(data) => DecodedEvent::Known(data),
            None => DecodedEvent::Unknown { kind: &self.kind, data: &self.data },
        }
    }

    /// Whether this event has a kind, under its name or an earlier one.
    pub fn is<T: EventKind>(&self) -> bool {
        T::NAMES.contains(&self.kind.as_str())
    }

    /// The typed data of an event of a kind; none for other events, and for data that does not match.
    pub fn data_as<T: EventKind>(&self) -> Option<T> {
        if self.is::<T>() { T::deserialize(&self.data).ok() } else { None }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
