//! Directories of a disk as plain files on the host: owners, modes, times, holes, hard links, and the marks of overlayfs.
//!
//! Invariant: a name of the disk is in the copy, or the act fails. Contents that cannot be read leave a pipe under their name,
//! which a save reports as left out.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt},
    },
};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};

use super::{
    Disk,
    inode::{Inode, ROOT},
};

/// Deeper directories cannot be copied by anything that comes after.
const DEPTH_MAX: usize = 480;
const CHUNK_LEN: usize = 1 << 20;
const OPAQUE: (&str, &[u8]) = ("user.overlay.opaque", b"y");

/// Copies the directory at `path` of a disk into the empty directory `to`; false where the disk has none there.
pub fn extract(disk: &Disk, path: &str, to: BorrowedFd<'_>) -> io::Result<bool> {
    rustix::process::umask(Mode::empty());
    let mut inode = disk.inode(ROOT)?;
    for name in path.split('/') {
        let entries = disk.entries(&inode, disk.inodes as usize)?;
        let Some((_, number)) = entries.into_iter().find(|(found, _)| found == name.as_bytes()) else {
            return Ok(false);
        };
        inode = disk.inode(number)?;
        if inode.kind() != FileType::Directory {
            return Ok(false);
        }
    }
    let mut copy = DiskCopy {
        disk,
        top: to,
        linked: HashMap::new(),
        bytes_left: disk.len,
        entries_left: disk.inodes.into(),
    };
    copy.tree(inode)?;
    Ok(true)
}

struct DiskCopy<'a> {
    disk: &'a Disk,
    top: BorrowedFd<'a>,
    /// Files with several names, by their first one.
    linked: HashMap<u32, Vec<u8>>,
    bytes_left: u64,
    /// Counted down by names, of which files may have several: sixteen for each inode.
    entries_left: u64,
}

struct Level {
    inode: Inode,
    to: OwnedFd,
    path: Vec<u8>,
    left: Vec<(Vec<u8>, u32)>,
}

fn too_much(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("the disk holds more {what} than fit on it"))
}

/// Whether an error is the disk's own: then what it concerns is left out by name.
fn is_of_disk(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

impl DiskCopy<'_> {
    fn tree(&mut self, root: Inode) -> io::Result<()> {
        self.entries_left *= 16;
        let left = self.disk.entries(&root, self.disk.inodes as usize)?;
        let mut open =
            vec![Level { inode: root, to: self.top.try_clone_to_owned()?, path: Vec::new(), left }];
        while let Some(level) = open.last_mut() {
            if let Some((name, number)) = level.left.pop() {
                self.entries_left = self.entries_left.checked_sub(1).ok_or_else(|| too_much("files"))?;
                let depth = open.len();
                let Some(level) = open.last_mut() else { break };
                if let Some(below) = self.entry(level, &name, number, depth)? {
                    open.push(below);
                }
            } else if let Some(level) = open.pop() {
                // Last of all, so that filling the directory does not change its time, nor its mode forbid it.
                if self.disk.is_opaque(&level.inode).unwrap_or(true) {
                    rustix::fs::fsetxattr(&level.to, OPAQUE.0, OPAQUE.1, XattrFlags::empty())?;
                }
                own(level.to.as_fd(), OsStr::new(""), &level.inode);
                rustix::fs::fchmod(&level.to, Mode::from_raw_mode(level.inode.mode & 0o7777))?;
                rustix::fs::futimens(&level.to, &times(&level.inode))?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, level: &Level, name: &[u8], number: u32, depth: usize) -> io::Result<Option<Level>> {
        let made = self.disk.inode(number).and_then(|inode| self.make(level, name, number, inode, depth));
        match made {
            Err(error) if is_of_disk(&error) => {
                // Part of it may be there.
                let _ = rustix::fs::unlinkat(&level.to, OsStr::from_bytes(name), AtFlags::empty());
                leave_out(level.to.as_fd(), OsStr::from_bytes(name)).map(|()| None)
            }
            made => made,
        }
    }

    fn make(
        &mut self,
        level: &Level,
        name: &[u8],
        number: u32,
        inode: Inode,
        depth: usize,
    ) -> io::Result<Option<Level>> {
        let (dir, place) = (level.to.as_fd(), OsStr::from_bytes(name));
        let path = || if level.path.is_empty() { name.to_vec() } else { [&level.path, name].join(&b'/') };
        match inode.kind() {
            FileType::Directory if depth >= DEPTH_MAX => leave_out(dir, place)?,
            FileType::Directory => {
                let left = self.disk.entries(&inode, self.disk.inodes as usize)?;
                rustix::fs::mkdirat(dir, place, Mode::RWXU)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let to = rustix::fs::openat(dir, place, flags, Mode::empty())?;
                return Ok(Some(Level { inode, to, path: path(), left }));
            }
            FileType::RegularFile => {
                if inode.links > 1
                    && let Some(first) = self.linked.get(&number)
                    && rustix::fs::linkat(self.top, OsStr::from_bytes(first), dir, place, AtFlags::empty())
                        .is_ok()
                {
                    return Ok(None);
                }
                self.file(dir, place, &inode)?;
                if inode.links > 1 {
                    self.linked.insert(number, path());
                }
            }
            FileType::Symlink => {
                let target = self.disk.link_target(&inode)?;
                rustix::fs::symlinkat(OsStr::from_bytes(&target), dir, place)?;
                own(dir, place, &inode);
                rustix::fs::utimensat(dir, place, &times(&inode), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            FileType::CharacterDevice if inode.is_whiteout() => {
                rustix::fs::mknodat(dir, place, FileType::CharacterDevice, Mode::empty(), 0)?;
            }
            _ => leave_out(dir, place)?,
        }
        Ok(None)
    }

    fn file(&mut self, dir: BorrowedFd<'_>, name: &OsStr, inode: &Inode) -> io::Result<()> {
        let extents = self.disk.extents(inode)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?);
        file.set_len(inode.len)?;
        let block_len = self.disk.block_len as u64;
        for extent in extents.iter() {
            let at = extent.logical * block_len;
            let len = (extent.count * block_len).min(inode.len.saturating_sub(at));
            self.bytes_left = self.bytes_left.checked_sub(len).ok_or_else(|| too_much("bytes"))?;
            self.copy_data(&file, extent.physical * block_len, at, len)?;
        }
        own(dir, name, inode);
        rustix::fs::fchmod(&file, Mode::from_raw_mode(inode.mode & 0o7777))?;
        Ok(rustix::fs::futimens(&file, &times(inode))?)
    }

    /// Contents of files are not in the journal: the kernel writes them to their place before it commits a transaction.
    fn copy_data(&self, file: &File, mut from: u64, mut to: u64, mut left: u64) -> io::Result<()> {
        let mut buffer = vec![0; CHUNK_LEN.min(usize::try_from(left).unwrap_or(CHUNK_LEN))];
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(CHUNK_LEN).min(CHUNK_LEN);
            self.disk.file.read_exact_at(&mut buffer[..piece], from)?;
            file.write_all_at(&buffer[..piece], to)?;
            (from, to, left) = (from + piece as u64, to + piece as u64, left - piece as u64);
        }
        Ok(())
    }
}

fn times(inode: &Inode) -> Timestamps {
    let time = Timespec { tv_sec: inode.mtime.0, tv_nsec: inode.mtime.1.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// Gives a file, or the directory itself where there is no name, its owner. A file of an id outside the Body's id range
/// stays with the Body's root.
fn own(dir: BorrowedFd<'_>, name: &OsStr, inode: &Inode) {
    let (user, group) = inode.owner;
    if user != u32::MAX && group != u32::MAX {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        let _ = rustix::fs::chownat(dir, name, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)), flags);
    }
}

/// Sockets, pipes, devices, and what cannot be read: a pipe says that something was there.
fn leave_out(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    Ok(rustix::fs::mknodat(dir, name, FileType::Fifo, Mode::RUSR, 0)?)
}
