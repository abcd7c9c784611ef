//! Copies an upper: by reflink where the file system can, with holes and overlayfs attributes kept.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps},
    io::Errno,
};

use super::{TreeUsage, names, open_dir, stat};

/// Deeper trees are refused: each level holds two descriptors.
const DEPTH_MAX: usize = 480;
const ATTRIBUTES_LEN_MAX: usize = 64 * 1024;

/// Copies the contents of `from` into the empty directory `to`: owners, modes, times, links, extended attributes,
/// whiteouts. Sockets are left out.
pub fn copy(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<TreeUsage> {
    copy_as(from, to, |mode| mode)
}

/// Copies a tree like [`copy`], but with modes that let every user read and remove the copy.
pub fn copy_open(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<TreeUsage> {
    copy_as(from, to, |mode| match FileType::from_raw_mode(mode) {
        FileType::Directory => (mode & !0o7777) | 0o777,
        FileType::RegularFile => (mode & !0o7000) | 0o444,
        _ => mode,
    })
}

fn copy_as(from: BorrowedFd<'_>, to: BorrowedFd<'_>, mode: fn(u32) -> u32) -> io::Result<TreeUsage> {
    let mut copier = TreeCopier { total: TreeUsage::default(), linked: HashMap::new(), top: to, mode };
    let mut root = rustix::fs::fstat(from)?;
    root.st_mode = mode(root.st_mode);
    let mut open = vec![CopyLevel {
        from: from.try_clone_to_owned()?,
        to: to.try_clone_to_owned()?,
        stat: root,
        left: names(from)?,
        path: Vec::new(),
    }];
    while let Some(level) = open.last_mut() {
        if let Some(name) = level.left.pop() {
            if let Some(below) = copier.entry(level, &name)? {
                if open.len() >= DEPTH_MAX {
                    return Err(io::Error::other(format!("the tree is deeper than {DEPTH_MAX} directories")));
                }
                open.push(below);
            }
        } else if let Some(level) = open.pop() {
            // Last, because filling the directory changes its times, and its mode may forbid that.
            attributes(level.from.as_fd(), level.to.as_fd())?;
            copy_metadata(level.to.as_fd(), &level.stat)?;
        }
    }
    Ok(copier.total)
}

struct CopyLevel {
    from: OwnedFd,
    to: OwnedFd,
    stat: Stat,
    left: Vec<CString>,
    /// The path below the top, for hard links.
    path: Vec<u8>,
}

struct TreeCopier<'a> {
    total: TreeUsage,
    linked: HashMap<(u64, u64), CString>,
    top: BorrowedFd<'a>,
    mode: fn(u32) -> u32,
}

impl TreeCopier<'_> {
    fn entry(&mut self, level: &CopyLevel, name: &CStr) -> io::Result<Option<CopyLevel>> {
        let (from, to) = (level.from.as_fd(), level.to.as_fd());
        let mut found = stat(from, name)?;
        found.st_mode = (self.mode)(found.st_mode);
        self.total.entries += 1;
        self.total.bytes += found.st_blocks as u64 * 512;
        let mut path = level.path.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.to_bytes());
        let kind = FileType::from_raw_mode(found.st_mode);
        if kind == FileType::Directory {
            rustix::fs::mkdirat(to, name, Mode::RWXU)?;
            let (from, to) = (open_dir(from, name)?, open_dir(to, name)?);
            let left = names(from.as_fd())?;
            return Ok(Some(CopyLevel { from, to, stat: found, left, path }));
        }
        if found.st_nlink > 1 && self.link(&found, &path, to, name)? {
            return Ok(None);
        }
        match kind {
            FileType::RegularFile => file(from, to, name, &found)?,
            FileType::Symlink => link(from, to, name, &found)?,
            FileType::CharacterDevice | FileType::Fifo => create_node(to, name, &found)?,
            _ => {}
        }
        Ok(None)
    }

    /// Creates a hard link if another name of this file was copied before; true if it did.
    fn link(&mut self, found: &Stat, path: &[u8], to: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
        let key = (found.st_dev, found.st_ino);
        if let Some(first) = self.linked.get(&key) {
            rustix::fs::linkat(self.top, first, to, name, AtFlags::empty())?;
            return Ok(true);
        }
        self.linked.insert(key, CString::new(path)?);
        Ok(false)
    }
}

fn file(from: BorrowedFd<'_>, to: BorrowedFd<'_>, name: &CStr, found: &Stat) -> io::Result<()> {
    let read = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let source = rustix::fs::openat(from, name, read, Mode::empty())?;
    let write = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let target = rustix::fs::openat(to, name, write, Mode::RUSR | Mode::WUSR)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_err() {
        contents(source.as_fd(), target.as_fd(), found.st_size as u64)?;
    }
    attributes(source.as_fd(), target.as_fd())?;
    copy_metadata(target.as_fd(), found)
}

/// Copies data and keeps holes.
fn contents(from: BorrowedFd<'_>, to: BorrowedFd<'_>, len: u64) -> io::Result<()> {
    let mut at = 0;
    while at < len {
        let start = match rustix::fs::seek(from, rustix::fs::SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(_) => at,
        };
        let end = rustix::fs::seek(from, rustix::fs::SeekFrom::Hole(start)).unwrap_or(len).min(len);
        let (mut read_at, mut write_at) = (start, start);
        while read_at < end {
            let many = usize::try_from(end - read_at).unwrap_or(usize::MAX).min(1 << 30);
            if rustix::fs::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), many)? == 0 {
                break;
            }
        }
        at = end.max(start + 1);
    }
    Ok(rustix::fs::ftruncate(to, len)?)
}

fn link(from: BorrowedFd<'_>, to: BorrowedFd<'_>, name: &CStr, found: &Stat) -> io::Result<()> {
    let target = rustix::fs::readlinkat(from, name, Vec::new())?;
    rustix::fs::symlinkat(&target, to, name)?;
    own(to, name, found)
}

/// Creates a whiteout (device 0/0) or a FIFO. An upper cannot contain other devices, and the kernel refuses them
/// here.
fn create_node(to: BorrowedFd<'_>, name: &CStr, found: &Stat) -> io::Result<()> {
    let kind = FileType::from_raw_mode(found.st_mode);
    rustix::fs::mknodat(to, name, kind, Mode::from_raw_mode(found.st_mode), found.st_rdev)?;
    own(to, name, found)
}

fn own(dir: BorrowedFd<'_>, name: &CStr, found: &Stat) -> io::Result<()> {
    let (user, group) = owner(found);
    match rustix::fs::chownat(dir, name, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::PERM) => Ok(()),
        done => Ok(done?),
    }
}

fn owner(found: &Stat) -> (rustix::fs::Uid, rustix::fs::Gid) {
    (rustix::fs::Uid::from_raw(found.st_uid), rustix::fs::Gid::from_raw(found.st_gid))
}

fn copy_metadata(target: BorrowedFd<'_>, found: &Stat) -> io::Result<()> {
    let (user, group) = owner(found);
    match rustix::fs::fchown(target, Some(user), Some(group)) {
        // Without privileges every file belongs to the caller already.
        Err(Errno::PERM) | Ok(()) => {}
        Err(errno) => return Err(errno.into()),
    }
    rustix::fs::fchmod(target, Mode::from_raw_mode(found.st_mode))?;
    let time = |seconds: i64, nanos: i64| Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = Timestamps {
        last_access: time(found.st_atime, found.st_atime_nsec as i64),
        last_modification: time(found.st_mtime, found.st_mtime_nsec as i64),
    };
    Ok(rustix::fs::futimens(target, &times)?)
}

/// Copies the `user.` attributes, which include overlayfs' own.
fn attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let mut list = vec![0u8; ATTRIBUTES_LEN_MAX];
    let len = match rustix::fs::flistxattr(from, &mut list[..]) {
        Ok(len) => len,
        Err(Errno::NOTSUP) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    };
    let mut value = Vec::new();
    for name in list[..len].split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        if !name.to_bytes().starts_with(b"user.") {
            continue;
        }
        value.resize(ATTRIBUTES_LEN_MAX, 0);
        let len = rustix::fs::fgetxattr(from, name, &mut value[..])?;
        rustix::fs::fsetxattr(to, name, &value[..len], rustix::fs::XattrFlags::empty())?;
    }
    Ok(())
}
