//! The Body's network namespace: the dearest of them, so it is made beside everything else.
//!
//! A helper of the launcher enters the Body's user namespace, makes a network namespace there, brings its loopback up,
//! and sends it to the Body's first process, which enters it before it gives up the right to.

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType},
    process::Pid,
};
use sys::beside::Beside;

use crate::{
    places::Places,
    report::{Step, StepError},
};

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
pub struct Helper(Beside);

impl Helper {
    /// Starts it, for the Body whose first process is `pid`.
    pub fn start(pid: Pid, way: &Way, places: Option<Places>) -> Result<Self, StepError> {
        let users = File::open(format!("/proc/{}/ns/user", pid.as_raw_nonzero()))
            .step("open the Body's user namespace")?;
        // A maker that works on the same processor waits for it; a blank before a report changes nothing.
        let stdout = std::io::stdout();
        let word = places.map(|_| (stdout.as_fd(), b' '));
        let place = places.map(|places| places.makers());
        let helper = sys::beside::make_network(users.as_fd(), way.send.as_fd(), word, place)
            .step("start the network's maker")?;
        if let Some(places) = places {
            places.beside_maker(helper.pid());
        }
        Ok(Self(helper))
    }

    /// Waits for its end, which says how it went.
    pub fn wait(self) -> Result<(), StepError> {
        self.0.wait().step("make the Body's network")
    }
}
