//! The transparent network of a Body with a policy: programs connect to any host, and the kernel redirects each
//! connection and each name lookup to sockets that the Body's egress proxy holds.
//!
//! The Body's first process sets it up in its network namespace, while it has the capabilities for that, and hands the
//! sockets to the supervisor. A socket stays in the namespace in which it was made, so a process of the host accepts
//! the Body's connections directly.
//!
//! Invariant: the redirect is in force before a program of the Body runs, and no program of the Body can change it.
//! Invariant: a Body without a redirect reaches less, never more: its network namespace has only a loopback.
//! Absent on purpose: microVMs. The guest redirects the connections of its own kernel.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use proto::{
    Mechanism,
    egress::{REDIRECT_PORT, RedirectSocket},
    launch::LaunchPlan,
};
use rustix::io::Errno;
use sys::redirect::IpVersion;

use crate::report::{StepError, StepExt};

const NAME: &str = "transparent network";
/// Connections that wait while the egress proxy restarts.
const BACKLOG: i32 = 1024;
const DNS_PORT: u16 = 53;

/// Whether the first process of a Body sets up a transparent network.
pub fn is_wanted(plan: &LaunchPlan) -> bool {
    plan.egress.is_some() && plan.vm.is_none()
}

/// Redirects the connections of the caller's network namespace, and sends the sockets to the supervisor. A mechanism
/// that is not enforced means that there are no sockets, and that nothing is redirected.
pub fn set_up(supervisor: BorrowedFd<'_>) -> Mechanism {
    let made = make_sockets().and_then(|made| made.send(supervisor).map(|()| made.v6));
    match made {
        Ok(v6) => enforced(v6.err().as_ref()),
        Err(error) => {
            // A byte without a descriptor ends the supervisor's wait.
            let _ = rustix::io::write(supervisor, b"-");
            degraded(&error)
        }
    }
}

/// Waits for the sockets of the first process, in the order of [`RedirectSocket::ALL`]; empty if it made none, or if it
/// ended.
pub fn receive(first_process: BorrowedFd<'_>) -> Vec<OwnedFd> {
    let received = RedirectSocket::ALL.iter().map(|_| sys::fd::receive(first_process));
    received.collect::<io::Result<_>>().unwrap_or_default()
}

struct RedirectSockets {
    sockets: [OwnedFd; RedirectSocket::ALL.len()],
    /// The reason why IPv6 is not redirected, where it is not.
    v6: Result<(), StepError>,
}

impl RedirectSockets {
    fn send(&self, supervisor: BorrowedFd<'_>) -> Result<(), StepError> {
        let sent = self.sockets.iter().try_for_each(|socket| sys::fd::send(supervisor, socket.as_fd()));
        sent.step("send the sockets of the network to the supervisor")
    }
}

fn make_sockets() -> Result<RedirectSockets, StepError> {
    let loopback = Ipv4Addr::LOCALHOST;
    let dns_udp = UdpSocket::bind((loopback, DNS_PORT)).step("open the socket for name lookups")?.into();
    let dns_tcp = listen(loopback.into(), DNS_PORT)?;
    let tcp4 = redirect(IpVersion::V4)?;
    let (tcp6, v6) = match redirect(IpVersion::V6) {
        Ok(listener) => (listener, Ok(())),
        // A host may have no IPv6. Then a listener that gets no connection stands in.
        Err(error) => (listen(loopback.into(), 0)?, Err(error)),
    };
    // In the order of `RedirectSocket::ALL`.
    Ok(RedirectSockets { sockets: [tcp4, tcp6, dns_udp, dns_tcp], v6 })
}

/// Redirects the connections of one version of the Internet protocol to the returned listener.
fn redirect(version: IpVersion) -> Result<OwnedFd, StepError> {
    let loopback: IpAddr = match version {
        IpVersion::V4 => Ipv4Addr::LOCALHOST.into(),
        IpVersion::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let listener = listen(loopback, REDIRECT_PORT)?;
    sys::redirect::redirect(version, REDIRECT_PORT).step("redirect connections")?;
    // Last, because without routes a redirect redirects nothing.
    sys::redirect::add_local_routes(version).step("route all addresses to the loopback")?;
    Ok(listener)
}

fn listen(address: IpAddr, port: u16) -> Result<OwnedFd, StepError> {
    sys::redirect::listen((address, port).into(), BACKLOG).step("listen for redirected connections")
}

fn enforced(no_v6: Option<&StepError>) -> Mechanism {
    let held = "the kernel redirects every TCP connection and name lookup to the egress proxy, and refuses other \
                protocols at once";
    match no_v6 {
        None => Mechanism::enforced(NAME, held),
        Some(error) => Mechanism::enforced(NAME, format!("{held}; IPv6 reaches nothing: {error}")),
    }
}

fn degraded(error: &StepError) -> Mechanism {
    let held = "only programs that read proxy variables reach the network, and name lookups fail at once";
    match Errno::from_io_error(error.cause()) {
        Some(Errno::NOENT | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT) => {
            Mechanism::degraded(NAME, format!("{held}: this kernel has no nf_tables with redirect ({error})"))
        }
        _ => Mechanism::degraded(NAME, format!("{held}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use proto::MechanismStatus;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn a_network_that_cannot_be_redirected_says_why() {
        let failed = |errno: Errno| {
            let error: Result<(), _> = Err::<(), _>(errno).step("redirect connections");
            degraded(&error.unwrap_err())
        };
        let held = "only programs that read proxy variables reach the network, and name lookups fail at once";
        for errno in [Errno::NOENT, Errno::OPNOTSUPP, Errno::PROTONOSUPPORT] {
            let told = failed(errno);
            let cause = io::Error::from(errno);
            let why = format!(
                "{held}: this kernel has no nf_tables with redirect (cannot redirect connections: {cause})"
            );
            assert_eq!((told.state, told.reason), (MechanismStatus::Degraded, why));
        }
        let told = failed(Errno::PERM);
        let why = format!("{held}: cannot redirect connections: {}", io::Error::from(Errno::PERM));
        assert_eq!((told.state, told.reason), (MechanismStatus::Degraded, why));
    }

    #[test]
    fn the_supervisor_has_all_sockets_or_none() {
        let (near, far) = pair();
        let loopback = Ipv4Addr::LOCALHOST.into();
        let sockets = [(); 4].map(|()| listen(loopback, 0).unwrap());
        RedirectSockets { sockets, v6: Ok(()) }.send(near.as_fd()).unwrap();
        assert_eq!(receive(far.as_fd()).len(), RedirectSocket::ALL.len());

        sys::fd::send(near.as_fd(), listen(loopback, 0).unwrap().as_fd()).unwrap();
        rustix::io::write(&near, b"-").unwrap();
        assert!(receive(far.as_fd()).is_empty(), "the first process made too few");
        drop(near);
        assert!(receive(far.as_fd()).is_empty(), "the first process ended");
    }
}
