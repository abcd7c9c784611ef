//! The Body's network namespace: the dearest of them, so it is made beside everything else.
//!
//! A helper forked by the launcher enters the Body's user namespace, makes a network namespace there, brings its
//! loopback up, and sends it to the Body's first process, which enters it before it gives up the right to.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType},
    process::{Pid, WaitOptions},
};
use sys::namespace::Side;

use crate::{
    places::Places,
    report::{Step, StepError},
};

/// Polite towards whoever is waited for: the namespace is needed last.
const NICE: i32 = 5;

/// The way of the namespace from the helper to the first process.
pub struct Way {
    /// Where the first process takes it.
    pub take: OwnedFd,
    send: OwnedFd,
}

impl Way {
    /// To be made before the fork.
    pub fn new() -> Result<Self, StepError> {
        let pair =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (take, send) = pair.step("make a pair of sockets")?;
        Ok(Self { take, send })
    }

    /// Waits for the namespace and enters it.
    pub fn enter(take: BorrowedFd<'_>) -> Result<(), StepError> {
        let namespace = sys::fd::receive(take).step("take the Body's network")?;
        sys::namespace::enter_network(namespace.as_fd()).step("enter the Body's network")
    }
}

/// The process that makes the namespace.
pub struct Helper(Pid);

impl Helper {
    /// Forks it, for the Body whose first process is `pid`.
    pub fn fork(pid: Pid, way: &Way, places: Option<Places>) -> Result<Self, StepError> {
        let users = File::open(format!("/proc/{}/ns/user", pid.as_raw_nonzero()))
            .step("open the Body's user namespace")?;
        match sys::namespace::fork_into(sys::namespace::NONE, None).step("fork the network's maker")? {
            Side::Parent(pid) => {
                if let Some(places) = places {
                    places.beside_maker(pid);
                }
                Ok(Self(pid))
            }
            Side::Child => {
                let made = make(users.as_fd(), way.send.as_fd());
                std::process::exit(made.map_or_else(|error| error.raw_os_error().unwrap_or(1), |()| 0))
            }
        }
    }

    /// Waits for its end, which says how it went.
    pub fn wait(self) -> Result<(), StepError> {
        let ended = loop {
            match rustix::process::waitpid(Some(self.0), WaitOptions::empty()) {
                Err(rustix::io::Errno::INTR) => {}
                ended => break ended.step("wait for the network's maker")?,
            }
        };
        let made = match ended.and_then(|(_, status)| status.exit_status()) {
            Some(0) => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Err(io::Error::other("its maker was killed")),
        };
        made.step("make the Body's network")
    }
}

fn make(users: BorrowedFd<'_>, send: BorrowedFd<'_>) -> io::Result<()> {
    let _ = rustix::process::nice(NICE);
    sys::namespace::enter_user(users)?;
    sys::namespace::new_network()?;
    sys::namespace::loopback_up()?;
    sys::fd::send(send, File::open("/proc/self/ns/net")?.as_fd())
}
