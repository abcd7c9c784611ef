//! Addresses that a name must not resolve to: those of this host, of its network, and reserved ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address belongs to this host or its network, or to no host at all.
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
                    || v6.segments()[0] & 0xffc0 == 0xfe80
            }
        },
    }
}

fn is_inner_v4(v4: Ipv4Addr) -> bool {
    let [a, b, ..] = v4.octets();
    v4.is_loopback()
        || v4.is_private()
        || v4.is_link_local()
        || v4.is_unspecified()
        || v4.is_broadcast()
        || v4.is_multicast()
        || a == 0
        || (a == 100 && b & 0xc0 == 64)
        || a >= 240
        || (a == 192 && b == 0 && v4.octets()[2] == 0)
        || (a == 198 && b & 0xfe == 18)
}

/// The IPv4 address inside a 6to4, NAT64 or IPv4-compatible address.
fn embedded(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = v6.segments();
    let at = |one: u16, two: u16| Ipv4Addr::from((u32::from(one) << 16) | u32::from(two));
    match s {
        [0x2002, one, two, ..] => Some(at(one, two)),
        [0x64, 0xff9b, _, _, _, _, one, two] => Some(at(one, two)),
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
        ] {
            assert!(is_inner(inner.parse().unwrap()), "{inner}");
        }
        for outer in
            ["1.1.1.1", "151.101.0.223", "2a04:4e42::223", "100.128.0.1", "172.32.0.1", "::ffff:1.1.1.1"]
        {
            assert!(!is_inner(outer.parse().unwrap()), "{outer}");
        }
    }
}
