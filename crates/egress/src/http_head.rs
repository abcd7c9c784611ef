//! Heads of HTTP/1 requests: parsed strictly, and written anew for the host.
//!
//! Invariant: the `Host` that reaches a host is the name that was judged, and the length of a body is given once.
//! Invariant: of a request that may only ask (`+plain`) nothing but the path and the values of a few headers reaches
//! the host.
//! Trust: HTTP parsers read folded lines, bare line ends, repeated headers and the like differently, so a head with any
//! of them is refused.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use proto::egress::{Permit, Protocol, RequestTarget, fit_to_show};

use crate::{
    http_body::BodyLength,
    refusal::Denial,
    secrets::has_placeholder,
    target::{Host, Target},
};

/// Headers that are passed on where a rule says `+plain`: those that caches and resumed downloads need.
const PLAIN_PASSED: &[&str] = &[
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
/// Headers of one connection, which a proxy does not pass on, and those that it writes itself.
const NOT_PASSED: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "upgrade",
];

/// Headers by which some servers take another method than the one that was judged.
pub const METHOD_OVERRIDES: &[&str] = &["x-http-method", "x-http-method-override", "x-method-override"];

/// The form in which a request names its resource.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    /// A path.
    ConnectionOrigin(String),
    /// A URL: its authority and its path.
    Absolute(String, String),
    /// `*`, for `OPTIONS`.
    Asterisk,
    /// Host and port, for `CONNECT`.
    Authority(String),
}

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub struct HttpRequest {
    method: String,
    form: Form,
    /// `HTTP/1.0` or `HTTP/1.1`.
    version: String,
    headers: Vec<(String, String)>,
}

impl HttpRequest {
    /// Parses a head, without the empty line at its end.
    pub fn parse(head: &[u8]) -> Result<Self, Denial> {
        let text = std::str::from_utf8(head).map_err(|_| Denial::bad("its head is not UTF-8"))?;
        let mut lines = text.split("\r\n");
        let line = lines.next().unwrap_or_default();
        if line.contains(|c: char| c.is_control()) {
            return Err(Denial::bad("its head contains control characters"));
        }
        let (method, address, version) = match line.split(' ').collect::<Vec<_>>()[..] {
            [method, address, version @ ("HTTP/1.1" | "HTTP/1.0")] if is_token(method) => {
                (method, address, version)
            }
            _ => return Err(Denial::bad("its first line is not an HTTP/1 request")),
        };
        let headers = lines.map(parse_header).collect::<Result<_, _>>()?;
        let form = parse_form(method, address)?;
        Ok(Self { method: method.to_owned(), form, version: version.to_owned(), headers })
    }

    /// The target of a CONNECT request.
    pub fn tunnel(&self) -> Option<&str> {
        match &self.form {
            Form::Authority(target) => Some(target),
            _ => None,
        }
    }

    /// The target of a request to a proxy: host and port of its URL.
    pub fn forward(&self) -> Result<String, Denial> {
        match &self.form {
            Form::Absolute(authority, _) if authority.contains(':') => Ok(authority.clone()),
            Form::Absolute(authority, _) => Ok(format!("{authority}:80")),
            _ => Err(Denial::bad("its URL is not an absolute one that begins with http://")),
        }
    }

    /// Checks that the request is one for the target, and for no other host.
    pub fn check_host(&self, target: &Target) -> Result<(), Denial> {
        let hosts: Vec<&str> = self.values("host").collect();
        let [host] = hosts[..] else { return Err(Denial::bad("it has no Host header, or several")) };
        let authority = match &self.form {
            Form::Absolute(authority, _) | Form::Authority(authority) => authority,
            Form::ConnectionOrigin(_) | Form::Asterisk => host,
        };
        match [host, authority].into_iter().find(|name| !target.is_called(name)) {
            None => Ok(()),
            Some(other) => {
                Err(Denial::forbidden(format!("its request is for the host {}", fit_to_show(other))))
            }
        }
    }

    /// Whether the head has a `Host` header or a URL with a host.
    pub fn has_host(&self) -> bool {
        self.values("host").next().is_some() || matches!(self.form, Form::Absolute(..) | Form::Authority(_))
    }

    /// Checks that a rule's protocol permits the request, and returns the length of its body.
    pub fn check_protocol(&self, permit: &Permit) -> Result<BodyLength, Denial> {
        if self.tunnel().is_some() {
            return Err(Denial::forbidden("a tunnel inside plain HTTP is not allowed"));
        }
        let upgrade = self.values("upgrade").any(|value| !value.eq_ignore_ascii_case("h2c"));
        if upgrade {
            return Err(Denial::forbidden(
                "it asks to upgrade the connection: a rule that ends with `+tcp` allows it",
            ));
        }
        let body = self.body_length()?;
        let is_plain = permit.protocol == Protocol::PlainHttp;
        if is_plain && (!matches!(self.method.as_str(), "GET" | "HEAD") || body != BodyLength::Known(0)) {
            return Err(Denial::forbidden(
                "its rule says `+plain`, which allows GET and HEAD without a body: use https",
            ));
        }
        Ok(body)
    }

    /// The parts that rules judge; `headers` are the [judged headers](Self::judged_headers).
    pub fn judged_part<'a>(
        &'a self,
        headers: &'a [(&'a str, &'a [u8])],
    ) -> Result<RequestTarget<'a>, Denial> {
        if METHOD_OVERRIDES.iter().any(|name| self.values(name).next().is_some()) {
            return Err(Denial::forbidden("a header of it asks for another method"));
        }
        let path = match &self.form {
            Form::ConnectionOrigin(path) | Form::Absolute(_, path) => path.as_str(),
            Form::Asterisk | Form::Authority(_) => "*",
        };
        let (path, query) = match path.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (path, None),
        };
        Ok(RequestTarget { method: &self.method, path, query, headers })
    }

    /// The headers, as rules judge them.
    pub fn judged_headers(&self) -> Vec<(&str, &[u8])> {
        self.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect()
    }

    /// Whether its answer has no body.
    pub fn is_head(&self) -> bool {
        self.method == "HEAD"
    }

    /// Whether a placeholder of a secret is in the head.
    pub fn has_placeholder(&self) -> bool {
        let path = match &self.form {
            Form::ConnectionOrigin(path) | Form::Absolute(_, path) => path,
            Form::Asterisk | Form::Authority(_) => "",
        };
        [path].into_iter().chain(self.headers.iter().map(|(_, value)| value.as_str())).any(|text| {
            let basic = text.get(..6).filter(|scheme| scheme.eq_ignore_ascii_case("basic "));
            let decoded = basic.and_then(|_| STANDARD.decode(text[6..].trim()).ok());
            has_placeholder(text.as_bytes()) || decoded.is_some_and(|decoded| has_placeholder(&decoded))
        })
    }

    /// Whether the client sends the body only after an answer of 100.
    pub fn expects_continue(&self) -> bool {
        self.version == "HTTP/1.1"
            && self.values("expect").any(|value| value.eq_ignore_ascii_case("100-continue"))
    }

    fn body_length(&self) -> Result<BodyLength, Denial> {
        let (lengths, codings): (Vec<&str>, Vec<&str>) =
            (self.values("content-length").collect(), self.values("transfer-encoding").collect());
        let ambiguous = || Denial::bad("the length of its body is ambiguous");
        match (&lengths[..], &codings[..]) {
            ([], []) => Ok(BodyLength::Known(0)),
            ([length], []) if length.bytes().all(|byte| byte.is_ascii_digit()) => {
                length.parse().map(BodyLength::Known).map_err(|_| ambiguous())
            }
            ([], [coding]) if coding.eq_ignore_ascii_case("chunked") && self.version == "HTTP/1.1" => {
                Ok(BodyLength::Chunked)
            }
            _ => Err(ambiguous()),
        }
    }

    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let named = self.headers.iter().filter(move |(own, _)| own.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.as_str())
    }

    /// The head of the request that is sent to the host.
    pub fn for_host(
        &self,
        target: &Target,
        permit: &Permit,
        body: BodyLength,
        set: &BTreeMap<String, String>,
    ) -> String {
        let path = match &self.form {
            Form::ConnectionOrigin(path) | Form::Absolute(_, path) => path,
            Form::Asterisk | Form::Authority(_) => "*",
        };
        let host = match (&target.host, &self.form) {
            (Host::Name(name), _) if target.port == 80 => name.clone(),
            (Host::Name(name), _) => format!("{name}:{}", target.port),
            (Host::Address(_), Form::Absolute(authority, _)) => authority.clone(),
            (Host::Address(_), _) => self.values("host").next().unwrap_or_default().to_owned(),
        };
        let headers = if permit.protocol == Protocol::PlainHttp {
            self.few_headers(set)
        } else {
            self.most_headers(set)
        };
        let length = match body {
            BodyLength::Chunked => "transfer-encoding: chunked\r\n".to_owned(),
            BodyLength::Known(len) if self.values("content-length").next().is_some() && len > 0 => {
                format!("content-length: {len}\r\n")
            }
            // Some servers want to be told that a POST has no body.
            BodyLength::Known(_) if matches!(self.method.as_str(), "POST" | "PUT" | "PATCH") => {
                "content-length: 0\r\n".to_owned()
            }
            BodyLength::Known(_) => String::new(),
        };
        let (method, version) =
            (&self.method, if permit.protocol == Protocol::PlainHttp { "HTTP/1.1" } else { &self.version });
        format!("{method} {path} {version}\r\nhost: {host}\r\n{headers}{length}connection: close\r\n\r\n")
    }

    fn few_headers(&self, set: &BTreeMap<String, String>) -> String {
        let mut kept: Vec<(&str, &str)> = Vec::new();
        for (name, value) in &self.headers {
            if let Some(passed) = PLAIN_PASSED.iter().find(|passed| name.eq_ignore_ascii_case(passed))
                && !kept.iter().any(|(name, _)| name == passed)
                && !set.keys().any(|other| name.eq_ignore_ascii_case(other))
            {
                kept.push((passed, value));
            }
        }
        let set = set.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        kept.into_iter().chain(set).map(|(name, value)| format!("{name}: {value}\r\n")).collect()
    }

    fn most_headers(&self, set: &BTreeMap<String, String>) -> String {
        let own = |name: &str| {
            let mut named = self.values("connection").flat_map(|value| value.split(','));
            named.any(|token| token.trim().eq_ignore_ascii_case(name))
        };
        let passed = |name: &str| {
            !NOT_PASSED.iter().any(|other| name.eq_ignore_ascii_case(other))
                && !own(name)
                && !set.keys().any(|other| name.eq_ignore_ascii_case(other))
        };
        let headers = self.headers.iter().filter(|(name, _)| passed(name)).map(|(name, value)| (name, value));
        headers.chain(set).map(|(name, value)| format!("{name}: {value}\r\n")).collect()
    }
}

fn parse_form(method: &str, address: &str) -> Result<Form, Denial> {
    if address.is_empty() || address.contains(|c: char| !c.is_ascii_graphic() || c == '#') {
        return Err(Denial::bad("its URL contains invalid characters"));
    }
    if method == "CONNECT" {
        return Ok(Form::Authority(address.to_owned()));
    }
    if let Some(rest) = address.strip_prefix("http://") {
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        return Ok(Form::Absolute(authority.to_owned(), path));
    }
    match address {
        "*" if method == "OPTIONS" => Ok(Form::Asterisk),
        path if path.starts_with('/') => Ok(Form::ConnectionOrigin(path.to_owned())),
        _ => Err(Denial::bad("its URL is neither a path nor an absolute one that begins with http://")),
    }
}

/// Parses a header line, which is neither folded nor has a bare line end.
pub fn parse_header(line: &str) -> Result<(String, String), Denial> {
    let (name, value) = line
        .split_once(':')
        .filter(|(name, _)| is_token(name))
        .ok_or_else(|| Denial::bad("its head contains a line that is not a header"))?;
    if value.contains(|c: char| (c.is_control() && c != '\t') || !c.is_ascii()) {
        return Err(Denial::bad("its head contains control characters"));
    }
    Ok((name.to_owned(), value.trim_matches([' ', '\t']).to_owned()))
}

fn is_token(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(is_token_byte)
}

/// Whether a method or the name of a header may have this byte.
pub fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
#[path = "http_head_tests.rs"]
mod tests;
