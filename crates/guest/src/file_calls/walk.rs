//! Walks through a tree of files.
//!
//! Invariant: no symbolic link is followed, whatever another process swaps meanwhile: each directory is opened from the
//! root of the walk, and the kernel refuses links on the way.
//! Invariant: a walk ends at its deadline, and holds one descriptor besides the root's.

use std::{io, os::fd::OwnedFd, time::Instant};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};

use super::open;
use crate::files::is_dots;

/// File systems that are endless and hold no files of a user; a walk from the root leaves them out.
const LEFT_OUT_AT_ROOT: [&str; 3] = ["proc", "sys", "dev"];
/// The most entries of one directory that a walk sees.
const ENTRIES_MAX: usize = 200_000;
/// The most directories that wait for their visit.
const WAITING_MAX: usize = 100_000;

/// A visitor of the files of a tree. `State` is what it knows about a directory.
pub trait TreeVisitor {
    type State;

    /// Whether to visit a directory, and with which state.
    fn enter(&mut self, above: &Self::State, name: &str) -> Option<Self::State>;

    /// Visits a file that is no directory.
    fn visit(&mut self, file: &WalkedFile<'_>, at: &Self::State) -> Visit;
}

/// Whether a walk goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visit {
    Continue,
    Stop,
}

/// A file of a tree.
#[derive(Debug)]
pub struct WalkedFile<'a> {
    pub dir: &'a OwnedFd,
    pub name: &'a str,
    /// The path from the root of the walk.
    pub path: &'a str,
    pub kind: FileType,
}

/// How far a walk came.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct WalkEnd {
    /// Whether the walk stopped before it had seen everything.
    pub truncated: bool,
    /// Whether a directory could not be read.
    pub unreadable: bool,
}

/// Visits all files below a directory, each directory in the order of its names.
pub fn walk<V: TreeVisitor>(root: &OwnedFd, start: V::State, visitor: &mut V, until: Instant) -> WalkEnd {
    let mut end = WalkEnd::default();
    let is_system_root = open::real_path(root).as_deref() == Some("/");
    let mut waiting = vec![(String::new(), start)];
    while let Some((path, state)) = waiting.pop() {
        let listing = match read_dir(root, &path, until) {
            Ok(listing) => listing,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            Err(_) => {
                end.unreadable = true;
                continue;
            }
        };
        end.truncated |= listing.truncated;
        let mut below = Vec::new();
        for (name, kind) in &listing.entries {
            if Instant::now() > until {
                return WalkEnd { truncated: true, ..end };
            }
            let child = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
            if *kind == FileType::Directory {
                let left_out = is_system_root && path.is_empty() && LEFT_OUT_AT_ROOT.contains(&name.as_str());
                let entered = if left_out { None } else { visitor.enter(&state, name) };
                below.extend(entered.map(|state| (child, state)));
                continue;
            }
            let file = WalkedFile { dir: &listing.dir, name, path: &child, kind: *kind };
            if visitor.visit(&file, &state) == Visit::Stop {
                return WalkEnd { truncated: true, ..end };
            }
        }
        if waiting.len() + below.len() > WAITING_MAX {
            return WalkEnd { truncated: true, ..end };
        }
        waiting.extend(below.into_iter().rev());
    }
    end
}

struct DirListing {
    dir: OwnedFd,
    entries: Vec<(String, FileType)>,
    truncated: bool,
}

/// Reads a directory below the root. Names that are no text are left out: no answer could name them.
fn read_dir(root: &OwnedFd, path: &str, until: Instant) -> Result<DirListing, Errno> {
    let path = if path.is_empty() { "." } else { path };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let dir = rustix::fs::openat2(root, path, flags, Mode::empty(), how)?;
    if open::is_own_entry(&dir) {
        return Err(Errno::ACCESS);
    }
    let mut entries = Vec::new();
    let mut truncated = false;
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if is_dots(name) {
            continue;
        }
        if entries.len() == ENTRIES_MAX || entries.len() % 1024 == 1023 && Instant::now() > until {
            truncated = true;
            break;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => kind_of(&dir, name).unwrap_or(FileType::Unknown),
            kind => kind,
        };
        if let Ok(name) = name.to_str() {
            entries.push((name.to_owned(), kind));
        }
    }
    entries.sort_unstable_by(|one, other| one.0.cmp(&other.0));
    Ok(DirListing { dir, entries, truncated })
}

/// Asks the file system for a kind that its listing does not say.
fn kind_of(dir: &OwnedFd, name: &std::ffi::CStr) -> io::Result<FileType> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}
