//! Start and stop of the server, and other processes on the same data directory.

use serde_json::json;

use crate::{client, server::TestServer, server_test};

server_test! {
    /// The first start creates a key and prints it; later ones do not.
    fn the_first_start_makes_a_key(pal) {
        let server = TestServer::start(pal);
        assert!(server.key.starts_with("e2b_") && server.key.len() == 44, "{}", server.key);
        assert_eq!(server.stop(), Some(0));
        let secret = std::fs::read_to_string(pal.data().join("serve.key")).unwrap();
        for file in ["events.db", "events.db-wal"] {
            let stored = std::fs::read(pal.data().join(file)).unwrap();
            assert!(!stored.windows(40).any(|part| part == &secret.trim().as_bytes()[4..]), "{file} holds the key");
        }
        let again = TestServer::start(pal);
        again.get("/v2/sandboxes").expect(200);
    }
}

server_test! {
    /// A first start that cannot listen creates no key; the next one does, and says where it is.
    fn a_start_on_a_busy_port_makes_no_key(pal) {
        let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = busy.local_addr().unwrap();
        let failed = pal.line(&format!("serve --listen {address}"));
        assert!(failed.code == 125 && failed.talk.contains("cannot listen"), "{failed:?}");
        let file = pal.data().join("serve.key");
        assert!(!file.exists());
        assert_eq!(pal.ok("keys ls --json"), "");
        drop(busy);
        let server = TestServer::start_with(pal, &["--listen", &address.to_string()]);
        assert_eq!(server.told["secret"], server.key.as_str());
        assert_eq!(server.told["secret_file"], file.to_str().unwrap());
    }
}

server_test! {
    /// Without a valid key a client gets only an error in JSON, and the refusal is in the log.
    fn nobody_gets_in_without_a_key(pal) {
        let server = TestServer::start(pal);
        for (method, path) in [("GET", "/v2/sandboxes"), ("POST", "/v2/sandboxes"), ("GET", "/nowhere"), ("DELETE", "/sandboxes/x")] {
            for headers in [vec![], vec![("X-API-KEY", "e2b_0000000000000000000000000000000000000000")], vec![("X-API-KEY", "")]] {
                let refused = client::ask(server.address, method, path, &headers, b"").unwrap().expect(401).json();
                assert_eq!(refused["code"], 401);
                assert!(refused["message"].is_string());
            }
        }
        client::ask(server.address, "GET", "/health", &[], b"").unwrap().expect(204);
        let events = pal.ok("events --json");
        assert!(events.contains("request.denied"), "{events}");
    }
}

server_test! {
    /// Requests with foreign host names or from pages of other sites are refused.
    fn foreign_hosts_and_origins_are_refused(pal) {
        let server = TestServer::start(pal);
        let key = ("X-API-KEY", server.key.as_str());
        let ask = |headers: &[(&str, &str)]| client::ask(server.address, "GET", "/v2/sandboxes", headers, b"").unwrap().status;
        assert_eq!(ask(&[key]), 200);
        assert_eq!(ask(&[key, ("Host", "evil.test")]), 403);
        assert_eq!(ask(&[key, ("Host", "localhost"), ("Origin", "https://evil.test")]), 403);
        assert_eq!(ask(&[key, ("Host", "localhost"), ("Origin", "http://localhost")]), 200);
    }
}

server_test! {
    /// A data directory has one server, and it listens beyond loopback only with --tls or --insecure.
    fn a_second_server_and_an_open_address_are_refused(pal) {
        let server = TestServer::start(pal);
        let second = pal.line("serve --listen 127.0.0.1:0");
        assert_eq!(second.code, 122, "{second:?}");
        assert!(second.talk.contains(&format!("at http://{}", server.address)), "{second:?}");
        drop(server);
        let open = pal.line("serve --listen 0.0.0.0:0");
        assert_eq!(open.code, 123, "{open:?}");
        let insisting = TestServer::start_with(pal, &["--listen", "0.0.0.0:0", "--insecure"]);
        assert_eq!(insisting.stop(), Some(0));
    }
}

server_test! {
    /// `pal` and the server see each other's changes.
    fn pal_and_the_server_see_the_same_bodies(pal) {
        let server = TestServer::start(pal);
        let made = pal.ok("create");
        let listed = server.get("/v2/sandboxes").expect(200).json();
        assert_eq!(listed[0]["sandboxID"], made.as_str());
        let sandbox = server.create(json!({}));
        assert!(pal.ok("ls").contains(&sandbox.id));
        pal.ok(&format!("pause {}", sandbox.id));
        assert_eq!(server.state(&sandbox).as_deref(), Some("paused"));
        assert_eq!(server.envd(&sandbox, "GET", "/health", b"").unwrap().status, 502);
        pal.ok(&format!("resume {}", sandbox.id));
        assert_eq!(server.state(&sandbox).as_deref(), Some("running"));
        server.write(&sandbox, "from-outside", "hello").unwrap().expect(200);
        assert_eq!(pal.ok(&format!("exec {} -- cat from-outside", sandbox.id)), "hello");
        pal.ok(&format!("rm --force {}", sandbox.id));
        assert_eq!(server.state(&sandbox), None);
        server.ask("DELETE", &format!("/sandboxes/{made}"), serde_json::Value::Null).expect(204);
        assert_eq!(pal.line(&format!("inspect {made}")).code, 121);
    }
}

server_test! {
    /// A killed server takes nothing with it; the next one finds everything.
    fn a_killed_server_loses_nothing(pal) {
        let server = TestServer::start(pal);
        let (runs, sleeps) = (server.create(json!({ "metadata": { "a": "b" } })), server.create(json!({})));
        server.write(&runs, "kept", "1").unwrap().expect(200);
        let line = "sleep 4321";
        std::thread::scope(|scope| {
            scope.spawn(|| server.run(&runs, line));
            testkit::wait::blocking(std::time::Duration::from_secs(10), "it runs", || server.processes(&runs).iter().any(|args| args.contains(line)).then_some(()));
            server.ask("POST", &format!("/sandboxes/{}/pause", sleeps.id), json!({})).expect(204);
            rustix::process::kill_process(rustix::process::Pid::from_raw(pid_of(pal)).unwrap(), rustix::process::Signal::KILL).unwrap();
        });
        server.kill();
        let server = TestServer::start(pal);
        assert_eq!(server.get(&format!("/sandboxes/{}", runs.id)).expect(200).json()["metadata"]["a"], "b");
        assert_eq!(server.read(&runs, "kept").unwrap().text(), "1");
        assert!(server.processes(&runs).iter().any(|args| args.contains(line)));
        assert_eq!(server.state(&sleeps).as_deref(), Some("paused"));
        server.ask("POST", &format!("/v2/sandboxes/{}/connect", sleeps.id), json!({})).expect(201);
        assert_eq!(server.state(&sleeps).as_deref(), Some("running"));
        server.sweep(pal);
    }
}

fn pid_of(pal: &crate::pal::Pal) -> i32 {
    let said: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(pal.data().join("serve.lock")).unwrap()).unwrap();
    i32::try_from(said["pid"].as_i64().unwrap()).unwrap()
}
