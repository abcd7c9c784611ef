//! Tells public IP addresses from those of this host and its private networks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address is reachable from the public internet.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(mapped) => is_public_v4(mapped),
            None => is_public_v6(address),
        },
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    // "This" network, carrier-grade NAT, protocol assignments, benchmarks, reserved.
    let special = a == 0
        || (a == 100 && b & 0xc0 == 64)
        || (a, b, c) == (192, 0, 0)
        || (a == 198 && b & 0xfe == 18)
        || a >= 240;
    let named =
        address.is_private() || address.is_loopback() || address.is_link_local() || address.is_multicast();
    !(special || named || address.is_documentation())
}

/// Whether an IPv6 address is global unicast, and not of 6to4, Teredo or another special range.
fn is_public_v6(address: Ipv6Addr) -> bool {
    let [first, second, ..] = address.segments();
    let handed_out = first & 0xe000 == 0x2000;
    let tunnels = first == 0x2002 || (first == 0x2001 && second < 0x200);
    handed_out && !tunnels && (first, second) != (0x2001, 0xdb8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_network_are_not_public() {
        for (address, expected) in [
            ("1.1.1.1", true),
            ("151.101.1.1", true),
            ("2606:4700::1111", true),
            ("::ffff:8.8.8.8", true),
            ("127.0.0.1", false),
            ("0.0.0.0", false),
            ("10.1.2.3", false),
            ("172.31.0.1", false),
            ("192.168.1.1", false),
            ("169.254.169.254", false),
            ("100.64.0.1", false),
            ("100.128.0.1", true),
            ("198.19.0.1", false),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
            ("192.0.0.8", false),
            ("203.0.113.1", false),
            ("::1", false),
            ("::", false),
            ("fe80::1", false),
            ("fd00::1", false),
            ("ff02::1", false),
            ("::ffff:127.0.0.1", false),
            ("2002:7f00:1::", false),
            ("64:ff9b::7f00:1", false),
            ("2001:db8::1", false),
            ("2001::1", false),
        ] {
            assert_eq!(is_public(address.parse().unwrap()), expected, "{address}");
        }
    }
}
