//! The proxy of the operator's network, through which the egress process reaches hosts where no direct way leads out.

use serde::{Deserialize, Serialize};

use super::{canonical_name, rule_reader::read_port};

/// Most names that are reached without the corporate proxy.
pub const DIRECT_MAX: usize = 256;

/// The part of an egress process's orders about the corporate proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorporateProxyOrder {
    /// Its `HOST:PORT`.
    pub address: String,
    /// The names and `.suffixes` that are reached without it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub direct: Vec<String>,
    /// The secret with which the egress process logs in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub login: Option<CorporateLogin>,
}

/// A user and a password for the corporate proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorporateLogin {
    /// The name of the secret.
    pub name: String,
    /// Its sealed value, `USER:PASSWORD`.
    pub sealed: String,
}

/// Reads `http://HOST:PORT`, and returns `HOST:PORT`; the error is the reason why it is no proxy.
pub fn read_proxy_url(url: &str) -> Result<String, &'static str> {
    const FORM: &str = "it is http://HOST:PORT";
    let address = url.strip_prefix("http://").ok_or(FORM)?;
    let address = address.strip_suffix('/').unwrap_or(address);
    if let Ok(literal) = address.parse::<std::net::SocketAddr>() {
        return if literal.port() == 0 { Err(FORM) } else { Ok(literal.to_string()) };
    }
    let (host, port) = address.rsplit_once(':').ok_or(FORM)?;
    let host = canonical_name(host).ok_or(FORM)?;
    let port = read_port(port).ok_or(FORM)?;
    Ok(format!("{host}:{port}"))
}

/// Reads a list of names and `.suffixes` with commas between them; the error is the reason why it is none.
pub fn read_no_proxy(list: &str) -> Result<Vec<String>, &'static str> {
    const FORM: &str = "it is a list such as git.corp.example,.intern.example";
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    let canonical = |name: &str| match name.strip_prefix('.') {
        Some(suffix) => canonical_name(suffix).map(|suffix| format!(".{suffix}")),
        None => canonical_name(name),
    };
    let names: Vec<String> = names.map(|name| canonical(name).ok_or(FORM)).collect::<Result<_, _>>()?;
    if names.len() > DIRECT_MAX { Err("it has at most 256 names") } else { Ok(names) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_a_host_and_a_port() {
        for (url, address) in [
            ("http://Proxy.corp.example:3128", "proxy.corp.example:3128"),
            ("http://10.0.0.8:8080/", "10.0.0.8:8080"),
            ("http://[fd00::8]:8080", "[fd00::8]:8080"),
        ] {
            assert_eq!(read_proxy_url(url).as_deref(), Ok(address));
        }
        for bad in [
            "proxy:3128",
            "https://proxy:3128",
            "http://proxy",
            "http://proxy:0",
            "http://10.0.0.8:0",
            "http://proxy:3128/path",
            "http://user:word@proxy:3128",
            "http://a\r\nb:1",
        ] {
            assert!(read_proxy_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_without_the_proxy_are_names_and_suffixes() {
        let read = read_no_proxy(" Git.corp.example, .intern.example,").unwrap();
        assert_eq!(read, ["git.corp.example", ".intern.example"]);
        assert_eq!(read_no_proxy(""), Ok(Vec::new()));
        for bad in ["*", "10.0.0.0/8", "10.0.0.1", "a b", ".", "..a", &vec!["a"; 257].join(",")] {
            assert!(read_no_proxy(bad).is_err(), "{bad}");
        }
    }
}
