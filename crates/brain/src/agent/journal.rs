//! The place where an agent's events are kept, as the driver sees it.

use std::{future::Future, pin::Pin, time::Duration};

use proto::{Draft, Event};

/// A boxed future that borrows from its maker.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Why the journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another driver has taken the agent over.
    #[error("another process drives the agent now")]
    Superseded,
    /// The log or its artifacts failed.
    #[error("{0}")]
    Store(String),
}

/// The chain of one agent, opened by its driver.
pub trait AgentJournal: Send + Sync {
    /// Appends events behind everything that the agent's chain has. Returns all events that the driver has not
    /// seen yet, in their order: those of other writers (messages, approvals, interrupts) and then its own.
    fn append(&self, drafts: Vec<Draft>) -> BoxFuture<'_, Result<Vec<Event>, JournalError>>;

    /// Waits for events of other writers, at most for `wait`.
    fn follow(&self, wait: Duration) -> BoxFuture<'_, Result<Vec<Event>, JournalError>>;

    /// Stores bytes that are too long for an event, and returns their SHA-256.
    fn put_artifact(&self, bytes: Vec<u8>) -> BoxFuture<'_, Result<String, JournalError>>;

    /// Reads bytes that were stored, by their SHA-256 and length.
    fn get_artifact<'a>(&'a self, sha256: &'a str, len: u64) -> BoxFuture<'a, Result<Vec<u8>, JournalError>>;
}
