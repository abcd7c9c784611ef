//! Connections to the hosts of targets.
//!
//! Invariant: the proxy connects to the very address that it judged: each connection takes the addresses of its name
//! once, and a name that no rule allows is not resolved at all. Names that go through a corporate proxy are the exception:
//! that proxy resolves them.

use std::{io, net::IpAddr, time::Duration};

use proto::egress::{NOT_ACCEPTED, NOT_RESOLVED};
use rustix::net::sockopt;
use tokio::{net::TcpStream, time::timeout};

use crate::{
    address::{is_inner, is_own},
    corporate::CorporateProxy,
    name_cache::NameCache,
    refusal::{Denial, UNREACHABLE},
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
    corporate: Option<&CorporateProxy>,
    target: &Target,
    private: bool,
    denied: impl Fn(IpAddr) -> Option<String>,
) -> Result<TcpStream, Denial> {
    let Some(corporate) = corporate.filter(|corporate| corporate.serves(target)) else {
        return dial_directly(names, target, private, denied).await;
    };
    // A rule about a public address permits private ones, too, and its host is not in the own network.
    let is_near = match target.host {
        Host::Name(_) => private,
        Host::Address(address) => is_inner(address) || is_own(address),
    };
    if is_near {
        let direct = dial_directly(names, target, private, denied).await;
        if !direct.as_ref().is_err_and(|denial| denial.status == UNREACHABLE) {
            return direct;
        }
    } else if let Host::Address(address) = target.host
        && let Some(why) = denied(address)
    {
        return Err(Denial::forbidden(why));
    }
    corporate.connect(names, target).await
}

async fn dial_directly(
    names: &NameCache,
    target: &Target,
    private: bool,
    denied: impl Fn(IpAddr) -> Option<String>,
) -> Result<TcpStream, Denial> {
    let addresses = resolved(names, target).await?;
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
    connect(&addresses, target.port).await.ok_or_else(|| Denial::unreachable(NOT_ACCEPTED))
}

/// The addresses of a target.
pub async fn resolved(names: &NameCache, target: &Target) -> Result<Vec<IpAddr>, Denial> {
    let name = match &target.host {
        Host::Address(address) => return Ok(vec![*address]),
        Host::Name(name) => name,
    };
    let found = timeout(PATIENCE, names.resolve(name, || resolve::resolve(name))).await;
    let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    found.map_err(|error| Denial::unreachable(format!("{NOT_RESOLVED}: {error}")))
}

/// Connects to the first address that accepts.
pub async fn connect(addresses: &[IpAddr], port: u16) -> Option<TcpStream> {
    for address in addresses {
        if let Ok(Ok(stream)) = timeout(PATIENCE, TcpStream::connect((*address, port))).await {
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
