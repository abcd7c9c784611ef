//! Writes, edits and removes files.
//!
//! Invariant: a file is replaced as a whole: its new content is written beside it and then takes its name, so that no
//! reader ever sees a part of it, and a write that fails leaves the file as it was.
//! Where that would lose something of the file (another owner, other names, extended attributes) or is not possible
//! (its directory cannot be written), the file is written in place.

use std::{
    ffi::CString,
    fs::File,
    io::{self, Seek, Write},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use proto::{
    file_call::{FileAnswer, FileError, WrittenFile},
    file_text::replace_text,
};
use rustix::{
    fs::{AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, Stat},
    io::Errno,
};

use super::{
    FileFault,
    open::{self, CheckedPath, file_error, not_regular},
    place::{FilePlace, Parents},
    read::read_whole,
};
use crate::files::remove_at;

/// The mode of a new file.
const MODE_NEW: u32 = 0o644;
/// How long the removal of a tree may take.
const REMOVAL_WAIT: Duration = Duration::from_secs(60);

/// Writes and removes files, in their order, up to the first one with which that is not possible.
pub fn write(files: &[WrittenFile]) -> Result<FileAnswer, FileFault> {
    for file in files {
        let written = CheckedPath::parse(&file.path).and_then(|path| match &file.content {
            Some(content) => write_file(&path, content.as_bytes()),
            None => remove_file(&path),
        });
        written.map_err(|reason| FileFault::new(reason, &file.path))?;
    }
    Ok(FileAnswer::Written)
}

fn write_file(path: &CheckedPath, content: &[u8]) -> Result<(), FileError> {
    let (place, existing) = FilePlace::find(path, Parents::Create)?.follow()?;
    replace(&place, existing.as_ref(), content)
}

fn remove_file(path: &CheckedPath) -> Result<(), FileError> {
    let place = FilePlace::find(path, Parents::Require)?;
    let stat = place.stat()?.ok_or(FileError::NotFound)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        return Err(FileError::IsDirectory);
    }
    rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::empty()).map_err(errno)
}

/// Removes a file, or a directory with its contents.
pub fn delete(path: &CheckedPath) -> Result<FileAnswer, FileError> {
    let place = FilePlace::find(path, Parents::Require).map_err(|error| match error {
        // Only the root has no place.
        FileError::IsDirectory => FileError::InvalidPath,
        error => error,
    })?;
    place.stat()?.ok_or(FileError::NotFound)?;
    remove_at(&place.dir, &place.name, Some(Instant::now() + REMOVAL_WAIT))
        .map_err(|error| file_error(&error))?;
    Ok(FileAnswer::Deleted)
}

/// Replaces text in a file.
pub fn edit(path: &CheckedPath, old: &str, new: &str, replace_all: bool) -> Result<FileAnswer, FileError> {
    if old.is_empty() {
        return Err(FileError::EmptyPattern);
    }
    let (place, existing) = FilePlace::find(path, Parents::Require)?.follow()?;
    let existing = existing.ok_or(FileError::NotFound)?;
    let mut file = open_existing(&place, &existing, OFlags::RDONLY)?;
    let text = String::from_utf8(read_whole(&mut file, &existing)?).map_err(|_| FileError::NotText)?;
    let (edited, occurrences) = replace_text(&text, old, new, replace_all)?;
    let now = place.stat()?.ok_or(FileError::NotFound)?;
    if version_of(&now) != version_of(&existing) {
        return Err(FileError::Other { why: "the file was changed at the same time".to_owned() });
    }
    replace(&place, Some(&now), edited.as_bytes())?;
    Ok(FileAnswer::Edited { occurrences })
}

/// Numbers of a file that change whenever it is written or replaced.
fn version_of(stat: &Stat) -> (u64, u64, i64, i64, i64) {
    (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime, stat.st_mtime_nsec as i64)
}

/// Gives a file this content, and creates it if it does not exist.
fn replace(place: &FilePlace, existing: Option<&Stat>, content: &[u8]) -> Result<(), FileError> {
    let Some(existing) = existing else {
        return put(place, content, MODE_NEW, None).map_err(|error| file_error(&error));
    };
    // A file that the user may not write stays, even if its directory lets the user replace it.
    let file = open_existing(place, existing, OFlags::WRONLY)?;
    if must_stay(&file, existing) {
        return write_in_place(file, content).map_err(|error| file_error(&error));
    }
    match put(place, content, existing.st_mode & 0o777, Some(existing.st_gid)) {
        Ok(()) => Ok(()),
        Err(error) if cannot_replace(&error) => {
            write_in_place(file, content).map_err(|error| file_error(&error))
        }
        Err(error) => Err(file_error(&error)),
    }
}

/// Opens the regular file that was seen at a place.
fn open_existing(place: &FilePlace, seen: &Stat, flags: OFlags) -> Result<File, FileError> {
    match FileType::from_raw_mode(seen.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(FileError::IsDirectory),
        _ => return Err(not_regular()),
    }
    let opened = open::open_at(&place.dir, &place.name, flags | OFlags::NOFOLLOW);
    let opened: OwnedFd = opened.map_err(|error| file_error(&error))?;
    let stat = rustix::fs::fstat(&opened).map_err(errno)?;
    if (stat.st_dev, stat.st_ino) != (seen.st_dev, seen.st_ino) {
        return Err(FileError::Other { why: "the file was replaced at the same time".to_owned() });
    }
    Ok(opened.into())
}

/// Whether a new file in its place would lose something: its owner, its other names or its attributes.
fn must_stay(file: &File, existing: &Stat) -> bool {
    let mut names = Vec::with_capacity(4096);
    let listed = rustix::fs::flistxattr(file, rustix::buffer::spare_capacity(&mut names));
    let is_users = |name: &[u8]| !name.is_empty() && !name.starts_with(b"security.");
    let has_attributes = listed.is_ok() && names.split(|byte| *byte == 0).any(is_users);
    existing.st_nlink > 1 || existing.st_uid != file_user() || has_attributes || listed == Err(Errno::RANGE)
}

/// The user of files that this thread creates.
fn file_user() -> u32 {
    sys::thread_rights::file_user()
}

/// Whether the directory, and not the file, is what cannot be changed.
fn cannot_replace(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::ACCESS | Errno::PERM | Errno::BUSY | Errno::XDEV))
}

fn write_in_place(mut file: File, content: &[u8]) -> io::Result<()> {
    // Finds out whether there is room while the old content is still there.
    match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, content.len() as u64) {
        Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => return Err(error.into()),
        _ => file.rewind()?,
    }
    file.write_all(content)?;
    file.set_len(content.len() as u64)
}

/// Writes a file under another name and then gives it its own.
fn put(place: &FilePlace, content: &[u8], mode: u32, group: Option<u32>) -> io::Result<()> {
    let name = CString::new(format!(".pal-{:032x}.tmp", u128::from_ne_bytes(sys::random::bytes()?)))?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(&place.dir, &name, flags, Mode::RUSR | Mode::WUSR)?);
    let done = fill(file, content, mode, group)
        .and_then(|()| Ok(rustix::fs::renameat(&place.dir, &name, &place.dir, &place.name)?));
    if done.is_err() {
        let _ = rustix::fs::unlinkat(&place.dir, &name, AtFlags::empty());
    }
    done
}

fn fill(mut file: File, content: &[u8], mode: u32, group: Option<u32>) -> io::Result<()> {
    file.write_all(content)?;
    if let Some(group) = group
        && rustix::fs::fstat(&file)?.st_gid != group
    {
        rustix::fs::fchown(&file, None, Some(Gid::from_raw(group)))?;
    }
    Ok(rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?)
}

fn errno(error: Errno) -> FileError {
    file_error(&error.into())
}
