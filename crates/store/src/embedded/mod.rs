//! The embedded store: the event log and the records on SQLite, artifacts in files, in one data directory.
//!
//! Invariant: several processes may use one data directory; SQLite's write lock orders the appends.

mod artifact;
mod error;
mod log;
mod open;
mod read;
mod records;
mod row;
mod schema;
mod verify;

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use artifact::ArtifactDir;
use proto::NodeId;
use rusqlite::Connection;

pub use open::{Durability, DurabilityError, FILE, OpenError};
pub use records::EmbeddedRecords;
pub use schema::SCHEMA_VERSION;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenMode {
    ReadWrite,
    ReadOnly,
}

/// The event log and the artifacts of one data directory.
#[derive(Debug)]
pub struct Store {
    connection: Mutex<Connection>,
    path: PathBuf,
    mode: OpenMode,
    /// Read from the log at its first use.
    node: OnceLock<NodeId>,
    artifacts: ArtifactDir,
}

impl Store {
    /// Opens the store in the existing directory `dir`. Creates the log if there is none, and migrates a log
    /// of an earlier version.
    pub fn open(dir: &Path, durability: Durability) -> Result<Store, OpenError> {
        let path = dir.join(FILE);
        let connection = open::read_write(&path, durability)?;
        Ok(Self::new(connection, path, OpenMode::ReadWrite, ArtifactDir::new(dir, durability)))
    }

    /// Opens the store in `dir` for reading; writes no event.
    pub fn open_read_only(dir: &Path) -> Result<Store, OpenError> {
        let path = dir.join(FILE);
        let connection = open::read_only(&path)?;
        Ok(Self::new(connection, path, OpenMode::ReadOnly, ArtifactDir::new(dir, Durability::Process)))
    }

    fn new(connection: Connection, path: PathBuf, mode: OpenMode, artifacts: ArtifactDir) -> Self {
        Store { connection: Mutex::new(connection), path, mode, node: OnceLock::new(), artifacts }
    }

    /// Writes the WAL back into the database when it is longer than the next open should have to read; gives
    /// up at once when other processes read or write. Dropping the store does this too; a caller with time to
    /// spare may do it earlier. It waits for the disk, at most once in [`open::WAL_LEN_TIDY`] of log.
    pub fn tidy(&self) {
        if self.mode == OpenMode::ReadWrite && open::wal_len(&self.path) > open::WAL_LEN_TIDY {
            // A failure loses nothing: all events are in the WAL, and the next process that closes the log
            // tries again.
            let _ = open::write_back(&self.lock());
        }
    }

    fn is_read_only(&self) -> bool {
        self.mode == OpenMode::ReadOnly
    }

    /// Locks the connection. A panic of another thread leaves no transaction open: unwinding rolls it back.
    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.tidy();
    }
}
