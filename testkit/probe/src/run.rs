//! Runs one probe in a child process, with a deadline.
//!
//! Invariant: a probe that the kernel kills for its attempt (SIGSYS, SIGKILL, SIGXCPU, SIGXFSZ) was denied;
//! one that dies of another cause, prints nothing or exceeds its time is broken.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::catalog::{Probe, ProbeArgs, ProbeCall};
use crate::sys::{self, ChildEnd, ForkSide, call};
use crate::verdict::{DoorState, ProbeOutcome, broken, denied};

/// The state before this program did anything.
pub struct InitialState {
    /// Open descriptors from 3 on, and what they refer to.
    pub descriptors: Vec<(i32, String)>,
}

impl InitialState {
    pub fn look() -> Self {
        let open = |fd: &i32| call!(libc::SYS_fcntl, *fd, libc::F_GETFD, 0).is_ok();
        let named = |fd| {
            let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
            (fd, link.map_or_else(|_| "unnamed".to_owned(), |l| l.display().to_string()))
        };
        Self { descriptors: (3..4096).filter(open).map(named).collect() }
    }
}

/// A probe's line of output.
#[derive(Debug, Serialize)]
pub struct ProbeReport {
    name: &'static str,
    verdict: DoorState,
    detail: String,
}

/// Runs probes with one set of arguments.
pub struct ProbeRunner {
    start: InitialState,
    args: ProbeArgs,
    time_max: Duration,
}

impl ProbeRunner {
    /// `timeout=SECONDS` replaces the ten seconds of a probe.
    pub fn new(start: InitialState, args: ProbeArgs) -> Self {
        let seconds = args.get("timeout").and_then(|t| t.parse().ok()).unwrap_or(10);
        Self { start, args, time_max: Duration::from_secs(seconds) }
    }

    pub fn report(&self, probe: &'static Probe) -> ProbeReport {
        let ProbeOutcome { verdict, detail } = self.outcome(probe);
        ProbeReport { name: probe.name, verdict, detail }
    }

    fn outcome(&self, probe: &'static Probe) -> ProbeOutcome {
        if let Some(key) = probe.missing(&self.args) {
            return broken(format!("needs {key}=…"));
        }
        let scratch = scratch(self.args.get("dir"));
        let call = ProbeCall { args: &self.args, target: probe.target, scratch, start: &self.start };
        let outcome = forked(self.time_max, || (probe.run)(&call));
        if let Some(directory) = &call.scratch {
            // A probe can remove what it could create; a leftover is visible and harmless.
            let _ = std::fs::remove_dir_all(directory);
        }
        outcome
    }
}

/// A private directory, if anything can be written at all.
fn scratch(wanted: Option<&str>) -> Option<PathBuf> {
    let name = format!("probe-{}", std::process::id());
    let bases = wanted.map_or_else(|| vec!["/tmp", "/var/tmp", "/dev/shm", "."], |dir| vec![dir]);
    bases
        .into_iter()
        .map(|base| PathBuf::from(base).join(&name))
        .find(|path| std::fs::create_dir(path).is_ok())
}

/// Runs `work` in a child and waits for its answer, its death or the deadline.
fn forked(time_max: Duration, work: impl FnOnce() -> ProbeOutcome) -> ProbeOutcome {
    let (read, write) = match sys::pipe() {
        Ok(ends) => ends,
        Err(error) => return broken(format!("pipe: {error}")),
    };
    let pid = match sys::fork() {
        Err(error) => return broken(format!("fork: {error}")),
        Ok(ForkSide::Child) => child(write, work),
        Ok(ForkSide::Parent(pid)) => pid,
    };
    drop(write);
    let (heard, overdue) = listen(File::from(read), pid, Instant::now() + time_max);
    // The child leads a process group of its own. It is not reaped yet, so the pid is still its own.
    let _ = call!(libc::SYS_kill, -pid, libc::SIGKILL);
    if overdue {
        let _ = call!(libc::SYS_kill, pid, libc::SIGKILL);
    }
    let end = sys::reap(pid);
    match (serde_json::from_slice(&heard), end) {
        (Ok(outcome), _) => outcome,
        _ if overdue => broken(format!("no answer within {} s", time_max.as_secs())),
        (_, Ok(end)) => silent(end),
        (_, Err(error)) => broken(format!("waitpid: {error}")),
    }
}

fn child(write: OwnedFd, work: impl FnOnce() -> ProbeOutcome) -> ! {
    let _ = call!(libc::SYS_setpgid, 0, 0);
    sys::die_with_parent();
    let word = serde_json::to_vec(&work()).unwrap_or_default();
    let mut pipe = File::from(write);
    // No output is a verdict of its own.
    let _ = pipe.write_all(&word).and_then(|()| pipe.write_all(b"\n"));
    sys::leave(0)
}

/// Reads until the newline, the end, the child's death or the deadline; returns whether it was the deadline.
fn listen(mut pipe: File, pid: i32, deadline: Instant) -> (Vec<u8>, bool) {
    let (mut heard, mut buffer) = (Vec::new(), [0u8; 4096]);
    loop {
        let dead = has_ended(pid);
        if readable(&pipe, Duration::from_millis(if dead { 0 } else { 20 })) {
            match pipe.read(&mut buffer) {
                Ok(count) if count > 0 => heard.extend_from_slice(buffer.get(..count).unwrap_or_default()),
                _ => {
                    // The pipe closed without an answer: wait for the death that explains it.
                    while !has_ended(pid) && Instant::now() < deadline {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    return (heard, !has_ended(pid));
                }
            }
            if heard.last() == Some(&b'\n') {
                return (heard, false);
            }
        } else if dead {
            return (heard, false);
        }
        if Instant::now() >= deadline {
            return (heard, true);
        }
    }
}

fn readable(pipe: &File, wait: Duration) -> bool {
    let mut poll = libc::pollfd { fd: pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, and it outlives the call.
    let ready = unsafe { libc::poll(&raw mut poll, 1, i32::try_from(wait.as_millis()).unwrap_or(0)) };
    ready > 0
}

/// Whether the child is dead, without reaping it.
fn has_ended(pid: i32) -> bool {
    let mut info = [0u8; 128];
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    let asked = call!(libc::SYS_waitid, libc::P_PID, pid, info.as_mut_ptr(), flags, 0);
    // si_signo, the first word, stays zero while no child has ended.
    asked.is_err() || info.iter().take(4).any(|byte| *byte != 0)
}

fn silent(end: ChildEnd) -> ProbeOutcome {
    match end {
        ChildEnd::Signal(n @ (libc::SIGSYS | libc::SIGKILL | libc::SIGXCPU | libc::SIGXFSZ)) => {
            denied(format!("killed by signal {n}"))
        }
        ChildEnd::Signal(n) => broken(format!("the probe crashed with signal {n}")),
        ChildEnd::Exit(n) => broken(format!("the probe ended with status {n} and said nothing")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::reached;

    const SOON: Duration = Duration::from_secs(5);

    fn dies_of(signal: i32) -> ProbeOutcome {
        forked(SOON, || {
            let _ = call!(libc::SYS_kill, std::process::id(), signal);
            reached("lived")
        })
    }

    #[test]
    fn a_word_is_heard() {
        assert_eq!(forked(SOON, || reached("open")), reached("open"));
    }

    #[test]
    fn death_by_the_filter_is_a_denial_and_a_crash_is_not() {
        assert_eq!(dies_of(libc::SIGSYS), denied("killed by signal 31"));
        assert_eq!(dies_of(libc::SIGKILL), denied("killed by signal 9"));
        assert_eq!(dies_of(libc::SIGABRT), broken("the probe crashed with signal 6"));
    }

    #[test]
    fn silence_and_delay_are_broken() {
        assert_eq!(forked(SOON, || sys::leave(3)), broken("the probe ended with status 3 and said nothing"));
        let slow = forked(Duration::from_secs(1), || {
            std::thread::sleep(Duration::from_secs(60));
            reached("late")
        });
        assert_eq!(slow, broken("no answer within 1 s"));
    }
}
