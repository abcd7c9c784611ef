//! Plain HTTP through the egress proxy: one request, written anew, to a host whose rule says `+plain`.
//!
//! It is for mirrors with signed files, where TLS would prove nothing more.
//!
//! Invariant: only the path and the values of a few headers of the Body's request reach the host: no body, no second
//! request, no header that names a host.
//! Invariant: bytes after the head of a request are discarded.

/// Headers that are passed on: those that caches and resumed downloads need.
const PASSED: &[&str] = &[
    "accept",
    "accept-encoding",
    "accept-language",
    "cache-control",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "range",
    "user-agent",
];

/// A request that the proxy sends for a Body.
#[derive(Debug, PartialEq, Eq)]
pub struct ForwardRequest {
    /// Host name and port, as in a CONNECT request.
    pub target: String,
    /// `GET` or `HEAD`.
    method: &'static str,
    path: String,
    headers: Vec<(&'static str, String)>,
}

impl ForwardRequest {
    /// Parses a head, without the empty line at its end.
    pub fn parse(head: &str) -> Result<Self, &'static str> {
        let mut lines = head.split("\r\n");
        let line = lines.next().unwrap_or_default();
        let (method, address) = match line.split(' ').collect::<Vec<_>>()[..] {
            ["GET", address, "HTTP/1.1" | "HTTP/1.0"] => ("GET", address),
            ["HEAD", address, "HTTP/1.1" | "HTTP/1.0"] => ("HEAD", address),
            _ => {
                return Err("only CONNECT, and GET and HEAD of an absolute http URL, are allowed: use https");
            }
        };
        let rest = address
            .strip_prefix("http://")
            .ok_or("its URL is not an absolute one that begins with http://")?;
        if rest.contains(|c: char| !c.is_ascii_graphic() || c == '#') {
            return Err("its URL contains invalid characters");
        }
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let target = if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        Ok(Self { target, method, path, headers: headers(lines)? })
    }

    /// The request that is sent to the host.
    pub fn for_host(&self, host: &str, port: u16) -> String {
        let port = if port == 80 { String::new() } else { format!(":{port}") };
        let headers: String =
            self.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        format!(
            "{} {} HTTP/1.1\r\nhost: {host}{port}\r\n{headers}connection: close\r\n\r\n",
            self.method, self.path
        )
    }
}

fn headers<'a>(lines: impl Iterator<Item = &'a str>) -> Result<Vec<(&'static str, String)>, &'static str> {
    let mut kept: Vec<(&'static str, String)> = Vec::new();
    for line in lines {
        // Different HTTP parsers treat folded lines and bare line feeds differently, so both are refused.
        let (name, value) = line
            .split_once(':')
            .filter(|(name, _)| is_token(name))
            .ok_or("its head contains a line that is not a header")?;
        if value.contains(|c: char| (c.is_control() && c != '\t') || !c.is_ascii()) {
            return Err("its head contains control characters");
        }
        let (name, value) = (name.to_ascii_lowercase(), value.trim());
        if name == "transfer-encoding" || name == "upgrade" || (name == "content-length" && value != "0") {
            return Err("plain http allows only requests without a body: use https");
        }
        if let Some(passed) = PASSED.iter().find(|passed| **passed == name)
            && !kept.iter().any(|(name, _)| name == passed)
        {
            kept.push((passed, value.to_owned()));
        }
    }
    Ok(kept)
}

fn is_token(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_written_anew_and_holds_little_of_the_old_one() {
        let head = "GET http://deb.debian.org/debian/dists/x?y=1 HTTP/1.1\r\nHost: evil.io\r\nRange: bytes=5-\r\nUSER-AGENT: apt\r\nrange: bytes=6-\r\nCookie: a=b\r\nAuthorization: x\r\nConnection: keep-alive\r\nX-Forwarded-Host: evil.io\r\nContent-Length: 0";
        let request = ForwardRequest::parse(head).unwrap();
        assert_eq!(request.target, "deb.debian.org:80");
        assert_eq!(
            request.for_host("deb.debian.org", 80),
            "GET /debian/dists/x?y=1 HTTP/1.1\r\nhost: deb.debian.org\r\nrange: bytes=5-\r\nuser-agent: apt\r\nconnection: close\r\n\r\n"
        );
        let bare = ForwardRequest::parse("HEAD http://mirror.test:8080?a HTTP/1.0").unwrap();
        assert_eq!(
            (bare.target.as_str(), bare.for_host("mirror.test", 8080).as_str()),
            ("mirror.test:8080", "HEAD /?a HTTP/1.1\r\nhost: mirror.test:8080\r\nconnection: close\r\n\r\n")
        );
    }

    #[test]
    fn a_head_with_two_readings_is_no_request() {
        let get = |rest: &str| format!("GET http://a.test/ HTTP/1.1\r\n{rest}");
        for head in [
            "GET / HTTP/1.1\r\nHost: a.test",
            "GET https://a.test/ HTTP/1.1",
            "GET HTTP://a.test/ HTTP/1.1",
            "GET ftp://a.test/ HTTP/1.1",
            "GET file:///etc/passwd HTTP/1.1",
            "get http://a.test/ HTTP/1.1",
            "POST http://a.test/ HTTP/1.1",
            "PUT http://a.test/ HTTP/1.1",
            "OPTIONS http://a.test/ HTTP/1.1",
            "TRACE http://a.test/ HTTP/1.1",
            "GET  http://a.test/ HTTP/1.1",
            "GET http://a.test/ HTTP/2",
            "GET http://a.test/",
            "GET http://a.test/\tx HTTP/1.1",
            "GET http://a.test/\nx HTTP/1.1",
            "GET http://a.test/#x HTTP/1.1",
            "GET http://a.test/\u{e9} HTTP/1.1",
            "GET http://a.test/\0 HTTP/1.1",
            "",
            "GET",
            &get("Transfer-Encoding: chunked"),
            &get("Content-Length: 5"),
            &get("content-length: 0, 5"),
            &get("Upgrade: websocket"),
            &get(" folded: x"),
            &get("a b: c"),
            &get("no colon"),
            &get(": x"),
            &get("Range: bytes=1-\nHost: evil.io"),
            &get("User-Agent: a\rb"),
            &get("User-Agent: \u{0}"),
            &get("Content-Length : 0"),
            &get("Range: 1\r\n\tmore"),
        ] {
            assert!(ForwardRequest::parse(head).is_err(), "{head:?}");
        }
        // The policy judges these targets as any other: no rule allows them.
        for (address, target) in [
            ("http://user@a.test/", "user@a.test:80"),
            ("http://a.test:80:80/", "a.test:80:80"),
            ("http://[::1]/", "[::1]"),
            ("http:///x", ":80"),
            ("http://a.test\\evil.io/", "a.test\\evil.io:80"),
        ] {
            assert_eq!(ForwardRequest::parse(&format!("GET {address} HTTP/1.1")).unwrap().target, target);
        }
    }
}
