//! Protects git directories in writable mounts by making them read-only.
//!
//! The host's git later executes files that a Body writes into a git directory: hooks, settings, `commondir`, the
//! todo list of a rebase. A list of single files would not be enough, because git also uses a file that did not exist
//! before. So each git directory is read-only as a whole, `.git` files that point to one are too, and every directory
//! between the mount and a git directory becomes a mount of its own, because the kernel does not rename or remove a
//! mount point.
//!
//! Invariant: the protection writes nothing to the host; it covers directories that exist when the Body starts.
//! Invariant: the search is bounded, and the enforcement record lists what it skipped.
//! Absent on purpose: repositories that a Body creates where there was none (SECURITY.md says so).
//! Trust: the mounted directory may come from an earlier, hostile Body. No link in it is followed. If a `.git` points
//! to a git directory below the same mount, that directory is looked up and verified by inode.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
};

use proto::Mechanism;
use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags};
use sys::mount::{MountAttrs, Submounts};

/// How deep below the mount the search goes.
const DEPTH_MAX: usize = 8;
/// Most directories of one mount that are searched.
const DIRS_MAX: usize = 10_000;
/// Most mounts that protect the git directories of one mount; each takes two descriptors while the Body is created.
const HOLDS_MAX: usize = 192;
/// Longest `.git` or `commondir` file that is read.
const POINTER_LEN_MAX: u64 = 8192;

/// A mount that protects one directory or file.
pub struct Hold {
    /// The mount point, opened through the mount above it.
    pub place: OwnedFd,
    /// A detached mount of the directory or file itself.
    pub tree: OwnedFd,
}

/// Git directories found in one mount.
#[derive(Debug, Default, PartialEq, Eq)]
struct Search {
    /// Git directories and `.git` files, relative to the mount.
    found: BTreeSet<PathBuf>,
    /// `.git` entries that are symbolic links, which cannot be mount points.
    links: usize,
    /// Directories that could not be read.
    unread: usize,
    /// Whether a bound ended the search.
    cut: bool,
}

/// The protection of git directories in all writable mounts of a Body.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Summary {
    /// How many are protected.
    held: usize,
    /// Descriptions of what could not be protected.
    gaps: Vec<String>,
    /// Mounts whose git directories the user wants unprotected.
    unprotected: Vec<PathBuf>,
}

impl Summary {
    /// Notes a mount whose git directories stay unprotected.
    pub fn leave_out(&mut self, target: &Path) {
        self.unprotected.push(target.to_owned());
    }

    fn add(&mut self, target: &Path, search: &Search, held: usize) {
        self.held += held;
        let mut gap = |what: String| self.gaps.push(format!("{}: {what}", target.display()));
        if search.cut {
            gap(format!("the search stopped at {DIRS_MAX} directories and {DEPTH_MAX} levels"));
        }
        if held < search.found.len() {
            gap(format!("{} more git directories than can be protected", search.found.len() - held));
        }
        if search.links > 0 {
            gap(format!("{} `.git` are symbolic links, which cannot be protected", search.links));
        }
        if search.unread > 0 {
            gap(format!("{} directories could not be read", search.unread));
        }
    }

    /// The entry of the enforcement record.
    pub fn record(&self) -> Mechanism {
        let name = "git directories";
        let held = match self.held {
            0 => "none is in a writable mount".to_owned(),
            count => format!("{count} in writable mounts are read-only"),
        };
        let unprotected: Vec<String> =
            self.unprotected.iter().map(|target| target.display().to_string()).collect();
        if !unprotected.is_empty() {
            let gaps = [&self.gaps[..], &[format!("unprotected as asked for: {}", unprotected.join(", "))]];
            Mechanism::degraded(name, format!("{held}; {}", gaps.concat().join("; ")))
        } else if self.gaps.is_empty() {
            Mechanism::enforced(name, held)
        } else {
            Mechanism::degraded(name, format!("{held}; {}", self.gaps.join("; ")))
        }
    }
}

/// Finds the git directories in a writable mount of `source`, whose detached mount is `tree`, and opens the mounts
/// that protect them, outermost first. A mount that is itself a git directory becomes read-only.
pub fn hold(
    source: &Path,
    target: &Path,
    tree: BorrowedFd<'_>,
    summary: &mut Summary,
) -> io::Result<Vec<Hold>> {
    let root = open_dir(source)?;
    check_same(root.as_fd(), tree, source)?;
    let search = search(root.as_fd(), source);
    if search.found.contains(Path::new("")) {
        sys::mount::restrict(tree, MountAttrs { read_only: true, ..MountAttrs::default() })?;
        summary.add(target, &search, search.found.len());
        return Ok(Vec::new());
    }
    let (wanted, held) = mounts_for(&search.found);
    let mut holds = BTreeMap::<PathBuf, Hold>::new();
    for (path, access) in &wanted {
        let above = path.parent().and_then(|above| holds.get(above)).map_or(tree, |above| above.tree.as_fd());
        let name = path.file_name().unwrap_or_default();
        let hold = hold_one(root.as_fd(), path, above, name, *access)?;
        holds.insert(path.clone(), hold);
    }
    summary.add(target, &search, held);
    // A path sorts before the paths below it.
    Ok(holds.into_values().collect())
}

/// The access through a protecting mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HoldAccess {
    /// Read-only: a git directory.
    Reads,
    /// Read and write: a directory above a git directory, which is only protected from being renamed.
    Writes,
}

/// The mounts that protect these paths, with the mounts above them; and how many of the paths are protected.
fn mounts_for(found: &BTreeSet<PathBuf>) -> (BTreeMap<PathBuf, HoldAccess>, usize) {
    let mut wanted = BTreeMap::new();
    let mut held = 0;
    for path in found {
        let above: Vec<&Path> =
            path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()).collect();
        if above.iter().any(|above| wanted.get(*above) == Some(&HoldAccess::Reads)) {
            // It lies within a directory that is protected as a whole.
            held += 1;
            continue;
        }
        let new = 1 + above.iter().filter(|above| !wanted.contains_key(**above)).count();
        if wanted.len() + new > HOLDS_MAX {
            continue;
        }
        for above in above {
            wanted.entry(above.to_owned()).or_insert(HoldAccess::Writes);
        }
        wanted.insert(path.clone(), HoldAccess::Reads);
        held += 1;
    }
    (wanted, held)
}

fn hold_one(
    root: BorrowedFd<'_>,
    path: &Path,
    above: BorrowedFd<'_>,
    name: &OsStr,
    through: HoldAccess,
) -> io::Result<Hold> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let original = rustix::fs::openat2(root, path, flags, Mode::empty(), BELOW)?;
    let place = rustix::fs::openat2(above, name, flags, Mode::empty(), BELOW)?;
    check_same(original.as_fd(), place.as_fd(), path)?;
    let tree = sys::mount::clone_tree_of(original.as_fd(), Submounts::Too)?;
    sys::mount::restrict(
        tree.as_fd(),
        MountAttrs { read_only: through == HoldAccess::Reads, ..MountAttrs::default() },
    )?;
    Ok(Hold { place, tree })
}

/// Checks that the mounted directory is the one that was searched: another process may have replaced it in between.
fn check_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|found| (found.st_dev, found.st_ino));
    if inode(one)? == inode(other)? {
        return Ok(());
    }
    Err(io::Error::other(format!("{} was replaced meanwhile", path.display())))
}

const BELOW: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Searches breadth first, so that a bound cuts off the deepest directories.
fn search(root: BorrowedFd<'_>, source: &Path) -> Search {
    let mut search = Search::default();
    let mut queue = VecDeque::from([(PathBuf::new(), 0)]);
    let mut looked = 0;
    while let Some((path, depth)) = queue.pop_front() {
        if looked == DIRS_MAX {
            search.cut = true;
            break;
        }
        looked += 1;
        let Ok(entries) = entries(root, &path) else {
            search.unread += 1;
            continue;
        };
        if is_git_dir(&entries) {
            search.found.insert(path);
            continue;
        }
        for (name, kind) in entries {
            let below = path.join(&name);
            match kind {
                FileType::Directory if name == *".git" => drop(search.found.insert(below)),
                FileType::RegularFile if name == *".git" => {
                    search.found.extend(pointed_git_dirs(source, &below));
                    search.found.insert(below);
                }
                FileType::Symlink if name == *".git" => {
                    search.links += 1;
                    search.found.extend(pointed_git_dirs(source, &below));
                }
                FileType::Directory if depth == DEPTH_MAX => search.cut = true,
                FileType::Directory => queue.push_back((below, depth + 1)),
                _ => {}
            }
        }
    }
    search
}

fn entries(root: BorrowedFd<'_>, path: &Path) -> io::Result<Vec<(std::ffi::OsString, FileType)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let dir = rustix::fs::openat2(root, path, flags, Mode::empty(), BELOW)?;
    let mut all = Vec::new();
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                rustix::fs::statat(&dir, entry.file_name(), rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
                    .map_or(FileType::Unknown, |found| FileType::from_raw_mode(found.st_mode))
            }
            kind => kind,
        };
        all.push((std::ffi::OsString::from_vec(name.to_vec()), kind));
    }
    Ok(all)
}

/// Recognises a git directory as git does: a bare repository, or a git directory under another name.
fn is_git_dir(entries: &[(std::ffi::OsString, FileType)]) -> bool {
    let has = |wanted: &str, kinds: &[FileType]| {
        entries.iter().any(|(name, kind)| name == wanted && kinds.contains(kind))
    };
    let links = [FileType::Directory, FileType::Symlink];
    has("HEAD", &[FileType::RegularFile, FileType::Symlink])
        && (has("commondir", &[FileType::RegularFile]) || has("objects", &links) && has("refs", &links))
}

/// The git directory that a `.git` file or link points to, and the one with its settings, if below the same mount.
fn pointed_git_dirs(source: &Path, git: &Path) -> Vec<PathBuf> {
    let place = source.join(git);
    let below = |path: PathBuf| path.strip_prefix(source).map(Path::to_owned).ok();
    let pointed = match read_pointer(&place) {
        Some(text) => text.strip_prefix(b"gitdir: ").map(|dir| resolve_relative(&place, dir)),
        None => Some(place.clone()),
    };
    let Some(dir) = pointed.and_then(|dir| std::fs::canonicalize(dir).ok()).filter(|dir| dir.is_dir()) else {
        return Vec::new();
    };
    let file = dir.join("commondir");
    let common =
        read_pointer(&file).and_then(|text| std::fs::canonicalize(resolve_relative(&file, &text)).ok());
    [Some(dir), common].into_iter().flatten().filter_map(below).collect()
}

/// The contents of one of git's small pointer files; `None` if it is no regular file.
fn read_pointer(path: &Path) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    file.take(POINTER_LEN_MAX).read_to_end(&mut text).ok()?;
    Some(text.trim_ascii_end().to_vec())
}

/// Resolves a path in a pointer file relative to that file.
fn resolve_relative(file: &Path, path: &[u8]) -> PathBuf {
    file.parent().unwrap_or(Path::new("/")).join(OsStr::from_bytes(path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A temporary directory, removed with its test.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("pal-git-dirs-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(&dir).unwrap();
            Self(dir.canonicalize().unwrap())
        }

        fn dir(&self, path: &str) -> &Self {
            std::fs::create_dir_all(self.0.join(path)).unwrap();
            self
        }

        fn file(&self, path: &str, text: &str) -> &Self {
            self.dir(Path::new(path).parent().unwrap().to_str().unwrap());
            std::fs::write(self.0.join(path), text).unwrap();
            self
        }

        fn search(&self) -> Search {
            search(open_dir(&self.0).unwrap().as_fd(), &self.0)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn paths<'a>(all: impl IntoIterator<Item = &'a str>) -> BTreeSet<PathBuf> {
        all.into_iter().map(PathBuf::from).collect()
    }

    #[test]
    fn every_kind_of_git_directory_is_found() {
        let place = Place::new("kinds");
        place.dir(".git/modules/sub").file("file", "").dir("a/b/.git").dir("empty/.git");
        place.file("bare/HEAD", "ref: refs/heads/main").dir("bare/objects").dir("bare/refs");
        place.file("sub/.git", "gitdir: ../.git/modules/sub\n");
        place.file("apart/.git", &format!("gitdir: {}\n", place.0.join("store/repo").display()));
        place.file("store/repo/config", "").file("outside/.git", "gitdir: /etc\n");
        place.file("tree/.git", "gitdir: ../main/.git/worktrees/tree\n");
        place.file("main/.git/worktrees/tree/commondir", "../..\n").dir("not-git/objects");
        let search = place.search();
        let wanted = [
            ".git",
            ".git/modules/sub",
            "a/b/.git",
            "apart/.git",
            "bare",
            "empty/.git",
            "main/.git",
            "main/.git/worktrees/tree",
            "outside/.git",
            "store/repo",
            "sub/.git",
            "tree/.git",
        ];
        assert_eq!(search, Search { found: paths(wanted), ..Search::default() });
    }

    #[test]
    fn what_cannot_be_held_is_counted() {
        let place = Place::new("links");
        place.file("store/repo/config", "").dir("linked");
        symlink("../store/repo", place.0.join("linked/.git")).unwrap();
        symlink("/", place.0.join("away")).unwrap();
        let search = place.search();
        assert_eq!(search, Search { found: paths(["store/repo"]), links: 1, ..Search::default() });
        let mut summary = Summary::default();
        summary.add(Path::new("/mnt"), &search, 1);
        let record = summary.record();
        assert_eq!(record.state, proto::MechanismStatus::Degraded);
        assert!(record.reason.contains("/mnt: 1 `.git` are symbolic links"), "{record:?}");
    }

    #[test]
    fn the_search_is_bounded_and_says_so() {
        let place = Place::new("deep");
        let deep = ["d"; DEPTH_MAX].join("/");
        place.dir(&format!("{deep}/.git"));
        assert_eq!(place.search(), Search { found: paths([&*format!("{deep}/.git")]), ..Search::default() });
        place.dir(&format!("{deep}/d/.git"));
        let search = place.search();
        assert!(search.cut && search.found.len() == 1, "{search:?}");
    }

    #[test]
    fn those_above_are_held_in_place_and_those_within_are_held_already() {
        let found = paths(["a/b/.git", "a/b/.git/modules/x", "a/c", ".git"]);
        let (wanted, held) = mounts_for(&found);
        let expected = [
            (".git", HoldAccess::Reads),
            ("a", HoldAccess::Writes),
            ("a/b", HoldAccess::Writes),
            ("a/b/.git", HoldAccess::Reads),
            ("a/c", HoldAccess::Reads),
        ];
        let expected: BTreeMap<PathBuf, HoldAccess> =
            expected.into_iter().map(|(path, through)| (path.into(), through)).collect();
        assert_eq!((wanted, held), (expected, 4));
        let many: BTreeSet<PathBuf> = (0..2 * HOLDS_MAX).map(|n| format!("r{n}/.git").into()).collect();
        let (wanted, held) = mounts_for(&many);
        assert_eq!((wanted.len(), held), (HOLDS_MAX, HOLDS_MAX / 2), "each takes two");
    }
}
