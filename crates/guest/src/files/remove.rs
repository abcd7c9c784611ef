//! Removes whole trees of any depth with a constant number of descriptors.
//!
//! Invariant: nothing outside the tree is touched, whatever another process swaps meanwhile: each directory is opened
//! with `O_NOFOLLOW`, and `..` is used only if it is the directory that we came from.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Instant,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

/// Removes the file or tree at `path`; a missing path is no error.
pub fn remove(path: &Path) -> io::Result<()> {
    remove_at(CWD, path, None)
}

/// Removes the file or tree at `path` from a directory, until that takes too long; a missing path is no error.
pub fn remove_at(
    above: impl AsFd,
    path: impl rustix::path::Arg + Copy,
    until: Option<Instant>,
) -> io::Result<()> {
    let unlinked = match rustix::fs::unlinkat(&above, path, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        Err(error @ (Errno::ISDIR | Errno::PERM)) => error,
        Err(error) => return Err(error.into()),
    };
    match open_dir(&above, path) {
        Ok(dir) => empty(dir, until)?,
        Err(Errno::NOENT) => return Ok(()),
        // It is a file that may not be removed.
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(unlinked.into()),
        Err(error) => return Err(error.into()),
    }
    match rustix::fs::unlinkat(&above, path, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Empties a directory. It goes back up through `..`, so each level costs a name in memory and no descriptor.
fn empty(root: OwnedFd, until: Option<Instant>) -> io::Result<()> {
    let mut here = root;
    let mut way: Vec<(CString, u64, u64)> = Vec::new();
    loop {
        if let Some(name) = clear_files(&here, until)? {
            let id = rustix::fs::fstat(&here)?;
            match open_dir(&here, name.as_c_str()) {
                Ok(below) => {
                    way.push((name, id.st_dev, id.st_ino));
                    here = below;
                }
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(error) => return Err(error.into()),
            }
            continue;
        }
        let Some((name, dev, ino)) = way.pop() else { return Ok(()) };
        let above = open_dir(&here, c"..")?;
        if !is(&rustix::fs::fstat(&above)?, dev, ino) {
            return Err(io::Error::other("the tree was moved while it was removed"));
        }
        here = above;
        match rustix::fs::unlinkat(&here, name.as_c_str(), AtFlags::REMOVEDIR) {
            // Another process added an entry meanwhile: the next round empties the directory again.
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Unlinks entries until it finds a directory, and returns that directory's name.
fn clear_files(dir: &OwnedFd, until: Option<Instant>) -> io::Result<Option<CString>> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if until.is_some_and(|until| Instant::now() > until) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it took too long; a part of the tree is left",
            ));
        }
        let name = entry.file_name();
        if is_dots(name) {
            continue;
        }
        if entry.file_type() == FileType::Directory {
            return Ok(Some(name.to_owned()));
        }
        match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            // The file system does not report entry types, or another process replaced the file by a directory.
            Err(Errno::ISDIR) => return Ok(Some(name.to_owned())),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

fn open_dir(dir: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

fn is(stat: &Stat, dev: u64, ino: u64) -> bool {
    stat.st_dev == dev && stat.st_ino == ino
}

/// Whether a name is `.` or `..`, which every directory lists.
pub fn is_dots(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::PathBuf};

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pal-remove-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn a_tree_goes_and_what_its_links_point_to_stays() {
        let dir = scratch("links");
        let (tree, kept) = (dir.join("tree"), dir.join("kept"));
        fs::create_dir_all(tree.join("a/b/c")).unwrap();
        fs::create_dir_all(&kept).unwrap();
        fs::write(kept.join("file"), "x").unwrap();
        fs::write(tree.join("a/b/file"), "x").unwrap();
        symlink(&kept, tree.join("a/link")).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists() && kept.join("file").exists());
        remove(&tree).unwrap();
        symlink(&kept, &tree).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists() && kept.exists());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn depth_needs_no_descriptors_and_no_short_paths() {
        let dir = scratch("deep");
        let root = open_dir(CWD, dir.as_path()).unwrap();
        let mut here = root;
        for _ in 0..2000 {
            rustix::fs::mkdirat(&here, c"0123456789", Mode::RWXU).unwrap();
            here = open_dir(&here, c"0123456789").unwrap();
        }
        remove(&dir).unwrap();
        assert!(!dir.exists());
    }
}
