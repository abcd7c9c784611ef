//! Connections of each peer: one address cannot take all places of a server.
//!
//! A peer is an IPv4 address or the first 64 bits of an IPv6 address, because one host usually has all addresses
//! below those.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Counts the connections of each peer.
#[derive(Debug, Clone)]
pub struct PeerConnections {
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
    max: usize,
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub struct PeerPlace {
    all: PeerConnections,
    peer: IpAddr,
}

impl PeerConnections {
    /// Allows each peer this many connections.
    pub fn new(max: usize) -> Self {
        Self { counts: Arc::default(), max }
    }

    /// Takes a place for a connection from this address; none if its peer has no place left.
    pub fn take(&self, from: IpAddr) -> Option<PeerPlace> {
        let peer = peer_of(from);
        let mut counts = self.counts();
        let count = counts.entry(peer).or_default();
        if *count >= self.max {
            return None;
        }
        *count += 1;
        Some(PeerPlace { all: self.clone(), peer })
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PeerPlace {
    fn drop(&mut self) {
        let mut counts = self.all.counts();
        if let Some(count) = counts.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.peer);
            }
        }
    }
}

fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_its_own_places() {
        let peers = PeerConnections::new(2);
        let at = |text: &str| text.parse::<IpAddr>().unwrap();
        let first = peers.take(at("192.0.2.1")).unwrap();
        let _second = peers.take(at("::ffff:192.0.2.1")).unwrap();
        assert!(peers.take(at("192.0.2.1")).is_none());
        let _other = peers.take(at("192.0.2.2")).unwrap();
        drop(first);
        assert!(peers.take(at("192.0.2.1")).is_some());
        let _six = (peers.take(at("2001:db8::1")).unwrap(), peers.take(at("2001:db8::2:1")).unwrap());
        assert!(peers.take(at("2001:db8::3")).is_none() && peers.take(at("2001:db8:0:1::3")).is_some());
    }

    #[test]
    fn nothing_is_kept_of_peers_that_left() {
        let peers = PeerConnections::new(2);
        drop(peers.take(IpAddr::from([192, 0, 2, 1])));
        assert!(peers.counts().is_empty());
    }
}
