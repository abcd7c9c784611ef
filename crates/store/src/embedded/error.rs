//! Translates errors of SQLite into errors of the log.

use rusqlite::{Error, ErrorCode, ffi};

use crate::event_log::{AppendError, ReadError};

pub(crate) fn append_error(error: Error) -> AppendError {
    // SQLite reports a full disk differently for the shared memory file of the WAL.
    let extended = error.sqlite_error().map(|error| error.extended_code);
    match error.sqlite_error_code() {
        _ if extended == Some(ffi::SQLITE_IOERR_SHMSIZE) => AppendError::DiskFull,
        Some(ErrorCode::DiskFull) => AppendError::DiskFull,
        Some(ErrorCode::DatabaseBusy | ErrorCode::FileLockingProtocolFailed) => AppendError::Busy,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::ConstraintViolation) => {
            AppendError::Damaged(error.to_string())
        }
        _ => AppendError::Backend(error.into()),
    }
}

pub(crate) fn read_error(error: Error) -> ReadError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::TooBig) => {
            ReadError::Damaged(error.to_string())
        }
        _ => ReadError::Backend(error.into()),
    }
}
