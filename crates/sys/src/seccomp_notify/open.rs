//! Gives a program a read-only descriptor of a file that it insists on opening for writing.
//!
//! A hypervisor maps the memory of a saved microVM privately and never writes to the file, yet opens it for both. A
//! hypervisor that its guest has taken over could then change the memory of every microVM that is restored later. So
//! its calls that open for reading and writing stop, and the process that answers them returns a descriptor of its
//! choice.
//! When its guest frees a page, the hypervisor wants to punch a hole into the file before it drops its own copy: that
//! call reports success and does nothing.
//!
//! Invariant: an answer replaces a call by a descriptor or by nothing, or lets the kernel run it unchanged.

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
};

use crate::bpf::{self, ANSWER, EQUAL, LOAD, step};

/// Longest path that is compared.
const PATH_LEN_MAX: usize = 256;
const IOC_RECV: libc::c_ulong = 0xc050_2100;
const IOC_SEND: libc::c_ulong = 0xc018_2101;
const IOC_ADDFD: libc::c_ulong = 0x4018_2103;

#[repr(C)]
#[derive(Default)]
struct SeccompNotice {
    id: u64,
    pid: u32,
    flags: u32,
    nr: i32,
    arch: u32,
    instruction_pointer: u64,
    args: [u64; 6],
}

#[repr(C)]
struct SeccompReply {
    id: u64,
    val: i64,
    error: i32,
    flags: u32,
}

#[repr(C)]
struct AddFd {
    id: u64,
    flags: u32,
    srcfd: u32,
    newfd: u32,
    newfd_flags: u32,
}

/// `fallocate` mode that punches a hole and keeps the length.
const CUT: libc::c_int = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// From here on, calls of this process and everything that it executes that open for reading and writing or punch
/// holes wait for an answer. The process that holds the returned descriptor answers, and must be another one.
pub fn notify_opens() -> io::Result<OwnedFd> {
    let mut program = [
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 3, libc::SYS_openat as u32),
        // The low half of the third argument.
        step(LOAD, 0, 0, 32),
        step(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, libc::O_ACCMODE as u32),
        step(EQUAL, 3, 4, libc::O_RDWR as u32),
        step(EQUAL, 0, 3, libc::SYS_fallocate as u32),
        // The low half of the second argument.
        step(LOAD, 0, 0, 24),
        step(EQUAL, 0, 1, CUT as u32),
        step(ANSWER, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
        step(ANSWER, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let fd = bpf::install(&mut program, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Answers one call: an open of `path` returns `file`, a hole in that file is not punched, and every other call
/// continues unchanged.
pub fn answer(listener: BorrowedFd<'_>, path: &CStr, file: BorrowedFd<'_>) -> io::Result<()> {
    let mut notice = SeccompNotice::default();
    // SAFETY: the structure has the kernel's layout and outlives the call; it must be all zeros, and is.
    if unsafe { libc::ioctl(listener.as_raw_fd(), IOC_RECV as _, &mut notice) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let given = if i64::from(notice.nr) == libc::SYS_fallocate {
        is_same(notice.pid, notice.args[0], file).then_some(0)
    } else {
        let asked = asked_path(notice.pid, notice.args[1]);
        asked
            .filter(|asked| asked == path.to_bytes())
            .map(|_| install_fd(listener, notice.id, file))
            .transpose()?
    };
    // SECCOMP_USER_NOTIF_FLAG_CONTINUE is 1: the kernel runs the call unchanged.
    let reply = SeccompReply {
        id: notice.id,
        val: given.unwrap_or(0).into(),
        error: 0,
        flags: u32::from(given.is_none()),
    };
    // SAFETY: the structure has the kernel's layout and outlives the call.
    if unsafe { libc::ioctl(listener.as_raw_fd(), IOC_SEND as _, &reply) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Installs the file in the caller's descriptor table; returns its number there.
fn install_fd(listener: BorrowedFd<'_>, id: u64, file: BorrowedFd<'_>) -> io::Result<i32> {
    let add =
        AddFd { id, flags: 0, srcfd: file.as_raw_fd() as u32, newfd: 0, newfd_flags: libc::O_CLOEXEC as u32 };
    // SAFETY: the structure has the kernel's layout and outlives the call; the file is open.
    let number = unsafe { libc::ioctl(listener.as_raw_fd(), IOC_ADDFD as _, &add) };
    if number < 0 { Err(io::Error::last_os_error()) } else { Ok(number) }
}

/// Whether a descriptor of a process refers to this file.
fn is_same(pid: u32, number: u64, file: BorrowedFd<'_>) -> bool {
    let theirs = std::fs::metadata(format!("/proc/{pid}/fd/{}", number as i32));
    let ours = rustix::fs::fstat(file);
    theirs
        .is_ok_and(|theirs| ours.is_ok_and(|ours| (theirs.dev(), theirs.ino()) == (ours.st_dev, ours.st_ino)))
}

/// Reads the path from the memory of the process, which waits in its call. The process could change it, but no
/// boundary depends on this path.
fn asked_path(pid: u32, at: u64) -> Option<Vec<u8>> {
    let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut path = Vec::new();
    // A read never crosses the end of a page, because the next page may not be mapped.
    while path.len() < PATH_LEN_MAX {
        let from = at + path.len() as u64;
        let mut piece = [0; 64];
        let len = piece.len().min(4096 - (from % 4096) as usize);
        let read = memory.read_at(&mut piece[..len], from).ok().filter(|read| *read > 0)?;
        match piece[..read].iter().position(|byte| *byte == 0) {
            Some(end) => {
                path.extend_from_slice(&piece[..end]);
                return Some(path);
            }
            None => path.extend_from_slice(&piece[..read]),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::{ffi::CString, io::Write, os::fd::AsFd};

    use super::*;

    /// Needs a process of its own; nextest runs each test in one.
    #[test]
    fn a_file_is_opened_for_reading_whatever_was_asked() {
        let path = std::env::temp_dir().join(format!("pal-intercept-{}", std::process::id()));
        std::fs::write(&path, "as it was").unwrap();
        let other = path.with_extension("other");
        std::fs::write(&other, "").unwrap();
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        // Forking needs a single thread, and a test has more, so a thread with its own filter makes the calls.
        let asker = std::thread::spawn({
            let (path, other) = (path.clone(), other.clone());
            move || {
                crate::caps::no_new_privileges().unwrap();
                let listener = notify_opens().unwrap();
                crate::fd::send(theirs.as_fd(), listener.as_fd()).unwrap();
                drop(listener);
                let mut mapped = File::options().read(true).write(true).open(&path).unwrap();
                let refused = mapped.write_all(b"changed").is_err();
                let mut plain = File::options().read(true).write(true).open(&other).unwrap();
                let written = plain.write_all(b"written").is_ok();
                let cut = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                let results = [&mapped, &plain].map(|file| rustix::fs::fallocate(file, cut, 0, 7).is_ok());
                (refused, written, results)
            }
        });
        let listener = crate::fd::receive(ours.as_fd()).unwrap();
        let file = File::open(&path).unwrap();
        let name = CString::new(path.to_str().unwrap()).unwrap();
        for _question in ["open", "open the other", "cut", "cut the other"] {
            answer(listener.as_fd(), &name, file.as_fd()).unwrap();
        }
        let results = asker.join().unwrap();
        assert_eq!(
            results,
            (true, true, [true, true]),
            "the one is for reading, the other as it was asked for"
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "as it was", "nothing was cut out of it");
        assert_eq!(std::fs::read(&other).unwrap(), [0; 7], "the other one is as it was cut");
        for path in [path, other] {
            std::fs::remove_file(path).unwrap();
        }
    }
}
