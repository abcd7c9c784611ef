//! Requests that are refused early, and connections: what a client is told, and what it can do next.

use std::{io::Write, net::TcpStream, time::Duration};

use serde_json::json;
use testkit::wait;

use crate::{
    client::{self, HttpAnswer},
    server::TestServer,
    server_test,
};

/// Sends raw bytes, and reads the answer to the end of the connection.
fn send(server: &TestServer, bytes: &str) -> HttpAnswer {
    let mut stream = client::dial(server.address);
    // A server that refuses a request early need not read all of it.
    let _ = stream.write_all(bytes.as_bytes());
    client::read(stream).unwrap()
}

server_test! {
    /// A request whose headers name two targets is refused; with one of each it is answered.
    fn requests_with_two_targets_are_refused(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let id = format!("E2b-Sandbox-Id: {}\r\n", made.id);
        let (host, port, end) = ("Host: 127.0.0.1\r\n", "E2b-Sandbox-Port: 49983\r\n", "Connection: close\r\n\r\n");
        send(&server, &format!("GET /health HTTP/1.1\r\n{host}{id}{port}{end}")).expect(204);
        for twice in [[host, host, &id, port], [host, &id, &id, port], [host, &id, port, port], [host, host, "", ""]] {
            let refused = send(&server, &format!("GET /health HTTP/1.1\r\n{}{end}", twice.concat())).expect(400);
            assert!(refused.json()["message"].as_str().unwrap().contains("more than one"), "{}", refused.text());
        }
    }
}

server_test! {
    /// Refusals of hyper itself have a body in JSON, also while the client is still sending.
    fn every_refusal_has_a_body(pal) {
        let server = TestServer::start(pal);
        let many: String = (0..129).map(|n| format!("X-{n}: x\r\n")).collect();
        let cases = [
            ("GARBAGE\r\n\r\n".to_owned(), 400),
            ("GET / HTTP/9.9\r\n\r\n".to_owned(), 400),
            ("GET / HTTP/1.1\r\nno colon\r\n\r\n".to_owned(), 400),
            (format!("GET /{} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "x".repeat(70_000)), 414),
            (format!("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{many}\r\n"), 431),
            (format!("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nX: {}\r\n\r\n", "x".repeat(300 << 10)), 431),
            (format!("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nX: {}\r\n\r\n", "x".repeat(3 << 20)), 431),
        ];
        for (request, status) in cases {
            let refused = send(&server, &request).expect(status).json();
            assert_eq!((&refused["code"], &refused["status"], &refused["kind"]), (&json!(status), &json!(status), &json!("usage")));
            assert!(refused["message"].is_string() && refused["hints"].is_array(), "{refused}");
        }
        let most: String = (0..120).map(|n| format!("X-{n}: x\r\n")).collect();
        let long = format!("X: {}\r\n", "x".repeat(200 << 10));
        for head in [most, long] {
            send(&server, &format!("GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}Connection: close\r\n\r\n")).expect(204);
        }
    }
}

/// Sends a request with a body that the server does not want, and returns the answer with its connection.
fn send_unwanted(
    server: &TestServer,
    path: &str,
    more: &[(&str, &str)],
    body: &[u8],
) -> (TcpStream, HttpAnswer) {
    let mut stream = client::dial(server.address);
    let head = client::head("POST", path, more);
    stream.write_all(format!("{head}Content-Length: {}\r\n\r\n", body.len()).as_bytes()).unwrap();
    let _ = stream.write_all(body);
    let answer = client::read_next(&mut stream).unwrap();
    (stream, answer)
}

server_test! {
    /// After an early refusal a connection goes on if the rest of the request is short, and says that it ends if not.
    fn an_early_refusal_leaves_nothing_in_the_connection(pal) {
        let server = TestServer::start(pal);
        let key = ("X-API-KEY", server.key.as_str());
        for (path, headers, status) in [("/v2/sandboxes", &[][..], 401), ("/v1/bodies", &[], 401), ("/nowhere", &[key], 404), ("/v1/nowhere", &[key], 404)] {
            let (mut stream, refused) = send_unwanted(&server, path, headers, &[b'x'; 200 << 10]);
            assert_eq!((refused.status, refused.header("connection")), (status, None), "{path}: {}", refused.text());
            stream.write_all(client::head("GET", "/health", &[]).as_bytes()).unwrap();
            stream.write_all(b"\r\n").unwrap();
            assert_eq!(client::read_next(&mut stream).unwrap().status, 204, "{path}: the connection goes on");
            let (_stream, refused) = send_unwanted(&server, path, headers, &vec![b'x'; 3 << 20]);
            assert_eq!((refused.status, refused.header("connection")), (status, Some("close")), "{path}");
        }
        let mut waiting = client::dial(server.address);
        let head = client::head("POST", "/v2/sandboxes", &[("Expect", "100-continue"), ("Content-Length", "10")]);
        waiting.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        let refused = client::read_next(&mut waiting).unwrap();
        assert_eq!((refused.status, refused.header("connection")), (401, Some("close")), "no body is asked for");
    }
}

server_test! {
    /// A request to the guest without its token is told so, however long it is.
    fn unauthenticated_requests_to_the_guest_are_told_so(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        for len in [2, 100 << 10, 4 << 20] {
            for (path, kind) in [
                ("/process.Process/Start", "application/connect+json"), ("/process.Process/List", "application/json"),
                ("/filesystem.Filesystem/Stat", "application/json"), ("/files?path=a", "application/octet-stream"),
            ] {
                for _ in 0..4 {
                    let headers = [("Content-Type", kind), ("X-Access-Token", "wrong")];
                    let refused = server.port(&made, 49983, "POST", path, &headers, &vec![b'x'; len]).unwrap();
                    assert_eq!(refused.status, 401, "{path} with {len} bytes: {}", refused.text());
                    assert_eq!(refused.json()["code"], 401);
                }
            }
        }
    }
}

server_test! {
    /// One address has its share of connections; one more is refused, and one that ends makes room.
    fn connections_of_one_address_are_bounded(pal) {
        let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--max-peer-connections", "8"]);
        let mut held: Vec<TcpStream> = (0..8).map(|_| client::dial(server.address)).collect();
        let look = || Some(client::ask(server.address, "GET", "/health", &[], b"").ok()?.status);
        let refused = wait::blocking(Duration::from_secs(10), "it is refused", || {
            let answer = client::ask(server.address, "GET", "/health", &[], b"").ok()?;
            (answer.status != 204).then_some(answer)
        });
        let refused = refused.expect(429);
        assert_eq!((refused.header("retry-after"), &refused.json()["kind"]), (Some("1"), &json!("limit")));
        held.pop();
        wait::blocking(Duration::from_secs(10), "there is room again", || (look() == Some(204)).then_some(()));
        drop(held);
        let counted = |text: String| text.lines().any(|line| line.starts_with("pal_refused_total{limit=\"connections\"} "));
        wait::blocking(Duration::from_secs(10), "it is counted", || counted(server.try_ask("GET", "/metrics", &json!(null)).ok()?.text()).then_some(()));
    }
}
