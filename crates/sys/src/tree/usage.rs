//! Disk usage of a tree.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::fs::FileType;

use super::{names, open_dir, stat};

/// Disk usage of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeUsage {
    /// Allocated bytes; a file with several names counts once for each.
    pub bytes: u64,
    /// Files, links and directories.
    pub entries: u64,
}

/// Most directories that are open on the way down; deeper parts of a tree are not counted.
const DEPTH_MAX: usize = 400;

/// Adds up a directory. Entries that vanish meanwhile or cannot be read are not counted.
pub fn usage(dir: BorrowedFd<'_>) -> io::Result<TreeUsage> {
    let mut total = TreeUsage::default();
    let mut open: Vec<(OwnedFd, Vec<std::ffi::CString>)> = vec![(dir.try_clone_to_owned()?, names(dir)?)];
    while let Some((dir, left)) = open.last_mut() {
        let Some(name) = left.pop() else {
            open.pop();
            continue;
        };
        let Ok(found) = stat(dir.as_fd(), &name) else { continue };
        total.entries += 1;
        total.bytes += found.st_blocks as u64 * 512;
        if FileType::from_raw_mode(found.st_mode) != FileType::Directory || open.len() >= DEPTH_MAX {
            continue;
        }
        let Some((dir, _)) = open.last() else { break };
        let below = open_dir(dir.as_fd(), &name).and_then(|dir| names(dir.as_fd()).map(|names| (dir, names)));
        open.extend(below);
    }
    Ok(total)
}
