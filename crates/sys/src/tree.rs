//! Removes, measures and copies trees on disk that a Body filled, without following a single link.
//!
//! Trust: names, depth, modes and links are hostile. Directories are entered by descriptor and never by path, so
//! neither a long path nor a swapped link leads elsewhere.

mod copy;
mod newest;
mod remove;
mod usage;

pub use copy::{copy, copy_open};
pub use newest::newest_change;
pub use remove::remove;
pub use usage::{TreeUsage, usage};

use std::{
    ffi::CString,
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat};

/// Opens a directory below another for reading, never through a link.
fn open_dir(parent: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}

/// The names in a directory.
fn names(dir: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

fn stat(dir: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<Stat> {
    Ok(rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?)
}
