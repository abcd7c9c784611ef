//! What a way out lets through: names in one spelling, and addresses that are neither this machine's nor its network's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::fit_to_show;

/// Most rules of a policy.
const RULES_MAX: usize = 256;

/// Why a text is no rule.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is no rule: write a name and a port such as `pypi.org:443` or `*.example.org:443`, with `+private` behind it for a host of your own network, or `+plain` for plain http"
)]
pub struct RuleError(String);

/// One name that may be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    host: String,
    /// Names below it, instead of it.
    below: bool,
    port: u16,
    /// Also where it leads to an address of this machine or its network.
    pub(super) private: bool,
    wire: Wire,
}

/// What is spoken with a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wire {
    /// TLS, which this proxy only carries.
    Tls,
    /// Plain HTTP, which this proxy asks itself.
    Plain,
}

/// Names that may be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy(Vec<Rule>);

impl Policy {
    /// Reads rules.
    pub fn parse<S: AsRef<str>>(rules: &[S]) -> Result<Self, RuleError> {
        if rules.len() > RULES_MAX {
            return Err(RuleError(format!("{} rules", rules.len())));
        }
        rules.iter().map(|rule| rule_of(rule.as_ref())).collect::<Result<_, _>>().map(Self)
    }

    /// The rule that lets a target through, if it is one this proxy understands.
    pub(super) fn judge(&self, target: &str, wire: Wire) -> Result<(String, u16, &Rule), String> {
        let (host, port) = target.rsplit_once(':').ok_or("it names no port")?;
        let port: u16 = if port.bytes().all(|byte| byte.is_ascii_digit()) {
            port.parse().map_err(|_| "its port is none")?
        } else {
            return Err("its port is none".into());
        };
        let host = host.to_ascii_lowercase();
        if !is_name(&host) {
            return Err("it is no plain name: addresses and other spellings are not let through".into());
        }
        let fits = |rule: &&Rule| {
            rule.wire == wire
                && rule.port == port
                && if rule.below {
                    host.strip_suffix(&rule.host).is_some_and(|front| front.ends_with('.') && front.len() > 1)
                } else {
                    rule.host == host
                }
        };
        match self.0.iter().find(fits) {
            Some(rule) => Ok((host, port, rule)),
            None if wire == Wire::Plain => Err(format!("no rule lets plain http to {host}:{port}")),
            None => Err(format!("no rule names {host}:{port}")),
        }
    }
}

fn rule_of(text: &str) -> Result<Rule, RuleError> {
    let bad = || RuleError(fit_to_show(text));
    let mut marks = text.split('+');
    let text = marks.next().unwrap_or_default();
    let (mut private, mut wire) = (false, Wire::Tls);
    for mark in marks {
        match mark {
            "private" => private = true,
            "plain" => wire = Wire::Plain,
            _ => return Err(bad()),
        }
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let (host, below) = host.strip_prefix("*.").map_or((host, false), |rest| (rest, true));
    let host = host.to_ascii_lowercase();
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|port| digits && *port != 0).ok_or_else(bad)?;
    // Nobody means all of a top-level domain.
    if !is_name(&host) || (below && !host.contains('.')) {
        Err(bad())
    } else {
        Ok(Rule { host, below, port, private, wire })
    }
}

/// One spelling of a name: lower-case labels, no dot at the end, and not what some resolver takes for an address.
fn is_name(host: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            && !label.starts_with('-')
    };
    let numeric = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit()) || label.starts_with("0x");
    let last = host.rsplit('.').next().unwrap_or(host);
    host.len() <= 253 && host.split('.').all(label) && !numeric(last)
}

/// Whether an address belongs to this machine, its network, or nobody.
pub(super) fn is_inner(address: IpAddr) -> bool {
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

/// IPv4 addresses in the clothes of 6to4 and NAT64.
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

    fn policy(rules: &[&str]) -> Policy {
        Policy::parse(rules).unwrap()
    }

    #[test]
    fn names_are_let_through_in_one_spelling_only() {
        let policy = policy(&["pypi.org:443", "*.pythonhosted.org:443"]);
        for target in
            ["pypi.org:443", "PyPI.org:443", "files.pythonhosted.org:443", "a.b.pythonhosted.org:443"]
        {
            assert!(
                policy.judge(target, Wire::Tls).is_ok() && policy.judge(target, Wire::Plain).is_err(),
                "{target}"
            );
        }
        for target in [
            "pypi.org:80",
            "pypi.org:4430",
            "pypi.org",
            "pypi.org:",
            "pypi.org:+443",
            "pypi.org.:443",
            "pypi.org.evil.io:443",
            "evilpypi.org:443",
            "pythonhosted.org:443",
            ".pythonhosted.org:443",
            "xpythonhosted.org:443",
            "user@pypi.org:443",
            "pypi.org@evil.io:443",
            "pypi.org\0.evil.io:443",
            "evil.io\0.pypi.org:443",
            "evil.io#pypi.org:443",
            "evil.io/pypi.org:443",
            "[::1]:443",
            "127.0.0.1:443",
            "2130706433:443",
            "0x7f000001:443",
            "0177.0.0.1:443",
            "127.1:443",
            "[::ffff:127.0.0.1]:443",
            "1.2.3.0x4:443",
            "",
            ":443",
            "..:443",
            "-x.org:443",
            "pypi.org:443:443",
            "pypi .org:443",
            "pypi.org:65979",
            "xn--pypi\u{202e}.org:443",
            "pypi\u{3002}org:443",
        ] {
            assert!(policy.judge(target, Wire::Tls).is_err(), "{target:?}");
        }
        assert!(Policy::default().judge("pypi.org:443", Wire::Tls).is_err(), "an empty list denies");
    }

    #[test]
    fn rules_that_mean_too_much_or_nothing_are_refused() {
        for rule in [
            "",
            "pypi.org",
            "*:443",
            "*.org:443",
            "*.:443",
            "pypi.org:0",
            "127.0.0.1:443",
            "pypi.org.:443",
            "a b:1",
            "https://pypi.org:443",
            "pypi.org:443 +private",
            "pypi.org:443+",
            "pypi.org:443+tls",
            "pypi.org:+443",
            "+plain",
        ] {
            assert!(Policy::parse(&[rule]).is_err(), "{rule:?}");
        }
        assert!(policy(&["registry.corp:8443+private"]).0[0].private);
        let both = policy(&["mirror.corp:80+plain+private"]);
        assert!(
            both.0[0].private
                && both.judge("mirror.corp:80", Wire::Plain).is_ok()
                && both.judge("mirror.corp:80", Wire::Tls).is_err()
        );
    }

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
