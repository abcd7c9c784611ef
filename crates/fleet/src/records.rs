//! The buckets of the records that a data directory holds.
//!
//! Invariant: a Body's directory is the truth about that Body; a record never says whether a Body exists.

use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};
use store::Bucket;
pub use store::{EmbeddedRecords, RecordKey, RecordTable, Records, RecordsError, Revision};

use crate::Fleet;

/// Settings: one record, [`CURRENT`](crate::settings::CURRENT).
pub(crate) const SETTINGS: Bucket = Bucket::new("settings");
/// Leases, by Body.
pub(crate) const LEASES: Bucket = Bucket::new("leases");
/// API keys, by their ids. The server gives them their type.
pub const KEYS: Bucket = Bucket::new("keys");

impl Fleet {
    /// The records of the data directory.
    pub fn records(&self) -> &Arc<dyn Records> {
        &self.records
    }

    pub(crate) fn table<T: Serialize + DeserializeOwned>(&self, bucket: Bucket) -> RecordTable<'_, T> {
        RecordTable::new(&*self.records, bucket)
    }
}
