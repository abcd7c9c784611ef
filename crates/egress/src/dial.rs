//! Connections to the hosts of targets.
//!
//! Invariant: the proxy connects to the very address that it judged: each connection takes the addresses of its name
//! once, and a name that no rule allows is not resolved at all.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use proto::egress::{NOT_ACCEPTED, NOT_RESOLVED};
use rustix::net::sockopt;
use tokio::{net::TcpStream, time::timeout};

use crate::{
    address::{is_inner, is_own},
    name_cache::NameCache,
    refusal::Denial,
    resolve,
    target::{Host, Target},
};

/// How long a name lookup or a connect may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// The first probe of a quiet connection, and the pause between further ones.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(120);
const KEEPALIVE_PAUSE: Duration = Duration::from_secs(30);
const KEEPALIVE_PROBES: u32 = 4;

/// Connects to a target, or returns the reason of a refusal.
///
/// `private` says whether it may be an address of this host or of a private network. A rule may deny the address of a name that another rule allows; `denied` tells.
pub async fn dial(
    names: &NameCache,
    target: &Target,
    private: bool,
    denied: impl Fn(IpAddr) -> Option<String>,
) -> Result<TcpStream, Denial> {
    let addresses = match &target.host {
        Host::Address(address) => vec![*address],
        Host::Name(name) => {
            let found = timeout(PATIENCE, names.resolve(name, || resolve::resolve(name))).await;
            let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            found.map_err(|error| Denial::unreachable(format!("{NOT_RESOLVED}: {error}")))?
        }
    };
    // A single inner address refuses all: a name with both kinds is suspicious.
    if !private && addresses.iter().any(|address| is_inner(*address) || is_own(*address)) {
        return Err(Denial::forbidden(match target.host {
            Host::Name(_) => "its name resolves to an address of this host or its network",
            Host::Address(_) => "it is an address of this host or its network",
        }));
    }
    if let Some(why) = addresses.iter().find_map(|address| denied(*address)) {
        return Err(Denial::forbidden(why));
    }
    let addresses: Vec<SocketAddr> =
        addresses.into_iter().map(|address| (address, target.port).into()).collect();
    connect(&addresses).await.ok_or_else(|| Denial::unreachable(NOT_ACCEPTED))
}

async fn connect(addresses: &[SocketAddr]) -> Option<TcpStream> {
    for address in addresses {
        if let Ok(Ok(stream)) = timeout(PATIENCE, TcpStream::connect(address)).await {
            keep_alive(&stream);
            return Some(stream);
        }
    }
    None
}

/// Lets a connection be quiet for long and still end soon after its other end is gone. It works without, so errors are
/// ignored.
pub fn keep_alive(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEPALIVE_AFTER);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEPALIVE_PAUSE);
    let _ = sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES);
}
