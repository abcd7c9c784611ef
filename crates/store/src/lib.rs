//! What happened and what is true now: the event log on SQLite, artifacts by their hash, and records, in one data
//! directory.
//!
//! Invariant: events are only ever added; the chain of hashes shows whatever was changed, cut or moved since.
//! Invariant: an event that [`Store::append`] has returned survives `kill -9`; with [`Durability::Power`] also the
//! loss of power.
//! Invariant: several processes may write one log; each append takes its place under SQLite's write lock.
//! Absent on purpose: retention. Nothing here forgets an event; artifacts go when the caller names them.
//! Absent on purpose: proof against whoever owns the machine. They can write the whole chain anew; keep the head
//! hash of [`ChainVerdict::Whole`] somewhere else to notice even that.

pub mod clock;

mod artifact;
mod embedded;
mod log;
mod open;
mod records;
mod row;
mod verify;

pub use artifact::{ArtifactError, ArtifactRef, ArtifactWriter};
pub use embedded::EmbeddedRecords;
pub use log::{AppendError, DATA_LEN_MAX, DEPTH_MAX, EventQuery, LABEL_LEN_MAX, ReadError, Store};
pub use open::{Durability, DurabilityError, FILE, OpenError, SCHEMA_VERSION};
pub use records::{
    Bucket, KEY_LEN_MAX, KeyError, Listing, RECORD_LEN_MAX, Record, RecordChange, RecordKey, RecordTable,
    Records, RecordsError, Revision, StoredRecord, WATCH_LEN_MAX,
};
pub use verify::{ChainBreach, ChainVerdict};
