//! One event as a row, and back.
//!
//! Invariant: `data` is stored as the canonical text that is hashed, so the hash of what is read is the hash of what
//! was written. `v` has no column: all rows of one schema version have the one envelope version.
//! Trust: a row may have been changed by anybody; what is not an event is an error, never a guess.

use proto::{BodyId, Event, event};
use rusqlite::Row;

/// The columns of an event, in the order that [`read`] takes them.
macro_rules! columns {
    () => {
        "seq, at, type, body, brain, data, prev, hash"
    };
}
pub(crate) use columns;

/// A row, and the text that its `data` has in the file.
pub(crate) struct StoredRow {
    /// The event.
    pub event: Event,
    /// Its data as stored.
    pub data: String,
}

/// Why a row is not an event.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowError {
    #[error(transparent)]
    Database(#[from] rusqlite::Error),
    #[error("{0}")]
    Unreadable(String),
}

/// Where a row says that it stands.
pub(crate) fn seq(row: &Row<'_>) -> Result<u64, RowError> {
    let seq: i64 = row.get(0)?;
    u64::try_from(seq).map_err(|_| RowError::Unreadable(format!("its number is {seq}")))
}

/// Reads an event.
pub(crate) fn read(row: &Row<'_>) -> Result<StoredRow, RowError> {
    let body: Option<String> = row.get(3)?;
    let body =
        body.map(BodyId::try_from).transpose().map_err(|error| RowError::Unreadable(error.to_string()))?;
    let data: String = row.get(5)?;
    let value = serde_json::from_str(&data)
        .map_err(|error| RowError::Unreadable(format!("its data is not JSON: {error}")))?;
    let event = Event {
        v: event::VERSION,
        seq: seq(row)?,
        at: row.get(1)?,
        kind: row.get(2)?,
        body,
        brain: row.get(4)?,
        data: value,
        prev: row.get(6)?,
        hash: row.get(7)?,
    };
    Ok(StoredRow { event, data })
}
