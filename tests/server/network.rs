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
