//! Lists one layer of an overlay as the paths that git has to check again.
//!
//! Invariant: entries, paths, depth and time are bounded, whatever a Body writes there meanwhile; no symbolic link is
//! followed.
//! Invariant: a walk that cannot see everything fails; it never returns a part.

use std::{
    ffi::CStr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

const ENTRIES_MAX: usize = 20_000;
/// Most paths that are reported one by one.
pub const PATHS_MAX: usize = 4096;
/// Most bytes of all paths together, those of directories included.
pub const PATHS_LEN_MAX: usize = 1 << 20;
const DEPTH_MAX: usize = 64;
/// Longest time for a walk over all layers.
const TIME_MAX: Duration = Duration::from_millis(300);
/// The attribute by which overlayfs marks an opaque directory, one that hides the directory below it.
const OPAQUE: &str = "user.overlay.opaque";
/// A name that stands for any name in a directory: git drops its untracked cache there.
pub const ANY: &[u8] = b"/-";

/// Identity and time of a directory in an upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirStamp {
    /// Its inode number.
    pub inode: u64,
    /// When a name was last added or removed: seconds and nanoseconds.
    pub time: (i64, i64),
}

/// The contents of one layer.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UpperListing {
    /// Paths that git has to check, with everything below them.
    pub paths: Vec<Vec<u8>>,
    /// Every directory; the top one comes first, as the empty path.
    pub dirs: Vec<(Vec<u8>, DirStamp)>,
}

/// The walk could not see everything.
#[derive(Debug, PartialEq, Eq)]
pub struct WalkFailed;

/// How to treat the directories inside a directory that its own path covers already, because it is opaque or nothing
/// is below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoveredDirs {
    /// Report each of them too, because git may remember names in it.
    Dirs,
    /// Skip them.
    Nothing,
}

/// Walks a layer except for its top `.git`; `begun` is when the query arrived.
pub fn look(
    top: BorrowedFd<'_>,
    lowers: &[OwnedFd],
    inside: CoveredDirs,
    begun: Instant,
) -> Result<UpperListing, WalkFailed> {
    let mut walk = UpperWalk { looked: UpperListing::default(), inside, entries: 0, len: 0, begun };
    let top = open(top, c".").map_err(|_| WalkFailed)?;
    let found = rustix::fs::fstat(&top).map_err(|_| WalkFailed)?;
    walk.looked.dirs.push((Vec::new(), seen(&found)));
    walk.dir(&top, lowers, &mut Vec::new(), 0, Coverage::No)?;
    Ok(walk.looked)
}

struct UpperWalk {
    looked: UpperListing,
    inside: CoveredDirs,
    entries: usize,
    len: usize,
    begun: Instant,
}

/// Whether the path of a directory already covers everything below it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Coverage {
    Yes,
    No,
}

impl UpperWalk {
    fn dir(
        &mut self,
        dir: &OwnedFd,
        lowers: &[OwnedFd],
        path: &mut Vec<u8>,
        depth: usize,
        whole: Coverage,
    ) -> Result<(), WalkFailed> {
        for entry in Dir::read_from(dir).map_err(|_| WalkFailed)? {
            let entry = entry.map_err(|_| WalkFailed)?;
            let name = entry.file_name();
            if name == c"." || name == c".." || (depth == 0 && name == c".git") {
                continue;
            }
            self.entries += 1;
            if self.entries > ENTRIES_MAX || depth >= DEPTH_MAX || self.begun.elapsed() > TIME_MAX {
                return Err(WalkFailed);
            }
            // A nested repository: git asks for the commit that it is at.
            if name == c".git" {
                self.add_path(path)?;
                continue;
            }
            let len = path.len();
            if len > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            let kind = match entry.file_type() {
                FileType::Unknown => kind_of(dir.as_fd(), name)?,
                known => known,
            };
            match kind {
                FileType::Directory => self.below((dir, lowers), name, path, depth, whole)?,
                // A file, a symbolic link, or a whiteout.
                _ if whole == Coverage::No => self.add_path(path)?,
                _ => {}
            }
            path.truncate(len);
        }
        Ok(())
    }

    fn below(
        &mut self,
        above: (&OwnedFd, &[OwnedFd]),
        name: &CStr,
        path: &mut Vec<u8>,
        depth: usize,
        whole: Coverage,
    ) -> Result<(), WalkFailed> {
        let dir = match open(above.0.as_fd(), name) {
            Ok(dir) => dir,
            // Another process has just replaced it.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return self.add_path(path),
            Err(_) => return Err(WalkFailed),
        };
        let found = rustix::fs::fstat(&dir).map_err(|_| WalkFailed)?;
        self.room_for(path)?;
        self.looked.dirs.push((path.clone(), seen(&found)));
        let mut value = [0; 4];
        let hides = matches!(rustix::fs::fgetxattr(&dir, OPAQUE, &mut value), Ok(1) if value[0] == b'y');
        let lowers: Vec<OwnedFd> = match (whole, hides) {
            (Coverage::No, false) => {
                above.1.iter().filter_map(|lower| open(lower.as_fd(), name).ok()).collect()
            }
            _ => Vec::new(),
        };
        if !lowers.is_empty() {
            return self.dir(&dir, &lowers, path, depth + 1, Coverage::No);
        }
        if whole == Coverage::No {
            self.add_path(path)?;
        }
        if self.inside == CoveredDirs::Nothing {
            return Ok(());
        }
        self.add_path(&[path, ANY].concat())?;
        self.dir(&dir, &[], path, depth + 1, Coverage::Yes)
    }

    fn add_path(&mut self, path: &[u8]) -> Result<(), WalkFailed> {
        self.room_for(path)?;
        if self.looked.paths.len() >= PATHS_MAX {
            return Err(WalkFailed);
        }
        self.looked.paths.push(path.to_owned());
        Ok(())
    }

    fn room_for(&mut self, path: &[u8]) -> Result<(), WalkFailed> {
        self.len += path.len() + 1;
        if self.len > PATHS_LEN_MAX { Err(WalkFailed) } else { Ok(()) }
    }
}

fn open(above: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::openat(above, name, flags, Mode::empty())
}

fn kind_of(dir: BorrowedFd<'_>, name: &CStr) -> Result<FileType, WalkFailed> {
    let found = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|_| WalkFailed)?;
    Ok(FileType::from_raw_mode(found.st_mode))
}

fn seen(found: &Stat) -> DirStamp {
    DirStamp { inode: found.st_ino, time: (found.st_mtime, found.st_mtime_nsec as i64) }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
    };

    use super::*;

    struct TestDir(PathBuf);

    impl TestDir {
        fn make(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("pal-changes-{name}-{}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            // The lower layer.
            for lower in ["src/deep", "new", "sub", "a", "b"] {
                fs::create_dir_all(dir.join("lower").join(lower)).unwrap();
            }
            fs::create_dir_all(dir.join("upper")).unwrap();
            Self(dir)
        }

        fn look_with(&self, inside: CoveredDirs, begun: Instant) -> Result<UpperListing, WalkFailed> {
            let open = |name: &str| OwnedFd::from(fs::File::open(self.0.join(name)).unwrap());
            look(open("upper").as_fd(), &[open("lower")], inside, begun)
        }

        fn look(&self) -> Result<UpperListing, WalkFailed> {
            self.look_with(CoveredDirs::Dirs, Instant::now())
        }

        fn paths(&self, inside: CoveredDirs) -> Vec<String> {
            let looked = self.look_with(inside, Instant::now()).unwrap();
            let mut paths: Vec<String> =
                looked.paths.into_iter().map(|path| String::from_utf8(path).unwrap()).collect();
            paths.sort();
            paths
        }
    }

    impl Drop for TestDir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn hide(dir: &Path) {
        rustix::fs::setxattr(dir, OPAQUE, b"y", rustix::fs::XattrFlags::empty()).unwrap();
    }

    #[test]
    fn every_path_is_told_and_whole_directories_by_their_own() {
        let place = TestDir::make("told");
        let at = |path: &str| place.0.join("upper").join(path);
        for dir in [".git/objects", "src/deep", "src/fresh/x", "new/inner", "sub/.git"] {
            fs::create_dir_all(at(dir)).unwrap();
        }
        for file in
            [".git/index", "top", "src/a", "src/deep/b", "src/fresh/x/y", "new/c", "new/inner/d", "sub/e"]
        {
            fs::write(at(file), "").unwrap();
        }
        std::os::unix::fs::symlink("/", at("src/link")).unwrap();
        hide(&at("new"));
        let mut told = vec![
            "new",
            "new/-",
            "new/inner/-",
            "src/a",
            "src/deep/b",
            "src/fresh",
            "src/fresh/-",
            "src/fresh/x/-",
            "src/link",
            "sub",
            "sub/e",
            "top",
        ];
        assert_eq!(place.paths(CoveredDirs::Dirs), told);
        told.retain(|path| !path.ends_with("/-"));
        assert_eq!(place.paths(CoveredDirs::Nothing), told);
        let dirs = place.look().unwrap().dirs.into_iter().map(|(path, _)| String::from_utf8(path).unwrap());
        let mut dirs: Vec<String> = dirs.collect();
        dirs.sort();
        assert_eq!(dirs, ["", "new", "new/inner", "src", "src/deep", "src/fresh", "src/fresh/x", "sub"]);
    }

    #[test]
    fn who_would_have_to_tell_too_much_is_unsure() {
        let place = TestDir::make("much");
        let at = |name: &str, count: usize| {
            let dir = place.0.join("upper").join(name);
            fs::create_dir_all(&dir).unwrap();
            (0..count).for_each(|n| fs::write(dir.join(n.to_string()), "").unwrap());
        };
        at("a", PATHS_MAX);
        assert_eq!(place.look().unwrap().paths.len(), PATHS_MAX);
        at("b", 1);
        assert_eq!(place.look(), Err(WalkFailed));
        hide(&place.0.join("upper/a"));
        assert_eq!(place.look().unwrap().paths.len(), 3, "a, what it hides, and b's");
        assert_eq!(
            place.look_with(CoveredDirs::Dirs, Instant::now() - 2 * TIME_MAX),
            Err(WalkFailed),
            "its time is over"
        );
        let deep = place.0.join("upper").join("x/".repeat(DEPTH_MAX + 1));
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(place.look(), Err(WalkFailed));
    }
}
