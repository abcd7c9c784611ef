//! Changes one system call of a program: a shared mapping of a file becomes private.
//!
//! A hypervisor leaves memory out of the saved state only if it is a shared mapping of a file. A restored microVM
//! needs that and yet a private mapping: its changes must not reach the file, and the VMM process saves the few
//! changed pages itself. So the one call that maps a memory of that length stops for the parent, which changes a flag
//! of it and detaches.
//!
//! Invariant: the only change makes a mapping private.

use std::io;

use rustix::process::{Pid, WaitId, WaitIdOptions};

use crate::bpf::{self, ANSWER, EQUAL, LOAD, step};

/// The stop status of a traced process at such a call: the event above the signal.
const AT_CALL: i32 = libc::PTRACE_EVENT_SECCOMP << 8 | libc::SIGTRAP;

/// The reason why a traced process is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceStop {
    /// It is at the expected call.
    Call,
    /// Another reason, such as a signal being delivered.
    Other(i32),
}

/// From here on, calls of this process that map exactly `len` bytes as shared stop for its tracer, and fail without
/// one.
pub fn stop_at_mapping(len: u64) -> io::Result<()> {
    let mut program = [
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 7, libc::SYS_mmap as u32),
        // The two halves of the second argument, and the low half of the fourth.
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

/// Makes the caller's parent its tracer. The caller stops at its next exec, and must be continued.
pub fn by_parent() -> io::Result<()> {
    // SAFETY: takes no arguments.
    let done = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes a stopped, traced child stop again at such a call. One thread must make all requests for a child.
pub fn watch_calls(child: Pid) -> io::Result<()> {
    request(libc::PTRACE_SETOPTIONS, child, 0, libc::PTRACE_O_TRACESECCOMP as usize)
}

/// Whether a traced child is stopped, without waiting and without consuming its exit.
pub fn stopped(child: Pid) -> io::Result<Option<TraceStop>> {
    let status = rustix::process::waitid(WaitId::Pid(child), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG)?;
    let status = status.and_then(|status| status.trapping_signal().or(status.stopping_signal()));
    Ok(status.map(|status| if status == AT_CALL { TraceStop::Call } else { TraceStop::Other(status) }))
}

/// Makes the mapping private at which a child is stopped, and detaches from the child.
pub fn make_private(child: Pid) -> io::Result<()> {
    // SAFETY: plain data for which zeroes are valid.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    request(libc::PTRACE_GETREGS, child, 0, &raw mut registers as usize)?;
    if registers.orig_rax != libc::SYS_mmap as u64 {
        return Err(io::Error::other("the process is stopped at another call"));
    }
    registers.r10 = registers.r10 & !(libc::MAP_SHARED_VALIDATE as u64) | libc::MAP_PRIVATE as u64;
    request(libc::PTRACE_SETREGS, child, 0, &raw mut registers as usize)?;
    request(libc::PTRACE_DETACH, child, 0, 0)
}

/// Continues a child that is stopped for another reason.
pub fn go_on(child: Pid, status: i32) -> io::Result<()> {
    // A plain signal is delivered to it; values above the signal's bits concern only the tracer.
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

    /// Maps a file as shared and writes to it; exits with the result.
    fn writes(file: &std::fs::File, len: usize) -> ! {
        // SAFETY: a new mapping, to which no other pointer exists.
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
