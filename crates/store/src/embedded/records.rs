//! Records as a table in the database file of the event log.
//!
//! A deleted record leaves a row without a value, so that a watch sees the deletion. Only the newest
//! [`DELETED_MAX`] deletions of a bucket are kept; a row with an empty key, which no record can have, holds
//! the revision of the newest deletion that was dropped.
//!
//! Invariant: a write is one transaction that reads the record's revision and assigns the next one of the
//! bucket, under SQLite's write lock from its first statement.
//! Invariant: the row with the newest revision of a bucket is never removed, so the next revision is one more
//! than it.
//! Invariant: the connection is separate from the event log's, so a record can be read while an append waits
//! for its turn.
//! Trust: any program may have written the file. Keys are checked when they are read.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rusqlite::{
    Connection, Error, ErrorCode, OptionalExtension, Row, Transaction, TransactionBehavior, ffi, params,
};

use super::open::{self, Durability, FILE};
use crate::records::{
    Bucket, Listing, RECORD_LEN_MAX, RecordChange, RecordKey, Records, RecordsError, Revision, StoredRecord,
    WATCH_LEN_MAX,
};

/// Deletions of one bucket that a watch can still see.
const DELETED_MAX: i64 = 512;
/// How often a waiting watch queries again.
const POLL: Duration = Duration::from_millis(20);
/// `STRICT` prevents other writers from storing a number in a text column.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS records (bucket TEXT NOT NULL, key TEXT NOT NULL, revision INTEGER NOT NULL, value TEXT) STRICT;
    CREATE UNIQUE INDEX IF NOT EXISTS records_by_key ON records (bucket, key);
    CREATE UNIQUE INDEX IF NOT EXISTS records_by_revision ON records (bucket, revision);
    CREATE INDEX IF NOT EXISTS records_deleted ON records (bucket, revision) WHERE value IS NULL;";

/// The records of one data directory, opened at their first use.
#[derive(Debug)]
pub struct EmbeddedRecords {
    path: PathBuf,
    durability: Durability,
    connection: Mutex<Option<Connection>>,
}

impl EmbeddedRecords {
    /// The records in the existing directory `dir`. Does not read or create anything yet.
    pub fn at(dir: &Path, durability: Durability) -> Self {
        Self { path: dir.join(FILE), durability, connection: Mutex::new(None) }
    }

    fn with<R>(&self, act: impl FnOnce(&Connection) -> Result<R, RecordsError>) -> Result<R, RecordsError> {
        // A panic of another thread leaves no transaction open: unwinding rolls it back.
        let mut slot: MutexGuard<'_, Option<Connection>> =
            self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = match slot.take() {
            Some(connection) => connection,
            None => open(&self.path, self.durability)?,
        };
        act(slot.insert(connection))
    }

    /// Changes a record that must be at `expected`; none means that it must not exist.
    fn write(
        &self,
        bucket: Bucket,
        key: &RecordKey,
        value: Option<&str>,
        expected: Option<Revision>,
    ) -> Result<Revision, RecordsError> {
        let len = value.map_or(0, str::len);
        if len > RECORD_LEN_MAX {
            return Err(RecordsError::TooLarge { bucket, key: key.clone(), len });
        }
        self.with(|connection| {
            let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
            let current = transaction
                .prepare_cached(
                    "SELECT revision FROM records WHERE bucket = ?1 AND key = ?2 AND value IS NOT NULL",
                )?
                .query_row(params![bucket.as_str(), key.as_str()], |row| revision(row, 0))
                .optional()?;
            if current != expected {
                return Err(RecordsError::Conflict { bucket, key: key.clone(), current });
            }
            let next = Revision(newest(&transaction, bucket)?.0 + 1);
            transaction
                .prepare_cached(
                    "INSERT INTO records VALUES (?1, ?2, ?3, ?4) \
                     ON CONFLICT (bucket, key) DO UPDATE SET revision = excluded.revision, value = excluded.value",
                )?
                .execute(params![bucket.as_str(), key.as_str(), column(next), value])?;
            if value.is_none() {
                drop_old_deletions(&transaction, bucket)?;
            }
            transaction.commit()?;
            Ok(next)
        })
    }

    fn changes(&self, bucket: Bucket, since: Revision) -> Result<Vec<RecordChange<String>>, RecordsError> {
        self.with(|connection| {
            let moment = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)?;
            // A watch from the start knows no record yet, so it needs no deletions.
            if since > Revision::START && dropped(&moment, bucket)? > since {
                return Err(RecordsError::Compacted { bucket, since });
            }
            let mut statement = moment.prepare_cached(
                "SELECT key, revision, value FROM records \
                 WHERE bucket = ?1 AND revision > ?2 AND key <> '' ORDER BY revision LIMIT ?3",
            )?;
            let mut rows = statement.query(params![bucket.as_str(), column(since), WATCH_LEN_MAX as i64])?;
            let mut changes = Vec::new();
            while let Some(row) = rows.next()? {
                changes.push(RecordChange {
                    key: key(row)?,
                    revision: revision(row, 1)?,
                    value: row.get(2)?,
                });
            }
            Ok(changes)
        })
    }
}

impl Records for EmbeddedRecords {
    fn get(&self, bucket: Bucket, key: &RecordKey) -> Result<Option<StoredRecord>, RecordsError> {
        self.with(|connection| {
            let mut statement = connection.prepare_cached(
                "SELECT revision, value FROM records WHERE bucket = ?1 AND key = ?2 AND value IS NOT NULL",
            )?;
            let found = statement.query_row(params![bucket.as_str(), key.as_str()], |row| {
                Ok(StoredRecord { key: key.clone(), revision: revision(row, 0)?, value: row.get(1)? })
            });
            Ok(found.optional()?)
        })
    }

    fn create(&self, bucket: Bucket, key: &RecordKey, value: &str) -> Result<Revision, RecordsError> {
        self.write(bucket, key, Some(value), None)
    }

    fn update(
        &self,
        bucket: Bucket,
        key: &RecordKey,
        value: &str,
        expected: Revision,
    ) -> Result<Revision, RecordsError> {
        self.write(bucket, key, Some(value), Some(expected))
    }

    fn delete(&self, bucket: Bucket, key: &RecordKey, expected: Revision) -> Result<(), RecordsError> {
        self.write(bucket, key, None, Some(expected)).map(drop)
    }

    fn list(&self, bucket: Bucket, below: Option<&RecordKey>) -> Result<Listing<StoredRecord>, RecordsError> {
        // `/` follows `.`, which joins segments; `~` is greater than all characters of a key.
        let (from, to) =
            below.map_or((String::new(), "~".to_owned()), |below| (format!("{below}."), format!("{below}/")));
        self.with(|connection| {
            let moment = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)?;
            let mut statement = moment.prepare_cached(
                "SELECT key, revision, value FROM records \
                 WHERE bucket = ?1 AND key >= ?2 AND key < ?3 AND value IS NOT NULL ORDER BY key",
            )?;
            let mut rows = statement.query(params![bucket.as_str(), from, to])?;
            let mut records = Vec::new();
            while let Some(row) = rows.next()? {
                records.push(StoredRecord {
                    key: key(row)?,
                    revision: revision(row, 1)?,
                    value: row.get(2)?,
                });
            }
            Ok(Listing { records, revision: newest(&moment, bucket)? })
        })
    }

    fn watch(
        &self,
        bucket: Bucket,
        since: Revision,
        wait: Duration,
    ) -> Result<Vec<RecordChange<String>>, RecordsError> {
        let deadline = Instant::now() + wait;
        loop {
            let changes = self.changes(bucket, since)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if !changes.is_empty() || left.is_zero() {
                return Ok(changes);
            }
            thread::sleep(left.min(POLL));
        }
    }
}

impl From<Error> for RecordsError {
    fn from(error: Error) -> Self {
        // SQLite reports a full disk differently for the shared memory file of the WAL.
        let extended = error.sqlite_error().map(|error| error.extended_code);
        match error.sqlite_error_code() {
            _ if extended == Some(ffi::SQLITE_IOERR_SHMSIZE) => RecordsError::DiskFull,
            Some(ErrorCode::DiskFull) => RecordsError::DiskFull,
            Some(ErrorCode::DatabaseBusy | ErrorCode::FileLockingProtocolFailed) => RecordsError::Busy,
            Some(
                ErrorCode::DatabaseCorrupt
                | ErrorCode::NotADatabase
                | ErrorCode::ConstraintViolation
                | ErrorCode::TooBig,
            ) => RecordsError::Damaged(error.to_string()),
            _ => RecordsError::Store(Box::new(error)),
        }
    }
}

/// Opens the database, and creates the table if there is none. If other processes create it too, the first
/// one wins.
fn open(path: &Path, durability: Durability) -> Result<Connection, RecordsError> {
    let connection = open::read_write(path, durability)?;
    let made: i64 = connection.query_row(
        "SELECT count(*) FROM sqlite_schema WHERE tbl_name = 'records' AND type IN ('table', 'index')",
        [],
        |row| row.get(0),
    )?;
    if made < 4 {
        let transaction = Transaction::new_unchecked(&connection, TransactionBehavior::Immediate)?;
        transaction.execute_batch(SCHEMA)?;
        transaction.commit()?;
    }
    Ok(connection)
}

/// The newest revision of a bucket.
fn newest(connection: &Connection, bucket: Bucket) -> Result<Revision, Error> {
    connection
        .prepare_cached("SELECT coalesce(max(revision), 0) FROM records WHERE bucket = ?1")?
        .query_row([bucket.as_str()], |row| revision(row, 0))
}

/// The newest deletion of a bucket that was dropped.
fn dropped(connection: &Connection, bucket: Bucket) -> Result<Revision, Error> {
    connection
        .prepare_cached("SELECT coalesce(max(revision), 0) FROM records WHERE bucket = ?1 AND key = ''")?
        .query_row([bucket.as_str()], |row| revision(row, 0))
}

fn drop_old_deletions(transaction: &Transaction<'_>, bucket: Bucket) -> Result<(), Error> {
    let oldest = transaction
        .prepare_cached(
            "SELECT revision FROM records WHERE bucket = ?1 AND value IS NULL AND key <> '' \
             ORDER BY revision DESC LIMIT 1 OFFSET ?2",
        )?
        .query_row(params![bucket.as_str(), DELETED_MAX], |row| row.get::<_, i64>(0))
        .optional()?;
    let Some(oldest) = oldest else { return Ok(()) };
    transaction
        .prepare_cached("DELETE FROM records WHERE bucket = ?1 AND value IS NULL AND revision <= ?2")?
        .execute(params![bucket.as_str(), oldest])?;
    transaction
        .prepare_cached("INSERT INTO records VALUES (?1, '', ?2, NULL)")?
        .execute(params![bucket.as_str(), oldest])?;
    Ok(())
}

fn key(row: &Row<'_>) -> Result<RecordKey, RecordsError> {
    let text: String = row.get(0)?;
    text.parse().map_err(|error: crate::records::KeyError| RecordsError::Damaged(error.to_string()))
}

fn revision(row: &Row<'_>, at: usize) -> Result<Revision, Error> {
    let found: i64 = row.get(at)?;
    u64::try_from(found).map(Revision).map_err(|_| Error::IntegralValueOutOfRange(at, found))
}

/// A revision as an integer of SQLite; no bucket reaches the range where they differ.
fn column(revision: Revision) -> i64 {
    i64::try_from(revision.0).unwrap_or(i64::MAX)
}
