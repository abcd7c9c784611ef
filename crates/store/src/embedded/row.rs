//! Conversion between an event and a row.
//!
//! Invariant: `data` is stored as the canonical text that is hashed, so the hash of what is read is the hash
//! of what was written. `v` has no column: the chain determines the version of the envelope.
//! Trust: any program may have changed a row; a row that is not a valid event is an error, never a guess.

use proto::{
    BodyId, ChainId, Event,
    event_data::{EventKind, ExecDetached, ExecEnded, ExecStarted},
};
use rusqlite::{Connection, Error, Row, params, types::Value};

/// The columns of an event, in the order that [`read`] expects.
macro_rules! columns {
    () => {
        "pos, chain, seq, at, type, body, brain, data, prev, hash, exec, tag"
    };
}
pub(crate) use columns;

/// A row: an event, and further columns.
pub(crate) struct StoredRow {
    /// The event.
    pub event: Event,
    /// Its data as stored.
    pub data: String,
    /// The columns for the indexes.
    pub index: IndexColumns,
}

/// The columns that repeat a part of the data for the indexes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct IndexColumns {
    /// The command that the event is about: the `seq` of its `exec.started`.
    pub exec: Option<i64>,
    /// The tag of a command that starts.
    pub tag: Option<String>,
}

impl IndexColumns {
    /// The values that these columns must have for an event.
    pub fn of(event: &Event) -> Self {
        let started = event.is::<ExecStarted>();
        let ended = [ExecEnded::NAMES, ExecDetached::NAMES].concat().contains(&event.kind.as_str());
        let exec = if started { Some(event.seq) } else { None };
        let exec = exec.or_else(|| event.data.get("exec").filter(|_| ended)?.as_u64());
        let tag = event.data.get("tag").filter(|_| started).and_then(|tag| tag.as_str());
        Self { exec: exec.and_then(|exec| i64::try_from(exec).ok()), tag: tag.map(str::to_owned) }
    }
}

/// Why a row is not an event.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowError {
    #[error(transparent)]
    Database(#[from] Error),
    #[error("{0}")]
    Unreadable(String),
}

/// The position of a row.
pub(crate) fn pos(row: &Row<'_>) -> Result<u64, RowError> {
    number(row, 0, "position")
}

/// The chain of a row, as it is stored, and its sequence number.
pub(crate) fn place(row: &Row<'_>) -> Result<(String, u64), RowError> {
    Ok((row.get(1)?, number(row, 2, "number")?))
}

fn number(row: &Row<'_>, column: usize, name: &str) -> Result<u64, RowError> {
    let found: i64 = row.get(column)?;
    u64::try_from(found).map_err(|_| RowError::Unreadable(format!("its {name} is {found}")))
}

/// Reads an event.
pub(crate) fn read(row: &Row<'_>) -> Result<StoredRow, RowError> {
    let unreadable = |error: &dyn std::error::Error| RowError::Unreadable(error.to_string());
    let (chain, seq) = place(row)?;
    let chain = ChainId::try_from(chain).map_err(|error| unreadable(&error))?;
    let body: Option<String> = row.get(5)?;
    let body = body.map(BodyId::try_from).transpose().map_err(|error| unreadable(&error))?;
    let data: String = row.get(7)?;
    let value = serde_json::from_str(&data)
        .map_err(|error| RowError::Unreadable(format!("its data is not JSON: {error}")))?;
    let event = Event {
        v: chain.envelope_version(),
        pos: pos(row)?,
        chain,
        seq,
        at: row.get(3)?,
        kind: row.get(4)?,
        body,
        brain: row.get(6)?,
        data: value,
        prev: row.get(8)?,
        hash: row.get(9)?,
    };
    Ok(StoredRow { event, data, index: IndexColumns { exec: row.get(10)?, tag: row.get(11)? } })
}

/// Writes an event that has a position.
pub(crate) fn insert(connection: &Connection, event: &Event) -> Result<(), Error> {
    let mut statement = connection
        .prepare_cached("INSERT INTO events VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)")?;
    let index = IndexColumns::of(event);
    statement.execute(params![
        column(event.pos),
        event.chain.to_string(),
        column(event.seq),
        event.at,
        event.kind,
        event.body.as_ref().map(BodyId::as_str),
        event.brain,
        index.exec,
        index.tag,
        event.data.to_string(),
        event.prev,
        event.hash
    ])?;
    Ok(())
}

/// A number as an integer of SQLite; no log reaches the range where they differ.
pub(crate) fn column(number: u64) -> Value {
    i64::try_from(number).unwrap_or(i64::MAX).into()
}
