//! Network policies over both APIs: their routes, and what keys may ask for.

use serde_json::{Value, json};

use crate::{
    native::{ask_as, create, key},
    server::TestServer,
    server_test,
};

server_test! {
    /// An admin key gives a Body a network; a key of scope `run` may not, until the operator says otherwise.
    fn a_network_needs_the_operator(pal) {
        let server = TestServer::start(pal);
        let network = json!({ "preset": ["models"], "allow": ["db.corp:5432+private"], "rules": [{ "action": "deny", "to": "**.evil.test:*", "why": "ads" }] });
        let id = create(&server, json!({ "network": network }));
        let path = format!("/v1/bodies/{id}/network");
        let shown = server.get(&path).expect(200).json();
        assert_eq!((&shown["in_force"], &shown["generation"], &shown["open"]), (&json!("now"), &json!(0), &json!(0)), "{shown}");
        assert_eq!(shown["rules"][1], json!({ "action": "deny", "to": "**.evil.test:*", "why": "ads" }));
        let more = server.ask("PATCH", &path, json!({ "allow": ["pypi.org:443"] })).expect(200).json();
        assert_eq!((&more["generation"], &more["rules"][0]["to"]), (&json!(1), &json!("pypi.org:443")));
        let none = server.ask("PUT", &path, json!({})).expect(200).json();
        assert_eq!((&none["policy"], &none["rules"], &none["in_force"]), (&json!(true), &json!([]), &json!("now")));
        for bad in [json!({ "allow": ["https://pypi.org"] }), json!({ "preset": ["all"] }), json!({ "preset": vec!["closed"; 9] }), json!({ "allow": vec!["a.test"; 257] }), json!({ "net": [] })] {
            server.ask("PUT", &path, bad.clone()).expect(400);
        }
        let (_, run) = key(&server, json!({ "name": "run", "scope": "run" }));
        let refused = ask_as(&server, &run, "POST", "/v1/bodies", json!({ "network": { "allow": ["pypi.org:443"] } }));
        assert_eq!(refused.status, 403, "{}", refused.text());
        assert!(refused.text().contains("--internet allow"), "{}", refused.text());
        let made = ask_as(&server, &run, "POST", "/v1/bodies", json!({ "network": { "preset": ["closed"] } })).expect(201).json();
        assert_eq!(ask_as(&server, &run, "PATCH", &format!("/v1/bodies/{}/network", made["id"].as_str().unwrap()), json!({ "allow": ["*:*"] })).status, 403);
    }
}

server_test! {
    /// With the operator's leave, keys of scope `run` and clients of E2B have public networks, and change them live.
    fn an_open_server_gives_public_networks(pal) {
        let server = TestServer::start_with(pal, &["--internet", "allow"]);
        let (_, run) = key(&server, json!({ "name": "run", "scope": "run" }));
        let ask = |allow: &str| ask_as(&server, &run, "POST", "/v1/bodies", json!({ "network": { "allow": [allow] } }));
        assert_eq!(ask("pypi.org:443").status, 201);
        for private in ["db.corp:5432+private", "127.0.0.1:80", "10.0.0.0/8", "[::1]"] {
            assert_eq!(ask(private).status, 403, "{private}");
        }
        let rules = |id: &str| -> Vec<Value> {
            let shown = server.get(&format!("/v1/bodies/{id}/network")).expect(200).json();
            assert_eq!(shown["in_force"], "now", "{shown}");
            shown["rules"].as_array().unwrap().iter().map(|rule| rule["to"].clone()).collect()
        };
        let closed = server.create(json!({ "allow_internet_access": false }));
        assert_eq!(rules(&closed.id), Vec::<Value>::new());
        let path = format!("/sandboxes/{}/network", closed.id);
        server.ask("PUT", &path, json!({ "allowOut": ["*.example.com", "1.1.1.1"], "denyOut": ["0.0.0.0/0"] })).expect(204);
        assert_eq!(rules(&closed.id), ["**.example.com:80", "**.example.com:443", "1.1.1.1/32:*"]);
        let usual = server.create(json!({}));
        assert_eq!(rules(&usual.id), ["*:*"]);
    }
}

server_test! {
    /// A key with a ceiling gives its Bodies networks on a closed server, and each connection needs the ceiling, too.
    fn a_ceiling_of_a_key_bounds_the_networks_of_its_bodies(pal) {
        let server = TestServer::start(pal);
        let ceiling = json!({ "preset": ["registries"], "allow": ["localhost:*+private"], "deny": ["localhost:9"] });
        let (_, run) = key(&server, json!({ "name": "run", "scope": "run", "network": ceiling }));
        let keys = server.get("/v1/keys").expect(200).json();
        let shown = keys["items"].as_array().unwrap().iter().find(|key| key["name"] == "run").unwrap();
        assert_eq!(shown["network"][0], json!({ "action": "deny", "to": "localhost:9" }), "{shown}");
        let listed: Value = pal.ok("keys ls --json").lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).find(|key| key["name"] == "run").unwrap();
        assert_eq!(listed["network"][0]["to"], "localhost:9");
        // Wider than the ceiling: it is no mistake, and the ceiling decides.
        let asked = json!({ "network": { "allow": ["*:*+private"] } });
        let made = ask_as(&server, &run, "POST", "/v1/bodies", asked).expect(201).json();
        let id = made["id"].as_str().unwrap();
        let path = format!("/v1/bodies/{id}/network");
        let shown = ask_as(&server, &run, "GET", &path, Value::Null).expect(200).json();
        assert_eq!(shown["ceiling"][0]["to"], "localhost:9", "{shown}");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let reached = std::thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut stream, _) = listener.accept().unwrap();
            let mut text = [0; 64];
            let len = stream.read(&mut text).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK").unwrap();
            String::from_utf8_lossy(&text[..len]).into_owned()
        });
        let fetch = |host: &str, port: u16| {
            let script = format!("exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT {host}:{port} HTTP/1.1\\r\\n\\r\\n' >&3; IFS= read -r line <&3; echo \"$line\"; printf 'GET / HTTP/1.1\\r\\nhost: {host}:{port}\\r\\n\\r\\n' >&3; timeout 10 cat <&3");
            pal.run(["exec", id, "--", "bash", "-c", &script]).out
        };
        let allowed = fetch("localhost", port);
        assert!(allowed.starts_with("HTTP/1.1 200") && allowed.ends_with("OK"), "{allowed}");
        assert!(reached.join().unwrap().starts_with("GET / HTTP/1.1"));
        for (host, port, why) in [("example.com", 443, "no rule names example.com:443"), ("localhost", 9, "the rule `deny localhost:9` denies")] {
            let denied = fetch(host, port);
            assert!(denied.starts_with("HTTP/1.1 403") && denied.contains("the ceiling of the key that owns the Body: ") && denied.contains(why), "{denied}");
        }
        // It holds after a change, a stop and a start, and in a fork; an admin's change is below it, too.
        ask_as(&server, &run, "PATCH", &path, json!({ "allow": ["example.com:443"] })).expect(200);
        server.ask("PATCH", &path, json!({ "allow": ["example.com:443"] })).expect(200);
        pal.ok(&format!("stop --grace 0s {id}"));
        pal.ok(&format!("start {id}"));
        let denied = fetch("example.com", 443);
        assert!(denied.contains("the ceiling of the key"), "{denied}");
        let test = pal.line(&format!("net test {id} example.com:443"));
        assert!(test.code == 1 && test.out.contains("the ceiling of the key") && !test.talk.contains("pal net allow"), "{test:?}");
        assert!(pal.line(&format!("net show {id}")).talk.contains("the ceiling of its key"));
        let fork = ask_as(&server, &run, "POST", &format!("/v1/bodies/{id}/fork"), json!({})).expect(201).json();
        let fork = fork["id"].as_str().or_else(|| fork["items"][0]["id"].as_str()).unwrap().to_owned();
        let shown = ask_as(&server, &run, "GET", &format!("/v1/bodies/{fork}/network"), Value::Null).expect(200).json();
        assert_eq!(shown["ceiling"][0]["to"], "localhost:9", "{shown}");
        // A key that reaches the Body changes nothing there with a ceiling of its own.
        let other = json!({ "name": "other", "scope": "run", "reach": "all", "network": { "allow": ["a.test"] } });
        let (_, other) = key(&server, other);
        assert_eq!(ask_as(&server, &other, "PATCH", &path, json!({ "deny": ["a.test"] })).status, 403);
        // Denials alone give no right to a network.
        let (_, floor) = key(&server, json!({ "name": "floor", "scope": "run", "network": { "deny": ["*:25"] } }));
        let asked = json!({ "network": { "allow": ["example.com"] } });
        assert_eq!(ask_as(&server, &floor, "POST", "/v1/bodies", asked).status, 403);
        for bad in [json!({ "allow": ["https://a.test"] }), json!({ "preset": ["all"] }), json!({ "ask": [] }), json!({ "deny": vec!["a.test"; 257] })] {
            server.ask("POST", "/v1/keys", json!({ "name": "bad", "scope": "run", "network": bad })).expect(400);
        }
        server.ask("POST", "/v1/keys", json!({ "name": "bad", "scope": "admin", "network": { "allow": ["a.test"] } })).expect(400);
    }
}

server_test! {
    /// On a closed server keys connect their own Bodies with each other, and name no Bodies that they do not reach.
    fn keys_connect_bodies_that_they_reach(pal) {
        let server = TestServer::start(pal);
        let (_, one) = key(&server, json!({ "name": "one", "scope": "run" }));
        let (_, two) = key(&server, json!({ "name": "two", "scope": "run" }));
        let make = |key: &str, wanted: Value| ask_as(&server, key, "POST", "/v1/bodies", wanted);
        let db = make(&one, json!({ "name": "db", "network": { "accept": ["app:5432"] } })).expect(201).json();
        let db = db["id"].as_str().unwrap();
        let shown = ask_as(&server, &one, "GET", &format!("/v1/bodies/{db}/network"), Value::Null).expect(200).json();
        assert_eq!((&shown["accept"], &shown["policy"]), (&json!(["app:5432"]), &json!(true)), "{shown}");
        let app = make(&one, json!({ "name": "app", "network": { "allow": ["db.body.internal:5432"] } })).expect(201).json();
        assert_eq!(app["name"], "app");
        let target = format!("{db}.body.internal:5432");
        for network in [json!({ "allow": [target] }), json!({ "rules": [{ "to": target }] }), json!({ "accept": [format!("{db}:1")] })] {
            let refused = make(&two, json!({ "network": network }));
            assert_eq!(refused.status, 404, "{network}: {}", refused.text());
        }
        make(&one, json!({ "network": { "allow": [target] } })).expect(201);
        let path = format!("/v1/bodies/{db}/network");
        let more = ask_as(&server, &one, "PATCH", &path, json!({ "accept": ["web:80"] })).expect(200).json();
        assert_eq!(more["accept"], json!(["app:5432", "web:80"]));
        let none = ask_as(&server, &one, "PUT", &path, json!({})).expect(200).json();
        assert_eq!(none.get("accept"), None, "{none}");
        for bad in [json!({ "accept": ["app"] }), json!({ "accept": ["app:3128"] }), json!({ "accept": vec!["app:1"; 257] })] {
            ask_as(&server, &one, "PUT", &path, bad).expect(400);
        }
    }
}
