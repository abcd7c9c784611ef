//! Unpacks a layer to disk, entry by entry, as root of the layer's ids and with no other rights.
//!
//! Trust: names, links and sizes come from an archive of unknown origin. Each path is resolved as if the layer were
//! the whole file system, so a link in it cannot lead outside.

use std::{
    ffi::{CString, OsStr},
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
};

use proto::pack::{HEADER_LEN_MAX, LayerEntry, LayerEntryKind};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid},
    io::Errno,
};

use crate::report::{StepError, StepExt};

/// The attribute of an opaque directory, which hides the contents that lower layers have in it.
const OPAQUE: (&str, &[u8]) = ("user.overlay.opaque", b"y");
const CHUNK: usize = 256 << 10;

/// Reads entries until the last one and creates them below `root`.
pub fn receive(root: BorrowedFd<'_>, from: &mut impl Read) -> Result<(), StepError> {
    rustix::process::umask(Mode::empty());
    let mut layer = LayerUnpacker { root, last: None, buffer: vec![0; CHUNK] };
    loop {
        let entry = read_entry(from).step("read the layer")?;
        if entry.what == LayerEntryKind::End {
            return Ok(());
        }
        layer.put(&entry, from).step(format!("unpack {:?}", proto::text::visible_bytes(&entry.path)))?;
    }
}

fn read_entry(from: &mut impl Read) -> io::Result<LayerEntry> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > HEADER_LEN_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut header = vec![0; len];
    from.read_exact(&mut header)?;
    let entry: LayerEntry = serde_json::from_slice(&header)?;
    proto::tree::check_path(&entry.path).map_err(io::Error::other)?;
    if let LayerEntryKind::Same(other) = &entry.what {
        proto::tree::check_path(other).map_err(io::Error::other)?;
    }
    Ok(entry)
}

struct LayerUnpacker<'a> {
    root: BorrowedFd<'a>,
    /// The directory of the previous entry, because the next one is often in it, too.
    last: Option<(Vec<u8>, OwnedFd)>,
    buffer: Vec<u8>,
}

impl LayerUnpacker<'_> {
    fn put(&mut self, entry: &LayerEntry, from: &mut impl Read) -> io::Result<()> {
        if entry.path.is_empty() {
            return self.root_itself(entry);
        }
        let (above, name) = split(&entry.path);
        let dir = self.dir(above)?;
        let dir = dir.as_fd();
        match &entry.what {
            LayerEntryKind::Dir => {
                make_dir(dir, name)?;
                apply_metadata(dir, name, entry, UnpackedKind::Other)
            }
            LayerEntryKind::File(size) => {
                clear(dir, name)?;
                self.file(dir, name, *size, from)?;
                apply_metadata(dir, name, entry, UnpackedKind::Other)
            }
            LayerEntryKind::Link(target) => {
                clear(dir, name)?;
                rustix::fs::symlinkat(OsStr::from_bytes(target), dir, name)?;
                apply_metadata(dir, name, entry, UnpackedKind::Link)
            }
            LayerEntryKind::Same(other) => {
                let (above, target) = split(other);
                let from = self.dir(above)?;
                clear(dir, name)?;
                Ok(rustix::fs::linkat(&from, target, dir, name, AtFlags::empty())?)
            }
            LayerEntryKind::Gone => {
                clear(dir, name)?;
                Ok(rustix::fs::mknodat(dir, name, FileType::CharacterDevice, Mode::empty(), 0)?)
            }
            LayerEntryKind::Opaque => {
                make_dir(dir, name)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let place = rustix::fs::openat(dir, name, flags, Mode::empty())?;
                Ok(rustix::fs::fsetxattr(&place, OPAQUE.0, OPAQUE.1, rustix::fs::XattrFlags::empty())?)
            }
            LayerEntryKind::End => Ok(()),
        }
    }

    fn root_itself(&self, entry: &LayerEntry) -> io::Result<()> {
        if entry.what != LayerEntryKind::Dir {
            return Err(io::Error::other("the root of a layer is a directory"));
        }
        rustix::fs::fchown(
            self.root,
            Some(Uid::from_raw(entry.owner.0)),
            Some(Gid::from_raw(entry.owner.1)),
        )?;
        Ok(rustix::fs::fchmod(self.root, Mode::from_raw_mode(entry.mode & 0o7777))?)
    }

    fn file(&mut self, dir: BorrowedFd<'_>, name: &OsStr, size: u64, from: &mut impl Read) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?);
        let mut left = size;
        while left > 0 {
            let room = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            from.read_exact(&mut self.buffer[..room])?;
            io::Write::write_all(&mut file, &self.buffer[..room])?;
            left -= room as u64;
        }
        Ok(())
    }

    /// Opens the directory at a path, and creates missing parts.
    fn dir(&mut self, path: &[u8]) -> io::Result<OwnedFd> {
        if let Some((last, dir)) = &self.last
            && last == path
        {
            return dir.try_clone();
        }
        let dir = self.find(path)?;
        self.last = Some((path.to_vec(), dir.try_clone()?));
        Ok(dir)
    }

    fn find(&self, path: &[u8]) -> io::Result<OwnedFd> {
        let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        // Starts at the deepest part that exists, and creates the rest.
        let mut there = parts.len();
        let mut at = loop {
            match self.open(&parts[..there].join(&b'/')) {
                Err(Errno::NOENT) if there > 0 => there -= 1,
                opened => break opened?,
            }
        };
        for part in &parts[there..] {
            let name = OsStr::from_bytes(part);
            make_dir(at.as_fd(), name)?;
            at = rustix::fs::openat(
                &at,
                name,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
        }
        Ok(at)
    }

    fn open(&self, path: &[u8]) -> rustix::io::Result<OwnedFd> {
        let path: &[u8] = if path.is_empty() { b"." } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat2(
            self.root,
            OsStr::from_bytes(path),
            flags,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        )
    }
}

fn split(path: &[u8]) -> (&[u8], &OsStr) {
    let cut = path.iter().rposition(|byte| *byte == b'/');
    let (above, name) = cut.map_or((&b""[..], path), |at| (&path[..at], &path[at + 1..]));
    (above, OsStr::from_bytes(name))
}

/// Creates a directory. An existing directory stays; any other file is removed first.
fn make_dir(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => {}
        made => return Ok(made?),
    }
    let found = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
        return Ok(());
    }
    clear(dir, name)?;
    Ok(rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755))?)
}

fn clear(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Err(Errno::NOENT) | Ok(()) => Ok(()),
        Err(Errno::ISDIR) => {
            let name = CString::new(name.as_bytes()).map_err(io::Error::from)?;
            sys::tree::remove(dir, &name)
        }
        Err(errno) => Err(errno.into()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum UnpackedKind {
    Link,
    Other,
}

/// Sets owner, mode and time. The owner comes first, because changing it clears setuid.
fn apply_metadata(
    dir: BorrowedFd<'_>,
    name: &OsStr,
    entry: &LayerEntry,
    kind: UnpackedKind,
) -> io::Result<()> {
    let (user, group) = entry.owner;
    rustix::fs::chownat(
        dir,
        name,
        Some(Uid::from_raw(user)),
        Some(Gid::from_raw(group)),
        AtFlags::SYMLINK_NOFOLLOW,
    )?;
    if kind == UnpackedKind::Other {
        // Only the entry that was just created has this name.
        rustix::fs::chmodat(dir, name, Mode::from_raw_mode(entry.mode & 0o7777), AtFlags::empty())?;
    }
    let time = Timespec { tv_sec: entry.mtime, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(dir, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
