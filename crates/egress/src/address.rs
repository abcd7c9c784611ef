//! Addresses that a name must not resolve to: those of this host, of its network, and those with a special meaning.
//!
//! Whether an address belongs to an interface of this host the kernel is asked for each connection: a UDP socket can be
//! bound to such an address only. A list would be wrong as soon as a laptop changes its network, and the cage has no way
//! to read one. Where the host lets sockets be bound to addresses that it does not have (`ip_nonlocal_bind`), the source
//! address that the kernel would choose decides: it is the address itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Addresses that no host has (RFC 5737, RFC 3849).
const NO_HOST_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const NO_HOST_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));
/// The address at which Azure serves its machines' own settings.
const AZURE_PLATFORM: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);

/// Whether an address belongs to an interface of this host.
pub fn is_own(address: IpAddr) -> bool {
    let binds = |address: IpAddr| UdpSocket::bind((address, 0)).is_ok();
    let no_host = if address.is_ipv4() { NO_HOST_V4 } else { NO_HOST_V6 };
    binds(address) && (!binds(no_host) || source_for(address) == Some(address))
}

/// The address from which this host would send to another one. No packet is sent.
fn source_for(address: IpAddr) -> Option<IpAddr> {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(SocketAddr::new(address, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Whether an address belongs to this host or its network, or has a special meaning.
///
/// The ranges for documentation do not count: they lead to nothing of this host, and laboratories give them to mirrors.
pub fn is_inner(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_inner_v4(v4),
        IpAddr::V6(v6) => match v6.to_ipv4_mapped().or_else(|| embedded(v6)) {
            Some(v4) => is_inner_v4(v4),
            None => {
                v6.is_loopback()
                    || v6.is_unspecified()
                    || v6.is_multicast()
                    || v6.segments()[0] & 0xfe00 == 0xfc00
                    // Link-local, and site-local as of old.
                    || v6.segments()[0] & 0xff80 == 0xfe80
                    || is_special_v6(v6)
            }
        },
    }
}

fn is_inner_v4(v4: Ipv4Addr) -> bool {
    let [a, b, c, _] = v4.octets();
    v4.is_loopback()
        || v4.is_private()
        || v4.is_link_local()
        || v4.is_unspecified()
        || v4.is_broadcast()
        || v4.is_multicast()
        || a == 0
        || (a == 100 && b & 0xc0 == 64)
        || a >= 240
        || (a == 198 && b & 0xfe == 18)
        // Protocol assignments, and the relays of 6to4.
        || matches!([a, b, c], [192, 0, 0] | [192, 88, 99])
        || v4 == AZURE_PLATFORM
}

/// Ranges that lead into a tunnel or nowhere: Teredo, ORCHID and benchmarks (2001::/23), and the discard-only range.
fn is_special_v6(v6: Ipv6Addr) -> bool {
    match v6.segments() {
        [0x2001, second, ..] => second < 0x200,
        [0x100, 0, 0, 0, ..] => true,
        _ => false,
    }
}

/// The IPv4 address inside a 6to4, NAT64, IPv4-translated or IPv4-compatible address.
fn embedded(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = v6.segments();
    let at = |one: u16, two: u16| Ipv4Addr::from((u32::from(one) << 16) | u32::from(two));
    match s {
        [0x2002, one, two, ..] => Some(at(one, two)),
        [0x64, 0xff9b, _, _, _, _, one, two] => Some(at(one, two)),
        [0, 0, 0, 0, 0xffff, 0, one, two] => Some(at(one, two)),
        [0, 0, 0, 0, 0, 0, one, two] if one != 0 => Some(at(one, two)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_and_its_network_are_known_in_every_dress() {
        for inner in [
            "127.0.0.1",
            "127.255.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "0.1.2.3",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "198.18.0.1",
            "192.0.0.1",
            "::1",
            "::",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "2002:7f00:1::",
            "64:ff9b::7f00:1",
            "::127.0.0.1",
            "168.63.129.16",
            "::ffff:168.63.129.16",
            "::ffff:0:127.0.0.1",
            "::ffff:0:10.0.0.1",
            "2001::1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "fec0::1",
            "192.88.99.1",
            "100::1",
            "100.100.100.200",
            "fd00:ec2::254",
        ] {
            assert!(is_inner(inner.parse().unwrap()), "{inner}");
        }
        for outer in [
            "1.1.1.1",
            "203.0.113.7",
            "2001:db8::1",
            "151.101.0.223",
            "2a04:4e42::223",
            "100.128.0.1",
            "172.32.0.1",
            "::ffff:1.1.1.1",
            "168.63.129.17",
            "2001:4860:4860::8888",
            "2001:200::1",
            "192.0.1.1",
            "::ffff:0:1.1.1.1",
        ] {
            assert!(!is_inner(outer.parse().unwrap()), "{outer}");
        }
    }

    #[test]
    fn the_kernel_tells_which_addresses_are_this_hosts() {
        assert!(is_own(Ipv4Addr::LOCALHOST.into()));
        assert!(!is_own([1, 1, 1, 1].into()) && !is_own(NO_HOST_V4) && !is_own(NO_HOST_V6));
        if let Some(own) = source_for([1, 1, 1, 1].into()) {
            assert!(is_own(own), "{own}");
        }
    }
}
