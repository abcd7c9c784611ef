//! The files of an agent: in its Body, in its own log, in the store that agents share, and in directories of the host.
//!
//! Every place answers the same [`FileCall`]s. [`CompositeFiles`] chooses the place by the path.
//!
//! Invariant: a place sees only paths below its own root, normalised, and never the prefix of its route.
//! Invariant: an operation of a call takes effect at most once, also after a crash: see [`FileBackend::recover`].

mod body;
mod composite;
mod host;
mod path;
mod route;
mod state;
mod store;
mod tree;

use brain::agent::BoxFuture;
use proto::{
    EventData, Failure,
    event_data::{CallRisk, CallVenue},
    file_call::{FileAnswer, FileCall},
};

pub use body::BodyBackend;
pub use composite::{CompositeFiles, reason_word};
pub use host::{HostAccess, HostDirectory};
pub use path::{normalize, resolve};
pub use state::StateFiles;
pub use store::SharedStore;

/// The answer of a place to a call.
#[derive(Debug, Clone, PartialEq)]
pub struct FileReply {
    /// The answer.
    pub answer: FileAnswer,
    /// Events that must be appended for the operation to take effect.
    pub events: Vec<EventData>,
}

impl From<FileAnswer> for FileReply {
    fn from(answer: FileAnswer) -> Self {
        Self { answer, events: Vec::new() }
    }
}

/// Whether the Body still lives the life in which a call began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyLife {
    /// Its guest knows the call.
    Same,
    /// It was started anew, or is another Body.
    Another,
}

/// A place of files.
pub trait FileBackend: Send + Sync {
    /// Carries out a call.
    fn call(&self, call: FileCall) -> BoxFuture<'_, Result<FileReply, Failure>>;

    /// The answer to a call that an earlier driver began; `None` if it cannot be known.
    fn recover(&self, call: FileCall, life: BodyLife) -> BoxFuture<'_, Result<Option<FileReply>, Failure>>;

    /// The place in which calls act, for the plan of a call.
    fn venue(&self) -> CallVenue {
        CallVenue::Agent
    }

    /// The risk of a change.
    fn change_risk(&self) -> CallRisk {
        CallRisk::Workspace
    }

    /// Appends the events of a reply, for a caller that is no tool call: those of a tool call are appended with its end.
    fn commit(&self, events: Vec<EventData>) -> BoxFuture<'_, Result<(), Failure>> {
        debug_assert!(events.is_empty(), "only files in a log have events");
        Box::pin(async { Ok(()) })
    }
}
