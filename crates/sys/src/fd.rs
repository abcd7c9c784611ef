//! Descriptors: paths through `/proc`, bounded reads, and files that are written whole or not at all.

use std::{
    fs::File,
    io::{self, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, SeekFrom},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags,
    },
};

const READ_AHEAD: usize = 8 << 10;
const COPY_LEN: usize = 1 << 20;

/// A path to the file behind a descriptor, valid only in this process.
///
/// It is needed where the kernel takes a path, but our ids may not search the directories on the way to it.
pub fn path_of(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Opens a directory or file with `O_PATH`: it can be named and mounted, but not read.
pub fn open_path(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Reads a small file whole; a longer one is an error.
pub fn read_small(path: &Path, len_max: u64) -> io::Result<String> {
    // Kernel files report no size; with an empty buffer the string would grow by reads of 32 bytes.
    let mut text = String::with_capacity(usize::try_from(len_max).unwrap_or(usize::MAX).min(READ_AHEAD));
    File::open(path)?.take(len_max + 1).read_to_string(&mut text)?;
    if text.len() as u64 > len_max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the file is too long"));
    }
    Ok(text)
}

/// Writes a kernel file, such as a cgroup's, in one call.
pub fn write_kernel(path: &Path, text: &str) -> io::Result<()> {
    let fd = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&fd, text.as_bytes())?;
    Ok(())
}

/// Replaces a file atomically: readers see the old or the new contents, never a part.
pub fn write_whole(path: &Path, contents: &[u8]) -> io::Result<()> {
    // The temporary name contains the pid, so that two writers of one file do not truncate each other's.
    let part = path.with_extension(format!("part{}", std::process::id()));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&part, flags, Mode::RUSR | Mode::WUSR)?;
    let written = File::from(fd).write_all(contents).and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written
}

/// Removes a symbolic link if it still points to `target`. Callers that lock the directory cannot replace it in
/// between.
pub fn remove_link(link: &Path, target: &Path) -> io::Result<()> {
    let dir = rustix::fs::open(
        link.parent().unwrap_or(Path::new("/")),
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::LockExclusive)?;
    if std::fs::read_link(link)? == target { std::fs::remove_file(link) } else { Ok(()) }
}

/// Sends a descriptor through a socket.
pub fn send(socket: BorrowedFd<'_>, fd: BorrowedFd<'_>) -> io::Result<()> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(socket, &[io::IoSlice::new(b".")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for a descriptor from a socket.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(
        socket,
        &mut [io::IoSliceMut::new(&mut [0])],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let sent = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    sent.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "no descriptor was sent"))
}

/// Reads what a socket has now, with the descriptor that came along.
pub fn read_with_descriptor(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let read = rustix::net::recvmsg(socket, &mut [io::IoSliceMut::new(buffer)], &mut ancillary, flags)?;
    let sent = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((read.bytes, sent))
}

/// Moves a descriptor to a fixed number that survives exec.
pub fn place(fd: OwnedFd, number: RawFd) -> io::Result<()> {
    // SAFETY: dup2 takes any two numbers; the source is open because we own it.
    let placed = unsafe { libc::dup2(fd.as_raw_fd(), number) };
    if placed < 0 {
        return Err(io::Error::last_os_error());
    }
    if fd.as_raw_fd() == number {
        // dup2 onto itself keeps CLOEXEC, so it is cleared by hand, and the number must stay open.
        rustix::io::fcntl_setfd(fd.as_fd(), rustix::io::FdFlags::empty())?;
        std::mem::forget(fd);
    }
    Ok(())
}

/// Closes every descriptor from `first` on, whatever owns it: for a process that is about to exec, and whose owners
/// are never used again.
pub fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: close_range takes numbers. Callers promise that no owner of a higher number is used or dropped later.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first as libc::c_uint, libc::c_uint::MAX, 0) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes over a descriptor that the process inherited; fails if it is not open.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD only asks whether the number is open.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, was handed to this process by its parent, and callers take each number once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
/// Copies the data of a file into an empty one and keeps its holes.
pub fn copy_data(source: &File, target: &File) -> io::Result<()> {
    let len = source.metadata()?.len();
    target.set_len(len)?;
    let mut at = 0;
    let mut buffer = vec![0; COPY_LEN];
    while at < len {
        at = match rustix::fs::seek(source, SeekFrom::Data(at)) {
            Ok(at) => at,
            // Only a hole is left.
            Err(Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = rustix::fs::seek(source, SeekFrom::Hole(at))?;
        while at < end {
            let (mut from, mut to) = (at, at);
            let wanted = usize::try_from(end - at).unwrap_or(usize::MAX);
            let copied = match rustix::fs::copy_file_range(
                source.as_fd(),
                Some(&mut from),
                target.as_fd(),
                Some(&mut to),
                wanted,
            ) {
                Ok(copied) if copied > 0 => copied,
                // Some file systems have no `copy_file_range`; then the data is read and written.
                _ => {
                    let piece = wanted.min(COPY_LEN);
                    let read = source.read_at(&mut buffer[..piece], at)?;
                    if read == 0 {
                        return Ok(());
                    }
                    target.write_all_at(&buffer[..read], at)?;
                    read
                }
            };
            at += copied as u64;
        }
    }
    Ok(())
}
