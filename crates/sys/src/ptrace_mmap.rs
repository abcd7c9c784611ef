//! One call of a program, changed on its way: a mapping of a file that it wants to share becomes private.
//!
//! A hypervisor leaves the memory out of what it writes of a machine only where that memory is shared with a file, and
//! maps it privately only where it is not. A machine that was thawed needs both: its pages are its own, and whoever
//! freezes it reads those few itself. So the one call that maps a memory of that length stops for its parent, which
//! changes a bit of it, and lets go for good.
//!
//! Invariant: what is changed makes a mapping private; nothing else is.

use std::io;

use rustix::process::{Pid, WaitId, WaitIdOptions};

use crate::bpf::{self, ANSWER, EQUAL, LOAD, step};

/// What a traced process stops with at such a call: the event above the signal.
const AT_CALL: i32 = libc::PTRACE_EVENT_SECCOMP << 8 | libc::SIGTRAP;

/// Why a traced process stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceStop {
    /// At the call that was waited for.
    Call,
    /// Something else, such as a signal on its way to it.
    Other(i32),
}

/// From here on the caller's calls that map exactly `len` bytes to be shared stop for whoever traces it, and fail where
/// nobody does.
pub fn stop_at_mapping(len: u64) -> io::Result<()> {
    let mut program = [
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 7, libc::SYS_mmap as u32),
        // The two halves of the second argument, and the low one of the fourth.
        step(LOAD, 0, 0, 24),
        step(EQUAL, 0, 5, len as u32),
        step(LOAD, 0, 0, 28),
        step(EQUAL, 0, 3, (len >> 32) as u32),
        step(LOAD, 0, 0, 40),
        step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 0, 1, libc::MAP_SHARED as u32),
        step(ANSWER, 0, 0, libc::SECCOMP_RET_TRACE),
        step(ANSWER, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    if bpf::install(&mut program, 0) < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has the caller's parent trace it. It stops when it becomes another program, and must be let go on.
pub fn by_parent() -> io::Result<()> {
    // SAFETY: takes no arguments.
    let done = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has a traced child that stands still stop again at such a call. Whatever is asked of it must be asked by one thread.
pub fn watch_calls(child: Pid) -> io::Result<()> {
    request(libc::PTRACE_SETOPTIONS, child, 0, libc::PTRACE_O_TRACESECCOMP as usize)
}

/// Whether a traced child stands still, without waiting, and without taking notice of its end.
pub fn stopped(child: Pid) -> io::Result<Option<TraceStop>> {
    let status = rustix::process::waitid(WaitId::Pid(child), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG)?;
    let status = status.and_then(|status| status.trapping_signal().or(status.stopping_signal()));
    Ok(status.map(|status| if status == AT_CALL { TraceStop::Call } else { TraceStop::Other(status) }))
}

/// Makes the mapping private that a child stands at, and lets the child go.
pub fn make_private(child: Pid) -> io::Result<()> {
    // SAFETY: plain data for which zeroes are valid.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    request(libc::PTRACE_GETREGS, child, 0, &raw mut registers as usize)?;
    if registers.orig_rax != libc::SYS_mmap as u64 {
        return Err(io::Error::other("it stands at another call"));
    }
    registers.r10 = registers.r10 & !(libc::MAP_SHARED_VALIDATE as u64) | libc::MAP_PRIVATE as u64;
    request(libc::PTRACE_SETREGS, child, 0, &raw mut registers as usize)?;
    request(libc::PTRACE_DETACH, child, 0, 0)
}

/// Lets a child go on that stands still for another reason.
pub fn go_on(child: Pid, status: i32) -> io::Result<()> {
    // A bare signal is passed on to it; what is above the signal's bits is the tracer's affair only.
    let signal = if status >> 8 == 0 && status != libc::SIGTRAP { status } else { 0 };
    request(libc::PTRACE_CONT, child, 0, signal as usize)
}

fn request(what: libc::c_uint, child: Pid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests made here take no address, or write to and read from registers that outlive the call.
    let done = unsafe { libc::ptrace(what, child.as_raw_nonzero().get(), address, data) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::{fd::AsRawFd, unix::fs::FileExt};

    use super::*;

    const LEN: usize = 3 << 20;

    /// Maps a file to be shared and writes to it; whether that went well is its end.
    fn writes(file: &std::fs::File, len: usize) -> ! {
        // SAFETY: a fresh mapping that nobody else knows of.
        let place = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if place == libc::MAP_FAILED {
            end(3);
        }
        // SAFETY: the mapping is writable and at least a byte long.
        unsafe { place.cast::<u8>().write_volatile(7) };
        end(0)
    }

    fn end(code: i32) -> ! {
        // SAFETY: ends the caller, and nothing of it is run any more.
        unsafe { libc::_exit(code) }
    }

    #[test]
    fn a_shared_mapping_of_that_length_is_private_and_no_other() {
        let path = std::env::temp_dir().join(format!("pal-trace-{}", std::process::id()));
        let file =
            std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(2 * LEN as u64).unwrap();
        std::fs::remove_file(path).unwrap();
        for (len, becomes) in [(LEN, 0), (2 * LEN, 7)] {
            file.write_all_at(&[0], 0).unwrap();
            // SAFETY: the child makes system calls and nothing else, and ends without coming back.
            let child = match unsafe { libc::fork() } {
                0 => {
                    by_parent().unwrap_or_else(|_| end(2));
                    // SAFETY: sends the caller a signal, at which it stops.
                    unsafe { libc::raise(libc::SIGTRAP) };
                    rustix::thread::set_no_new_privs(true).unwrap_or_else(|_| end(2));
                    stop_at_mapping(LEN as u64).unwrap_or_else(|_| end(2));
                    writes(&file, len)
                }
                child => Pid::from_raw(child).unwrap(),
            };
            let mut changed = false;
            let end = loop {
                match stopped(child) {
                    Ok(Some(TraceStop::Call)) => {
                        make_private(child).unwrap();
                        changed = true;
                    }
                    Ok(Some(TraceStop::Other(status))) => {
                        watch_calls(child).and_then(|()| go_on(child, status)).unwrap()
                    }
                    _ => {}
                }
                if let Some(status) = crate::process::ended(child) {
                    break status;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            };
            assert_eq!((end.exit_status(), changed), (Some(0), len == LEN));
            let mut first = [0];
            file.read_exact_at(&mut first, 0).unwrap();
            assert_eq!(first[0], becomes, "a private write stays out of the file, a shared one is in it");
        }
    }
}
