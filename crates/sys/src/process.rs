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

/// Opens a pidfd, which never refers to another process.
pub fn open(pid: Pid) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// Sends a signal; no error if the process has ended.
pub fn signal(handle: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    match rustix::process::pidfd_send_signal(handle, signal) {
        Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The exit status of a child that has ended, without waiting; reaps it then.
///
/// For a traced child, `wait` also reports stops, whatever the options, and consumes them. So this peeks first, and
/// consumes nothing but an exit.
pub fn ended(child: Pid) -> Option<WaitStatus> {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let seen = rustix::process::waitid(WaitId::Pid(child), look).ok().flatten()?;
    if !(seen.exited() || seen.killed() || seen.dumped()) {
        return None;
    }
    rustix::process::waitpid(Some(child), WaitOptions::empty()).ok().flatten().map(|(_, status)| status)
}

/// Sets a resource limit of the caller and its children, never above the current one.
pub fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let hard = rustix::process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let value = Some(value.min(hard)).filter(|value| *value != u64::MAX);
    Ok(rustix::process::setrlimit(resource, Rlimit { current: value, maximum: value })?)
}

/// Sets the name that `ps` shows.
pub fn set_name(name: &CStr) -> io::Result<()> {
    Ok(rustix::thread::set_name(name)?)
}

/// The kernel kills the caller when its parent ends, until the caller changes its ids.
pub fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Undoes [`die_with_parent`] for a caller that keeps its ids.
pub fn outlive_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(None)?)
}

/// Starts a program in a process group of its own, and terminates it when the thread that starts it ends.
///
/// Some programs signal their whole group when they fail, which would include the process that started `pal`.
pub fn own_process_group(command: &mut Command) {
    let starter = rustix::process::getpid();
    let ask = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
        // If the parent has ended already, its death signal will not come.
        if rustix::process::getppid() == Some(starter) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    command.process_group(0);
    // SAFETY: it makes two system calls and takes neither memory nor locks.
    unsafe { command.pre_exec(ask) };
}

/// Restricts the caller and its children to the first `count` of its CPUs.
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
