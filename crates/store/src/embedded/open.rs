//! Opens the database of the log, creates it if there is none, and migrates an earlier version.
//!
//! Invariant: a database is ours only with our application id, and readable only with our version or an older
//! one.
//! Invariant: creating or migrating a database may be interrupted anywhere, also by `kill -9`; the next
//! process that opens it completes the work.
//! Invariant: once the file exists, only SQLite opens it: closing any descriptor of it would drop the POSIX
//! locks that SQLite holds on it in this process.
//! Trust: any program may have written the file. SQLite runs nothing in its schema: no trigger, no view, no
//! function.

use std::{
    fmt,
    fs::{OpenOptions, Permissions},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use rusqlite::{
    Connection, Error, ErrorCode, MAIN_DB, OpenFlags, TransactionBehavior, config::DbConfig, ffi,
    limits::Limit,
};
use rustix::fs::Access;

use super::schema::{self, SCHEMA_VERSION};

/// Name of the database in the data directory.
pub const FILE: &str = "events.db";
/// "PalE" in the header of the file: marks our databases of every version.
const APPLICATION_ID: i32 = 0x5061_6c45;
const BUSY_WAIT: Duration = Duration::from_secs(10);
/// The longest row: its data and a few short columns. A longer row is not ours and is not read into memory.
/// Version 1 of the schema allowed 1 MiB of data.
const ROW_LEN_MAX: i32 = 1024 * 1024 + 64 * 1024;

/// Small pages: a commit changes about six pages whatever their size, and SQLite writes and checksums each
/// whole. Measured against 4096: appends are a tenth faster, a write-back at 1000 pages takes half the time,
/// and the file is as long; reading the WAL at open costs the same, because it has a few more pages.
const PAGE_LEN: u32 = 1024;
/// The length of the WAL at which closing a store writes it back.
///
/// The first process that opens the log reads the whole WAL: about 1.2 µs for each page, so 1.2 ms at the
/// 1000 pages where SQLite itself would write it back. Writing back waits for the disk (twice, about 1.3 ms
/// on a virtual disk). One `pal run` adds about 30 pages; so an open reads 100 pages on average, and one run
/// in 7 waits for the disk, after its work is done. Long-lived processes keep SQLite's own limit of 1000
/// pages: there the commit that reaches the limit waits, about 2 ms once in 160 events.
pub(crate) const WAL_LEN_TIDY: u64 = 200 * PAGE_LEN as u64;

/// The failure that an acknowledged event survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// A loss of power: every append waits for the disk.
    Power,
    /// The end of the process, also by `kill -9`. After a loss of power the last events may be missing; the
    /// rest of the log stays valid.
    #[default]
    Process,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Durability::Power => "power",
            Durability::Process => "process",
        })
    }
}

/// A text that is not a durability.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a durability: say power or process")]
pub struct DurabilityError(String);

impl FromStr for Durability {
    type Err = DurabilityError;
    fn from_str(text: &str) -> Result<Self, DurabilityError> {
        match text {
            "power" => Ok(Durability::Power),
            "process" => Ok(Durability::Process),
            _ => Err(DurabilityError(text.to_owned())),
        }
    }
}

/// Why a log could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no log, and the caller did not ask to create one.
    #[error("there is no event log at {path}")]
    Missing {
        /// The expected path.
        path: PathBuf,
    },
    /// The kernel refuses access to the file or its directory.
    #[error("cannot open the event log {path}")]
    Access {
        /// The file, or its directory if the kernel refuses that.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A newer `pal` wrote the log.
    #[error("the event log has version {found}, and this program knows only {known}")]
    Newer {
        /// Its version.
        found: i32,
        /// The version of this program.
        known: i32,
    },
    /// An earlier `pal` wrote the log; opening it for writing migrates it.
    #[error("the event log has version {found}; opening it for writing migrates it to version {known}")]
    Older {
        /// Its version.
        found: i32,
        /// The version of this program.
        known: i32,
    },
    /// The file is not a database.
    #[error("{path} is not a database")]
    NotADatabase {
        /// The file.
        path: PathBuf,
    },
    /// The file is a database of another program.
    #[error("{path} is a database, but not an event log")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The file system does not support a write-ahead log.
    #[error("the file system of {path} cannot hold an event log: SQLite has no write-ahead log there")]
    NoWal {
        /// The file.
        path: PathBuf,
    },
    /// Another process holds the lock.
    #[error("the event log {path} stayed locked for {} s", BUSY_WAIT.as_secs())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// Another error of SQLite.
    #[error("cannot open the event log {path}")]
    Database {
        /// The file.
        path: PathBuf,
        /// The error of SQLite.
        #[source]
        source: Error,
    },
}

/// Opens for reading and writing; creates the database if there is none.
pub(crate) fn read_write(path: &Path, durability: Durability) -> Result<Connection, OpenError> {
    let fail = |source| explain(path, Access::READ_OK | Access::WRITE_OK, source);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let connection = match raw(path, flags) {
        // The file was missing; another process may have created it since.
        Err(error) if is_code(&error, ErrorCode::CannotOpen) => {
            if is_missing(path) {
                make_file(path)?;
            }
            raw(path, flags)
        }
        other => other,
    }
    .map_err(fail)?;
    // SQLite silently opens a file for reading that it may not write.
    if connection.is_readonly(MAIN_DB).map_err(fail)? {
        return Err(fail(Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_READONLY), None)));
    }
    if find_state(&connection, path).map_err(|error| error.or(fail))? != SchemaState::Current {
        make_schema(&connection, path).map_err(|error| error.or(fail))?;
    }
    // In WAL mode the default, FULL, waits for the disk at each commit. NORMAL waits only when the WAL is
    // written back: a commit is in the page cache, which outlives the process but not the kernel.
    if durability == Durability::Process {
        connection.execute_batch("PRAGMA synchronous=NORMAL").map_err(fail)?;
    }
    Ok(connection)
}

/// Opens for reading only.
pub(crate) fn read_only(path: &Path) -> Result<Connection, OpenError> {
    let fail = |source| explain(path, Access::READ_OK, source);
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let mut connection = raw(path, flags).map_err(fail)?;
    let mut state = find_state(&connection, path);
    // In a read-only directory SQLite cannot create the shared memory that a WAL needs. Without a WAL it is
    // not needed, and the file can be read directly.
    if matches!(&state, Err(OpenFault::Sqlite(error)) if is_code(error, ErrorCode::CannotOpen))
        && wal_len(path) == 0
    {
        connection = raw(&immutable(path), flags | OpenFlags::SQLITE_OPEN_URI).map_err(fail)?;
        state = find_state(&connection, path);
    }
    match state.map_err(|error| error.or(fail))? {
        SchemaState::Current => {}
        SchemaState::Older(found) => return Err(OpenError::Older { found, known: SCHEMA_VERSION }),
        // The process that created the file was killed before it created the tables, so there is nothing to
        // read.
        SchemaState::New => return Err(OpenError::Missing { path: path.to_owned() }),
    }
    connection.execute_batch("PRAGMA cell_size_check=ON").map_err(fail)?;
    Ok(connection)
}

/// The length of a database's WAL; 0 if there is none.
pub(crate) fn wal_len(path: &Path) -> u64 {
    let mut wal = path.as_os_str().to_owned();
    wal.push("-wal");
    Path::new(&wal).metadata().map_or(0, |found| found.len())
}

/// Moves all of the WAL into the database and empties it, unless another process uses it.
pub(crate) fn write_back(connection: &Connection) -> Result<(), Error> {
    connection.busy_timeout(Duration::ZERO)?;
    let done = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
    connection.busy_timeout(BUSY_WAIT)?;
    done
}

/// Whether an error came from SQLite with this code.
pub(crate) fn is_code(error: &Error, code: ErrorCode) -> bool {
    error.sqlite_error_code() == Some(code)
}

/// A failure that is either clear by itself, or needs [`explain`].
enum OpenFault {
    Clear(OpenError),
    Sqlite(Error),
}

impl OpenFault {
    fn or(self, explain: impl Fn(Error) -> OpenError) -> OpenError {
        match self {
            OpenFault::Clear(error) => error,
            OpenFault::Sqlite(error) => explain(error),
        }
    }
}

impl From<Error> for OpenFault {
    fn from(error: Error) -> Self {
        OpenFault::Sqlite(error)
    }
}

/// Opens a connection with all settings that cost no statement. Our own Mutex protects it, so SQLite needs
/// none.
fn raw(path: &Path, flags: OpenFlags) -> Result<Connection, Error> {
    let connection = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.busy_timeout(BUSY_WAIT)?;
    // A checkpoint at close would make the last process wait for the disk, which is usually a single `pal
    // run`.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    // Our schema has no trigger, no view, no function and no foreign key; a schema that has one is hostile.
    // The setting for foreign keys stays as it is: there is nothing that it could affect.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, ROW_LEN_MAX)?;
    connection.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
    Ok(connection)
}

/// The relation of a database to the schema of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SchemaState {
    /// The database has no table yet.
    New,
    /// An earlier version wrote it.
    Older(i32),
    /// The schema is that of this version.
    Current,
}

/// Checks that the database is ours, and determines its version.
fn find_state(connection: &Connection, path: &Path) -> Result<SchemaState, OpenFault> {
    match read_state(connection, path) {
        // Another process may have created the tables between two of these queries: query again within one
        // transaction.
        Err(OpenFault::Clear(OpenError::Foreign { .. })) if connection.is_autocommit() => {
            let _moment = connection.unchecked_transaction()?;
            read_state(connection, path)
        }
        found => found,
    }
}

fn read_state(connection: &Connection, path: &Path) -> Result<SchemaState, OpenFault> {
    let header = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    match (header("application_id")?, header("user_version")?) {
        (APPLICATION_ID, SCHEMA_VERSION) => Ok(SchemaState::Current),
        (APPLICATION_ID, found) if found > SCHEMA_VERSION => {
            Err(OpenFault::Clear(OpenError::Newer { found, known: SCHEMA_VERSION }))
        }
        (APPLICATION_ID, found) if found > 0 => Ok(SchemaState::Older(found)),
        (0, 0) => {
            let tables: i64 =
                connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
            if tables == 0 { Ok(SchemaState::New) } else { Err(foreign(path)) }
        }
        _ => Err(foreign(path)),
    }
}

fn foreign(path: &Path) -> OpenFault {
    OpenFault::Clear(OpenError::Foreign { path: path.to_owned() })
}

/// Creates the empty file, accessible only by its owner; SQLite gives its WAL and shared memory the same
/// mode.
fn make_file(path: &Path) -> Result<(), OpenError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    // The umask may have removed bits that SQLite needs.
    let made = made.and_then(|file| file.set_permissions(Permissions::from_mode(0o600)));
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let dir = path.parent().unwrap_or(path);
            Err(OpenError::Access { path: dir.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

/// Creates the tables and the header, or migrates those of an earlier version, in one transaction. If several
/// processes do so at once, the first one does the work.
fn make_schema(connection: &Connection, path: &Path) -> Result<(), OpenFault> {
    enter_wal(connection, path)?;
    let transaction = rusqlite::Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
    match find_state(&transaction, path)? {
        SchemaState::Current => return Ok(()),
        SchemaState::New => schema::create_all(&transaction)?,
        SchemaState::Older(found) => schema::migrate(&transaction, found)?,
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
    Ok(transaction.commit()?)
}

/// The file stores the journal mode, so it is set once. SQLite does not wait for other processes while it
/// changes it.
fn enter_wal(connection: &Connection, path: &Path) -> Result<(), OpenFault> {
    // Takes effect in a database that has no page yet, and is ignored otherwise.
    connection.pragma_update(None, "page_size", PAGE_LEN)?;
    let deadline = Instant::now() + BUSY_WAIT;
    loop {
        let mode =
            connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0));
        match mode {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(_) => return Err(OpenFault::Clear(OpenError::NoWal { path: path.to_owned() })),
            Err(error) if is_code(&error, ErrorCode::DatabaseBusy) && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(OpenFault::Sqlite(error)),
        }
    }
}

/// Finds out why SQLite could not open the file: its error says little, so this tries the system calls.
fn explain(path: &Path, access: Access, source: Error) -> OpenError {
    let dir = path.parent().unwrap_or(path);
    let refused =
        |path: &Path, access| rustix::fs::access(path, access).err().map(|errno| (path.to_owned(), errno));
    let refusal = refused(path, access).or_else(|| {
        is_code(&source, ErrorCode::CannotOpen)
            .then(|| refused(dir, Access::WRITE_OK | Access::EXEC_OK))
            .flatten()
    });
    let path = path.to_owned();
    match (refusal, source.sqlite_error_code()) {
        (Some((_, rustix::io::Errno::NOENT)), _) => OpenError::Missing { path },
        (Some((path, errno)), _) => OpenError::Access { path, source: errno.into() },
        (None, Some(ErrorCode::NotADatabase)) => OpenError::NotADatabase { path },
        (None, Some(ErrorCode::DatabaseBusy | ErrorCode::FileLockingProtocolFailed)) => {
            OpenError::Busy { path }
        }
        (None, _) => OpenError::Database { path, source },
    }
}

fn is_missing(path: &Path) -> bool {
    matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// The file as a URI that tells SQLite not to look for a WAL.
fn immutable(path: &Path) -> PathBuf {
    use std::{fmt::Write, os::unix::ffi::OsStrExt};
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'/' | b'.' | b'-' | b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                uri.push(char::from(*byte))
            }
            // Writing to a String cannot fail.
            _ => write!(uri, "%{byte:02x}").unwrap_or(()),
        }
    }
    uri.push_str("?immutable=1");
    PathBuf::from(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_durability_reads_back_as_it_is_written() {
        for durability in [Durability::Power, Durability::Process] {
            assert_eq!(durability.to_string().parse::<Durability>().unwrap(), durability);
        }
        assert_eq!(
            "disk".parse::<Durability>().unwrap_err().to_string(),
            "\"disk\" is not a durability: say power or process"
        );
    }

    #[test]
    fn power_waits_for_the_disk_at_each_commit_and_process_does_not() {
        let dir = std::env::temp_dir().join(format!("palisade-store-open-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let settings = |durability| {
            let connection = read_write(&dir.join(FILE), durability).unwrap();
            let number =
                |name| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0)).unwrap();
            let mode: String = connection.pragma_query_value(None, "journal_mode", |row| row.get(0)).unwrap();
            (mode, number("synchronous"), number("page_size"), number("wal_autocheckpoint"))
        };
        let (power, process) = (settings(Durability::Power), settings(Durability::Process));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(power, ("wal".to_owned(), 2, 1024, 1000));
        assert_eq!(process, ("wal".to_owned(), 1, 1024, 1000));
    }

    #[test]
    fn a_path_becomes_a_uri_whatever_its_bytes() {
        use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
        let path = Path::new(OsStr::from_bytes(b"/a b?/\xff%#.db"));
        assert_eq!(immutable(path), Path::new("file:/a%20b%3f/%ff%25%23.db?immutable=1"));
    }
}
