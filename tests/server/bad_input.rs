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
        let cases: [(&[u8], u16); 16] = [
            (b"", 400),
            (b"{", 400),
            (b"[]", 400),
            (br#"["host"]"#, 400),
            (br#"{"templateID":"host","autoResume":[true]}"#, 400),
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
        assert_eq!(server.get("/v2/sandboxes").json().as_array().unwrap().len(), 1);
    }
}

server_test! {
    /// No route of either API takes an array for an object.
    fn arrays_are_no_objects(pal) {
        let server = TestServer::start(pal);
        let body = server.create(json!({})).id;
        let document = server.get("/openapi.json").expect(200).json();
        let mut routes = vec![
            ("POST".to_owned(), "/sandboxes".to_owned()), ("POST".into(), "/v2/sandboxes".into()), ("POST".into(), "/v2/templates".into()),
            ("POST".into(), "/v3/templates".into()), ("POST".into(), "/templates/tags".into()), ("DELETE".into(), "/templates/tags".into()),
            ("PUT".into(), format!("/sandboxes/{body}/network")),
        ];
        routes.extend(["connect", "resume", "timeout", "refreshes", "pause", "fork", "snapshots"].map(|verb| ("POST".to_owned(), format!("/sandboxes/{body}/{verb}"))));
        for (path, methods) in document["paths"].as_object().unwrap() {
            let of_json = |about: &Value| about["requestBody"]["content"].get("application/json").is_some();
            let methods = methods.as_object().unwrap().iter().filter(|(_, about)| of_json(about));
            routes.extend(methods.map(|(method, _)| (method.to_uppercase(), path.replace("{id}", &body).replace(['{', '}'], ""))));
        }
        assert!(routes.len() > 20, "{routes:?}");
        for (method, path) in routes {
            for array in [json!([]), json!(["x"]), json!(["x", "admin"]), json!([1, 2]), json!([null])] {
                let answer = server.ask(&method, &path, array.clone());
                assert!((400..500).contains(&answer.status), "{method} {path} {array}: {} {}", answer.status, answer.text());
            }
        }
        assert_eq!(server.get("/v2/sandboxes").json().as_array().unwrap().len(), 1);
        assert_eq!(server.get("/v1/keys").expect(200).json()["items"].as_array().unwrap().len(), 1, "no key was made");
    }
}
