//! The buckets of records in a data directory.
//!
//! Invariant: a Body's directory is the truth about that Body; a record never decides whether a Body exists.

use std::sync::Arc;

use proto::Failure;
use serde::{Serialize, de::DeserializeOwned};
use store::Bucket;
pub use store::{EmbeddedRecords, RecordKey, RecordTable, Records, RecordsError, Revision};

use crate::Fleet;

/// The settings: one record, [`CURRENT`](crate::settings::CURRENT).
pub(crate) const SETTINGS: Bucket = Bucket::new("settings");
/// Leases, by Body.
pub const LEASES: Bucket = Bucket::new("leases");
/// Homes, by name.
pub(crate) const HOMES: Bucket = Bucket::new("homes");
/// Templates, by name: creating the record claims the name.
pub(crate) const TEMPLATES: Bucket = Bucket::new("templates");
/// Complete builds, by template and build.
pub(crate) const BUILDS: Bucket = Bucket::new("builds");
/// Builds that are requested, running or failed, by template and build.
pub(crate) const BUILD_JOBS: Bucket = Bucket::new("build-jobs");
/// Secrets that Bodies may use, by name.
pub(crate) const SECRETS: Bucket = Bucket::new("secrets");
/// API keys, by id. The server defines their type.
pub const KEYS: Bucket = Bucket::new("keys");

/// The record key that consists of these names, in this order.
pub fn key_of<const N: usize>(names: [&str; N]) -> Result<RecordKey, Failure> {
    Ok(RecordKey::of(names).map_err(RecordsError::from)?)
}

impl Fleet {
    /// The records of the data directory.
    pub fn records(&self) -> &Arc<dyn Records> {
        &self.records
    }

    pub(crate) fn table<T: Serialize + DeserializeOwned>(&self, bucket: Bucket) -> RecordTable<'_, T> {
        RecordTable::new(&*self.records, bucket)
    }
}
