//! Invalid requests: each is refused precisely, in E2B's format, and leaves nothing.

use std::io::Write;

use serde_json::{Value, json};

use crate::{client, server::TestServer, server_test};

server_test! {
    /// Malformed, mistyped and impossible bodies.
    fn bodies_that_make_no_sense_are_refused(pal) {
        let server = TestServer::start(pal);
        let headers = [("X-API-KEY", server.key.as_str())];
        let post = |body: &[u8]| client::ask(server.address, "POST", "/v2/sandboxes", &headers, body).unwrap();
        let large = vec![b' '; 2 << 20];
        let cases: [(&[u8], u16); 14] = [
            (b"", 400),
            (b"{", 400),
            (b"[]", 400),
            (b"\xff\xfe", 400),
            (b"{}", 400),
            (br#"{"templateID":7}"#, 400),
            (br#"{"templateID":"no-such-template"}"#, 404),
            (br#"{"templateID":"host","timeout":-1}"#, 400),
            (br#"{"templateID":"host","timeout":99999999999}"#, 400),
            (br#"{"templateID":"host","metadata":{"a":1}}"#, 400),
            (br#"{"templateID":"host","envVars":{"a=b":"1"}}"#, 400),
            (br#"{"templateID":"host","network":{"denyOut":["nonsense"]}}"#, 400),
            (br#"{"templateID":"host","volumeMounts":[{"name":"a","path":"/a"}]}"#, 501),
            (&large, 413),
        ];
        for (body, status) in cases {
            let refused = post(body).expect(status);
            assert_eq!(refused.json()["code"], status, "{}", refused.text());
            assert!(refused.json()["message"].as_str().is_some_and(|message| !message.is_empty()));
        }
        assert_eq!(server.get("/v2/sandboxes").json(), json!([]));
    }
}

server_test! {
    /// Ids and routes that do not exist.
    fn what_is_not_there_is_not_found(pal) {
        let server = TestServer::start(pal);
        for id in ["nobody", "..", "%2e%2e%2fkey", "A", "%00", "x-y"] {
            for (method, verb, body) in [
                ("GET", "", Value::Null),
                ("DELETE", "", Value::Null),
                ("POST", "/connect", json!({ "timeout": 1 })),
                ("POST", "/pause", json!({})),
                ("POST", "/timeout", json!({ "timeout": 1 })),
                ("POST", "/fork", json!({})),
                ("POST", "/snapshots", json!({})),
                ("GET", "/metrics", Value::Null),
                ("GET", "/logs", Value::Null),
                ("PUT", "/network", json!({})),
            ] {
                let answer = server.ask(method, &format!("/sandboxes/{id}{verb}"), body);
                assert!([404, 405].contains(&answer.status), "{method} {id}{verb}: {}", answer.text());
                assert_eq!(answer.json()["code"], answer.status);
            }
        }
        assert_eq!(server.get("/nowhere").expect(404).json()["code"], 404);
        assert_eq!(server.ask("PATCH", "/v2/sandboxes", Value::Null).expect(405).json()["code"], 405);
        for port in ["49983", "49999", "80"] {
            let answer = client::ask(server.address, "GET", "/health", &[("E2b-Sandbox-Id", "nobody"), ("E2b-Sandbox-Port", port)], b"").unwrap().expect(502);
            assert_eq!(answer.json()["message"], "The sandbox was not found", "{port}");
        }
        for absent in ["/volumes", "/volumes/x", "/secrets"] {
            assert_eq!(server.get(absent).expect(501).json()["error_code"], "not_supported");
        }
    }
}

server_test! {
    /// A chunked body without a length works like any other; an incomplete one changes nothing.
    fn chunked_and_broken_bodies(pal) {
        let server = TestServer::start(pal);
        let head = client::head("POST", "/v2/sandboxes", &[("X-API-KEY", &server.key), ("Connection", "close"), ("Transfer-Encoding", "chunked")]);
        let body = r#"{"templateID":"host"}"#;
        let mut stream = client::dial(server.address);
        for piece in [head.as_str(), "\r\n", &format!("{:x}\r\n{}\r\n", 5, &body[..5]), &format!("{:x}\r\n{}\r\n0\r\n\r\n", body.len() - 5, &body[5..])] {
            stream.write_all(piece.as_bytes()).unwrap();
        }
        client::read(stream).unwrap().expect(201);
        let mut broken = client::dial(server.address);
        broken.write_all(format!("{head}\r\n5\r\n{{\"te").as_bytes()).unwrap();
        broken.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(client::read(broken).unwrap().expect(400).json()["message"], "the request's body broke off");
        for garbage in ["GARBAGE\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "\0\0\0\0\r\n\r\n"] {
            let mut stream = client::dial(server.address);
            stream.write_all(garbage.as_bytes()).unwrap();
            let _ = client::read(stream);
        }
        assert_eq!(server.get("/v2/sandboxes").json().as_array().unwrap().len(), 1);
    }
}
