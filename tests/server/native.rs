//! The native API: answers, refusals, and how clients continue after a break.

use std::io::{BufRead, BufReader, Write};

use serde_json::{Value, json};

use crate::{client, server::TestServer, server_test};

/// Creates a Body through the native API.
pub fn create(server: &TestServer, wanted: Value) -> String {
    server.ask("POST", "/v1/bodies", wanted).expect(201).json()["id"].as_str().unwrap().to_owned()
}

/// Creates a key of a scope; returns its secret.
pub fn key(server: &TestServer, wanted: Value) -> (String, String) {
    let made = server.ask("POST", "/v1/keys", wanted).expect(201).json();
    (made["id"].as_str().unwrap().into(), made["secret"].as_str().unwrap().into())
}

/// Sends a request with another key than the first.
pub fn ask_as(
    server: &TestServer,
    secret: &str,
    method: &str,
    path: &str,
    body: Value,
) -> client::HttpAnswer {
    let bearer = format!("Bearer {secret}");
    let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    client::ask(
        server.address,
        method,
        path,
        &[("Authorization", &bearer), ("Content-Type", "application/json")],
        &body,
    )
    .unwrap()
}

server_test! {
    /// serde would take the fields of a struct from an array; the API's description allows objects alone.
    fn an_array_is_no_request(pal) {
        let server = TestServer::start(pal);
        let refused = |path: &str, body: Value| assert_eq!(server.ask("POST", path, body).expect(400).json()["kind"], "usage");
        for path in ["/v1/gc", "/v1/bodies", "/v1/keys"] {
            refused(path, json!([]));
        }
        refused("/v1/bodies", json!({ "limits": [] }));
        refused("/v1/bodies", json!({ "mounts": [["/usr", "/mnt/usr"]] }));
        server.ask("POST", "/v1/gc", json!({})).expect(200);
        create(&server, json!({ "limits": {}, "mounts": [{ "source": "/usr", "target": "/mnt/usr" }] }));
    }
}

server_test! {
    /// The routes behave as `pal ps`, `pal limit` and `pal suspend` do.
    fn a_running_body_shows_its_processes_and_takes_other_limits(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({ "name": "web" }));
        server.ask("POST", "/v1/bodies/web/exec", json!({ "argv": ["sh", "-c", "setsid sleep 4321 >/dev/null 2>&1 &"] })).expect(200);
        let list = server.get("/v1/bodies/web/processes").expect(200).json();
        let is_sleeper = |process: &Value| process["command"].as_array().is_some_and(|command| command.contains(&json!("4321")));
        assert!(list["items"].as_array().unwrap().iter().any(is_sleeper), "{list}");
        assert_eq!(list["left_out"], 0);

        let path = format!("/v1/bodies/{id}/limits");
        let changed = server.ask("PATCH", &path, json!({ "pids": 1234, "wall_ms": 3_600_000 })).expect(200).json();
        assert_eq!((&changed["body"]["limits"]["pids"], &changed["body"]["limits"]["wall_ms"]), (&json!(1234), &json!(3_600_000)), "{changed}");
        assert_eq!(server.get("/v1/bodies/web").expect(200).json()["limits"]["pids"], 1234, "it is kept");
        for bad in [json!({}), json!({ "files": 64 }), json!({ "memory_bytes": 1 }), json!({ "wall_ms": 1u64 << 63 }), json!([1])] {
            server.ask("PATCH", &path, bad).expect(400);
        }
        let said = server.ask("POST", "/v1/bodies/web/suspend", Value::Null).json();
        assert!(said["message"].as_str().unwrap().contains("memory"), "only a microVM can be suspended: {said}");
    }
}

server_test! {
    /// `/` says what this is, as a page or as JSON; on loopback the API's description needs no key.
    fn the_first_page_leads_on(pal) {
        let server = TestServer::start(pal);
        let get = |path: &str, accept: &str| client::ask(server.address, "GET", path, &[("Accept", accept)], b"").unwrap().expect(200);
        let page = get("/", "text/html,application/xhtml+xml,*/*;q=0.8");
        assert!(page.header("content-type").unwrap().starts_with("text/html"));
        assert!(page.text().contains("Palisade") && page.text().contains("href=\"/openapi.json\""));
        let said = get("/", "*/*").json();
        assert_eq!((&said["name"], &said["openapi"]), (&json!("Palisade"), &json!("/openapi.json")));
        let document = get("/openapi.json", "*/*").json();
        assert_eq!(document["info"]["title"], "Palisade");
        assert_eq!(client::ask(server.address, "GET", "/v1/version", &[], b"").unwrap().status, 401, "the routes still need one");
        drop(server);
        // Other hosts may reach this one.
        let server = TestServer::start_with(pal, &["--listen", "0.0.0.0:0", "--insecure"]);
        let address = (std::net::Ipv4Addr::LOCALHOST, server.address.port()).into();
        let status = |headers: &[(&str, &str)]| client::ask(address, "GET", "/openapi.json", headers, b"").unwrap().status;
        assert_eq!((status(&[]), status(&[("X-API-KEY", &server.key)])), (401, 200));
    }
}

server_test! {
    /// The whole life of a Body.
    fn a_body_lives_and_ends(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({ "metadata": { "a": "b" }, "env": { "SECRET": "value" } }));
        let body = server.get(&format!("/v1/bodies/{id}")).expect(200).json();
        assert_eq!((&body["status"], &body["metadata"], &body["env"]), (&json!("running"), &json!({ "a": "b" }), &json!(["SECRET"])));
        assert_eq!(body["ports"], "private");
        let exec = |argv: Value| server.ask("POST", &format!("/v1/bodies/{id}/exec"), argv);
        let ran = exec(json!({ "argv": ["sh", "-c", "cat; echo $SECRET >&2; exit 3"], "stdin": "in" })).expect(200).json();
        assert_eq!((&ran["code"], &ran["stdout"], &ran["stderr"]), (&json!(3), &json!("in"), &json!("value\n")));
        for (verb, status) in [("pause", "paused"), ("resume", "running"), ("stop", "stopped"), ("start", "running")] {
            assert_eq!(server.ask("POST", &format!("/v1/bodies/{id}/{verb}"), Value::Null).expect(200).json()["status"], status);
        }
        let forks = server.ask("POST", &format!("/v1/bodies/{id}/fork"), json!({ "count": 2 })).expect(201).json();
        for fork in forks["items"].as_array().unwrap() {
            assert_eq!(fork["parent"], id.as_str());
            assert_ne!(fork["traffic_token"], body["traffic_token"]);
            server.ask("DELETE", &format!("/v1/bodies/{}?force=true", fork["id"].as_str().unwrap()), Value::Null).expect(204);
        }
        let snapshot = server.ask("POST", &format!("/v1/bodies/{id}/snapshot"), json!({ "name": "kept" })).expect(201).json();
        assert_eq!(server.get("/v1/snapshots/kept").expect(200).json()["id"], snapshot["id"]);
        assert!(server.get("/v1/templates").expect(200).text().contains("kept"));
        server.ask("DELETE", &format!("/v1/bodies/{id}"), Value::Null).expect(409);
        server.ask("DELETE", &format!("/v1/bodies/{id}?force=true"), Value::Null).expect(204);
        server.ask("DELETE", "/v1/snapshots/kept", Value::Null).expect(204);
        let gone = server.get(&format!("/v1/bodies/{id}")).expect(404).json();
        assert_eq!((&gone["kind"], &gone["status"]), (&json!("not_found"), &json!(404)));
        assert!(!gone["hints"].as_array().unwrap().is_empty());
    }
}

server_test! {
    /// A name is taken wherever an id is, and means nothing to a key that does not see its Body.
    fn a_name_stands_for_an_id_in_every_path(pal) {
        let server = TestServer::start(pal);
        let (_, secret) = key(&server, json!({ "name": "mine", "scope": "run" }));
        let mine = |method: &str, path: &str, body: Value| ask_as(&server, &secret, method, path, body);
        let id = mine("POST", "/v1/bodies", json!({ "name": "my-web" })).expect(201).json()["id"].clone();
        let body = mine("GET", "/v1/bodies/my-web", Value::Null).expect(200).json();
        assert_eq!((&body["id"], &body["name"]), (&id, &json!("my-web")));
        let ran = mine("POST", "/v1/bodies/my-web/exec", json!({ "argv": ["echo", "hello"] })).expect(200).json();
        assert_eq!(ran["stdout"], "hello\n");
        mine("PUT", "/v1/bodies/my-web/files?path=/home/user/x", Value::Null).expect(204);
        assert!(mine("GET", "/v1/events?body=my-web", Value::Null).expect(200).text().contains("exec.started"));
        let forks = mine("POST", "/v1/bodies/my-web/fork", json!({ "count": 2, "name": "twin" })).expect(201).json();
        assert_eq!((&forks["items"][0]["name"], &forks["items"][1]["name"]), (&json!("twin-1"), &json!("twin-2")));
        // Another key neither finds the Body, nor its id, nor gets the name.
        let (_, other) = key(&server, json!({ "name": "other", "scope": "run" }));
        for path in ["/v1/bodies/my-web", "/v1/bodies/twin-1/logs", "/v1/events?body=my-web"] {
            let refused = ask_as(&server, &other, "GET", path, Value::Null).expect(404).text();
            assert!(!refused.contains(id.as_str().unwrap()), "{refused}");
        }
        let taken = ask_as(&server, &other, "POST", "/v1/bodies", json!({ "name": "my-web" })).expect(409).text();
        assert!(!taken.contains(id.as_str().unwrap()), "{taken}");
        for odd in ["My", "-a", "a_b", ""] {
            assert_eq!(mine("POST", "/v1/bodies", json!({ "name": odd })).expect(400).json()["kind"], "usage", "{odd}");
        }
        for name in ["my-web", "twin-1", "twin-2"] {
            mine("DELETE", &format!("/v1/bodies/{name}?force=true"), Value::Null).expect(204);
        }
        mine("GET", "/v1/bodies/my-web", Value::Null).expect(404);
    }
}

server_test! {
    /// A repeated request creates one Body, also after a restart.
    fn a_repeated_request_makes_one_body(pal) {
        let server = TestServer::start(pal);
        let again = |server: &TestServer| {
            let headers = [("X-API-KEY", server.key.as_str()), ("Idempotency-Key", "once-1")];
            let answer = client::ask(server.address, "POST", "/v1/bodies", &headers, b"").unwrap();
            (answer.status, answer.json()["id"].clone())
        };
        let (status, first) = again(&server);
        assert_eq!(status, 201);
        assert_eq!(again(&server), (200, first.clone()));
        // Another request under the same key is a mistake, and is never answered with the first one's result.
        let headers = [("X-API-KEY", server.key.as_str()), ("Idempotency-Key", "once-1"), ("Content-Type", "application/json")];
        let other = client::ask(server.address, "POST", "/v1/bodies", &headers, br#"{"limits":{"pids":117802061}}"#).unwrap();
        assert_eq!(other.status, 409, "{}", other.text());
        // An idempotency key belongs to one caller, for both APIs.
        let sandbox = json!({ "templateID": "host", "timeout": 300 }).to_string();
        let elsewhere = client::ask(server.address, "POST", "/v2/sandboxes", &headers, sandbox.as_bytes()).unwrap();
        assert_eq!(elsewhere.status, 422, "{}", elsewhere.text());
        server.kill();
        let server = TestServer::start(pal);
        assert_eq!(again(&server), (200, first));
        assert_eq!(server.get("/v1/bodies").json()["items"].as_array().unwrap().len(), 1);
    }
}

server_test! {
    /// Lists have pages that hold everything once.
    fn lists_come_in_pages(pal) {
        let server = TestServer::start(pal);
        let made: Vec<String> = (0..3).map(|_| create(&server, json!({}))).collect();
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = server.get(&format!("/v1/bodies?limit=2{cursor}")).expect(200).json();
            seen.extend(page["items"].as_array().unwrap().iter().map(|body| body["id"].as_str().unwrap().to_owned()));
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(seen, made);
        for odd in ["limit=0", "limit=1001", "limit=x", "cursor=%21", "unknown=1"] {
            assert_eq!(server.get(&format!("/v1/bodies?{odd}")).expect(400).json()["kind"], "usage", "{odd}");
        }
    }
}

server_test! {
    /// Files are uploaded and downloaded unchanged.
    fn files_go_up_and_down(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let path = format!("/v1/bodies/{id}/files?path=/home/user/a%20dir/file");
        let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n * 7 % 251) as u8).collect();
        let put = client::ask(server.address, "PUT", &path, &[("X-API-KEY", &server.key)], &bytes).unwrap();
        put.expect(204);
        let got = server.get(&path).expect(200);
        assert!(got.body == bytes && got.whole);
        assert_eq!(server.get(&format!("/v1/bodies/{id}/files?path=/no/such")).expect(404).json()["kind"], "not_found");
        assert_eq!(server.get(&format!("/v1/bodies/{id}/files?path=/etc")).expect(400).json()["kind"], "usage");
    }
}

server_test! {
    /// Bodies of one key do not exist for another, and a scope limits a key.
    fn keys_keep_to_their_bodies_and_scopes(pal) {
        let server = TestServer::start(pal);
        let (_, other) = key(&server, json!({ "name": "other", "scope": "run" }));
        let (reader_id, reader) = key(&server, json!({ "name": "reader", "scope": "read" }));
        let id = create(&server, json!({}));
        for (method, path) in [("GET", ""), ("POST", "/pause"), ("DELETE", "?force=true"), ("GET", "/logs"), ("GET", "/terminals")] {
            let answer = ask_as(&server, &other, method, &format!("/v1/bodies/{id}{path}"), Value::Null);
            assert_eq!(answer.status, 404, "{method} {path}: {}", answer.text());
        }
        assert_eq!(ask_as(&server, &other, "GET", "/v1/bodies", Value::Null).json()["items"], json!([]));
        assert_eq!(ask_as(&server, &other, "GET", "/v1/events", Value::Null).status, 403);
        assert_eq!(ask_as(&server, &other, "GET", "/v1/keys", Value::Null).status, 403);
        assert_eq!(ask_as(&server, &reader, "POST", "/v1/bodies", json!({})).status, 403);
        assert_eq!(ask_as(&server, &reader, "GET", "/v1/bodies", Value::Null).status, 200);
        assert_eq!(ask_as(&server, "e2b_nobody", "GET", "/v1/bodies", Value::Null).status, 401);
        assert_eq!(ask_as(&server, &other, "POST", "/v1/bodies", json!({ "mounts": [{ "source": "/etc", "target": "/mnt/x" }] })).status, 403);
        server.ask("DELETE", &format!("/v1/keys/{reader_id}"), Value::Null).expect(204);
        assert_eq!(ask_as(&server, &reader, "GET", "/v1/bodies", Value::Null).status, 401, "a revoked key is worthless at once");
        let events = server.get("/v1/events?limit=1000").expect(200).json();
        let of = |kind: &str| events["items"].as_array().unwrap().iter().filter(|event| event["type"] == kind).count();
        assert!(of("request.accepted") > 0 && of("request.denied") > 0, "{events}");
    }
}

server_test! {
    /// Snapshots belong to the key of their Body, in both APIs, also after that Body was removed.
    fn snapshots_of_one_key_are_not_there_for_another(pal) {
        let server = TestServer::start(pal);
        let (_, one) = key(&server, json!({ "name": "one" }));
        let (_, other) = key(&server, json!({ "name": "other" }));
        let body = ask_as(&server, &one, "POST", "/v1/bodies", json!({})).expect(201).json()["id"].as_str().unwrap().to_owned();
        let taken = ask_as(&server, &one, "POST", &format!("/v1/bodies/{body}/snapshot"), json!({ "name": "mine" })).expect(201).json();
        let id = taken["id"].as_str().unwrap();
        let names = ["mine", "mine:default", id, &id[..8]];
        let make = |secret: &str, name: &str| {
            let native = ask_as(&server, secret, "POST", "/v1/bodies", json!({ "template": name }));
            let e2b = ask_as(&server, secret, "POST", "/v2/sandboxes", json!({ "templateID": name }));
            if let (201, 201) = (native.status, e2b.status) {
                for made in [native.json()["id"].as_str().unwrap(), e2b.json()["sandboxID"].as_str().unwrap()] {
                    ask_as(&server, secret, "DELETE", &format!("/v1/bodies/{made}?force=true"), Value::Null).expect(204);
                }
            }
            (native.status, e2b.status)
        };
        let lists = |secret: &str| ["/v1/snapshots", "/v1/templates", "/snapshots", "/templates"].map(|path| ask_as(&server, secret, "GET", path, Value::Null).expect(200).text().contains("mine"));
        for gone in [false, true] {
            // Its owner sees it, which is the control for the checks below.
            assert_eq!((lists(&one), make(&one, "mine")), ([true; 4], (201, 201)), "{gone}");
            ask_as(&server, &one, "GET", "/templates/aliases/mine", Value::Null).expect(200);
            assert_eq!(lists(&other), [false; 4], "{gone}");
            for name in names {
                assert_eq!(make(&other, name), (404, 404), "{name} {gone}");
            }
            for (method, path) in [("GET", "/v1/snapshots/mine"), ("DELETE", "/v1/snapshots/mine"), ("GET", "/templates/aliases/mine"), ("DELETE", "/templates/mine"), ("DELETE", "/templates/mine:default")] {
                ask_as(&server, &other, method, path, Value::Null).expect(404);
            }
            if !gone {
                ask_as(&server, &one, "DELETE", &format!("/v1/bodies/{body}?force=true"), Value::Null).expect(204);
            }
        }
        ask_as(&server, &one, "DELETE", "/templates/mine:default", Value::Null).expect(204);
        assert_eq!(lists(&one), [false; 4]);
    }
}

server_test! {
    /// A client that lost its connection continues to follow events without a gap.
    fn events_go_on_where_they_were_left(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let head = |more: &[(&str, &str)]| {
            let headers: Vec<(&str, &str)> = [("X-API-KEY", server.key.as_str())].into_iter().chain(more.iter().copied()).collect();
            client::head("GET", &format!("/v1/events/stream?body={id}"), &headers)
        };
        let follow = |more: &[(&str, &str)]| {
            let mut stream = client::dial(server.address);
            stream.write_all(format!("{}\r\n", head(more)).as_bytes()).unwrap();
            BufReader::new(stream)
        };
        let events = |stream: &mut BufReader<std::net::TcpStream>, count: usize| {
            let mut seen = Vec::new();
            while seen.len() < count {
                let mut line = String::new();
                assert_ne!(stream.read_line(&mut line).unwrap(), 0, "the stream ended");
                if let Some(data) = line.strip_prefix("data: ") {
                    seen.push(serde_json::from_str::<Value>(data).unwrap());
                }
            }
            seen
        };
        let first = events(&mut follow(&[("Last-Event-ID", "0")]), 2);
        assert_eq!(first[0]["type"], "body.created");
        let last = first[1]["pos"].to_string();
        let mut live = follow(&[("Last-Event-ID", &last)]);
        server.ask("POST", &format!("/v1/bodies/{id}/exec"), json!({ "argv": ["true"] })).expect(200);
        let next = events(&mut live, 2);
        assert_eq!((&next[0]["type"], &next[1]["type"]), (&json!("exec.started"), &json!("exec.ended")));
        assert!(next[0]["pos"].as_u64() > first[1]["pos"].as_u64());
        assert_eq!(server.ask("POST", "/v1/events/verify", Value::Null).expect(200).json()["whole"], true);
    }
}

server_test! {
    /// The output of a command is streamed while it runs.
    fn a_stream_tells_of_a_command_as_it_runs(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let headers = [("X-API-KEY", server.key.as_str()), ("Content-Type", "application/json"), ("Accept", "text/event-stream")];
        let body = json!({ "argv": ["sh", "-c", "echo one; echo two >&2; exit 4"] }).to_string();
        let said = client::ask(server.address, "POST", &format!("/v1/bodies/{id}/exec"), &headers, body.as_bytes()).unwrap().expect(200).text();
        let kinds: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
        assert_eq!((kinds.first(), kinds.last()), (Some(&"started"), Some(&"ended")), "{said}");
        assert!(kinds.contains(&"stdout") && kinds.contains(&"stderr") && said.contains("\"code\":4"), "{said}");
    }
}

server_test! {
    /// Invalid requests have one form of error body.
    fn nonsense_is_refused_in_one_error_body(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let raw = |method: &str, path: &str, kind: &str, body: &[u8]| {
            client::ask(server.address, method, path, &[("X-API-KEY", &server.key), ("Content-Type", kind)], body).unwrap()
        };
        let exec = format!("/v1/bodies/{id}/exec");
        let large = vec![b' '; (1 << 20) + 1];
        let cases: [(&str, &str, &str, &[u8], u16); 14] = [
            ("POST", "/v1/bodies", "application/json", b"{", 400),
            ("POST", "/v1/bodies", "application/json", b"[]", 400),
            ("POST", "/v1/bodies", "application/json", br#"{"unknown":1}"#, 400),
            ("POST", "/v1/bodies", "application/json", br#"{"template":"no-such"}"#, 404),
            ("POST", "/v1/bodies", "application/json", br#"{"limits":{"memory_bytes":1}}"#, 400),
            ("POST", "/v1/bodies", "application/json", br#"{"layer":"wasm"}"#, 400),
            ("POST", "/v1/bodies", "application/json", br#"{"layer":"microvm"}"#, 409),
            ("POST", "/v1/bodies", "text/plain", b"{}", 415),
            ("POST", "/v1/bodies", "application/json", &large, 413),
            ("POST", &exec, "application/json", br#"{"argv":[]}"#, 400),
            ("POST", &exec, "application/json", br#"{"argv":["no-such-command"]}"#, 422),
            ("GET", "/v1/bodies/nobody", "application/json", b"", 404),
            ("GET", "/v1/nowhere", "application/json", b"", 404),
            ("PATCH", "/v1/bodies", "application/json", b"", 405),
        ];
        for (method, path, kind, body, status) in cases {
            let answer = raw(method, path, kind, body).expect(status);
            let said = answer.json();
            assert_eq!(said["status"], status, "{said}");
            assert!(said["message"].as_str().is_some_and(|message| !message.is_empty()) && said["hints"].is_array(), "{said}");
        }
        assert_eq!(server.get("/v1/bodies").json()["items"].as_array().unwrap().len(), 1);
    }
}
