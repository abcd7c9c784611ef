//! Programs next to the VMM process, each in a sandbox of its own: the Body's first process starts them while it may
//! still create namespaces, each in a user namespace below the Body's.
//!
//! Invariant: such a program has the Body's ids and no others; it ends with the Body.

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

/// The first descriptor after the standard streams.
const FIRST_FD: RawFd = 3;

/// One such program.
pub struct Sidecar {
    /// Its process, a child of this one.
    pub pid: Pid,
    /// The read end of its output.
    pub said: OwnedFd,
}

/// Forks into namespaces, including a user namespace. `become_it` gets the write end of the output, and returns only
/// on failure.
pub fn start(
    plan: &LaunchPlan,
    namespaces: i32,
    become_it: impl FnOnce(OwnedFd) -> io::Error,
) -> io::Result<Sidecar> {
    let (said, say) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (wait, go) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // A parent cannot write the id maps of a process that is not dumpable. No other process exists yet that could
    // attach to it.
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
            let mapped = sys::namespace::write_maps(
                pid,
                &identity_map(&plan.ids.users),
                &identity_map(&plan.ids.groups),
                true,
            );
            set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
            mapped?;
            rustix::io::write(&go, b".")?;
            Ok(Sidecar { pid, said })
        }
    }
}

/// Maps every id of the Body to itself.
fn identity_map(ranges: &[IdRange]) -> Vec<IdMapLine> {
    let line =
        |range: &IdRange| IdMapLine { inside: range.inside, outside: range.inside, count: range.count };
    ranges.iter().map(line).collect()
}

/// Keeps `/dev/null` as standard input, the output and, after them, one more descriptor if there is one.
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
    // These descriptors are closed by number below; forgetting them is safe, because the process execs next.
    std::mem::forget((nothing, say, more));
    sys::fd::close_from(kept)
}
