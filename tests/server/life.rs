//! The life cycle of a sandbox.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{
    client,
    server::{TestServer, sandbox},
    server_test,
};

server_test! {
    /// Created, read, listed, ended; the second end finds nothing.
    fn a_sandbox_is_made_looked_at_and_ended(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({ "metadata": { "who": "me" }, "envVars": { "A": "b" } }));
        for name in ["templateID", "sandboxID", "clientID", "envdVersion", "envdAccessToken", "domain"] {
            assert!(made.said[name].is_string(), "{name}: {}", made.said);
        }
        let info = server.get(&format!("/sandboxes/{}", made.id)).expect(200).json();
        assert_eq!((info["state"].as_str(), info["metadata"]["who"].as_str()), (Some("running"), Some("me")));
        assert_eq!(info["lifecycle"], json!({ "autoResume": false, "onTimeout": "kill" }));
        for name in ["cpuCount", "memoryMB", "diskSizeMB"] {
            assert!(info[name].as_u64().is_some_and(|number| number > 0), "{info}");
        }
        assert!(server.run(&made, "echo $A").unwrap().text().contains("Ygo"), "the base64 of b and a newline");
        server.ask("DELETE", &format!("/sandboxes/{}", made.id), Value::Null).expect(204);
        let again = server.ask("DELETE", &format!("/sandboxes/{}", made.id), Value::Null).expect(404).json();
        assert_eq!(again["code"], 404);
    }
}

server_test! {
    /// At its deadline a sandbox is ended or paused, as requested; an extended one stays.
    fn deadlines_are_met(pal) {
        let server = TestServer::start(pal);
        let begun = Instant::now();
        let (killed, paused) = (server.create(json!({ "timeout": 1 })), server.create(json!({ "timeout": 1, "autoPause": true })));
        let (files, extended) = (server.create(json!({ "timeout": 1, "autoPause": true, "autoPauseMemory": false })), server.create(json!({ "timeout": 1 })));
        server.ask("POST", &format!("/sandboxes/{}/timeout", extended.id), json!({ "timeout": 300 })).expect(204);
        server.await_state(&killed, None);
        assert!(begun.elapsed() >= Duration::from_secs(1), "too early");
        server.await_state(&paused, Some("paused"));
        server.await_state(&files, Some("paused"));
        assert_eq!(server.get(&format!("/sandboxes/{}", files.id)).json()["pauseMode"], "filesystem");
        assert_eq!(server.state(&extended).as_deref(), Some("running"));
        assert!(pal.ok("events --json").contains("body.expired"));
    }
}

server_test! {
    /// The next server handles a deadline that passed while no server ran.
    fn deadlines_are_met_across_a_restart(pal) {
        let server = TestServer::start(pal);
        let (killed, paused) = (server.create(json!({ "timeout": 1 })), server.create(json!({ "timeout": 1, "autoPause": true })));
        server.kill();
        std::thread::sleep(Duration::from_secs(2));
        let server = TestServer::start(pal);
        server.await_state(&killed, None);
        server.await_state(&paused, Some("paused"));
        server.sweep(pal);
    }
}

server_test! {
    /// Paused with memory it continues; with files only it starts again. Connecting never shortens the
    /// deadline.
    fn pause_and_connect(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let path = |verb: &str| format!("/sandboxes/{}/{verb}", made.id);
        server.write(&made, "kept", "1").unwrap().expect(200);
        server.run(&made, "sleep 4321 >/dev/null 2>&1 &").unwrap().expect(200);
        server.ask("POST", &path("pause"), json!({})).expect(204);
        server.ask("POST", &path("pause"), json!({})).expect(409);
        let refused = server.envd(&made, "GET", "/health", b"").unwrap().expect(502).json();
        assert_eq!(refused, json!({ "sandboxId": made.id, "message": "The sandbox was not found", "code": 502 }));
        server.ask("POST", &format!("/v2{}", path("connect")), json!({ "timeout": 300 })).expect(201);
        assert!(server.run(&made, "pgrep -f 'sleep 4321' >/dev/null || pidof sleep >/dev/null && echo still").unwrap().text().contains("c3RpbGwK"));
        server.ask("POST", &path("pause"), json!({ "memory": false })).expect(204);
        server.ask("POST", &path("connect"), json!({ "timeout": 300 })).expect(201);
        assert_eq!(server.read(&made, "kept").unwrap().expect(200).text(), "1");
        assert!(!server.run(&made, "pidof sleep >/dev/null && echo still").unwrap().text().contains("c3RpbGwK"));
        let end = |server: &TestServer| server.get(&format!("/sandboxes/{}", made.id)).json()["endAt"].as_str().unwrap().to_owned();
        let before = end(&server);
        server.ask("POST", &path("connect"), json!({ "timeout": 1 })).expect(200);
        assert_eq!(end(&server), before);
    }
}

server_test! {
    /// A request to a port resumes a paused sandbox with auto-resume, and it is not paused while it is in
    /// use.
    fn traffic_wakes_what_may_be_woken(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({ "timeout": 2, "autoPause": true, "autoResume": { "enabled": true } }));
        let sleeper = server.create(json!({ "autoPause": true }));
        for made in [&made, &sleeper] {
            server.ask("POST", &format!("/sandboxes/{}/pause", made.id), json!({})).expect(204);
        }
        server.envd(&sleeper, "GET", "/health", b"").unwrap().expect(502);
        server.envd(&made, "GET", "/health", b"").unwrap().expect(204);
        let whole = server.run(&made, "sleep 4; echo end").unwrap();
        assert!(whole.whole && whole.text().contains("ZW5kCg"), "it was paused under a running command: {whole:?}");
        server.await_state(&made, Some("paused"));
    }
}

server_test! {
    /// A repeated request creates one sandbox, also if both arrive at once, and after a restart.
    fn a_request_with_a_name_is_done_once(pal) {
        let server = TestServer::start(pal);
        let body = json!({ "templateID": "host", "timeout": 300 });
        let ask = |server: &TestServer, name: &str, body: &Value| {
            let headers = [("X-API-KEY", server.key.as_str()), ("Idempotency-Key", name)];
            client::ask(server.address, "POST", "/v2/sandboxes", &headers, body.to_string().as_bytes()).unwrap()
        };
        let ids: Vec<String> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..4).map(|_| scope.spawn(|| sandbox(ask(&server, "once-1", &body).expect(201).json()).id)).collect();
            asked.into_iter().map(|asked| asked.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_ne!(sandbox(ask(&server, "once-2", &body).expect(201).json()).id, ids[0]);
        // The grammar of an idempotency key is that of the native API.
        let other = sandbox(ask(&server, "Order_7:v1.2", &body).expect(201).json()).id;
        assert_eq!(sandbox(ask(&server, "Order_7:v1.2", &body).expect(201).json()).id, other);
        ask(&server, "once-1", &json!({ "templateID": "host", "timeout": 301 })).expect(422);
        ask(&server, "Not Plain", &body).expect(400);
        server.kill();
        let server = TestServer::start(pal);
        assert_eq!(sandbox(ask(&server, "once-1", &body).expect(201).json()).id, ids[0]);
        server.sweep(pal);
    }
}

server_test! {
    /// Lists can be filtered and have pages, with each sandbox once.
    fn lists_are_filtered_and_paged(pal) {
        let server = TestServer::start(pal);
        let made: Vec<String> = (0..5).map(|number| server.create(json!({ "metadata": { "odd key": "a&b=c", "n": number.to_string() } })).id).collect();
        server.create(json!({}));
        let (mut seen, mut token) = (Vec::new(), String::new());
        loop {
            let page = server.get(&format!("/v2/sandboxes?metadata=odd%252520key%3Da%252526b%25253Dc&limit=2&order=asc{token}")).expect(200);
            let ids = page.json();
            seen.extend(ids.as_array().unwrap().iter().map(|one| one["sandboxID"].as_str().unwrap().to_owned()));
            match page.header("x-next-token") {
                Some(next) => token = format!("&nextToken={next}"),
                None => break,
            }
        }
        assert_eq!(seen, made);
        assert_eq!(server.get("/v2/sandboxes?state=paused").json(), json!([]));
        assert_eq!(server.get("/v2/sandboxes?metadata=n%3D3").json()[0]["sandboxID"], made[3].as_str());
        for bad in ["state=odd", "order=odd", "limit=0", "limit=x", "nextToken=x", "startedAfter=x"] {
            server.get(&format!("/v2/sandboxes?{bad}")).expect(400);
        }
    }
}

server_test! {
    /// Forks and snapshots begin in the state of their sandbox.
    fn forks_and_snapshots(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({ "metadata": { "who": "parent" } }));
        server.write(&made, "kept", "1").unwrap().expect(200);
        let forks = server.ask("POST", &format!("/sandboxes/{}/fork", made.id), json!({ "count": 2 })).expect(201).json();
        for fork in forks.as_array().unwrap() {
            assert_eq!(server.read(&sandbox(fork["sandbox"].clone()), "kept").unwrap().text(), "1");
        }
        server.ask("POST", &format!("/sandboxes/{}/fork", made.id), json!({ "count": 21 })).expect(400);
        let taken = server.ask("POST", &format!("/sandboxes/{}/snapshots", made.id), json!({ "name": "tested" })).expect(201).json();
        assert_eq!(taken, json!({ "snapshotID": "tested:default", "names": ["tested:default"] }));
        assert_eq!(server.get("/snapshots").json(), json!([taken]));
        let from = server.create(json!({ "templateID": "tested:default" }));
        assert_eq!(server.read(&from, "kept").unwrap().text(), "1");
        server.ask("DELETE", "/templates/tested%3Adefault", Value::Null).expect(409);
        server.ask("DELETE", &format!("/sandboxes/{}", from.id), Value::Null).expect(204);
        server.ask("DELETE", "/templates/tested%3Adefault", Value::Null).expect(204);
        server.ask("DELETE", "/templates/tested%3Adefault", Value::Null).expect(404);
    }
}

server_test! {
    /// Clients can read the resource use and the log of a sandbox.
    fn metrics_and_logs(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let metrics = server.get(&format!("/sandboxes/{}/metrics", made.id)).expect(200).json();
        assert!(metrics[0]["memTotal"].as_u64().is_some_and(|bytes| bytes > 0), "{metrics}");
        let past = server.get(&format!("/sandboxes/{}/metrics?start=1&end=2", made.id)).expect(200).json();
        assert_eq!(past, json!([]));
        server.get(&format!("/sandboxes/{}/metrics?start=2&end=1", made.id)).expect(400);
        let logs = server.get(&format!("/sandboxes/{}/logs", made.id)).expect(200).json();
        assert_eq!(logs["logEntries"][0]["message"], "body.created");
    }
}
