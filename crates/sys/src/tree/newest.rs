//! The newest change in a tree.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::fs::{FileType, Stat};

use super::{names, open_dir, stat};

/// Most directories that are open on the way down.
const DEPTH_MAX: usize = 400;

/// Finds the newest status change (ctime) of what is below a directory, except below its entry `skip`; `None` if nothing
/// is there. A directory counts only while it is empty. A tree that is too large or too deep, or that cannot be read, is an
/// error.
pub fn newest_change(dir: BorrowedFd<'_>, skip: &CStr, entries_max: usize) -> io::Result<Option<SystemTime>> {
    let mut first = names(dir)?;
    first.retain(|name| name.as_c_str() != skip);
    let (mut seen, mut newest) = (first.len(), None);
    let mut open: Vec<(OwnedFd, Vec<CString>)> = vec![(dir.try_clone_to_owned()?, first)];
    while let Some((dir, left)) = open.last_mut() {
        let Some(name) = left.pop() else {
            open.pop();
            continue;
        };
        let found = match stat(dir.as_fd(), &name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        let below = match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => Some(open_dir(dir.as_fd(), &name)?),
            _ => None,
        };
        let inside = below.as_ref().map(|below| names(below.as_fd())).transpose()?.unwrap_or_default();
        seen += inside.len();
        if seen > entries_max || open.len() >= DEPTH_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        match below.filter(|_| !inside.is_empty()) {
            Some(below) => open.push((below, inside)),
            None => newest = newest.max(Some(changed_at(&found))),
        }
    }
    Ok(newest)
}

fn changed_at(found: &Stat) -> SystemTime {
    let seconds = Duration::from_secs(u64::try_from(found.st_ctime).unwrap_or(0));
    UNIX_EPOCH + seconds + Duration::from_nanos(found.st_ctime_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_change_is_found_and_one_entry_is_left_out() {
        let dir = std::env::temp_dir().join(format!("pal-newest-{}", std::process::id()));
        std::fs::create_dir_all(dir.join(".git/deep")).unwrap();
        let top = std::fs::File::open(&dir).unwrap();
        let look = |max| newest_change(top.as_fd(), c".git", max);
        assert_eq!(look(10).unwrap(), None, "only the entry that is left out");
        std::fs::create_dir_all(dir.join("a/b")).unwrap();
        std::fs::write(dir.join("a/b/file"), "1").unwrap();
        let before = look(10).unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(dir.join(".git/deep/index"), "1").unwrap();
        assert_eq!(look(10).unwrap(), Some(before));
        std::fs::write(dir.join("a/b/file"), "2").unwrap();
        let after = look(10).unwrap().unwrap();
        assert!(after > before);
        std::fs::remove_file(dir.join("a/b/file")).unwrap();
        std::fs::write(dir.join("a/c"), "").unwrap();
        assert!(look(10).unwrap().unwrap() >= after, "an empty directory counts, too");
        assert!(look(1).is_err(), "a tree with too many entries");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
