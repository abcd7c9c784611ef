//! Mounts layers of another Body with this Body's ids.
//!
//! A snapshot keeps the host ids of the Body that wrote it. Another Body has other ids, so the snapshot's directory
//! gets an id-mapped mount: nothing is copied, and no file changes its owner.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Command, Stdio},
};

use proto::spec::{IdRange, Ids};
use sys::namespace::{ForkResult, IdMapLine, Pid};

use crate::report::{StepError, StepExt};

/// Id-mapped mounts for one Body.
pub struct IdmappedViews<'a> {
    to: &'a Ids,
    /// User namespaces that exist already: the layers of a template were often all written with equal ids.
    made: Vec<(Ids, OwnedFd)>,
}

impl<'a> IdmappedViews<'a> {
    /// Creates mounts for a Body with these ids.
    pub fn new(to: &'a Ids) -> Self {
        Self { to, made: Vec::new() }
    }

    /// Maps a detached mount, whose files were written with another Body's ids, to this Body's ids.
    pub fn show(&mut self, tree: BorrowedFd<'_>, from: &Ids) -> Result<(), StepError> {
        let at = match self.made.iter().position(|(ids, _)| ids == from) {
            Some(at) => at,
            None => {
                let (users, groups) =
                    (lines(&from.users, &self.to.users), lines(&from.groups, &self.to.groups));
                self.made.push((from.clone(), user_namespace(&users, &groups).step("create an id map")?));
                self.made.len() - 1
            }
        };
        sys::mount::map_ids(tree, self.made[at].1.as_fd()).step("mount a layer with the Body's ids").map_err(|error| {
            error.hint("the file system of the data directory must allow id-mapped mounts: ext4, xfs and btrfs do, and tmpfs since Linux 6.3")
        })
    }
}

/// Maps the ids on disk to the ids shown: both correspond to one id inside.
fn lines(from: &[IdRange], to: &[IdRange]) -> Vec<IdMapLine> {
    let pairs = from.iter().zip(to);
    pairs
        .map(|(from, to)| IdMapLine {
            inside: from.outside,
            outside: to.outside,
            count: from.count.min(to.count),
        })
        .collect()
}

/// A user namespace with these maps; only the returned descriptor keeps it alive.
fn user_namespace(users: &[IdMapLine], groups: &[IdMapLine]) -> io::Result<OwnedFd> {
    let (held, hold) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    match sys::namespace::fork_into(sys::namespace::USER, None)? {
        ForkResult::Child => {
            drop(hold);
            let _ = rustix::io::read(&held, &mut [0u8; 1]);
            std::process::exit(0);
        }
        ForkResult::Parent(pid) => {
            drop(held);
            let opened = sys::namespace::write_maps(pid, users, groups, true)
                .and_then(|()| File::open(format!("/proc/{}/ns/user", pid.as_raw_nonzero())));
            drop(hold);
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())?;
            opened.map(OwnedFd::from)
        }
    }
}

/// Maps ranges that the administrator gave to an ordinary user, with the system's setuid helpers.
pub fn write_with_helpers(pid: Pid, users: &[IdMapLine], groups: &[IdMapLine]) -> Result<(), StepError> {
    for (program, lines) in [("newuidmap", users), ("newgidmap", groups)] {
        let numbers = lines.iter().flat_map(|line| [line.inside, line.outside, line.count]);
        let output = Command::new(program)
            .arg(pid.as_raw_nonzero().to_string())
            .args(numbers.map(|number| number.to_string()))
            .stdin(Stdio::null())
            .output()
            .step(format!("run {program}"))?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(io::Error::other(message)).step(format!("map the Body's ids with {program}"));
        }
    }
    Ok(())
}
