//! How far a rule reaches: one host, private networks, addresses, or everything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::{
    Failure, Kind,
    egress::{EgressRule, RuleAction, fit_to_show},
    spec::Egress,
};

/// A range of this many bits or fewer counts as everything.
const WIDE_BITS: u32 = 7;
/// Ranges of IPv4 that are of this host, of private networks, or of no host at all; and the platform of Azure, which
/// has a public address.
const INNER_V4: &[(Ipv4Addr, u32)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 3),
];
/// Ranges of IPv6 inside the global one that are of private networks, or lead to IPv4 addresses.
const INNER_V6: &[(Ipv6Addr, u32)] = &[
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
];
const GLOBAL_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);

/// How far a rule reaches that allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RuleReach {
    /// Names, if they lead to public addresses.
    Names,
    /// Public addresses.
    PublicAddresses,
    /// Every public name, or a large part of all addresses.
    Everything,
    /// Addresses of this host or of private networks, or names that may lead to them.
    Private,
}

/// How far a rule reaches by itself; none for a rule that denies or asks.
pub fn rule_reach(rule: &EgressRule) -> Option<RuleReach> {
    if rule.action != RuleAction::Allow {
        return None;
    }
    let text = rule.host_and_ports();
    if rule.to.split('+').skip(1).any(|mark| mark == "private") {
        return Some(RuleReach::Private);
    }
    Some(match address_range(text) {
        Some((address, bits)) if is_inner(address, bits) => match bits <= WIDE_BITS {
            // The largest ranges mean "everything"; the egress process refuses the private addresses in them.
            true => RuleReach::Everything,
            false => RuleReach::Private,
        },
        Some((_, bits)) if bits <= WIDE_BITS => RuleReach::Everything,
        Some(_) => RuleReach::PublicAddresses,
        None if !names_hosts(rule) => RuleReach::Everything,
        None => RuleReach::Names,
    })
}

/// Whether a rule names a host, or the hosts below a name, and neither addresses nor everything.
pub(crate) fn names_hosts(rule: &EgressRule) -> bool {
    let text = rule.host_and_ports();
    address_range(text).is_none() && text != "*" && !text.starts_with("*:")
}

/// The range of a rule for addresses: `ADDRESS[/BITS][:PORTS]`, IPv6 in brackets.
fn address_range(text: &str) -> Option<(IpAddr, u32)> {
    let (address, rest) = match text.strip_prefix('[') {
        Some(v6) => {
            let (address, rest) = v6.split_once(']')?;
            (IpAddr::V6(address.parse().ok()?), rest)
        }
        None => {
            let end = text.find(['/', ':']).unwrap_or(text.len());
            (IpAddr::V4(text[..end].parse().ok()?), &text[end..])
        }
    };
    let width = if address.is_ipv4() { 32 } else { 128 };
    let bits = match rest.strip_prefix('/') {
        Some(bits) => bits.split(':').next()?.parse().ok().filter(|bits| *bits <= width)?,
        None => width,
    };
    Some((address, bits))
}

/// Whether a range has an address of this host, of a private network, or of no host.
fn is_inner(address: IpAddr, bits: u32) -> bool {
    match address {
        IpAddr::V4(address) => {
            let address = (u128::from(address.to_bits()), bits);
            INNER_V4.iter().any(|(inner, len)| overlaps(address, (u128::from(inner.to_bits()), *len), 32))
        }
        IpAddr::V6(address) => {
            let address = (address.to_bits(), bits);
            let of = |(inner, len): &(Ipv6Addr, u32)| (inner.to_bits(), *len);
            let is_global = bits >= GLOBAL_V6.1 && overlaps(address, of(&GLOBAL_V6), 128);
            !is_global || INNER_V6.iter().any(|inner| overlaps(address, of(inner), 128))
        }
    }
}

/// Whether two ranges of addresses of `width` bits share an address.
fn overlaps((one, one_bits): (u128, u32), (other, other_bits): (u128, u32), width: u32) -> bool {
    let free = width - one_bits.min(other_bits);
    one.checked_shr(free).unwrap_or(0) == other.checked_shr(free).unwrap_or(0)
}

/// Warnings about rules that open more than a person may expect.
pub fn network_warnings(egress: &Egress) -> Vec<Failure> {
    let warning = |rule: &EgressRule| {
        let to = fit_to_show(&rule.to);
        match rule_reach(rule)? {
            RuleReach::Everything => Some(
                Failure::new(
                    Kind::Denied,
                    format!("OPEN NETWORK: the rule `{to}` lets the Body send everything that it can read to any public host"),
                )
                .hint("allow only what it needs: --net registries --allow HOST:PORT"),
            ),
            RuleReach::Private => Some(
                Failure::new(
                    Kind::Denied,
                    format!("the rule `{to}` lets the Body reach this host or your private network"),
                )
                .hint("services there may trust every caller"),
            ),
            RuleReach::Names | RuleReach::PublicAddresses => None,
        }
    };
    egress.all_rules().iter().filter_map(warning).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reach_of_a_rule_is_known() {
        use RuleReach::{Everything, Names, Private, PublicAddresses};
        for (to, reach) in [
            ("pypi.org:443", Names),
            ("**.example.org", Names),
            ("*.example.org:*", Names),
            ("*", Everything),
            ("*:443", Everything),
            ("GET,HEAD *:443/**", Everything),
            ("GET a.test/repos/*", Names),
            ("*:*+private", Private),
            ("registry.corp:443+private", Private),
            ("0.0.0.0/0:*", Everything),
            ("[::]/0", Everything),
            ("128.0.0.0/1:443", Everything),
            ("1.1.1.1:53", PublicAddresses),
            ("8.8.8.0/24", PublicAddresses),
            ("[2606:4700::]/32:443", PublicAddresses),
            ("127.0.0.1:8080", Private),
            ("10.0.0.0/8", Private),
            ("169.254.169.254:80", Private),
            ("168.63.129.16", Private),
            ("172.0.0.0/8:*", Private),
            ("198.18.0.7:443", Private),
            ("[::1]:80", Private),
            ("[fd00::1]", Private),
            ("[::ffff:10.0.0.1]:443", Private),
            ("[2002:7f00:1::]:443", Private),
            ("[64:ff9b::7f00:1]:443", Private),
            ("240.0.0.1", Private),
        ] {
            assert_eq!(rule_reach(&EgressRule::allow(to)), Some(reach), "{to}");
        }
        assert_eq!(rule_reach(&EgressRule::deny("*:*")), None);
    }

    #[test]
    fn an_open_network_is_a_loud_warning() {
        let egress = Egress { allow: vec!["pypi.org:443".into(), "*:*".into()], ..Egress::default() };
        let warnings: Vec<String> =
            network_warnings(&egress).into_iter().map(|warning| warning.to_string()).collect();
        assert_eq!(
            warnings,
            [
                "OPEN NETWORK: the rule `*:*` lets the Body send everything that it can read to any public host"
            ]
        );
        assert!(network_warnings(&Egress { allow: vec!["pypi.org".into()], ..Egress::default() }).is_empty());
    }
}
