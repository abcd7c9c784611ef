//! Git directories in writable mounts, held read-only.
//!
//! What a Body writes into a git directory, the host's git obeys later: hooks, settings, `commondir`, the todo list of a
//! rebase. No list of single files holds: git takes a file that was missing yesterday as well as one that was there. So
//! a git directory is read-only as a whole, `.git` files that lead to one are too, and every directory between the mount
//! and a git directory is a mount of its own, because the kernel renames and removes no mount point.
//!
//! Invariant: nothing is written to the host to hold it: what is held was there when the Body started.
//! Invariant: the search is bounded, and what it left out stands in the record.
//! Absent on purpose: repositories that a Body makes where there was none (SECURITY.md says so).
//! Trust: the mounted directory may be a hostile one of an earlier Body. No link in it is followed, but that a `.git`
//! leads to a git directory below the same mount is looked up, and proved by inode.

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

/// How far below the mount git directories are looked for.
const DEPTH_MAX: usize = 8;
/// How many directories of one mount are looked into.
const DIRS_MAX: usize = 10_000;
/// How many mounts hold the git directories of one mount; each takes two descriptors while the Body is made.
const HOLDS_MAX: usize = 192;
/// Longest `.git` or `commondir` file that is read.
const POINTER_LEN_MAX: u64 = 8192;

/// A mount that holds one directory or file in place.
pub struct Hold {
    /// Where it goes: opened through the mount above it.
    pub place: OwnedFd,
    /// A detached mount of what is there.
    pub tree: OwnedFd,
}

/// What was found in one mount.
#[derive(Debug, Default, PartialEq, Eq)]
struct Search {
    /// Git directories and `.git` files, relative to the mount.
    found: BTreeSet<PathBuf>,
    /// `.git` that are symbolic links, which nothing can be mounted on.
    links: usize,
    /// Directories that could not be read.
    unread: usize,
    /// Whether a bound ended the search.
    cut: bool,
}

/// What holds the git directories of all writable mounts of a Body.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Summary {
    /// How many are held.
    held: usize,
    /// What could not be held, in words.
    gaps: Vec<String>,
    /// Mounts whose git directories nobody wants held.
    unprotected: Vec<PathBuf>,
}

impl Summary {
    /// Notes a mount whose git directories are not to be held.
    pub fn leave_out(&mut self, target: &Path) {
        self.unprotected.push(target.to_owned());
    }

    fn add(&mut self, target: &Path, search: &Search, held: usize) {
        self.held += held;
        let mut gap = |what: String| self.gaps.push(format!("{}: {what}", target.display()));
        if search.cut {
            gap(format!("searched {DIRS_MAX} directories and {DEPTH_MAX} levels, not what is beyond"));
        }
        if held < search.found.len() {
            gap(format!("{} more than can be held", search.found.len() - held));
        }
        if search.links > 0 {
            gap(format!("{} `.git` are symbolic links, which cannot be held", search.links));
        }
        if search.unread > 0 {
            gap(format!("{} directories could not be read", search.unread));
        }
    }

    /// The line of the enforcement record.
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

/// Looks for the git directories of a writable mount of `source`, whose detached mount is `tree`, and takes what holds
/// them, outermost first. A mount that is a git directory itself is made read-only.
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
    // A path sorts before those below it.
    Ok(holds.into_values().collect())
}

/// What a hold lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HoldAccess {
    /// Reading: a git directory.
    Reads,
    /// Everything: a directory above one, which is only kept from being renamed.
    Writes,
}

/// The mounts that hold these paths, with those above them; and how many of the paths are held.
fn mounts_for(found: &BTreeSet<PathBuf>) -> (BTreeMap<PathBuf, HoldAccess>, usize) {
    let mut wanted = BTreeMap::new();
    let mut held = 0;
    for path in found {
        let above: Vec<&Path> =
            path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()).collect();
        if above.iter().any(|above| wanted.get(*above) == Some(&HoldAccess::Reads)) {
            // It is within one that is held whole.
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

/// What is mounted must be what was looked at: another process may exchange it in between.
fn check_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|found| (found.st_dev, found.st_ino));
    if inode(one)? == inode(other)? {
        return Ok(());
    }
    Err(io::Error::other(format!("{} was exchanged meanwhile", path.display())))
}

const BELOW: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Breadth first, so that a bound cuts off what is deepest.
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
                    search.found.extend(led_to(source, &below));
                    search.found.insert(below);
                }
                FileType::Symlink if name == *".git" => {
                    search.links += 1;
                    search.found.extend(led_to(source, &below));
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

/// As git itself tells one: a bare repository, or a git directory by another name.
fn is_git_dir(entries: &[(std::ffi::OsString, FileType)]) -> bool {
    let has = |wanted: &str, kinds: &[FileType]| {
        entries.iter().any(|(name, kind)| name == wanted && kinds.contains(kind))
    };
    let links = [FileType::Directory, FileType::Symlink];
    has("HEAD", &[FileType::RegularFile, FileType::Symlink])
        && (has("commondir", &[FileType::RegularFile]) || has("objects", &links) && has("refs", &links))
}

/// The git directory that a `.git` file or link leads to, and the one that has its settings, below the same mount.
fn led_to(source: &Path, git: &Path) -> Vec<PathBuf> {
    let place = source.join(git);
    let below = |path: PathBuf| path.strip_prefix(source).map(Path::to_owned).ok();
    let pointed = match read_pointer(&place) {
        Some(text) => text.strip_prefix(b"gitdir: ").map(|dir| beside(&place, dir)),
        None => Some(place.clone()),
    };
    let Some(dir) = pointed.and_then(|dir| std::fs::canonicalize(dir).ok()).filter(|dir| dir.is_dir()) else {
        return Vec::new();
    };
    let file = dir.join("commondir");
    let common = read_pointer(&file).and_then(|text| std::fs::canonicalize(beside(&file, &text)).ok());
    [Some(dir), common].into_iter().flatten().filter_map(below).collect()
}

/// What one of git's small files says; none where it is no file.
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

/// A path in a file means what it means beside the file.
fn beside(file: &Path, path: &[u8]) -> PathBuf {
    file.parent().unwrap_or(Path::new("/")).join(OsStr::from_bytes(path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory of a test's own, gone with it.
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
