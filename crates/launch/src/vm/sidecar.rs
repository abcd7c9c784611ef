//! Programs beside who minds a machine, behind walls of their own: started by the Body's first process while that may
//! still make namespaces, each in a user namespace below the Body's.
//!
//! Invariant: such a program has the Body's ids and none besides; it ends with the Body.

use std::{
    fs::File,
    io,
    os::fd::{OwnedFd, RawFd},
};

use proto::{launch::LaunchPlan, spec::IdRange};
use rustix::{
    pipe::PipeFlags,
    process::{DumpableBehavior, Pid, set_dumpable_behavior},
};
use sys::namespace::{ForkResult, IdMapLine};

/// The first descriptor behind the standard streams.
const FIRST_FD: RawFd = 3;

/// One of them.
pub struct Sidecar {
    /// Its process, a child of this one.
    pub pid: Pid,
    /// What it says.
    pub said: OwnedFd,
}

/// Forks into namespaces, a user namespace among them. `become_it` is given where to speak, and returns only when it fails.
pub fn start(
    plan: &LaunchPlan,
    namespaces: i32,
    become_it: impl FnOnce(OwnedFd) -> io::Error,
) -> io::Result<Sidecar> {
    let (said, say) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (wait, go) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // A process that nobody may look into has no map that its parent could write. Nobody else is here yet to look.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    match sys::namespace::fork_into(namespaces, None)? {
        ForkResult::Child => {
            drop((go, said));
            let error = match rustix::io::read(&wait, &mut [0u8; 1]) {
                Ok(1) => become_it(say),
                _ => io::ErrorKind::UnexpectedEof.into(),
            };
            let _ = io::Write::write_all(&mut io::stderr(), format!("{error}\n").as_bytes());
            std::process::exit(1)
        }
        ForkResult::Parent(pid) => {
            let mapped =
                sys::namespace::write_maps(pid, &same(&plan.ids.users), &same(&plan.ids.groups), true);
            set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
            mapped?;
            rustix::io::write(&go, b".")?;
            Ok(Sidecar { pid, said })
        }
    }
}

/// Every id of the Body, as it is there.
fn same(ranges: &[IdRange]) -> Vec<IdMapLine> {
    let line =
        |range: &IdRange| IdMapLine { inside: range.inside, outside: range.inside, count: range.count };
    ranges.iter().map(line).collect()
}

/// Keeps nothing to read, where to speak and, behind them, one more descriptor where there is one.
pub fn close_other_fds(say: OwnedFd, more: Option<OwnedFd>) -> io::Result<()> {
    let nothing = OwnedFd::from(File::open("/dev/null")?);
    let high = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, FIRST_FD + 1);
    let mut placed = vec![(high(&nothing)?, 0), (high(&say)?, 1), (high(&say)?, 2)];
    if let Some(more) = &more {
        placed.push((high(more)?, FIRST_FD));
    }
    let kept = FIRST_FD + more.is_some() as RawFd;
    for (fd, number) in placed {
        sys::fd::place(fd, number)?;
    }
    // What is closed by number here is never closed again: all that follows ends in an exec.
    std::mem::forget((nothing, say, more));
    sys::fd::close_from(kept)
}
