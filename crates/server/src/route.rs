//! Routes a request: to a port of a Body, or to the control plane.
//!
//! Trust: the route only names a target. The target checks whether the caller may use it.

use axum::http::{HeaderMap, HeaderValue, Request, header};
use proto::BodyId;

use crate::App;

/// The port at which E2B's clients expect envd.
pub const ENVD_PORT: u16 = 49983;
const SANDBOX_ID: &str = "e2b-sandbox-id";
const SANDBOX_PORT: &str = "e2b-sandbox-port";

/// A port of a Body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortTarget {
    /// The Body's id as the request has it; the Body may not exist, and the id may be invalid.
    pub body: String,
    /// Its port.
    pub port: u16,
}

/// The target of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// To a port of a Body.
    Body(PortTarget),
    /// To the guest of the Body whose token signed it.
    Signed,
    /// To the control plane.
    Control,
    /// Refused: the request has a foreign host name.
    Foreign(&'static str),
    /// Refused: two readers of the request could come to different targets.
    Ambiguous(&'static str),
}

/// Determines the target of a request.
pub fn of<B>(app: &App, request: &Request<B>) -> Route {
    let config = app.config();
    find(request, config.domain_name(), config.listen.ip().is_loopback())
}

fn find<B>(request: &Request<B>, domain: &str, only_here: bool) -> Route {
    if let Some(why) = ambiguity(request.headers()) {
        return Route::Ambiguous(why);
    }
    if let Some(target) = by_headers(request.headers()) {
        return Route::Body(target);
    }
    let Some(host) = host(request) else { return Route::Foreign("the request names no host") };
    let name = without_port(host);
    if let Some(target) = by_host(name, domain) {
        return Route::Body(target);
    }
    // Protects against DNS rebinding: a foreign page can point its own name at this address, but the browser
    // then sends that name.
    if only_here && !is_ours(name, domain) {
        return Route::Foreign("this server does not serve that host name");
    }
    let query = request.uri().query().unwrap_or_default();
    if request.uri().path() == "/files" && query.split('&').any(|pair| pair.starts_with("signature=")) {
        return Route::Signed;
    }
    let origin = request.headers().get(header::ORIGIN).map(|origin| origin.as_bytes());
    if origin.is_some_and(|origin| !is_same(origin, host)) {
        return Route::Foreign("cross-site requests are not allowed");
    }
    Route::Control
}

/// Why the headers that name a target can be read in two ways, if they can.
fn ambiguity(headers: &HeaderMap) -> Option<&'static str> {
    let is_repeated = |name: &str| headers.get_all(name).iter().nth(1).is_some();
    let repeated = [
        ("host", "the request has more than one Host header"),
        (SANDBOX_ID, "the request has more than one E2b-Sandbox-Id header"),
        (SANDBOX_PORT, "the request has more than one E2b-Sandbox-Port header"),
    ];
    if let Some((_, why)) = repeated.into_iter().find(|(name, _)| is_repeated(name)) {
        return Some(why);
    }
    let is_no_port = headers.get(SANDBOX_PORT).is_some_and(|port| parse_port(port).is_none());
    is_no_port.then_some("E2b-Sandbox-Port is not a port number")
}

fn parse_port(port: &HeaderValue) -> Option<u16> {
    port.to_str().ok()?.parse().ok()
}

fn by_headers(headers: &HeaderMap) -> Option<PortTarget> {
    let body = headers.get(SANDBOX_ID)?.to_str().unwrap_or_default();
    let port = headers.get(SANDBOX_PORT).and_then(parse_port);
    Some(PortTarget { body: without_client(body).to_owned(), port: port.unwrap_or(ENVD_PORT) })
}

/// Parses `<port>-<body>.<domain>`.
fn by_host(name: &str, domain: &str) -> Option<PortTarget> {
    let (first, rest) = name.split_once('.')?;
    let (port, body) = first.split_once('-')?;
    let known = rest.eq_ignore_ascii_case(domain) || rest.eq_ignore_ascii_case("localhost");
    let plain = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|_| known && plain)?;
    Some(PortTarget { body: without_client(body).to_ascii_lowercase(), port })
}

/// The id of a Body in a sandbox's name. E2B's clients of version 1 append a dash and the id of a client, and no id of
/// a Body contains a dash.
pub fn without_client(name: &str) -> &str {
    name.split_once('-').map_or(name, |(id, _)| id)
}

fn host<B>(request: &Request<B>) -> Option<&str> {
    let named = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    request.uri().authority().map(|authority| authority.as_str()).or(named)
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Whether a host name is safe from DNS rebinding: an IP address, `localhost`, or a name in our own domain.
fn is_ours(name: &str, domain: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let domain = domain.to_ascii_lowercase();
    let is_or_below = |of: &str| name == of || name.strip_suffix(of).is_some_and(|left| left.ends_with('.'));
    name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok()
        || is_or_below("localhost")
        || is_or_below(&domain)
}

fn is_same(origin: &[u8], host: &str) -> bool {
    let origin = std::str::from_utf8(origin).unwrap_or_default();
    origin.split_once("://").is_some_and(|(_, from)| from.eq_ignore_ascii_case(host))
}

impl PortTarget {
    /// The Body's id, if it is valid.
    pub fn id(&self) -> Option<BodyId> {
        self.body.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn go(headers: &[(&str, &str)], uri: &str) -> Route {
        let request = headers
            .iter()
            .fold(Request::builder().uri(uri), |request, (name, value)| request.header(*name, *value));
        find(&request.body(()).unwrap(), "pal.test", true)
    }

    fn body(body: &str, port: u16) -> Route {
        Route::Body(PortTarget { body: body.into(), port })
    }

    #[test]
    fn headers_and_host_names_lead_to_a_port_of_a_body() {
        assert_eq!(
            go(&[("host", "127.0.0.1:3900"), ("e2b-sandbox-id", "abc"), ("e2b-sandbox-port", "80")], "/"),
            body("abc", 80)
        );
        assert_eq!(go(&[("e2b-sandbox-id", "abc")], "/"), body("abc", ENVD_PORT));
        assert_eq!(go(&[("host", "8080-abc.pal.test:3900")], "/x"), body("abc", 8080));
        assert_eq!(go(&[("host", "8080-abc.LOCALHOST")], "/x"), body("abc", 8080));
    }

    #[test]
    fn a_name_with_a_client_leads_to_its_body() {
        assert_eq!(
            go(&[("e2b-sandbox-id", "abc-palisade"), ("e2b-sandbox-port", "80")], "/"),
            body("abc", 80)
        );
        assert_eq!(go(&[("host", "8080-abc-6532622b.pal.test")], "/"), body("abc", 8080));
        assert_eq!(
            (without_client("abc"), without_client("abc-"), without_client("abc-d-e")),
            ("abc", "abc", "abc")
        );
    }

    #[test]
    fn requests_with_two_targets_are_refused() {
        let is_refused = |headers: &[(&str, &str)]| matches!(go(headers, "/"), Route::Ambiguous(_));
        let (host, id, port) = (("host", "localhost"), ("e2b-sandbox-id", "abc"), ("e2b-sandbox-port", "80"));
        assert!(!is_refused(&[host, id, port]));
        assert!(is_refused(&[host, host]) && is_refused(&[host, ("host", "evil.test"), id, port]));
        assert!(
            is_refused(&[host, id, ("e2b-sandbox-id", "xyz"), port]) && is_refused(&[host, id, port, port])
        );
        for odd in ["", "0x50", "-1", "65536", "80, 81"] {
            assert!(is_refused(&[host, id, ("e2b-sandbox-port", odd)]), "{odd:?}");
        }
    }

    #[test]
    fn the_rest_is_the_control_planes() {
        for host in [
            "127.0.0.1:3900",
            "localhost",
            "[::1]:3900",
            "pal.test",
            "api.pal.test",
            "x-abc.pal.test",
            "-abc.pal.test",
        ] {
            assert_eq!(go(&[("host", host)], "/sandboxes"), Route::Control, "{host}");
        }
        assert_eq!(go(&[("host", "localhost")], "/files?path=a&signature=v1_x"), Route::Signed);
    }

    #[test]
    fn names_and_pages_of_others_lead_nowhere() {
        let foreign = |headers: &[(&str, &str)]| matches!(go(headers, "/sandboxes"), Route::Foreign(_));
        assert!(foreign(&[("host", "evil.test")]));
        assert!(foreign(&[("host", "80-abc.evil.test")]));
        assert!(foreign(&[("host", "notlocalhost")]));
        assert!(foreign(&[]));
        assert!(foreign(&[("host", "localhost:3900"), ("origin", "http://evil.test")]));
        assert!(foreign(&[("host", "localhost:3900"), ("origin", "http://8080-abc.localhost:3900")]));
        assert!(foreign(&[("host", "localhost:3900"), ("origin", "null")]));
        assert_eq!(
            go(&[("host", "localhost:3900"), ("origin", "http://localhost:3900")], "/sandboxes"),
            Route::Control
        );
    }
}
