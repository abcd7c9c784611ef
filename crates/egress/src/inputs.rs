//! The descriptors and orders that the supervisor sends to the process when it starts.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    net::{TcpListener, UdpSocket},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
};

use proto::egress::{EgressStart, MESSAGE_LEN_MAX};

/// Everything that the supervisor sends.
pub struct ProxyInputs {
    /// Listens in the directory that the Body sees.
    pub listener: UnixListener,
    pub spool: File,
    /// A pidfd of the Body's first process.
    pub body: OwnedFd,
    /// Listens for messages of `pal`.
    pub control: UnixListener,
    /// Listens for the egress processes of other Bodies.
    pub peers: UnixListener,
    /// Sockets in the Body's network namespace, if its connections are redirected.
    pub redirect: Option<RedirectInputs>,
    pub start: EgressStart,
}

/// The sockets in the Body's network namespace.
pub struct RedirectInputs {
    pub tcp: [TcpListener; 2],
    pub dns_udp: UdpSocket,
    pub dns_tcp: TcpListener,
}

impl ProxyInputs {
    /// Receives the descriptors, in the order in which the supervisor sends them, and then the orders.
    pub fn receive(supervisor: &UnixStream, is_transparent: bool) -> io::Result<Self> {
        let take = || sys::fd::receive(supervisor.as_fd());
        let (listener, spool, body) = (UnixListener::from(take()?), File::from(take()?), take()?);
        let (control, peers) = (UnixListener::from(take()?), UnixListener::from(take()?));
        let redirect = if is_transparent { Some(RedirectInputs::receive(&take)?) } else { None };
        listener.set_nonblocking(true)?;
        control.set_nonblocking(true)?;
        peers.set_nonblocking(true)?;
        Ok(Self { listener, spool, body, control, peers, redirect, start: read_start(supervisor)? })
    }
}

impl RedirectInputs {
    fn receive(take: &dyn Fn() -> io::Result<OwnedFd>) -> io::Result<Self> {
        // The order of `RedirectSocket::ALL`.
        let tcp = [TcpListener::from(take()?), TcpListener::from(take()?)];
        let (dns_udp, dns_tcp) = (UdpSocket::from(take()?), TcpListener::from(take()?));
        for listener in tcp.iter().chain([&dns_tcp]) {
            listener.set_nonblocking(true)?;
        }
        dns_udp.set_nonblocking(true)?;
        Ok(Self { tcp, dns_udp, dns_tcp })
    }
}

fn read_start(supervisor: &UnixStream) -> io::Result<EgressStart> {
    let mut line = String::new();
    BufReader::new(supervisor.take(MESSAGE_LEN_MAX)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
