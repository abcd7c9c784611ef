//! The Body's network namespace. It takes longest to create, so a helper process creates it in parallel.
//!
//! The helper is a fork of the launcher. It enters the Body's user namespace, creates a network namespace there,
//! brings its loopback up, and sends it to the Body's first process, which enters it before it drops the capability
//! to do so.
//!
//! Trust: the helper stays in the launcher's pid namespace, so no process of the Body can name it.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType},
    process::{Pid, WaitOptions},
};
use sys::namespace::ForkResult;

use crate::report::{StepError, StepExt};

/// The socket pair through which the helper sends the namespace to the first process, and the first process sends its
/// redirected sockets to the supervisor.
pub struct NetnsPassage {
    /// The end of the first process.
    pub take: OwnedFd,
    /// The end of the helper and the supervisor.
    pub send: OwnedFd,
}

impl NetnsPassage {
    /// Creates the pair; must be called before the fork.
    pub fn new() -> Result<Self, StepError> {
        let pair =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (take, send) = pair.step("make a pair of sockets")?;
        Ok(Self { take, send })
    }

    /// Waits for the namespace and enters it.
    pub fn enter(take: BorrowedFd<'_>) -> Result<(), StepError> {
        let namespace = sys::fd::receive(take).step("receive the Body's network")?;
        sys::namespace::enter_network(namespace.as_fd()).step("enter the Body's network")
    }
}

/// The process that creates the namespace.
pub struct NetnsHelper(Pid);

impl NetnsHelper {
    /// Starts the helper for the Body whose first process is `pid`.
    pub fn start(pid: Pid, way: &NetnsPassage) -> Result<Self, StepError> {
        let users = File::open(format!("/proc/{}/ns/user", pid.as_raw_nonzero()))
            .step("open the Body's user namespace")?;
        match sys::namespace::fork().step("start the network helper")? {
            ForkResult::Parent(helper) => Ok(Self(helper)),
            ForkResult::Child => {
                let made = make_network(users.as_fd(), way.send.as_fd());
                let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
                std::process::exit(made.map_or_else(|error| errno(error).raw_os_error(), |()| 0))
            }
        }
    }

    /// Waits for the end of the helper, which exits with the kernel's error number.
    pub fn wait(self) -> Result<(), StepError> {
        let ended = loop {
            match rustix::process::waitpid(Some(self.0), WaitOptions::empty()) {
                Err(Errno::INTR) => {}
                ended => break ended.map_err(io::Error::from),
            }
        };
        let made = ended.and_then(|ended| match ended.and_then(|(_, status)| status.exit_status()) {
            Some(0) => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Err(io::Error::other("a signal ended the helper")),
        });
        made.step("make the Body's network")
    }
}

fn make_network(users: BorrowedFd<'_>, send: BorrowedFd<'_>) -> io::Result<()> {
    sys::namespace::enter_users(users)?;
    sys::namespace::unshare_network()?;
    sys::namespace::loopback_up()?;
    sys::fd::send(send, File::open("/proc/self/ns/net")?.as_fd())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn ended(script: &str) -> Result<(), String> {
        #[expect(clippy::zombie_processes, reason = "the helper is what waits for it")]
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        NetnsHelper(pid).wait().map_err(|error| error.failed().cause)
    }

    #[test]
    fn the_error_of_a_helper_is_the_kernels() {
        assert_eq!(ended("exit 0"), Ok(()));
        let full = io::Error::from(Errno::NOSPC);
        assert_eq!(ended(&format!("exit {}", Errno::NOSPC.raw_os_error())), Err(full.to_string()));
        assert_eq!(ended("kill -9 $$"), Err("a signal ended the helper".into()));
    }
}
