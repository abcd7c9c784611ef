//! A digest of the upper. The guest computes it before it is saved and after it was restored; both must be equal.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use proto::vm::UpperDigest;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use sha2::{Digest, Sha256};

/// Most entries in a digest; a larger upper is compared by its first ones.
const ENTRIES_MAX: u64 = 4096;
const DEPTH_MAX: usize = 64;
/// Longest time for a digest: under emulation each stat is slow, and a caller waits.
const PATIENCE: Duration = Duration::from_millis(500);

/// Hashes names, types, modes, owners, sizes and times of everything below some directories, in sorted order.
pub fn look<'a>(roots: impl Iterator<Item = BorrowedFd<'a>>, until: Option<u64>) -> UpperDigest {
    let mut walk = UpperSummary {
        hash: Sha256::new(),
        entries: 0,
        max: until.unwrap_or(ENTRIES_MAX).min(ENTRIES_MAX),
        deadline: Instant::now() + PATIENCE,
        whole: true,
        bound: until.is_some(),
    };
    for dir in roots.filter_map(|root| open(root, c".").ok()) {
        walk.dir(&dir, 0);
    }
    UpperDigest { hash: proto::event::hex(&walk.hash.finalize()), entries: walk.entries, whole: walk.whole }
}

struct UpperSummary {
    hash: Sha256,
    entries: u64,
    max: u64,
    deadline: Instant,
    whole: bool,
    /// Whether the entry count is given; then time does not cut the walk short.
    bound: bool,
}

impl UpperSummary {
    fn dir(&mut self, dir: &OwnedFd, depth: usize) {
        let Ok(listed) = Dir::read_from(dir) else { return };
        let mut names: Vec<_> = listed
            .flatten()
            .map(|entry| entry.file_name().to_owned())
            .filter(|name| !matches!(name.to_bytes(), b"." | b".."))
            .collect();
        names.sort();
        for name in names {
            let late = !self.bound && self.entries.is_multiple_of(64) && Instant::now() > self.deadline;
            if self.entries >= self.max || late {
                self.whole = false;
                // The count so far limits the second walk, so that both cover the same entries.
                self.max = self.entries;
                return;
            }
            let Ok(stat) = rustix::fs::statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            self.entry(depth, name.to_bytes(), &stat);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory
                && depth < DEPTH_MAX
                && let Ok(below) = open(dir.as_fd(), &name)
            {
                self.dir(&below, depth + 1);
            }
        }
    }

    fn entry(&mut self, depth: usize, name: &[u8], stat: &Stat) {
        self.entries += 1;
        let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        // The size of a directory depends on the file system, so it is left out.
        let size = if directory { 0 } else { stat.st_size };
        self.hash.update((name.len() as u64).to_le_bytes());
        self.hash.update(name);
        for number in [
            depth as i64,
            i64::from(stat.st_mode),
            i64::from(stat.st_uid),
            i64::from(stat.st_gid),
            size,
            stat.st_mtime,
            stat.st_mtime_nsec as i64,
        ] {
            self.hash.update(number.to_le_bytes());
        }
    }
}

fn open(at: BorrowedFd<'_>, name: &std::ffi::CStr) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(
        at,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_told_apart_by_any_change() {
        let dir = std::env::temp_dir().join(format!("pal-guest-tree-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("a/b")).unwrap();
        std::fs::write(dir.join("a/b/c"), "one").unwrap();
        let root = open(rustix::fs::CWD, &std::ffi::CString::new(dir.to_str().unwrap()).unwrap()).unwrap();
        let before = look(std::iter::once(root.as_fd()), None);
        assert_eq!(before, look(std::iter::once(root.as_fd()), Some(before.entries)));
        assert_eq!((before.entries, before.whole), (3, true));
        std::fs::write(dir.join("a/b/c"), "three").unwrap();
        let after = look(std::iter::once(root.as_fd()), None);
        assert_ne!(before.hash, after.hash);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
