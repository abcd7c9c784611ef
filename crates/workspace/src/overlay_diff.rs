//! A Body's files, compared with what it began with: each change becomes an object of ours.
//!
//! Where attributes may change what git stores of a file, it is copied to a tree of ours, for git to read there; so are
//! the files that say what is ignored.
//!
//! Invariant: what is copied are plain files and directories, made by us under names that git may hold.
//! Trust: everything that is read here is a Body's; see [`crate::overlay_reader`].

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
/// All files together.
const TOTAL_MAX: u64 = 8 << 30;
/// Most changes.
const CHANGES_MAX: usize = 2_000_000;
/// Most things that are listed as left out.
pub const LEFT_OUT_MAX: usize = 1000;
/// How often a file that changes while it is read is read again.
const TRIES: usize = 3;
/// What is copied at once.
const PIECE_LEN: usize = 64 << 10;
/// Files that say how git treats others.
const IGNORES: &[u8] = b".gitignore";
const ATTRIBUTES: &[u8] = b".gitattributes";

/// Why something is left out that only ids of the Body may read.
const HIDDEN: &str = "it cannot be read";

/// Something of a Body that git cannot hold, or may not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SkippedPath {
    /// Where, made fit for a terminal.
    pub path: String,
    /// Why.
    pub why: &'static str,
}

/// A file or a link that may differ from the base.
#[derive(Debug)]
pub struct Change {
    /// Where.
    pub path: Vec<u8>,
    /// What it is to git.
    pub mode: u32,
    /// What is in it; none of a file that was copied for git to read.
    pub id: Option<ObjectId>,
}

/// What a walk found.
#[derive(Debug, Default)]
pub struct Changes {
    /// Files and links that may differ from the base.
    pub files: Vec<Change>,
    /// Files of the base that are gone, unless they are among those.
    pub gone: Vec<Vec<u8>>,
    /// What could not be taken.
    pub skipped: Vec<SkippedPath>,
    bytes: u64,
}

/// One walk.
#[derive(Debug)]
pub struct OverlayWalk<'a> {
    /// Names of the base.
    pub base: &'a IndexNames,
    /// Names the Body's own git tracks.
    pub tracked: &'a IndexNames,
    /// Whether these are all: where they are not, those of the base are tracked, too.
    pub all_tracked: bool,
    /// Who knows what is ignored.
    pub ignore: IgnoreChecker,
    /// Whether attributes may change what git stores.
    pub attributes: bool,
    /// Directories that others read: submodules.
    pub apart: &'a BTreeMap<Vec<u8>, Option<ObjectId>>,
    /// Where objects go.
    pub pack: &'a mut PackWriter,
    /// What was found so far.
    pub changes: Changes,
}

/// Where a walk stands.
struct WalkPosition<'a> {
    path: &'a [u8],
    dirs: &'a OverlayDir,
    /// The same directory in our tree.
    ours: BorrowedFd<'a>,
    /// Whether untracked files here are ignored.
    ignored: bool,
    depth: usize,
}

impl OverlayWalk<'_> {
    /// Walks the whole tree.
    pub fn run(mut self, seen: &VisibleFiles, ours: BorrowedFd<'_>) -> Result<Changes, WorkspaceError> {
        if seen.hidden {
            self.changes.gone.extend(self.base.iter().map(|(name, _)| name.to_vec()));
        }
        self.dir(&WalkPosition { path: b"", dirs: &seen.dirs, ours, ignored: false, depth: 0 })?;
        self.forgotten()?;
        Ok(self.changes)
    }

    /// What the Body's git no longer tracks and ignores is gone, though its files are there.
    fn forgotten(&mut self) -> Result<(), WorkspaceError> {
        if !self.all_tracked {
            return Ok(());
        }
        let mut untracked: Vec<Vec<u8>> =
            self.base.without(self.tracked).into_iter().map(<[u8]>::to_vec).collect();
        // What is gone already is not asked about.
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
        // Before anybody is asked about their neighbours.
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
                // What is ignored anyway is nobody's loss.
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

    /// For each child, whether it is ignored. What is tracked is not.
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
                // Some patterns fit directories only, so there must be one.
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
                self.skip(&path, HIDDEN);
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
                self.skip(path, HIDDEN);
            }
            return Ok(());
        };
        if self.apart.contains_key(path) {
            // Its directory is there, so it is the submodule it was, whatever was removed around it.
            self.changes.gone.retain(|gone| gone != path);
            return Ok(());
        }
        if inner.hides {
            remove(at.ours, name)?;
            self.base_gone(path);
        } else if self.base.contains(path) {
            // Only a submodule is both a name of the base and a directory there.
            if !dirs.entries().during("list a directory of the Body")?.is_empty() {
                self.skip(path, "it is a submodule that this host does not have");
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
        // One that only held what is ignored.
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
            self.skip(&path, why.unwrap_or(HIDDEN));
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

    /// None for one that does not keep still.
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

/// Copies a file to a tree of ours; holes stay holes.
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
    // It may grow while it is read.
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

/// Why something cannot be in git, or may not.
fn refused(name: &[u8], path: &[u8], found: &OverlayEntry, depth: usize) -> Option<&'static str> {
    match () {
        () if is_dot_git(name) => Some(if matches!(found, OverlayEntry::Dir(_)) {
            "a repository inside the repository: its history is not taken"
        } else {
            "git may not hold this name"
        }),
        () if path.len() > PATH_LEN_MAX => Some("its path is too long"),
        () if depth >= DEPTH_MAX => Some("it lies too deep"),
        () => None,
    }
}

/// Whether some file system takes that name for `.git`: git refuses all of them.
pub fn is_dot_git(name: &[u8]) -> bool {
    let text: String = String::from_utf8_lossy(name).chars().filter(|c| !is_ignorable(*c)).collect();
    text.split('\\').any(|part| {
        let part = part.split(':').next().unwrap_or(part).trim_end_matches([' ', '.']).to_ascii_lowercase();
        part == ".git" || part == "git~1"
    })
}

/// What HFS+ leaves out of names.
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
    rustix::fs::openat(ours, name, flags, Mode::empty()).during("open a directory of ours")
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
