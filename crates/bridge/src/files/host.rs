//! A directory of the host that an agent may read, and write if the user says so.
//!
//! Invariant: nothing outside of the directory is reached, whatever paths and symbolic links say: the directory is opened
//! once, and the kernel resolves every path beneath that descriptor.
//! Invariant: an operation has limits on time, entries and bytes.
//! Trust: the paths come from a model. The files in the directory may be anything, also pipes and devices.

mod change;
mod walk;

use std::{
    fs::File,
    io::Read,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use brain::agent::BoxFuture;
use proto::{
    Failure, Kind,
    event_data::CallRisk,
    file_call::{CONTENT_LEN_MAX, FileAnswer, FileCall, FileEntry, FileError, FileOperation, PATHS_MAX},
};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2, statat},
    io::Errno,
};

use super::{
    BodyLife, FileBackend, FileReply,
    tree::{answer_bytes, refuse},
};

/// Whether an agent may change the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostAccess {
    /// It may only read.
    ReadOnly,
    /// It may write.
    ReadWrite,
}

/// A directory of the host.
#[derive(Clone)]
pub struct HostDirectory {
    root: Arc<OwnedFd>,
    access: HostAccess,
}

impl HostDirectory {
    /// Opens a directory.
    pub fn open(path: &Path, access: HostAccess) -> Result<Self, Failure> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(path, flags, Mode::empty()).map_err(|error| {
            Failure::new(Kind::Usage, format!("cannot open the directory {}", path.display()))
                .because(std::io::Error::from(error))
                .hint("name a directory that exists and that you can read")
        })?;
        Ok(Self { root: Arc::new(root), access })
    }

    fn answer(&self, operation: &FileOperation) -> FileAnswer {
        let (path, done) = match operation {
            FileOperation::List { path } => (path, self.list(path)),
            FileOperation::Read { path, offset, limit } => {
                (path, self.read(path).map(|bytes| answer_bytes(bytes, *offset, *limit)))
            }
            FileOperation::Glob { pattern, path } => (path, self.glob(pattern, path)),
            FileOperation::Grep { pattern, path, glob, limit } => {
                (path, self.grep(pattern, path, glob.as_deref(), *limit))
            }
            FileOperation::Recall { .. } => return FileAnswer::Unknown,
            FileOperation::Write { files } => return self.change_all(files),
            FileOperation::Edit { path, old, new, replace_all } => {
                (path, self.edit(path, old, new, *replace_all))
            }
            FileOperation::Delete { path } => (path, self.delete(path)),
        };
        done.unwrap_or_else(|reason| refuse(path, reason))
    }

    /// Opens a path beneath the directory.
    fn open_beneath(&self, path: &str, flags: OFlags) -> Result<OwnedFd, FileError> {
        let below = path.trim_matches('/');
        let below = if below.is_empty() { "." } else { below };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        // A pipe without a writer would block the open; a path that is only looked at is not opened.
        let careful =
            if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NONBLOCK | OFlags::NOCTTY };
        let flags = flags | OFlags::CLOEXEC | careful;
        openat2(self.root.as_fd(), below, flags, Mode::empty(), resolve).map_err(file_error)
    }

    fn list(&self, path: &str) -> Result<FileAnswer, FileError> {
        let directory = self.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut entries = Vec::new();
        let mut truncated = false;
        for entry in Dir::read_from(&directory).map_err(file_error)? {
            let entry = entry.map_err(file_error)?;
            // A name that is no text cannot be named by a model.
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name == "." || name == ".." {
                continue;
            }
            if entries.len() >= PATHS_MAX {
                truncated = true;
                break;
            }
            let found = statat(&directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW).ok();
            let is_dir = entry.file_type() == FileType::Directory;
            let len = found.as_ref().and_then(|found| u64::try_from(found.st_size).ok()).unwrap_or(0);
            entries.push(FileEntry {
                path: format!("{}/{name}", path.trim_end_matches('/')),
                is_dir,
                len: if is_dir { 0 } else { len },
                modified_s: found.map_or(0, |found| found.st_mtime),
            });
        }
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(FileAnswer::Entries { entries, truncated })
    }

    /// Reads a regular file.
    fn read(&self, path: &str) -> Result<Vec<u8>, FileError> {
        let file = self.open_beneath(path, OFlags::RDONLY)?;
        let found = fstat(&file).map_err(file_error)?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(FileError::IsDirectory),
            _ => return Err(FileError::Other { why: "not_a_file".into() }),
        }
        let len = u64::try_from(found.st_size).unwrap_or(0);
        if len > CONTENT_LEN_MAX as u64 {
            return Err(FileError::TooLarge { len });
        }
        let mut bytes = Vec::new();
        // The file may grow while it is read.
        let read = File::from(file).take(CONTENT_LEN_MAX as u64 + 1).read_to_end(&mut bytes);
        read.map_err(|error| FileError::Other { why: error.to_string() })?;
        if bytes.len() > CONTENT_LEN_MAX {
            return Err(FileError::TooLarge { len: bytes.len() as u64 });
        }
        Ok(bytes)
    }
}

impl FileBackend for HostDirectory {
    fn call(&self, call: FileCall) -> BoxFuture<'_, Result<FileReply, Failure>> {
        let directory = self.clone();
        Box::pin(async move {
            let done = tokio::task::spawn_blocking(move || directory.answer(&call.operation)).await;
            done.map(FileReply::from).map_err(|error| {
                Failure::new(Kind::Internal, "reading a directory of the host was interrupted").because(error)
            })
        })
    }

    /// A change reaches the host.
    fn change_risk(&self) -> CallRisk {
        CallRisk::Outside
    }

    /// A directory of the host has no ledger of calls.
    fn recover(&self, call: FileCall, _: BodyLife) -> BoxFuture<'_, Result<Option<FileReply>, Failure>> {
        Box::pin(async move {
            match call.key {
                Some(_) => Ok(None),
                None => self.call(call).await.map(Some),
            }
        })
    }
}

fn file_error(error: Errno) -> FileError {
    match error {
        Errno::NOENT => FileError::NotFound,
        Errno::NOTDIR => FileError::NotDirectory,
        Errno::ISDIR => FileError::IsDirectory,
        // The kernel says so about a path that leaves the directory.
        Errno::ACCESS | Errno::PERM | Errno::XDEV | Errno::LOOP | Errno::ROFS => FileError::PermissionDenied,
        Errno::INVAL | Errno::NAMETOOLONG => FileError::InvalidPath,
        other => FileError::Other { why: std::io::Error::from(other).to_string() },
    }
}

#[cfg(test)]
mod tests;
