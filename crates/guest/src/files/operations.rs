//! Stat, list, make, move and remove, and the Connect errors of their failures. All of it runs on a helper thread.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use proto::wire::filesystem::{
    EntryInfo, ListDirRequest, ListDirResponse, MakeDirRequest, MakeDirResponse, MoveRequest, MoveResponse,
    RemoveRequest, RemoveResponse, StatRequest, StatResponse,
};

use super::{entry::entry, make_dirs, remove::remove};
use crate::{
    connect::{Code, ConnectError},
    paths,
    users::{GuestUser, IdNames},
};

/// Entries in one listing.
const ENTRIES_MAX: usize = 50_000;

/// The user for whom an operation runs, and the directory that an empty path means.
#[derive(Debug)]
pub struct FileCaller {
    pub user: GuestUser,
    pub workdir: Option<String>,
}

impl FileCaller {
    pub fn path(&self, path: &str) -> Result<PathBuf, ConnectError> {
        paths::resolve(path.as_bytes(), &self.user, self.workdir.as_deref())
    }
}

pub fn stat(caller: &FileCaller, asked: &StatRequest) -> Result<StatResponse, ConnectError> {
    let path = caller.path(&asked.path)?;
    Ok(StatResponse { entry: Some(known_entry(&path)?) })
}

pub fn make(caller: &FileCaller, asked: &MakeDirRequest) -> Result<MakeDirResponse, ConnectError> {
    let path = caller.path(&asked.path)?;
    match std::fs::metadata(&path) {
        Ok(found) if found.is_dir() => {
            return Err(ConnectError::new(
                Code::AlreadyExists,
                format!("directory already exists: {}", path.display()),
            ));
        }
        Ok(_) => {
            let message = format!("path already exists but it is not a directory: {}", path.display());
            return Err(ConnectError::invalid(message));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(fault("error getting file info", &error)),
    }
    make_dirs(&path, &caller.user).map_err(|error| fault("failed to create directory", &error))?;
    Ok(MakeDirResponse { entry: Some(known_entry(&path)?) })
}

pub fn rename(caller: &FileCaller, asked: &MoveRequest) -> Result<MoveResponse, ConnectError> {
    let (from, to) = (caller.path(&asked.source)?, caller.path(&asked.destination)?);
    if let Some(parent) = to.parent() {
        make_dirs(parent, &caller.user).map_err(|error| fault("failed to create directory", &error))?;
    }
    std::fs::rename(&from, &to).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            ConnectError::new(Code::NotFound, format!("source file not found: {}", from.display()))
        }
        _ => fault("error renaming", &error),
    })?;
    Ok(MoveResponse { entry: Some(known_entry(&to)?) })
}

pub fn delete(caller: &FileCaller, asked: &RemoveRequest) -> Result<RemoveResponse, ConnectError> {
    let path = caller.path(&asked.path)?;
    remove(&path).map_err(|error| fault("error removing file or directory", &error))?;
    Ok(RemoveResponse {})
}

pub fn list(caller: &FileCaller, asked: &ListDirRequest) -> Result<ListDirResponse, ConnectError> {
    let path = caller.path(&asked.path)?;
    let real = std::fs::canonicalize(&path).map_err(|error| fault("path not found", &error))?;
    if !real.is_dir() {
        return Err(ConnectError::invalid(format!("path is not a directory: {}", path.display())));
    }
    let names = IdNames::read();
    let mut entries = Vec::new();
    let mut open = vec![children(&real)?];
    let depth = usize::try_from(asked.depth.max(1)).unwrap_or(usize::MAX);
    while let Some(siblings) = open.last_mut() {
        let Some((child, is_dir)) = siblings.pop_front() else {
            open.pop();
            continue;
        };
        if let Some(found) = listed(&child, &real, &path, &names)? {
            entries.push(found);
        }
        if entries.len() > ENTRIES_MAX {
            let message =
                format!("more than {ENTRIES_MAX} entries: ask for less depth or a smaller directory");
            return Err(ConnectError::new(Code::ResourceExhausted, message));
        }
        if is_dir && open.len() < depth {
            open.push(children(&child)?);
        }
    }
    Ok(ListDirResponse { entries })
}

/// Describes an entry under the path that the caller gave, not the resolved one; `None` if it no longer exists.
fn listed(
    child: &Path,
    real: &Path,
    asked: &Path,
    names: &IdNames,
) -> Result<Option<EntryInfo>, ConnectError> {
    match entry(child, names) {
        Ok(mut found) => {
            let shown =
                child.strip_prefix(real).map_or_else(|_| child.to_path_buf(), |below| asked.join(below));
            found.path = shown.to_string_lossy().into_owned();
            Ok(Some(found))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fault("error getting file info", &error)),
    }
}

/// Lists a directory sorted by name. A directory that no longer exists is empty.
fn children(dir: &Path) -> Result<VecDeque<(PathBuf, bool)>, ConnectError> {
    let failed = |error: io::Error| {
        ConnectError::internal(format!("error reading directory {}: {error}", dir.display()))
    };
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(VecDeque::new()),
        read => read.map_err(failed)?,
    };
    let mut children = Vec::new();
    for entry in entries.take(ENTRIES_MAX + 1) {
        let entry = entry.map_err(failed)?;
        children.push((entry.path(), entry.file_type().is_ok_and(|kind| kind.is_dir())));
    }
    children.sort_unstable();
    Ok(children.into())
}

fn known_entry(path: &Path) -> Result<EntryInfo, ConnectError> {
    entry(path, &IdNames::read()).map_err(|error| fault("file not found", &error))
}

/// Translates a kernel error into a Connect error.
pub fn fault(what: &str, error: &io::Error) -> ConnectError {
    let code = match error.kind() {
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::NotADirectory | ErrorKind::InvalidFilename | ErrorKind::InvalidInput => {
            Code::InvalidArgument
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => Code::PermissionDenied,
        _ if super::is_link_loop(error) => Code::FailedPrecondition,
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    ConnectError::new(code, format!("{what}: {error}"))
}
