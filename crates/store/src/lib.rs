//! What happened and what is true now: the event log, artifacts by their hash, and records.
//!
//! [`EventLog`], [`Artifacts`] and [`Records`] say what a store does; [`Store`] and [`EmbeddedRecords`] are the embedded
//! one, on SQLite and files in one data directory. Every implementation passes the suite in `tests/store/conformance.rs`.
//!
//! Invariant: events are only ever added; the chains of hashes and their seals show what was changed, cut or moved.
//! Invariant: an event that an append has returned survives `kill -9`; with [`Durability::Power`] also the loss of
//! power.
//! Invariant: several processes may write one log; each append takes its place behind the head that it expects.
//! Absent on purpose: retention. Nothing here forgets an event; artifacts go when the caller names them.
//! Absent on purpose: proof against the owner of the machine, who can write all chains anew; keep the head hash of
//! [`LogVerdict::Whole`] somewhere else to notice even that.

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
