//! Where a file is written: its directory as a descriptor, and its name in it.
//!
//! Invariant: links are followed step by step, each from the directory that holds it, so that a link that another
//! process swaps leads nowhere that its user could not go by itself.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
};

use proto::file_call::FileError;
use rustix::{
    fs::{AtFlags, CWD, FileType, OFlags, Stat},
    io::Errno,
};

use super::open::{CheckedPath, file_error, open_at};

/// How many links are followed, as the kernel limits it.
const LINKS_MAX: usize = 40;
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY);

/// The place of a file, which may not exist.
#[derive(Debug)]
pub struct FilePlace {
    pub dir: OwnedFd,
    pub name: CString,
}

/// Whether missing directories are created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parents {
    Create,
    Require,
}

impl FilePlace {
    /// The place that a path names; a link at its end is not followed.
    pub fn find(path: &CheckedPath, parents: Parents) -> Result<Self, FileError> {
        let (dir, name) = path.split().ok_or(FileError::IsDirectory)?;
        let opened = match parents {
            Parents::Create => make_dirs(dir),
            Parents::Require => open_at(CWD, dir, DIRECTORY),
        };
        let name = CString::new(name).map_err(|_| FileError::InvalidPath)?;
        Ok(Self { dir: opened.map_err(|error| file_error(&error))?, name })
    }

    /// Follows the links at this place to the file that a program would open, and describes that file if it exists.
    pub fn follow(mut self) -> Result<(Self, Option<Stat>), FileError> {
        for _ in 0..LINKS_MAX {
            let Some(stat) = self.stat()? else { return Ok((self, None)) };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                return Ok((self, Some(stat)));
            }
            let target = rustix::fs::readlinkat(&self.dir, &self.name, Vec::new()).map_err(errno)?;
            let (dir, name) = split_target(target.as_bytes()).ok_or(FileError::IsDirectory)?;
            if let Some(dir) = dir {
                self.dir = open_at(&self.dir, dir, DIRECTORY).map_err(|error| file_error(&error))?;
            }
            self.name = name;
        }
        Err(errno(Errno::LOOP))
    }

    /// Describes what is there, and not what a link points to.
    pub fn stat(&self) -> Result<Option<Stat>, FileError> {
        match rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(errno(error)),
        }
    }
}

fn errno(error: Errno) -> FileError {
    file_error(&error.into())
}

/// The directory and the name of a link's target; `None` if the target can only be a directory.
fn split_target(target: &[u8]) -> Option<(Option<CString>, CString)> {
    let (dir, name) = match target.iter().rposition(|byte| *byte == b'/') {
        Some(0) => (Some(&b"/"[..]), &target[1..]),
        Some(at) => (Some(&target[..at]), &target[at + 1..]),
        None => (None, target),
    };
    if matches!(name, b"" | b"." | b"..") {
        return None;
    }
    let name = CString::new(name).ok()?;
    Some((dir.map(CString::new).transpose().ok()?, name))
}

/// Opens a directory, and creates it and those above it that do not exist.
fn make_dirs(path: &str) -> io::Result<OwnedFd> {
    // The nearest one that exists: most often the directory itself.
    let mut there = path;
    let mut dir = loop {
        match open_at(CWD, there, DIRECTORY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && there != "/" => {
                there = there
                    .rsplit_once('/')
                    .map_or("/", |(above, _)| if above.is_empty() { "/" } else { above });
            }
            opened => break opened?,
        }
    };
    for name in path[there.len()..].split('/').filter(|name| !name.is_empty()) {
        dir = make_dir(dir.as_fd(), name)?;
    }
    Ok(dir)
}

fn make_dir(above: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    match rustix::fs::mkdirat(&above, name, 0o755.into()) {
        Ok(()) | Err(Errno::EXIST) => open_at(above, name, DIRECTORY),
        Err(error) => Err(error.into()),
    }
}
