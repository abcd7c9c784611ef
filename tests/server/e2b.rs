//! Promises to E2B's clients of several versions, beside the shapes of answers.

use serde_json::{Value, json};

use crate::{
    client,
    server::{Sandbox, TestServer},
    server_test,
};

server_test! {
    /// Clients of version 1 name a sandbox by its id, a dash and the id of a client, in paths, headers and host names.
    fn a_sandbox_is_found_by_the_name_of_version_1(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let client_id = made.said["clientID"].as_str().unwrap();
        let named = Sandbox { id: format!("{}-{client_id}", made.id), ..made.clone() };
        assert_eq!(server.get(&format!("/sandboxes/{}", named.id)).expect(200).json()["sandboxID"], made.id);
        server.envd(&named, "GET", "/health", b"").unwrap().expect(204);
        let host = format!("49983-{}.localhost:{}", named.id, server.address.port());
        client::ask(server.address, "GET", "/health", &[("Host", &host)], b"").unwrap().expect(204);
        server.ask("POST", &format!("/sandboxes/{}/timeout", named.id), json!({ "timeout": 60 })).expect(204);
        let metrics = server.get(&format!("/sandboxes/metrics?sandbox_ids={}", named.id)).expect(200).json();
        assert!(metrics["sandboxes"].get(&named.id).is_some(), "{metrics}");
        server.ask("POST", &format!("/sandboxes/{}/snapshots", named.id), json!({ "name": "mine" })).expect(201);
        assert_eq!(server.get(&format!("/snapshots?sandboxID={}", named.id)).expect(200).json().as_array().unwrap().len(), 1);
        server.ask("DELETE", "/templates/mine", Value::Null).expect(204);
        server.ask("DELETE", &format!("/sandboxes/{}", named.id), Value::Null).expect(204);
        server.get(&format!("/sandboxes/{}", made.id)).expect(404);
    }
}

server_test! {
    /// An egress proxy is refused at create and update, and its password is nowhere.
    fn egress_proxies_are_refused(pal) {
        let server = TestServer::start(pal);
        let proxy = json!({ "address": "proxy.test:1080", "username": "u", "password": "hunter2-of-the-test" });
        let refused = server.ask("POST", "/v2/sandboxes", json!({ "templateID": "host", "network": { "egressProxy": proxy } })).expect(501);
        assert!(refused.json()["error_code"] == "not_supported" && !refused.text().contains("hunter2"), "{}", refused.text());
        assert_eq!(server.get("/v2/sandboxes").json(), json!([]));
        let made = server.create(json!({ "network": { "egressProxy": null, "denyOut": ["10.0.0.0/8"] } }));
        let path = format!("/sandboxes/{}/network", made.id);
        server.ask("PUT", &path, json!({ "egressProxy": proxy })).expect(501);
        server.ask("PUT", &path, json!({ "egressProxy": null })).expect(204);
        assert!(!server.get(&format!("/sandboxes/{}", made.id)).text().contains("egressProxy"));
        assert!(!pal.ok("events --json").contains("hunter2"));
    }
}

server_test! {
    /// A sandbox that does not get the internet access that its client may expect says so in the answer and in its log.
    fn missing_internet_access_is_said(pal) {
        let server = TestServer::start(pal);
        let logs = |made: &Sandbox| {
            let told = server.get(&format!("/v2/sandboxes/{}/logs?level=warn", made.id)).expect(200).json();
            told["logs"].as_array().unwrap().iter().map(|entry| entry["message"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        for wants in [json!({ "allow_internet_access": true }), json!({ "network": { "allowOut": ["pypi.org"] } })] {
            let made = server.create(wants);
            assert_eq!(made.said["allowInternetAccess"], false);
            assert!(made.said["warnings"][0].as_str().unwrap().contains("no internet access"), "{}", made.said);
            assert!(logs(&made).iter().any(|line| line.starts_with("network.denied: internet")), "{:?}", logs(&made));
        }
        let unsaid = server.create(json!({}));
        assert_eq!((unsaid.said["warnings"].as_array().map(Vec::len), logs(&unsaid)), (Some(1), vec![]));
        for refuses in [json!({ "allow_internet_access": false }), json!({ "network": { "denyOut": ["0.0.0.0/0"] } })] {
            let made = server.create(refuses);
            assert!(made.said.get("warnings").is_none() && logs(&made).is_empty(), "{}", made.said);
        }
        server.ask("PUT", &format!("/sandboxes/{}/network", unsaid.id), json!({ "allowOut": ["1.1.1.1"] })).expect(204);
        assert_eq!(logs(&unsaid).len(), 1);
    }
}

server_test! {
    /// Templates of E2B that do not exist here are named as such.
    fn templates_that_are_absent_say_so(pal) {
        let server = TestServer::start(pal);
        for name in ["desktop", "mcp-gateway", "desktop:latest"] {
            let refused = server.ask("POST", "/v2/sandboxes", json!({ "templateID": name })).expect(404).json();
            assert!(refused["message"].as_str().unwrap().contains("does not exist on this server yet"), "{refused}");
        }
        let told = server.get("/templates/aliases/desktop").expect(404).json();
        assert!(told["message"].as_str().unwrap().contains("yet"), "{told}");
    }
}
