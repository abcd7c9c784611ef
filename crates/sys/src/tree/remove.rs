//! Removes a tree of any depth with two descriptors.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::{
    fs::{AtFlags, Mode},
    io::Errno,
};

use super::{names, open_dir};

/// Removes `name` below `parent` with everything in it. Missing entries are no error, also if another process removes
/// them.
///
/// A directory that is not empty is first moved up into the tree's top, so depth costs one rename a level and never
/// a descriptor or a stack frame.
pub fn remove(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let mut moved = 0u64;
    // Repeated if another process has added an entry since.
    while unlink(parent, name)? == UnlinkResult::NotEmpty {
        make_accessible(parent, name);
        let Some(top) = there(open_dir(parent, name))? else { continue };
        for child in there(names(top.as_fd()))?.unwrap_or_default() {
            there(empty_into(top.as_fd(), &child, &mut moved))?;
        }
    }
    Ok(())
}

/// `None` if the entry does not exist.
fn there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

/// Removes `child` of `top`, moving the entries of a directory up into `top`.
fn empty_into(top: BorrowedFd<'_>, child: &CStr, moved: &mut u64) -> io::Result<()> {
    if unlink(top, child)? == UnlinkResult::Gone {
        return Ok(());
    }
    make_accessible(top, child);
    let dir = open_dir(top, child)?;
    for name in names(dir.as_fd())? {
        if unlink(dir.as_fd(), &name)? == UnlinkResult::Gone {
            continue;
        }
        make_accessible(dir.as_fd(), &name);
        there(move_up(dir.as_fd(), &name, top, moved))?;
    }
    // If another process has added an entry since, the next round finds it.
    unlink(top, child)?;
    Ok(())
}

fn move_up(from: BorrowedFd<'_>, name: &CStr, top: BorrowedFd<'_>, moved: &mut u64) -> io::Result<()> {
    loop {
        *moved += 1;
        let fresh = CString::new(format!(".pal-removing-{moved}"))?;
        match rustix::fs::renameat_with(from, name, top, &fresh, rustix::fs::RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            done => return Ok(done?),
        }
    }
}

#[derive(PartialEq, Eq)]
enum UnlinkResult {
    Gone,
    NotEmpty,
}

fn unlink(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<UnlinkResult> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(UnlinkResult::Gone),
        Err(Errno::ISDIR) => {}
        Err(errno) => return Err(errno.into()),
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(UnlinkResult::Gone),
        Err(Errno::NOTEMPTY) => Ok(UnlinkResult::NotEmpty),
        Err(errno) => Err(errno.into()),
    }
}

/// Makes a directory accessible that forbids access to its own owner.
fn make_accessible(dir: BorrowedFd<'_>, name: &CStr) {
    let _ = rustix::fs::chmodat(dir, name, Mode::RWXU, AtFlags::empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_deeper_than_any_path_is_removed() {
        let base = std::env::temp_dir().join(format!("pal-remove-{}", std::process::id()));
        std::fs::create_dir(&base).unwrap();
        let root = rustix::fs::open(&base, rustix::fs::OFlags::DIRECTORY, Mode::empty()).unwrap();
        rustix::fs::mkdirat(&root, "t", Mode::RWXU).unwrap();
        let mut dir = open_dir(root.as_fd(), c"t").unwrap();
        for depth in 0..3000 {
            rustix::fs::mkdirat(&dir, "directory", Mode::RWXU).unwrap();
            let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
            rustix::fs::openat(&dir, format!("file {depth}"), flags, Mode::RUSR).unwrap();
            let next = open_dir(dir.as_fd(), c"directory").unwrap();
            if depth % 100 == 99 {
                rustix::fs::fchmod(&dir, Mode::empty()).unwrap();
            }
            dir = next;
        }
        std::os::unix::fs::symlink("/etc", base.join("t/link")).unwrap();
        remove(root.as_fd(), c"t").unwrap();
        remove(root.as_fd(), c"t").unwrap();
        assert_eq!(std::fs::read_dir(&base).unwrap().count(), 0);
        std::fs::remove_dir(&base).unwrap();
        assert!(std::path::Path::new("/etc/passwd").exists());
    }
    /// A process may still be writing there after its creator was killed.
    #[test]
    fn what_is_added_meanwhile_is_removed_too() {
        let base = std::env::temp_dir().join(format!("pal-remove-added-{}", std::process::id()));
        std::fs::create_dir_all(base.join("t/d")).unwrap();
        let root = rustix::fs::open(&base, rustix::fs::OFlags::DIRECTORY, Mode::empty()).unwrap();
        let added = std::thread::scope(|scope| {
            let adder = scope.spawn(|| {
                let mut added = 0;
                while added < 20_000 && std::fs::write(base.join(format!("t/d/{added}")), "").is_ok() {
                    added += 1;
                }
                added
            });
            while std::fs::read_dir(base.join("t/d")).unwrap().next().is_none() {}
            remove(root.as_fd(), c"t").unwrap();
            adder.join().unwrap()
        });
        assert!(added > 0);
        assert_eq!(std::fs::read_dir(&base).unwrap().count(), 0);
        std::fs::remove_dir(&base).unwrap();
    }
}
