//! Changes of a directory of the host.
//!
//! Invariant: a file is replaced as a whole by a rename, so that a reader sees the old content or the new one.

use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd, OwnedFd},
};

use proto::{
    file_call::{CONTENT_LEN_MAX, FileAnswer, FileError, WrittenFile},
    file_text,
};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, mkdirat, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

use super::{super::tree::refuse, HostAccess, HostDirectory, file_error};

/// How many directories deep a removal goes.
const DEPTH_MAX: usize = 64;

impl HostDirectory {
    /// Writes and removes files, up to the first that fails.
    pub(super) fn change_all(&self, files: &[WrittenFile]) -> FileAnswer {
        for file in files {
            let done = match &file.content {
                Some(text) => self.write(&file.path, text.as_bytes()),
                None => self.delete(&file.path).map(drop),
            };
            if let Err(reason) = done {
                return refuse(&file.path, reason);
            }
        }
        FileAnswer::Written
    }

    pub(super) fn edit(
        &self,
        path: &str,
        old: &str,
        new: &str,
        replace_all: bool,
    ) -> Result<FileAnswer, FileError> {
        self.check_access()?;
        let text = String::from_utf8(self.read(path)?).map_err(|_| FileError::NotText)?;
        let (text, occurrences) = file_text::replace_text(&text, old, new, replace_all)?;
        self.write(path, text.as_bytes())?;
        Ok(FileAnswer::Edited { occurrences })
    }

    pub(super) fn delete(&self, path: &str) -> Result<FileAnswer, FileError> {
        self.check_access()?;
        let (parent, name) = self.open_parent(path)?;
        remove(&parent, name, 0)?;
        Ok(FileAnswer::Deleted)
    }

    fn write(&self, path: &str, bytes: &[u8]) -> Result<(), FileError> {
        self.check_access()?;
        if bytes.len() > CONTENT_LEN_MAX {
            return Err(FileError::TooLarge { len: bytes.len() as u64 });
        }
        self.make_parents(path)?;
        let (parent, name) = self.open_parent(path)?;
        let mode = match statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => match FileType::from_raw_mode(found.st_mode) {
                FileType::Directory => return Err(FileError::IsDirectory),
                FileType::RegularFile => Mode::from_raw_mode(found.st_mode) & Mode::from_raw_mode(0o777),
                _ => Mode::from_raw_mode(0o644),
            },
            Err(_) => Mode::from_raw_mode(0o644),
        };
        let temporary = temporary_name()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&parent, &temporary, flags, mode).map_err(file_error)?;
        let written =
            File::from(file).write_all(bytes).map_err(|error| FileError::Other { why: error.to_string() });
        let done = written.and_then(|()| renameat(&parent, &temporary, &parent, name).map_err(file_error));
        if done.is_err() {
            let _ = unlinkat(&parent, &temporary, AtFlags::empty());
        }
        done
    }

    fn check_access(&self) -> Result<(), FileError> {
        match self.access {
            HostAccess::ReadWrite => Ok(()),
            HostAccess::ReadOnly => Err(FileError::PermissionDenied),
        }
    }

    /// The directory of a path, and its last name.
    fn open_parent<'a>(&self, path: &'a str) -> Result<(OwnedFd, &'a str), FileError> {
        let (parent, name) = path.trim_end_matches('/').rsplit_once('/').ok_or(FileError::IsDirectory)?;
        if name.is_empty() {
            return Err(FileError::IsDirectory);
        }
        Ok((self.open_beneath(parent, OFlags::RDONLY | OFlags::DIRECTORY)?, name))
    }

    /// Creates the directories above a path that do not exist.
    fn make_parents(&self, path: &str) -> Result<(), FileError> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        for end in 1..parts.len() {
            let directory = format!("/{}", parts[..end].join("/"));
            match self.open_beneath(&directory, OFlags::PATH | OFlags::DIRECTORY) {
                Ok(_) => {}
                Err(FileError::NotFound) => {
                    let (parent, name) = self.open_parent(&directory)?;
                    match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(file_error(error)),
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Removes a file, or a directory with its contents. Links are removed, never followed.
fn remove(parent: &OwnedFd, name: &str, depth: usize) -> Result<(), FileError> {
    if depth > DEPTH_MAX {
        return Err(FileError::Other { why: format!("the directory is more than {DEPTH_MAX} levels deep") });
    }
    match unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) => return Ok(()),
        // The kernel refuses to unlink a directory with one of these.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(file_error(error)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(parent.as_fd(), name, flags, Mode::empty()).map_err(file_error)?;
    let mut names = Vec::new();
    for entry in Dir::read_from(&directory).map_err(file_error)? {
        let entry = entry.map_err(file_error)?;
        let name = entry.file_name().to_str().map_err(|_| FileError::InvalidPath)?.to_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    names.iter().try_for_each(|name| remove(&directory, name, depth + 1))?;
    unlinkat(parent, name, AtFlags::REMOVEDIR).map_err(file_error)
}

fn temporary_name() -> Result<String, FileError> {
    let bytes: [u8; 8] = sys::random::bytes().map_err(|error| FileError::Other { why: error.to_string() })?;
    Ok(format!(".palisade-{:016x}.tmp", u64::from_ne_bytes(bytes)))
}
