//! Tests of requests to the proxy's socket.

use std::fs::File;

use proto::egress::Flush;
use tokio::{io::AsyncReadExt, time::timeout};

use super::*;
use crate::{
    client_hello::tests::hello_for,
    journal::tests::{lines, spool},
};

/// Sends a request to a proxy and then `first`; returns the answer and the decisions.
async fn ask(rules: &[&str], request: &str, first: &[u8]) -> (String, Vec<Decision>) {
    let file = spool();
    let reply = ask_with(file.try_clone().unwrap(), rules, request, first).await;
    (reply, lines(&file).into_iter().map(|line| line.data).collect())
}

/// A proxy with these rules.
pub fn proxy(spool: File, rules: &[&str]) -> Proxy {
    let journal = Journal::new(spool, Flush::Kernel);
    Proxy::new(Policy::parse(rules).unwrap(), 1, journal, NameTable::default())
}

async fn ask_with(spool: File, rules: &[&str], request: &str, first: &[u8]) -> String {
    let proxy = Rc::new(proxy(spool, rules));
    let (mut stream, inside) = UnixStream::pair().unwrap();
    let asking = async move {
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = vec![0; 4096];
        let len = stream.read(&mut answer).await.unwrap();
        let mut text = String::from_utf8_lossy(&answer[..len]).into_owned();
        if text.starts_with("HTTP/1.1 200") {
            // A proxy that has refused may have closed the connection already.
            let _ = stream.write_all(first).await;
            let len = timeout(Duration::from_secs(5), stream.read(&mut answer)).await.unwrap().unwrap_or(0);
            text.push_str(&String::from_utf8_lossy(&answer[..len]));
        }
        text
    };
    tokio::join!(proxy.connection(inside), asking).1
}

/// A listener that answers every connection, and its port.
pub async fn start_listener() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut first = [0; 512];
            let _ = stream.read(&mut first).await;
            let _ = stream.write_all(b"REACHED").await;
        }
    });
    port
}

#[tokio::test]
async fn a_named_host_is_reached_and_nothing_else_is() {
    let port = start_listener().await;
    let (open, closed) = (format!("localhost:{port}+tls+private"), format!("localhost:{port}+tls"));
    let connect = |target: &str| format!("CONNECT {target} HTTP/1.1\r\n\r\n");
    let hello = hello_for(&["localhost"]);
    // The listener answers every connection that gets through.
    let (reply, decided) = ask(&[&open], &connect(&format!("localhost:{port}")), &hello).await;
    assert!(
        reply.ends_with("REACHED") && decided.last().is_some_and(|decision| decision.allowed),
        "{reply} {decided:?}"
    );
    for (what, rules, target, first) in [
        ("an address of this host", vec![closed.as_str()], format!("localhost:{port}"), hello.clone()),
        ("no rule", vec![], format!("localhost:{port}"), hello.clone()),
        ("another port", vec![open.as_str()], format!("localhost:{}", port ^ 1), hello.clone()),
        ("the address itself", vec![open.as_str()], format!("127.0.0.1:{port}"), hello.clone()),
        ("another name inside", vec![open.as_str()], format!("localhost:{port}"), hello_for(&["evil.io"])),
        ("no name inside", vec![open.as_str()], format!("localhost:{port}"), hello_for(&[])),
        (
            "a relayed CONNECT",
            vec![open.as_str()],
            format!("localhost:{port}"),
            b"CONNECT evil.io:443 HTTP/1.1\r\n\r\n".to_vec(),
        ),
        (
            "plain HTTP inside",
            vec![open.as_str()],
            format!("localhost:{port}"),
            b"GET / HTTP/1.1\r\nHost: evil.io\r\n\r\n".to_vec(),
        ),
    ] {
        let (reply, decided) = ask(&rules, &connect(&target), &first).await;
        assert!(!reply.contains("REACHED"), "{what}: {reply}");
        assert!(
            decided.iter().all(|decision| !decision.allowed) && !decided.is_empty(),
            "{what}: {decided:?}"
        );
    }
    let (reply, _) = ask(
        &[&open],
        &format!(
            "GET http://localhost:{port}/ HTTP/1.1\r\nHost: localhost\r\n\r\nCONNECT x:1 HTTP/1.1\r\n\r\n"
        ),
        b"",
    )
    .await;
    assert!(reply.starts_with("HTTP/1.1 403"), "a rule for TLS does not allow plain http: {reply}");
}

/// A plain HTTP server that echoes its request, with a count of connections that sent a byte.
pub async fn start_echo_server() -> (u16, Arc<std::sync::atomic::AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, count) =
        (listener.local_addr().unwrap().port(), Arc::new(std::sync::atomic::AtomicUsize::new(0)));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut asked = vec![0; 4096];
            let len = stream.read(&mut asked).await.unwrap();
            if len == 0 {
                continue;
            }
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            // Any further bytes would be a second request.
            let more = timeout(Duration::from_millis(50), stream.read(&mut asked[len..]))
                .await
                .map_or(0, Result::unwrap);
            let reply = String::from_utf8_lossy(&asked[..len + more]).into_owned();
            let _ = stream
                .write_all(
                    format!(
                        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{reply}",
                        reply.len()
                    )
                    .as_bytes(),
                )
                .await;
        }
    });
    (port, count)
}

#[tokio::test]
async fn plain_http_reaches_who_may_be_asked_so_one_question_at_a_time() {
    let (port, count) = start_echo_server().await;
    let reached = || count.load(std::sync::atomic::Ordering::SeqCst);
    let (plain, tls, closed) = (
        format!("localhost:{port}+plain+private"),
        format!("localhost:{port}+tls+private"),
        format!("localhost:{port}+plain"),
    );
    let get = |target: &str| {
        format!(
            "GET http://{target}/pool/a.deb HTTP/1.1\r\nHost: evil.io\r\nRange: bytes=1-\r\nCookie: secret\r\n\r\n"
        )
    };
    let here = format!("localhost:{port}");
    let smuggled = format!("{}GET http://{here}/second HTTP/1.1\r\n\r\n", get(&here));
    for request in [get(&here), smuggled] {
        let (reply, decided) = ask(&[&plain], &request, b"").await;
        assert!(
            reply.ends_with(&format!(
                "GET /pool/a.deb HTTP/1.1\r\nhost: {here}\r\nrange: bytes=1-\r\nconnection: close\r\n\r\n"
            )),
            "{reply}"
        );
        assert!(decided.len() == 1 && decided[0].allowed, "{decided:?}");
    }
    assert_eq!(reached(), 2, "the second question went nowhere");
    for (what, rules, request) in [
        ("a rule for TLS", vec![tls.as_str()], get(&here)),
        ("no rule", vec![], get(&here)),
        ("an address of this host", vec![closed.as_str()], get(&here)),
        ("another port", vec![plain.as_str()], get(&format!("localhost:{}", port ^ 1))),
        ("the address itself", vec![plain.as_str()], get(&format!("127.0.0.1:{port}"))),
        ("a name before an @", vec![plain.as_str()], get(&format!("{here}@localhost:{port}"))),
        (
            "a question with a body",
            vec![plain.as_str()],
            format!("POST http://{here}/ HTTP/1.1\r\nContent-Length: 1\r\n\r\nx"),
        ),
    ] {
        let (reply, decided) = ask(&rules, &request, b"").await;
        assert!(
            reply.starts_with("HTTP/1.1 40")
                && decided.iter().all(|decision| !decision.allowed)
                && !decided.is_empty(),
            "{what}: {reply} {decided:?}"
        );
    }
    // A tunnel leads to the same judgement.
    let tunnel = format!("CONNECT {here} HTTP/1.1\r\n\r\n");
    let inside =
        |method: &str, host: &str| format!("{method} /x HTTP/1.1\r\nHost: {host}\r\nCookie: a\r\n\r\n");
    for (method, host) in [("POST", here.as_str()), ("GET", "evil.io")] {
        let (reply, decided) = ask(&[&plain], &tunnel, inside(method, host).as_bytes()).await;
        assert!(reply.contains("\r\n\r\nHTTP/1.1 403 Denied") && !decided[0].allowed, "{reply} {decided:?}");
    }
    assert_eq!(reached(), 2, "no other request got through");
    let (reply, _) = ask(&[&plain], &tunnel, inside("GET", &here).as_bytes()).await;
    assert!(
        reply.ends_with(&format!("GET /x HTTP/1.1\r\nhost: {here}\r\nconnection: close\r\n\r\n")),
        "{reply}"
    );
    assert_eq!(reached(), 3);
}

#[tokio::test]
async fn not_a_byte_goes_out_where_its_decision_cannot_be_recorded() {
    let (port, count) = start_echo_server().await;
    let reached = || count.load(std::sync::atomic::Ordering::SeqCst);
    let here = format!("localhost:{port}");
    let (plain, tls) = (format!("{here}+plain+private"), format!("{here}+tls+private"));
    let cases = [
        (plain, format!("GET http://{here}/ HTTP/1.1\r\n\r\n"), Vec::new(), "HTTP/1.1 503 Denied"),
        (tls, format!("CONNECT {here} HTTP/1.1\r\n\r\n"), hello_for(&["localhost"]), "HTTP/1.1 200"),
    ];
    for (rule, request, first, expected) in &cases {
        let full = File::options().append(true).open("/dev/full").unwrap();
        let reply = ask_with(full, &[rule], request, first).await;
        assert!(reply.starts_with(expected) && !reply.contains("GET /"), "{reply}");
        assert_eq!(reached(), 0, "{request}");
        // With room for the decision, this request gets through.
        ask(&[rule], request, first).await;
        assert_eq!(reached(), 1, "{request}");
        count.store(0, std::sync::atomic::Ordering::SeqCst);
    }
    let full = File::options().append(true).open("/dev/full").unwrap();
    let denied = ask_with(full, &[], &format!("CONNECT {here} HTTP/1.1\r\n\r\n"), b"").await;
    assert!(denied.starts_with("HTTP/1.1 503") && denied.contains("cannot be recorded"), "{denied}");
}
