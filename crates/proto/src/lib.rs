//! The shared types of Palisade: ids, specs, limits, enforcement, events, guest messages, failures.
//!
//! Invariant: no I/O, no clock, no randomness; only values.
//! Trust: everything that crosses a boundary is parsed into one of these types before use.

pub mod base32;
pub mod body_name;
pub mod chain;
pub mod connect;
pub mod egress;
pub mod enforcement;
pub mod envelope;
pub mod event;
pub mod event_data;
pub mod failure;
pub mod file_call;
pub mod file_pattern;
pub mod file_text;
pub mod guest;
pub mod id;
pub mod launch;
pub mod layer;
pub mod lease;
pub mod limits;
pub mod mux;
pub mod pack;
pub mod secret;
pub mod size;
pub mod spec;
pub mod template;
pub mod text;
pub mod tree;
pub mod vm;
pub mod wire;
pub mod workspace;

pub use body_name::BodyName;
pub use chain::{ChainHead, ChainId};
pub use enforcement::{Enforcement, Mechanism, MechanismStatus};
pub use event::{Draft, Event};
pub use event_data::EventData;
pub use failure::{Failure, Kind};
pub use id::{AgentId, BodyId, LayerId, NodeId, SnapshotId, TemplateId};
pub use layer::Layer;
pub use limits::Limits;
pub use size::Size;
pub use spec::Spec;
