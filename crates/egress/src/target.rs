//! The target of a connection: a name or an address, and a port.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use proto::egress::{Permit, Policy, is_named_address};

use crate::names::NameTable;

/// The host that a program wants to reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// A name in its canonical spelling.
    Name(String),
    /// An address that stands for no name.
    Address(IpAddr),
}

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub host: Host,
    pub port: u16,
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(out, "{name}:{}", self.port),
            Host::Address(address) => SocketAddr::new(*address, self.port).fmt(out),
        }
    }
}

impl Target {
    /// The target of a connection to an address; the error is a reason for the record.
    pub fn of_address(address: SocketAddr, names: &NameTable) -> Result<Self, String> {
        let port = address.port();
        match address.ip().to_canonical() {
            IpAddr::V4(v4) if is_named_address(v4) => match names.name_of(v4) {
                Some(name) => Ok(Self { host: Host::Name(name.to_owned()), port }),
                None => Err("no name has this address: look the name up again".into()),
            },
            ip if is_this_host(ip) => {
                Err("it is an address of the host itself, which is never reached".into())
            }
            ip => Ok(Self { host: Host::Address(ip), port }),
        }
    }

    /// The target of an address that the operator chose.
    pub fn of_literal(address: SocketAddr) -> Self {
        Self { host: Host::Address(address.ip()), port: address.port() }
    }

    /// The target of a CONNECT request or of a URL; the error is a reason for the record.
    pub fn parse(text: &str, names: &NameTable) -> Result<Self, String> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            if address.port() == 0 {
                return Err("its port is not a number from 1 to 65535".into());
            }
            return Self::of_address(address, names);
        }
        let (name, port) = Policy::target(text)?;
        Ok(Self { host: Host::Name(name), port })
    }

    /// The permission of a policy for the target, or the reason why there is none.
    pub fn judge(&self, policy: &Policy) -> Result<Permit, String> {
        match &self.host {
            Host::Name(name) => policy.judge_name(name, self.port),
            Host::Address(address) => policy.judge_address(*address, self.port),
        }
    }

    /// The target as the `Forwarded` header of a request names it that goes to another host.
    pub fn forwarded(&self, usual_port: u16) -> String {
        match &self.host {
            Host::Name(name) if self.port == usual_port => format!("host={name}"),
            _ => format!("host=\"{self}\""),
        }
    }

    /// The rule by which a connection to the target waits for a decision.
    pub fn asking(&self, policy: &Policy) -> Option<String> {
        match &self.host {
            Host::Name(name) => policy.asking_name(name, self.port),
            Host::Address(address) => policy.asking_address(*address, self.port),
        }
    }

    /// Whether a `Host` header may say this. A host without a name may be called anything.
    pub fn is_called(&self, host: &str) -> bool {
        let Host::Name(name) = &self.host else { return true };
        let (own, port) = match host.rsplit_once(':') {
            Some((own, port)) => (own, Some(port)),
            None => (host, None),
        };
        own.eq_ignore_ascii_case(name) && port.is_none_or(|port| port == self.port.to_string())
    }

    /// Whether a TLS hello may ask for this server name.
    pub fn is_server_name(&self, server_name: &str) -> bool {
        match &self.host {
            Host::Name(name) => server_name.eq_ignore_ascii_case(name),
            Host::Address(_) => true,
        }
    }
}

/// Whether the kernel takes an address for the host's loopback. `0.0.0.0` and `::` are also ways to it.
fn is_this_host(ip: IpAddr) -> bool {
    ip.is_loopback() || ip.is_unspecified()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_name_or_an_address_in_one_spelling() {
        let mut names = NameTable::default();
        let address = names.address_of("a.test", |_| Ok(())).unwrap().unwrap();
        let shown = |text: &str| Target::parse(text, &names).map(|target| target.to_string());
        assert_eq!(shown(&format!("{address}:443")).as_deref(), Ok("a.test:443"));
        assert_eq!(shown(&format!("[::ffff:{address}]:443")).as_deref(), Ok("a.test:443"));
        assert_eq!(shown("A.Test:443").as_deref(), Ok("a.test:443"));
        assert_eq!(shown("192.0.2.7:22").as_deref(), Ok("192.0.2.7:22"));
        assert_eq!(shown("[::ffff:192.0.2.7]:22").as_deref(), Ok("192.0.2.7:22"));
        assert_eq!(shown("[2001:db8::7]:22").as_deref(), Ok("[2001:db8::7]:22"));
        for bad in [
            "198.18.0.2:443",
            "127.0.0.1:443",
            "127.8.8.8:443",
            "0.0.0.0:443",
            "[::1]:443",
            "[::]:443",
            "[::ffff:127.0.0.1]:443",
            "192.0.2.7:0",
            "192.0.2.7",
            "a.test",
            "a.test:0",
            "2130706433:443",
        ] {
            assert!(shown(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_target_has_its_name_and_no_other() {
        let named = Target { host: Host::Name("a.test".into()), port: 8080 };
        for host in ["a.test", "A.TEST", "a.test:8080"] {
            assert!(named.is_called(host), "{host}");
        }
        for host in
            ["", "b.test", "a.test:80", "a.test:", "a.test:08080", "a.test.", "x@a.test", "a.test:8080:8080"]
        {
            assert!(!named.is_called(host), "{host}");
        }
        let address = Target { host: Host::Address([192, 0, 2, 7].into()), port: 80 };
        assert!(
            address.is_called("b.test")
                && address.is_server_name("b.test")
                && !named.is_server_name("b.test")
        );
    }
}
