//! The event log, artifacts by their hash, and records.
//!
//! [`EventLog`], [`Artifacts`] and [`Records`] are the interfaces of a store; [`Store`] and
//! [`EmbeddedRecords`] are the embedded implementation, on SQLite and files in one data directory. Every
//! implementation passes the suite in `tests/store/conformance.rs`.
//!
//! Invariant: events are only ever added; the hash chains and their seals reveal events that were changed,
//! removed or moved.
//! Invariant: an event that an append has returned survives `kill -9`; with [`Durability::Power`] also a loss
//! of power.
//! Invariant: several processes may write one log; each append goes after the head that it expects.
//! Absent on purpose: retention. This crate removes no event; it removes artifacts when the caller names
//! them.
//! Absent on purpose: proof against the owner of the host, who can rewrite all chains; store the head hash of
//! [`LogVerdict::Whole`] elsewhere to detect even that.

pub mod clock;

mod artifacts;
mod embedded;
mod event_log;
mod query;
mod records;

pub use artifacts::{ArtifactError, ArtifactRef, ArtifactSink, ArtifactWriter, Artifacts};
pub use embedded::{Durability, DurabilityError, EmbeddedRecords, FILE, OpenError, SCHEMA_VERSION, Store};
pub use event_log::{
    APPEND_LEN_MAX, Append, AppendError, ChainBreach, DEPTH_MAX, EventLog, LABEL_LEN_MAX, LogVerdict,
    ReadError, SEAL_EVERY,
};
pub use query::{EventOrder, EventQuery, ExecFilter};
pub use records::{
    Bucket, KEY_LEN_MAX, KeyError, Listing, RECORD_LEN_MAX, Record, RecordChange, RecordKey, RecordTable,
    Records, RecordsError, Revision, StoredRecord, WATCH_LEN_MAX,
};
