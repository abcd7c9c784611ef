//! One process: its limits, its name, its end.

use std::{
    ffi::CStr,
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
};

use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus,
};

/// A handle on a process that never names another one.
pub fn open(pid: Pid) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// Sends a signal; a process that is gone already is no error.
pub fn signal(handle: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    match rustix::process::pidfd_send_signal(handle, signal) {
        Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// How a child ended, if it has, without waiting; whoever is told so has buried it.
///
/// Whoever traces a child is told where it stands, too, whatever is asked for, and the next who asks is not told again. So
/// this looks first, and takes away nothing but an end.
pub fn ended(child: Pid) -> Option<WaitStatus> {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let seen = rustix::process::waitid(WaitId::Pid(child), look).ok().flatten()?;
    if !(seen.exited() || seen.killed() || seen.dumped()) {
        return None;
    }
    rustix::process::waitpid(Some(child), WaitOptions::empty()).ok().flatten().map(|(_, status)| status)
}

/// A limit of the caller and its children, never above what it has now.
pub fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let hard = rustix::process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let value = Some(value.min(hard)).filter(|value| *value != u64::MAX);
    Ok(rustix::process::setrlimit(resource, Rlimit { current: value, maximum: value })?)
}

/// What `ps` shows.
pub fn set_name(name: &CStr) -> io::Result<()> {
    Ok(rustix::thread::set_name(name)?)
}

/// The caller dies with its parent, until it takes other ids.
pub fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Undoes [`die_with_parent`] for a caller that keeps its ids.
pub fn outlive_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(None)?)
}

/// Has a program lead a process group of its own, and asks it to end when the thread that starts it ends.
///
/// Programs that fail are known to signal their whole group, which would be whoever started `pal`.
pub fn own_process_group(command: &mut Command) {
    let starter = rustix::process::getpid();
    let ask = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
        // Whoever is gone by now sends no signal any more.
        if rustix::process::getppid() == Some(starter) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    command.process_group(0);
    // SAFETY: it makes two system calls and takes neither memory nor locks.
    unsafe { command.pre_exec(ask) };
}

/// Keeps the caller and its children on the first `count` of its processors.
pub fn pin_to_first(count: u32) -> io::Result<()> {
    let all = rustix::thread::sched_getaffinity(None)?;
    let mut few = rustix::thread::CpuSet::new();
    let chosen = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).take(count as usize);
    chosen.for_each(|cpu| few.set(cpu));
    Ok(rustix::thread::sched_setaffinity(None, &few)?)
}

/// Whether the caller ignores a signal.
pub fn ignores(signal: i32) -> bool {
    // SAFETY: sigaction is plain data for which zeroes are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action this only writes the present one to memory that outlives the call.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_known() {
        assert!(ignores(libc::SIGPIPE), "Rust ignores it");
        assert!(!ignores(libc::SIGTERM));
    }
}
