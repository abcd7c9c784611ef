//! The log: append, read, and the [`Store`] that does it.
//!
//! Invariant: an append is one transaction that reads the head, adds the events and moves the head, under SQLite's
//! write lock from its first statement; so no two writers ever chain to the same event.
//! Direction of failure: an event that cannot be stored whole is not stored at all, and the caller is told.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use proto::{BodyId, Draft, Event};
use rusqlite::{
    Connection, Error, ErrorCode, OptionalExtension, Transaction, TransactionBehavior, ffi, params,
};
use serde_json::Value;

use crate::{
    artifact::Artifacts,
    clock,
    open::{self, Durability, FILE, OpenError},
    row::{self, RowError, columns},
    verify::{self, ChainVerdict},
};

/// Longest data of one event, as JSON; what is longer belongs into an artifact.
pub const DATA_LEN_MAX: usize = 1024 * 1024;
/// Deepest data of one event. Readers of JSON give up at 128, and the event itself is around it.
pub const DEPTH_MAX: usize = 100;
/// Longest type and longest Brain, in bytes.
pub const LABEL_LEN_MAX: usize = 1024;

/// Why events could not be appended. None of them was.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// No room.
    #[error("the disk of the event log is full; the event was not stored")]
    DiskFull,
    /// Somebody else kept the write lock.
    #[error("the event log stayed locked by another process; the event was not stored")]
    Busy,
    /// Opened for reading.
    #[error("the event log was opened for reading only")]
    ReadOnly,
    /// An event beyond a limit.
    #[error("the {field} of event {kind:?} is {found}, and {max} is the most")]
    TooLarge {
        /// Type of the event, cut.
        kind: String,
        /// Which part of it, and in what unit.
        field: &'static str,
        /// How much it is.
        found: usize,
        /// How much it may be.
        max: usize,
    },
    /// The log cannot be continued.
    #[error("the event log is damaged: {0}; the event was not stored")]
    Damaged(String),
    /// Whatever else SQLite says.
    #[error("cannot append to the event log")]
    Database(#[source] Error),
}

impl From<Error> for AppendError {
    fn from(error: Error) -> Self {
        // The shared memory of the WAL is the one file whose lack of room SQLite reports otherwise.
        let extended = error.sqlite_error().map(|error| error.extended_code);
        match error.sqlite_error_code() {
            _ if extended == Some(ffi::SQLITE_IOERR_SHMSIZE) => AppendError::DiskFull,
            Some(ErrorCode::DiskFull) => AppendError::DiskFull,
            Some(ErrorCode::DatabaseBusy | ErrorCode::FileLockingProtocolFailed) => AppendError::Busy,
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::ConstraintViolation) => {
                AppendError::Damaged(error.to_string())
            }
            _ => AppendError::Database(error),
        }
    }
}

/// Why events could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// One event is not readable.
    #[error("event {seq} cannot be read: {why}")]
    Event {
        /// Its place.
        seq: u64,
        /// What is wrong with it.
        why: String,
    },
    /// The file is broken.
    #[error("the event log is damaged: {0}")]
    Damaged(String),
    /// The log could not be opened again to be verified.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Whatever else SQLite says.
    #[error("cannot read the event log")]
    Database(#[source] Error),
}

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::TooBig) => {
                ReadError::Damaged(error.to_string())
            }
            _ => ReadError::Database(error),
        }
    }
}

/// Which events to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventQuery {
    /// Only events after this place; 0 is before the first.
    pub after: u64,
    /// Only events of this Body.
    pub body: Option<BodyId>,
    /// At most so many.
    pub limit: usize,
}

impl Default for EventQuery {
    fn default() -> Self {
        Self { after: 0, body: None, limit: usize::MAX }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpenMode {
    ReadWrite,
    ReadOnly,
}

/// The event log and the artifacts of one data directory.
#[derive(Debug)]
pub struct Store {
    connection: Mutex<Connection>,
    path: PathBuf,
    mode: OpenMode,
    pub(crate) artifacts: Artifacts,
}

impl Store {
    /// Opens the store in `dir`, which exists; makes the log where there is none.
    pub fn open(dir: &Path, durability: Durability) -> Result<Store, OpenError> {
        let path = dir.join(FILE);
        let connection = Mutex::new(open::read_write(&path, durability)?);
        Ok(Store { connection, path, mode: OpenMode::ReadWrite, artifacts: Artifacts::new(dir, durability) })
    }

    /// Opens the store in `dir` for reading; writes nothing that anybody would miss.
    pub fn open_read_only(dir: &Path) -> Result<Store, OpenError> {
        let path = dir.join(FILE);
        let connection = Mutex::new(open::read_only(&path)?);
        let artifacts = Artifacts::new(dir, Durability::Process);
        Ok(Store { connection, path, mode: OpenMode::ReadOnly, artifacts })
    }

    /// Appends one event. When this returns it is stored.
    pub fn append(&self, draft: Draft) -> Result<Event, AppendError> {
        let mut events = self.append_all(vec![draft])?;
        events.pop().ok_or_else(|| AppendError::Damaged("nothing came back".into()))
    }

    /// Appends all events or none of them, side by side, in one transaction.
    pub fn append_all(&self, drafts: Vec<Draft>) -> Result<Vec<Event>, AppendError> {
        if self.mode == OpenMode::ReadOnly {
            return Err(AppendError::ReadOnly);
        }
        // Outside of the transaction: others wait while it is open.
        let drafts = drafts.into_iter().map(check).collect::<Result<Vec<_>, _>>()?;
        let mut events = Vec::with_capacity(drafts.len());
        let connection = self.lock();
        let transaction = Transaction::new_unchecked(&connection, TransactionBehavior::Immediate)?;
        let (mut seq, mut prev) =
            head(&transaction)?.ok_or_else(|| AppendError::Damaged("it has no head".into()))?;
        for (draft, data) in drafts {
            seq += 1;
            let event = Event::chain(draft, seq, clock::now(), &prev);
            insert(&transaction, &event, &data)?;
            prev.clone_from(&event.hash);
            events.push(event);
        }
        transaction
            .prepare_cached("UPDATE head SET seq = ?1, hash = ?2 WHERE one = 1")?
            .execute(params![column(seq), prev])?;
        transaction.commit()?;
        Ok(events)
    }

    /// Events in their order. Their hashes are not checked here; [`Store::verify`] does that.
    pub fn events(&self, query: &EventQuery) -> Result<Vec<Event>, ReadError> {
        let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
        let after = column(query.after);
        let connection = self.lock();
        let mut statement;
        let mut rows = match &query.body {
            None => {
                statement = connection.prepare_cached(concat!(
                    "SELECT ",
                    columns!(),
                    " FROM events WHERE seq > ?1 ORDER BY seq LIMIT ?2"
                ))?;
                statement.query(params![after, limit])?
            }
            Some(body) => {
                statement = connection.prepare_cached(concat!(
                    "SELECT ",
                    columns!(),
                    " FROM events WHERE seq > ?1 AND body = ?3 ORDER BY seq LIMIT ?2"
                ))?;
                statement.query(params![after, limit, body.as_str()])?
            }
        };
        let mut events = Vec::new();
        while let Some(row) = rows.next()? {
            events.push(row::read(row).map_err(|error| unreadable(row, error))?.event);
        }
        Ok(events)
    }

    /// The place of the last event; 0 in an empty log.
    pub fn last_seq(&self) -> Result<u64, ReadError> {
        match head(&self.lock())? {
            Some((seq, _)) => Ok(seq),
            None => Err(ReadError::Damaged("it has no head".into())),
        }
    }

    /// Reads the whole log and says whether it is what was written. Others append meanwhile: this reads one moment
    /// of the log, by a connection of its own.
    pub fn verify(&self) -> Result<ChainVerdict, ReadError> {
        verify::verify(&self.path)
    }

    /// Writes the WAL back into the database when it has grown past what the next open should have to read; gives up
    /// at once when others read or write. Done when the store is dropped; a caller with time to spare may do it
    /// earlier. Waits for the disk, at most once in [`open::WAL_LEN_TIDY`] of log.
    pub fn tidy(&self) {
        if self.mode == OpenMode::ReadWrite && open::wal_len(&self.path) > open::WAL_LEN_TIDY {
            // Whatever goes wrong is no loss: all events are in the WAL, and the next one to leave tries again.
            let _ = open::write_back(&self.lock());
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.mode == OpenMode::ReadOnly
    }

    /// A panic of another thread leaves no transaction open: it is rolled back as it unwinds.
    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.tidy();
    }
}

/// The place and hash of the last event.
pub(crate) fn head(connection: &Connection) -> Result<Option<(u64, String)>, Error> {
    connection
        .prepare_cached("SELECT seq, hash FROM head WHERE one = 1")?
        .query_row([], |row| {
            let seq: i64 = row.get(0)?;
            let seq = u64::try_from(seq).map_err(|_| Error::IntegralValueOutOfRange(0, seq))?;
            Ok((seq, row.get(1)?))
        })
        .optional()
}

fn insert(connection: &Connection, event: &Event, data: &str) -> Result<(), Error> {
    let mut statement =
        connection.prepare_cached("INSERT INTO events VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?;
    let body = event.body.as_ref().map(BodyId::as_str);
    statement.execute(params![
        column(event.seq),
        event.at,
        event.kind,
        body,
        event.brain,
        data,
        event.prev,
        event.hash
    ])?;
    Ok(())
}

/// A place as SQLite counts; nobody lives to see the difference.
fn column(seq: u64) -> i64 {
    i64::try_from(seq).unwrap_or(i64::MAX)
}

fn unreadable(row: &rusqlite::Row<'_>, error: RowError) -> ReadError {
    match error {
        RowError::Database(error) if error.sqlite_error_code().is_some() => error.into(),
        error => ReadError::Event { seq: row::seq(row).unwrap_or(0), why: error.to_string() },
    }
}

/// A draft within the limits, and its data as text.
fn check(draft: Draft) -> Result<(Draft, String), AppendError> {
    let within = |field, found, max| {
        let kind = || draft.kind.chars().take(64).collect();
        if found <= max { Ok(()) } else { Err(AppendError::TooLarge { kind: kind(), field, found, max }) }
    };
    within("length of the type in bytes", draft.kind.len(), LABEL_LEN_MAX)?;
    within("length of the brain in bytes", draft.brain.as_ref().map_or(0, String::len), LABEL_LEN_MAX)?;
    within("depth of the data", depth(&draft.data, 0), DEPTH_MAX)?;
    let data = draft.data.to_string();
    within("length of the data in bytes", data.len(), DATA_LEN_MAX)?;
    Ok((draft, data))
}

/// How many lists and objects are around the innermost value; does not go deeper than the first that is too many.
fn depth(value: &Value, around: usize) -> usize {
    if around > DEPTH_MAX {
        return around;
    }
    match value {
        Value::Array(items) => items.iter().map(|item| depth(item, around + 1)).max().unwrap_or(around + 1),
        Value::Object(items) => {
            items.values().map(|item| depth(item, around + 1)).max().unwrap_or(around + 1)
        }
        _ => around,
    }
}
