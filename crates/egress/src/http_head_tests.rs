//! Tests of heads, with those that two parsers could read differently.

use proto::egress::PermitTerms;

use super::*;

fn permit(protocol: Protocol) -> Permit {
    Permit {
        protocol,
        private: false,
        inspect: false,
        connects_late: false,
        terms: PermitTerms::default(),
        rule: String::new(),
    }
}

fn named(text: &str) -> Target {
    let (name, port) = text.split_once(':').unwrap();
    Target { host: Host::Name(name.into()), port: port.parse().unwrap() }
}

/// The request to a proxy that becomes of a head where a rule says `+plain`, and its target.
fn plain(head: &str) -> Result<(String, String), Denial> {
    let request = HttpRequest::parse(head.as_bytes())?;
    let target = request.forward()?;
    let body = request.check_protocol(&permit(Protocol::PlainHttp))?;
    let sent = target.split_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let sent = if sent {
        request.for_host(&named(&target), &permit(Protocol::PlainHttp), body, &BTreeMap::new())
    } else {
        String::new()
    };
    Ok((target, sent))
}

/// The request that becomes of one inside a connection to `a.test:8080` where a rule says `+http`.
fn inner(head: &str) -> Result<(String, BodyLength), Denial> {
    let request = HttpRequest::parse(head.as_bytes())?;
    request.check_host(&named("a.test:8080"))?;
    let body = request.check_protocol(&permit(Protocol::Http))?;
    Ok((request.for_host(&named("a.test:8080"), &permit(Protocol::Http), body, &BTreeMap::new()), body))
}

#[test]
fn a_connect_and_a_plain_question_are_understood_and_nothing_else_is() {
    let parse = |head: &[u8]| HttpRequest::parse(head);
    let tunnel = parse(b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: evil.io").unwrap();
    assert_eq!(tunnel.tunnel(), Some("pypi.org:443"), "the target counts, whatever Host says");
    let forward = parse(b"GET http://pypi.org/ HTTP/1.1\r\nHost: evil.io").unwrap();
    assert_eq!((forward.tunnel(), forward.forward()), (None, Ok("pypi.org:80".to_owned())));
    for head in [
        &b"GET / HTTP/1.1\r\nHost: pypi.org"[..],
        b"CONNECT  pypi.org:443 HTTP/1.1",
        b"CONNECT pypi.org:443",
        b"connect pypi.org:443 HTTP/1.1",
        b"CONNECT pypi.org:443 HTTP/2",
        b"CONNECT a b HTTP/1.1",
        b"CONNECT pypi.org:443\n HTTP/1.1",
        b"CONNECT pypi.org:443\0 HTTP/1.1",
        b"\xff",
        b"",
    ] {
        let understood =
            parse(head).is_ok_and(|request| request.tunnel().is_some() || request.forward().is_ok());
        assert!(!understood, "{:?}", String::from_utf8_lossy(head));
    }
}

#[test]
fn a_request_is_written_anew_and_holds_little_of_the_old_one() {
    let head = "GET http://deb.debian.org/debian/dists/x?y=1 HTTP/1.1\r\nHost: evil.io\r\nRange: bytes=5-\r\nUSER-AGENT: apt\r\nrange: bytes=6-\r\nCookie: a=b\r\nAuthorization: x\r\nConnection: keep-alive\r\nX-Forwarded-Host: evil.io\r\nContent-Length: 0";
    let (target, sent) = plain(head).unwrap();
    assert_eq!(target, "deb.debian.org:80");
    assert_eq!(
        sent,
        "GET /debian/dists/x?y=1 HTTP/1.1\r\nhost: deb.debian.org\r\nrange: bytes=5-\r\nuser-agent: apt\r\nconnection: close\r\n\r\n"
    );
    let (target, sent) = plain("HEAD http://mirror.test:8080?a HTTP/1.0").unwrap();
    assert_eq!(
        (target.as_str(), sent.as_str()),
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
        assert!(plain(head).is_err(), "{head:?}");
    }
    // The policy judges these targets as any other: no rule allows them.
    for (address, target) in [
        ("http://user@a.test/", "user@a.test:80"),
        ("http://a.test:80:80/", "a.test:80:80"),
        ("http://[::1]/", "[::1]"),
        ("http:///x", ":80"),
        ("http://a.test\\evil.io/", "a.test\\evil.io:80"),
    ] {
        assert_eq!(plain(&format!("GET {address} HTTP/1.1")).unwrap().0, target);
    }
}

#[test]
fn a_request_for_the_host_of_its_connection_keeps_its_headers() {
    let (sent, body) = inner(
        "PATCH /x?y HTTP/1.1\r\nHost: A.test\r\nAuthorization: b c\r\nX-Many: 1\r\nX-Many: 2\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\nExpect: 100-continue\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nProxy-Authorization: x\r\nContent-Length: 5",
    )
    .unwrap();
    assert_eq!(
        (sent.as_str(), body),
        (
            "PATCH /x?y HTTP/1.1\r\nhost: a.test:8080\r\nAuthorization: b c\r\nX-Many: 1\r\nX-Many: 2\r\ncontent-length: 5\r\nconnection: close\r\n\r\n",
            BodyLength::Known(5)
        )
    );
    let (sent, body) =
        inner("POST http://a.test:8080/ HTTP/1.1\r\nHost: a.test:8080\r\nTransfer-Encoding: Chunked")
            .unwrap();
    assert!(
        sent.starts_with("POST / HTTP/1.1\r\nhost: a.test:8080\r\ntransfer-encoding: chunked\r\n"),
        "{sent}"
    );
    assert_eq!(body, BodyLength::Chunked);
    let (sent, _) = inner("GET / HTTP/1.0\r\nHost: a.test").unwrap();
    assert_eq!(sent, "GET / HTTP/1.0\r\nhost: a.test:8080\r\nconnection: close\r\n\r\n");
    assert!(inner("OPTIONS * HTTP/1.1\r\nHost: a.test").unwrap().0.starts_with("OPTIONS * HTTP/1.1\r\n"));
}

#[test]
fn a_request_for_another_host_or_with_two_lengths_is_denied() {
    for (head, status) in [
        ("GET / HTTP/1.1\r\nHost: evil.io", 403),
        ("GET / HTTP/1.1\r\nHost: a.test:80", 403),
        ("GET / HTTP/1.1\r\nHost: a.test@evil.io", 403),
        ("GET / HTTP/1.1\r\nHost: a.test, evil.io", 403),
        ("GET http://evil.io/ HTTP/1.1\r\nHost: a.test", 403),
        ("GET http://a.test/ HTTP/1.1\r\nHost: evil.io", 403),
        ("GET http://user@a.test/ HTTP/1.1\r\nHost: a.test", 403),
        ("GET / HTTP/1.1", 400),
        ("GET / HTTP/1.1\r\nHost: a.test\r\nhost: a.test", 400),
        ("CONNECT a.test:8080 HTTP/1.1\r\nHost: a.test", 403),
        ("GET / HTTP/1.1\r\nHost: a.test\r\nUpgrade: websocket", 403),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nContent-Length: 5", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5, 5", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: +5", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: ", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 99999999999999999999", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: gzip, chunked", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        ("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: \x0bchunked", 400),
        ("POST / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked", 400),
    ] {
        assert_eq!(inner(head).unwrap_err().status, status, "{head:?}");
    }
    let upgrade = inner("GET / HTTP/1.1\r\nHost: a.test\r\nUpgrade: websocket").unwrap_err();
    assert!(upgrade.why.contains("+tcp"), "{upgrade:?}");
    assert!(inner("GET / HTTP/1.1\r\nHost: a.test").is_ok());
}

#[test]
fn a_host_without_a_name_keeps_the_name_that_the_program_gives_it() {
    let target = Target { host: Host::Address([192, 0, 2, 7].into()), port: 80 };
    for (head, host) in [
        ("GET / HTTP/1.1\r\nHost: a.test", "a.test"),
        ("GET http://192.0.2.7/ HTTP/1.1", "192.0.2.7"),
        ("GET http://192.0.2.7/ HTTP/1.1\r\nHost: evil.io", "192.0.2.7"),
    ] {
        let request = HttpRequest::parse(head.as_bytes()).unwrap();
        let sent = request.for_host(&target, &permit(Protocol::Http), BodyLength::Known(0), &BTreeMap::new());
        assert_eq!(sent, format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"));
    }
}
