//! Tests of requests on inspected connections that servers could read in two ways, and of requests for other hosts.

use std::time::Duration;

use super::*;

async fn world() -> World {
    let rule = EgressRule::allow("GET,POST localhost:PORT/ok/**+private");
    World::new(vec![rule], SecretTable::default()).await
}

/// Sends bytes on an HTTP/1.1 connection, and returns what comes back until the end.
async fn exchange(world: &World, bytes: &str) -> String {
    let mut stream = world.connect(&[HTTP1]).await.unwrap();
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // The end of the last answer, or a pause behind it.
    let _ = timeout(Duration::from_secs(1), stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_second_request_is_judged_like_the_first() {
    local(async {
        let world = world().await;
        let host = world.target.clone();
        let first = format!("GET /ok/a HTTP/1.1\r\nHost: {host}\r\n\r\n");
        for (what, second, status) in [
            ("another host", "GET /ok/b HTTP/1.1\r\nHost: evil.io\r\n\r\n".to_owned(), "421"),
            ("another path", format!("GET /other HTTP/1.1\r\nHost: {host}\r\n\r\n"), "403"),
            (
                "a URL of another host",
                format!("GET https://evil.io/ok/b HTTP/1.1\r\nHost: {host}\r\n\r\n"),
                "421",
            ),
            ("a tunnel", format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n"), "403"),
            (
                "a tunnel to another host",
                "CONNECT evil.io:443 HTTP/1.1\r\nHost: evil.io\r\n\r\n".to_owned(),
                "403",
            ),
        ] {
            world.arrived.borrow_mut().clear();
            let answer = exchange(&world, &format!("{first}{second}")).await;
            let arrived = world.arrived.borrow().clone();
            assert_eq!(arrived.len(), 1, "{what}: {arrived:?}");
            assert!(arrived[0].starts_with("GET /ok/a\n"), "{what}: {arrived:?}");
            assert!(answer.contains(&format!("HTTP/1.1 {status} ")), "{what}: {answer}");
        }
        world.arrived.borrow_mut().clear();
        exchange(&world, &format!("{first}{}", first.replace("/ok/a", "/ok/b"))).await;
        assert_eq!(world.arrived.borrow().len(), 2, "two requests that the policy allows");
    })
    .await;
}

#[tokio::test]
async fn an_authority_of_another_host_is_misdirected_in_http_2() {
    local(async {
        let world = world().await;
        let ask = async |uri: String, host: Option<&str>| {
            let mut request = world.request(H2, Method::GET, "/ok/a", "");
            *request.uri_mut() = uri.parse().unwrap();
            if let Some(host) = host {
                request.headers_mut().insert(header::HOST, host.parse().unwrap());
            }
            world.ask(H2, request).await.0.as_u16()
        };
        let own = format!("https://{}/ok/a", world.target);
        assert_eq!(ask(own.clone(), None).await, 200);
        assert_eq!(ask("https://evil.io/ok/a".into(), None).await, 421);
        assert_eq!(ask(own, Some("evil.io")).await, 421);
        assert_eq!(ask(format!("https://localhost:{}/ok/a", world.port ^ 1), None).await, 421);
        assert_eq!(world.arrived.borrow().len(), 1);
    })
    .await;
}

#[tokio::test]
async fn no_request_hides_in_another_one() {
    local(async {
        let world = world().await;
        let host = world.target.clone();
        let hidden = format!("GET /hidden HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let len = hidden.len();
        let post = |rest: String| format!("POST /ok/a HTTP/1.1\r\nHost: {host}\r\n{rest}");
        for (what, bytes) in [
            (
                "a length and chunks",
                post(format!(
                    "Content-Length: {}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}",
                    len + 5
                )),
            ),
            (
                "chunks twice",
                post(format!(
                    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
                )),
            ),
            (
                "chunks and another coding",
                post(format!("Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}")),
            ),
            (
                "a coding with odd letters",
                post(format!("Transfer-Encoding: \u{b}chunked\r\nContent-Length: {len}\r\n\r\n{hidden}")),
            ),
            ("two lengths", post(format!("Content-Length: 0\r\nContent-Length: {len}\r\n\r\n{hidden}"))),
            ("a signed length", post(format!("Content-Length: +0\r\n\r\n{hidden}"))),
            ("a folded header", post(format!("X: a\r\n Content-Length: {len}\r\n\r\n{hidden}"))),
            ("a space before a colon", post(format!("Content-Length : {len}\r\n\r\n{hidden}"))),
            ("bare line feeds", format!("POST /ok/a HTTP/1.1\nHost: {host}\n\n{hidden}")),
            ("a bare carriage return", post(format!("X: a\rContent-Length: {len}\r\n\r\n{hidden}"))),
            ("a NUL", post(format!("X: a\0b\r\n\r\n{hidden}"))),
            ("a malformed chunk", post(format!("Transfer-Encoding: chunked\r\n\r\n0 x\r\n\r\n{hidden}"))),
        ] {
            world.arrived.borrow_mut().clear();
            exchange(&world, &bytes).await;
            let arrived = world.arrived.borrow().clone();
            let is_hidden = |request: &String| request.starts_with("GET /hidden");
            assert!(arrived.len() <= 1 && !arrived.iter().any(is_hidden), "{what}: {arrived:?}");
            // Each request that arrives has one reading: hyper wrote it.
            let has_both = |request: &String| {
                request.contains("content-length") && request.contains("transfer-encoding")
            };
            assert!(!arrived.iter().any(has_both), "{what}: {arrived:?}");
        }
        world.arrived.borrow_mut().clear();
        exchange(&world, &post(format!("Content-Length: {len}\r\n\r\n{hidden}"))).await;
        let whole = world.arrived.borrow()[0].clone();
        assert!(whole.contains("GET /hidden"), "as the body of a request it arrives: {whole}");
    })
    .await;
}
