//! Compares a Body's files with the base of its workspace and writes each changed file as a git object.
//!
//! A file whose stored form attributes may change is copied to a directory of the host instead, where git
//! reads it. `.gitignore` and `.gitattributes` files are copied there, too.
//!
//! Invariant: the copy holds only regular files, symbolic links and directories, under names that git
//! accepts.
//! Trust: everything read here comes from a Body; see [`crate::overlay_reader`].

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, Mode, OFlags},
    io::Errno,
};
use serde::Serialize;

use crate::{
    error::{ErrorContext, WorkspaceError},
    ignore::IgnoreChecker,
    index::IndexNames,
    overlay_reader::{DEPTH_MAX, OverlayDir, OverlayEntry, OverlayFile, OverlaySubdir},
    pack_writer::{ObjectId, ObjectKind, PackWriter},
    upper::VisibleFiles,
};

/// Longest path.
const PATH_LEN_MAX: usize = 4000;
/// Largest file.
const FILE_MAX: u64 = 1 << 30;
/// Total size of all files.
const TOTAL_MAX: u64 = 8 << 30;
/// Most changed files.
const CHANGES_MAX: usize = 2_000_000;
/// Most skipped paths that are listed.
pub const LEFT_OUT_MAX: usize = 1000;
/// How often to retry a file that changes while it is read.
const TRIES: usize = 3;
/// Length of one read when a file is copied.
const PIECE_LEN: usize = 64 << 10;
/// Names of the files that hold git's rules about other files.
const IGNORES: &[u8] = b".gitignore";
const ATTRIBUTES: &[u8] = b".gitattributes";

/// Why a path is skipped that only ids of the Body may read.
const UNREADABLE: &str = "the host cannot read it";

/// A path of a Body that git cannot hold or must not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SkippedPath {
    /// The path, escaped for a terminal.
    pub path: String,
    /// The reason.
    pub why: &'static str,
}

/// A file or symbolic link that may differ from the base.
#[derive(Debug)]
pub struct Change {
    /// The path.
    pub path: Vec<u8>,
    /// The mode in a git tree.
    pub mode: u32,
    /// The object id of its content; none if git must read it from the copy.
    pub id: Option<ObjectId>,
}

/// The result of comparing a Body's files with the base.
#[derive(Debug, Default)]
pub struct Changes {
    /// Files and symbolic links that may differ from the base.
    pub files: Vec<Change>,
    /// Files of the base that were deleted, unless `files` lists them, too.
    pub gone: Vec<Vec<u8>>,
    /// Paths that were skipped.
    pub skipped: Vec<SkippedPath>,
    bytes: u64,
}

/// One comparison of a Body's files with the base.
#[derive(Debug)]
pub struct OverlayWalk<'a> {
    /// The names of the base.
    pub base: &'a IndexNames,
    /// The names that the Body's own index tracks.
    pub tracked: &'a IndexNames,
    /// Whether `tracked` is complete; if not, the names of the base count as tracked, too.
    pub all_tracked: bool,
    /// Decides which files are ignored.
    pub ignore: IgnoreChecker,
    /// Whether attributes may change what git stores.
    pub attributes: bool,
    /// Submodules, which are read separately.
    pub apart: &'a BTreeMap<Vec<u8>, Option<ObjectId>>,
    /// The pack to which new objects are written.
    pub pack: &'a mut PackWriter,
    /// The changes found so far.
    pub changes: Changes,
}

/// The directory at which the comparison is.
struct WalkPosition<'a> {
    path: &'a [u8],
    dirs: &'a OverlayDir,
    /// The directory of the copy that corresponds to it.
    ours: BorrowedFd<'a>,
    /// Whether untracked files in it are ignored.
    ignored: bool,
    depth: usize,
}

impl OverlayWalk<'_> {
    /// Compares the whole tree.
    pub fn run(mut self, seen: &VisibleFiles, ours: BorrowedFd<'_>) -> Result<Changes, WorkspaceError> {
        if seen.hidden {
            self.changes.gone.extend(self.base.iter().map(|(name, _)| name.to_vec()));
        }
        self.dir(&WalkPosition { path: b"", dirs: &seen.dirs, ours, ignored: false, depth: 0 })?;
        self.drop_untracked_ignored()?;
        Ok(self.changes)
    }

    /// Treats a file of the base as deleted if the Body's index no longer tracks it and it is ignored, even
    /// if it still exists.
    fn drop_untracked_ignored(&mut self) -> Result<(), WorkspaceError> {
        if !self.all_tracked {
            return Ok(());
        }
        let mut untracked: Vec<Vec<u8>> =
            self.base.without(self.tracked).into_iter().map(<[u8]>::to_vec).collect();
        // Files that are known to be deleted need no check.
        let gone: std::collections::BTreeSet<&Vec<u8>> = self.changes.gone.iter().collect();
        untracked.retain(|path| !gone.contains(path));
        if untracked.is_empty() {
            return Ok(());
        }
        let ignored = self.ignore.ask(&untracked)?;
        self.changes
            .gone
            .extend(untracked.into_iter().zip(ignored).filter(|(_, ignored)| *ignored).map(|(path, _)| path));
        Ok(())
    }

    fn dir(&mut self, at: &WalkPosition<'_>) -> Result<(), WorkspaceError> {
        let mut entries = at.dirs.entries().during("list a directory of the Body")?;
        if at.depth == 0 {
            entries.remove(b".git".as_slice());
        }
        entries.retain(|name, found| !self.is_only_prepared(&join(at.path, name), found));
        // Copy the rules before git answers questions about other files of the directory.
        for rule in [IGNORES, ATTRIBUTES] {
            match entries.get(rule) {
                Some(OverlayEntry::File(node)) => self.rule(at, rule, node)?,
                Some(_) => remove(at.ours, rule)?,
                None => {}
            }
        }
        let mut children = Vec::new();
        for (name, found) in entries {
            let path = join(at.path, &name);
            if let Some(why) = refused(&name, &path, &found, at.depth) {
                // An ignored path would not be saved anyway, so it is not listed.
                if !at.ignored && !matches!(found, OverlayEntry::Gone | OverlayEntry::Other) {
                    self.skip(&path, why);
                }
                continue;
            }
            if self.changes.files.len() > CHANGES_MAX {
                return Err(WorkspaceError::Hostile(format!(
                    "the Body changed more than {CHANGES_MAX} files"
                )));
            }
            children.push((name, path, found));
        }
        let ignored = self.ignored(at, &children)?;
        for ((name, path, found), ignored) in children.into_iter().zip(ignored) {
            self.entry(at, &name, path, found, ignored)?;
        }
        Ok(())
    }

    /// Whether a preparation made an entry, and neither the base nor the Body's index knows it: it was there when the
    /// Body began, so it is no work of the Body.
    fn is_only_prepared(&self, path: &[u8], found: &OverlayEntry) -> bool {
        let prepared = match found {
            OverlayEntry::Dir(inner) => inner.prepared,
            OverlayEntry::File(node) | OverlayEntry::Link(node) => node.prepared,
            OverlayEntry::Gone | OverlayEntry::Other | OverlayEntry::Unreadable => false,
        };
        let known = |names: &IndexNames| names.contains(path) || names.holds(path);
        // An index that cannot be read to its end may know any path.
        prepared && self.all_tracked && !known(self.base) && !known(self.tracked)
    }

    fn rule(&mut self, at: &WalkPosition<'_>, name: &[u8], node: &OverlayFile) -> Result<(), WorkspaceError> {
        if name == IGNORES {
            self.ignore.has_rules()?;
        } else {
            self.attributes = true;
        }
        if let Ok(mut file) = at.dirs.file(node)
            && node.len <= FILE_MAX
        {
            copy(at.ours, name, &mut file, node)?;
        }
        Ok(())
    }

    /// For each child, whether it is ignored. A tracked file never is.
    fn ignored(
        &mut self,
        at: &WalkPosition<'_>,
        children: &[(Vec<u8>, Vec<u8>, OverlayEntry)],
    ) -> Result<Vec<bool>, WorkspaceError> {
        if at.ignored {
            return Ok(children.iter().map(|(_, path, found)| !self.is_tracked(path, found)).collect());
        }
        let mut asked = Vec::new();
        for (index, (name, path, found)) in children.iter().enumerate() {
            let ask = match found {
                // Some patterns match directories only, so the directory must exist in the copy.
                OverlayEntry::Dir(_) => {
                    make_dir(at.ours, name)?;
                    true
                }
                OverlayEntry::File(_) | OverlayEntry::Link(_) | OverlayEntry::Unreadable => {
                    !self.is_tracked(path, found)
                }
                OverlayEntry::Gone | OverlayEntry::Other => false,
            };
            if ask {
                asked.push((index, path.clone()));
            }
        }
        let mut ignored = vec![false; children.len()];
        if asked.is_empty() {
            return Ok(ignored);
        }
        let paths: Vec<Vec<u8>> = asked.iter().map(|(_, path)| path.clone()).collect();
        for ((index, _), answer) in asked.into_iter().zip(self.ignore.ask(&paths)?) {
            ignored[index] = answer;
        }
        Ok(ignored)
    }

    fn entry(
        &mut self,
        at: &WalkPosition<'_>,
        name: &[u8],
        path: Vec<u8>,
        found: OverlayEntry,
        ignored: bool,
    ) -> Result<(), WorkspaceError> {
        match found {
            OverlayEntry::Other => Ok(()),
            OverlayEntry::Unreadable if ignored => Ok(()),
            OverlayEntry::Unreadable => {
                self.skip(&path, UNREADABLE);
                Ok(())
            }
            OverlayEntry::Gone => {
                remove(at.ours, name)?;
                self.base_gone(&path);
                Ok(())
            }
            OverlayEntry::File(_) | OverlayEntry::Link(_) if ignored => Ok(()),
            OverlayEntry::File(node) => {
                self.base_below_gone(&path);
                self.file(at, name, path, &node)
            }
            OverlayEntry::Link(node) => {
                self.base_below_gone(&path);
                remove(at.ours, name)?;
                let target = at.dirs.link(&node).during("read a link of the Body")?.into_bytes();
                let id = self
                    .pack
                    .add(ObjectKind::Blob, target.len() as u64, target.as_slice())
                    .during("copy a link of the Body")?;
                self.changes.files.push(Change { path, mode: 0o120_000, id: Some(id) });
                Ok(())
            }
            OverlayEntry::Dir(inner) => self.enter(at, name, &path, &inner, ignored),
        }
    }

    fn enter(
        &mut self,
        at: &WalkPosition<'_>,
        name: &[u8],
        path: &[u8],
        inner: &OverlaySubdir,
        ignored: bool,
    ) -> Result<(), WorkspaceError> {
        let Ok(dirs) = at.dirs.enter(inner) else {
            if !ignored {
                self.skip(path, UNREADABLE);
            }
            return Ok(());
        };
        if self.apart.contains_key(path) {
            // The directory of the submodule exists, so the submodule stays, even if everything around it was
            // replaced.
            self.changes.gone.retain(|gone| gone != path);
            return Ok(());
        }
        if inner.hides {
            remove(at.ours, name)?;
            self.base_gone(path);
        } else if self.base.contains(path) {
            // Only a submodule is a name of the base and also a directory in the Body.
            if !dirs.entries().during("list a directory of the Body")?.is_empty() {
                self.skip(path, "it is in a submodule that the host has not initialised");
            }
            return Ok(());
        }
        if ignored && !self.tracks_below(path) {
            let _ = rustix::fs::unlinkat(at.ours, name, AtFlags::REMOVEDIR);
            return Ok(());
        }
        make_dir(at.ours, name)?;
        let ours = open_dir(at.ours, name)?;
        self.dir(&WalkPosition {
            path,
            dirs: &dirs,
            ours: ours.as_fd(),
            ignored: at.ignored || ignored,
            depth: at.depth + 1,
        })?;
        // Removes the directory if it is empty, because it held only ignored files.
        let _ = rustix::fs::unlinkat(at.ours, name, AtFlags::REMOVEDIR);
        Ok(())
    }

    fn is_tracked(&self, path: &[u8], found: &OverlayEntry) -> bool {
        let itself = self.tracked.contains(path) || !self.all_tracked && self.base.contains(path);
        itself
            || matches!(found, OverlayEntry::Dir(_) | OverlayEntry::Unreadable | OverlayEntry::Gone)
                && self.tracks_below(path)
    }

    fn tracks_below(&self, path: &[u8]) -> bool {
        self.tracked.holds(path) || !self.all_tracked && self.base.holds(path)
    }

    fn base_gone(&mut self, path: &[u8]) {
        if self.base.contains(path) {
            self.changes.gone.push(path.to_owned());
        }
        self.base_below_gone(path);
    }

    fn base_below_gone(&mut self, path: &[u8]) {
        self.changes.gone.extend(self.base.below(path).map(<[u8]>::to_vec));
    }

    fn file(
        &mut self,
        at: &WalkPosition<'_>,
        name: &[u8],
        path: Vec<u8>,
        node: &OverlayFile,
    ) -> Result<(), WorkspaceError> {
        let why = match () {
            () if node.len > FILE_MAX => Some("it is larger than 1 GiB"),
            () if self.changes.bytes + node.len > TOTAL_MAX => {
                Some("all changes together are larger than 8 GiB")
            }
            () => None,
        };
        let opened = if why.is_none() { at.dirs.file(node).ok() } else { None };
        let Some(mut file) = opened else {
            self.skip(&path, why.unwrap_or(UNREADABLE));
            return Ok(());
        };
        self.changes.bytes += node.len;
        let id = if self.attributes {
            copy(at.ours, name, &mut file, node)?;
            None
        } else {
            match self.pack_file(&mut file)? {
                Some(id) => Some(id),
                None => {
                    self.skip(&path, "it changes while it is read");
                    return Ok(());
                }
            }
        };
        self.changes.files.push(Change {
            path,
            mode: if node.executable { 0o100_755 } else { 0o100_644 },
            id,
        });
        Ok(())
    }

    /// Adds a file to the pack; none if the file kept changing while it was read.
    fn pack_file(&mut self, file: &mut File) -> Result<Option<ObjectId>, WorkspaceError> {
        for _ in 0..TRIES {
            let len = file
                .seek(SeekFrom::Start(0))
                .and_then(|_| file.metadata())
                .during("copy a file of the Body")?
                .len();
            if len > FILE_MAX {
                return Ok(None);
            }
            match self.pack.add(ObjectKind::Blob, len, &mut *file) {
                Ok(id) => return Ok(Some(id)),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                Err(error) => return Err(error).during("copy a file of the Body"),
            }
        }
        Ok(None)
    }

    fn skip(&mut self, path: &[u8], why: &'static str) {
        if self.changes.skipped.len() < LEFT_OUT_MAX {
            self.changes.skipped.push(SkippedPath { path: proto::text::visible_bytes(path), why });
        }
    }
}

/// Copies a file to the host's directory; keeps holes.
fn copy(
    ours: BorrowedFd<'_>,
    name: &[u8],
    file: &mut File,
    node: &OverlayFile,
) -> Result<(), WorkspaceError> {
    let doing = "copy a file of the Body";
    remove(ours, name)?;
    let mode = Mode::from_raw_mode(if node.executable { 0o755 } else { 0o644 });
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let copy = rustix::fs::openat(ours, name, flags, mode).during(doing)?;
    rustix::fs::fchmod(&copy, mode).during(doing)?;
    let mut copy = File::from(copy);
    let mut piece = vec![0; PIECE_LEN];
    let mut len = 0;
    // The file may grow while it is read, so read no more than its first length.
    let mut file = file.take(node.len);
    loop {
        match file.read(&mut piece).during(doing)? {
            0 => break,
            read if piece[..read].iter().all(|byte| *byte == 0) => {
                copy.seek(SeekFrom::Current(read as i64)).during(doing)?;
                len += read as u64;
            }
            read => {
                copy.write_all(&piece[..read]).during(doing)?;
                len += read as u64;
            }
        }
    }
    copy.set_len(len).during(doing)
}

/// Why git cannot hold a path, or must not.
fn refused(name: &[u8], path: &[u8], found: &OverlayEntry, depth: usize) -> Option<&'static str> {
    match () {
        () if is_dot_git(name) => Some(if matches!(found, OverlayEntry::Dir(_)) {
            "it is a git repository inside the workspace; its history is not saved"
        } else {
            "git does not allow this name"
        }),
        () if path.len() > PATH_LEN_MAX => Some("its path is longer than 4,000 bytes"),
        () if depth >= DEPTH_MAX => Some("it is more than 128 directories deep"),
        () => None,
    }
}

/// Whether some file system treats a name as `.git`; git refuses all of these names.
pub fn is_dot_git(name: &[u8]) -> bool {
    let text: String = String::from_utf8_lossy(name).chars().filter(|c| !is_ignorable(*c)).collect();
    text.split('\\').any(|part| {
        let part = part.split(':').next().unwrap_or(part).trim_end_matches([' ', '.']).to_ascii_lowercase();
        part == ".git" || part == "git~1"
    })
}

/// Characters that HFS+ ignores in names.
fn is_ignorable(c: char) -> bool {
    matches!(c, '\u{200c}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{206a}'..='\u{206f}' | '\u{feff}')
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_owned() } else { [path, b"/", name].concat() }
}

fn make_dir(ours: BorrowedFd<'_>, name: &[u8]) -> Result<(), WorkspaceError> {
    match rustix::fs::mkdirat(ours, name, Mode::from_raw_mode(0o700)) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) if open_dir(ours, name).is_ok() => Ok(()),
        Err(Errno::EXIST) => {
            remove(ours, name)?;
            rustix::fs::mkdirat(ours, name, Mode::from_raw_mode(0o700)).during("make a directory")
        }
        Err(errno) => Err(errno).during("make a directory"),
    }
}

fn open_dir(ours: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, WorkspaceError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(ours, name, flags, Mode::empty()).during("open a directory of the copy")
}

fn remove(ours: BorrowedFd<'_>, name: &[u8]) -> Result<(), WorkspaceError> {
    let name = std::ffi::CString::new(name).map_err(io::Error::from).during("read a name")?;
    match sys::tree::remove(ours, &name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).during("clear a copy"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_dot_git_is_known() {
        for name in [
            ".git",
            ".GIT",
            ".gIt",
            "git~1",
            "GIT~1",
            ".git ",
            ".git.",
            ".git. .",
            ".git:x",
            ".git::$INDEX_ALLOCATION",
            ".g\u{200c}it",
            "a\\.git",
            ".git\\x",
            "\u{feff}.git",
        ] {
            assert!(is_dot_git(name.as_bytes()), "{name:?}");
        }
        for name in [".gitignore", ".github", "git", "x.git", ".git-", "git~2", "dot.git", "..git"] {
            assert!(!is_dot_git(name.as_bytes()), "{name:?}");
        }
    }
}
