//! Limits of the server: how much one client may use, and the answer beyond that.

use std::io::{Read, Write};

use serde_json::{Value, json};

use crate::{
    client,
    native::{ask_as, create, key},
    ports::{ECHO, PORT},
    server::TestServer,
    server_test,
};

server_test! {
    /// Beyond the limit of Bodies the server refuses, with the time to retry.
    fn bodies_are_bounded(pal) {
        let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--max-bodies", "2"]);
        let first = create(&server, json!({}));
        create(&server, json!({}));
        let refused = server.ask("POST", "/v1/bodies", json!({})).expect(429);
        assert_eq!((refused.header("retry-after"), &refused.json()["kind"]), (Some("1"), &json!("limit")));
        let e2b = server.ask("POST", "/v2/sandboxes", json!({ "templateID": "host" })).expect(429);
        assert_eq!((e2b.header("retry-after"), &e2b.json()["code"]), (Some("1"), &json!(429)));
        server.ask("POST", &format!("/v1/bodies/{first}/fork"), json!({})).expect(429);
        let metrics = server.get("/metrics").expect(200).text();
        assert!(metrics.contains("pal_refused_total{limit=\"bodies\"} 3"), "{metrics}");
        assert!(metrics.contains("pal_bodies{status=\"running\"} 2"), "{metrics}");
        server.ask("DELETE", &format!("/v1/bodies/{first}?force=true"), Value::Null).expect(204);
        create(&server, json!({}));
    }
}

server_test! {
    /// Concurrent requests cannot all take the last place.
    fn bodies_asked_for_at_once_are_bounded_too(pal) {
        let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--max-bodies", "4"]);
        let ask = || server.try_ask("POST", "/v2/sandboxes", &json!({ "templateID": "host", "timeout": 300 })).unwrap().status;
        for _ in 0..3 {
            let statuses: Vec<u16> = std::thread::scope(|scope| {
                let asked: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
                asked.into_iter().map(|asked| asked.join().unwrap()).collect()
            });
            let made = server.get("/v2/sandboxes").expect(200).json().as_array().unwrap().clone();
            assert!((1..=4).contains(&made.len()), "{} Bodies: {statuses:?}", made.len());
            assert_eq!(made.len(), statuses.iter().filter(|status| **status == 201).count(), "{statuses:?}");
            for body in made {
                server.ask("DELETE", &format!("/sandboxes/{}", body["sandboxID"].as_str().unwrap()), Value::Null).expect(204);
            }
        }
    }
}

server_test! {
    /// A key's quota limits its Bodies together, and not those of other keys.
    fn quotas_are_kept(pal) {
        let server = TestServer::start(pal);
        let (_, small) = key(&server, json!({ "name": "small", "quota": { "bodies": 2, "memory_bytes": 300 << 20 } }));
        let make = |memory: u64| ask_as(&server, &small, "POST", "/v1/bodies", json!({ "limits": { "memory_bytes": memory << 20 } }));
        make(200).expect(201);
        assert!(make(200).expect(429).text().contains("memory"));
        make(64).expect(201);
        assert!(make(8).expect(429).text().contains("Bodies"));
        create(&server, json!({}));
    }
}

server_test! {
    /// Forks count with the number of Bodies, each with the limits of its parent.
    fn forks_keep_to_the_quota_too(pal) {
        let server = TestServer::start(pal);
        let (_, small) = key(&server, json!({ "name": "small", "quota": { "bodies": 4, "memory_bytes": 300 << 20 } }));
        let made = ask_as(&server, &small, "POST", "/v2/sandboxes", json!({ "templateID": "host", "timeout": 300 })).expect(429);
        assert!(made.text().contains("memory"), "its default is more than the quota: {}", made.text());
        let body = ask_as(&server, &small, "POST", "/v1/bodies", json!({ "limits": { "memory_bytes": 100 << 20 } })).expect(201).json()["id"].as_str().unwrap().to_owned();
        let native = |count: u32| ask_as(&server, &small, "POST", &format!("/v1/bodies/{body}/fork"), json!({ "count": count }));
        let e2b = |count: u32| ask_as(&server, &small, "POST", &format!("/sandboxes/{body}/fork"), json!({ "count": count, "timeout": 300 }));
        for refused in [native(4), e2b(4), native(3), e2b(3)] {
            refused.expect(429);
        }
        assert_eq!(native(1).expect(201).json()["items"].as_array().unwrap().len(), 1);
        assert_eq!(e2b(1).expect(201).json().as_array().unwrap().len(), 1);
        assert!(native(1).expect(429).text().contains("memory") && e2b(1).expect(429).header("retry-after").is_some());
    }
}

server_test! {
    /// A host that is short of memory creates no Body.
    fn a_host_short_of_memory_makes_no_body(pal) {
        let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--reserve", "1000TiB"]);
        let refused = server.ask("POST", "/v1/bodies", json!({})).expect(503);
        assert_eq!((refused.header("retry-after"), &refused.json()["kind"]), (Some("5"), &json!("host")));
        server.ask("POST", "/v2/sandboxes", json!({ "templateID": "host" })).expect(503);
    }
}

server_test! {
    /// Endless request heads and silent clients do not affect others.
    fn odd_heads_hurt_nobody(pal) {
        let server = TestServer::start(pal);
        let mut quiet: Vec<_> = (0..100).map(|_| client::dial(server.address)).collect();
        quiet.iter_mut().for_each(|stream| stream.write_all(b"GET /v1/bodies HTTP/1.1\r\nHost: 127").unwrap());
        let many: String = (0..500).map(|n| format!("X-{n}: x\r\n")).collect();
        let long = format!("X-Long: {}\r\n", "x".repeat(1 << 20));
        for bomb in [many, long] {
            let mut stream = client::dial(server.address);
            let _ = stream.write_all(format!("GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n{bomb}\r\n").as_bytes());
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(!answer.starts_with(b"HTTP/1.1 2"), "{}", String::from_utf8_lossy(&answer));
        }
        server.get("/v1/bodies").expect(200);
    }
}

server_test! {
    /// Pages of other sites and foreign host names are refused, with a key or without.
    fn pages_of_others_get_nowhere(pal) {
        let server = TestServer::start(pal);
        let host = format!("{}", server.address);
        let ask = |headers: &[(&str, &str)]| {
            let headers: Vec<(&str, &str)> = [("X-API-KEY", server.key.as_str())].into_iter().chain(headers.iter().copied()).collect();
            client::ask(server.address, "GET", "/v1/bodies", &headers, b"").unwrap().status
        };
        assert_eq!(ask(&[("Host", &host)]), 200);
        assert_eq!(ask(&[("Host", &host), ("Origin", &format!("http://{host}"))]), 200);
        assert_eq!(ask(&[("Host", "evil.test")]), 403);
        assert_eq!(ask(&[("Host", &host), ("Origin", "http://evil.test")]), 403);
        assert_eq!(ask(&[("Host", &host), ("Origin", "null")]), 403);
    }
}

/// Calls curl with the certificate of an authority; returns what it prints.
fn curl(authority: &std::path::Path, args: &[&str]) -> String {
    let mut curl = std::process::Command::new("curl");
    let asked = curl
        .args(["--silent", "--show-error", "--noproxy", "*", "--cacert"])
        .arg(authority)
        .args(args)
        .output()
        .unwrap();
    assert!(asked.status.success(), "{args:?}: {}", String::from_utf8_lossy(&asked.stderr));
    String::from_utf8_lossy(&asked.stdout).into_owned()
}

server_test! {
    /// TLS with a certificate of the server's own authority, which survives a restart and is good for its names alone.
    fn a_certificate_of_our_own_making(pal) {
        let authority = pal.data().join("tls-ca.pem");
        let mut before = None;
        for _ in 0..2 {
            let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--tls", "--domain", "pal.test"]);
            assert_eq!(server.told["certificate"], authority.to_str().unwrap());
            let port = server.address.port();
            for host in ["127.0.0.1", "localhost", "api.pal.test", "8000-abc.pal.test"] {
                let told = curl(&authority, &["--resolve", &format!("{host}:{port}:127.0.0.1"), "--write-out", "%{http_code} %{http_version}", "--output", "/dev/null", &format!("https://{host}:{port}/health")]);
                assert_eq!(told, if host.starts_with("8000") { "502 2" } else { "204 2" }, "{host}");
            }
            let older = curl(&authority, &["--http1.1", "--write-out", "%{http_code} %{http_version}", "--output", "/dev/null", &format!("https://127.0.0.1:{port}/health")]);
            assert_eq!(older, "204 1.1");
            let plain = client::ask(server.address, "GET", "/health", &[], b"");
            assert!(plain.is_err(), "plain text is not answered: {plain:?}");
            let now = std::fs::read_to_string(&authority).unwrap();
            assert!(before.replace(now.clone()).is_none_or(|before| before == now), "clients trust it once");
        }
        for file in ["tls.key", "tls-ca.key"] {
            let key = std::fs::metadata(pal.data().join(file)).unwrap();
            assert_eq!(std::os::unix::fs::PermissionsExt::mode(&key.permissions()) & 0o777, 0o600);
        }
        let openssl = |args: &[&str]| {
            let ran = std::process::Command::new("openssl").args(args).current_dir(pal.data()).output().unwrap();
            (ran.status.success(), String::from_utf8_lossy(&ran.stdout).into_owned())
        };
        let strict = openssl(&["verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", "tls-ca.pem", "tls.pem"]);
        assert!(strict.0, "{}", strict.1);
        let shown = openssl(&["x509", "-in", "tls-ca.pem", "-noout", "-subject", "-ext", "nameConstraints"]).1;
        assert!(shown.contains("CN = Palisade at ") && shown.contains("DNS:pal.test") && !shown.contains("*"), "{shown}");
    }
}

server_test! {
    /// Over HTTP/2 a client drives a sandbox and reaches its ports as over HTTP/1.1.
    fn a_sandbox_over_http_2(pal) {
        let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--tls", "--domain", "pal.test"]);
        let (authority, port) = (pal.data().join("tls-ca.pem"), server.address.port());
        let key = format!("X-API-KEY: {}", server.key);
        let resolve = |host: &str| format!("{host}:{port}:127.0.0.1");
        let made = curl(&authority, &["--resolve", &resolve("api.pal.test"), "--header", &key, "--json", r#"{"templateID":"host"}"#, &format!("https://api.pal.test:{port}/v2/sandboxes")]);
        let made: Value = serde_json::from_str(&made).unwrap();
        assert_eq!(made["domain"], format!("pal.test:{port}"));
        let id = made["sandboxID"].as_str().unwrap();
        let started = pal.feed(["exec", id, "--", "sh", "-c", "cat >echo.py; python3 echo.py >/dev/null 2>&1 &"], ECHO.as_bytes());
        assert!(started.status.success(), "{started:?}");
        let host = format!("{PORT}-{id}.pal.test");
        let ask = || curl(&authority, &["--resolve", &resolve(&host), "--header", "X-MiXed: 1", "--header", &key, "--write-out", " %{http_version}", &format!("https://{host}:{port}/path")]);
        let echoed = testkit::wait::blocking(std::time::Duration::from_secs(15), "the port is open", || Some(ask()).filter(|told| told.contains("GET /path")));
        assert!(echoed.contains(&format!("Host: {host}:{port}")) && echoed.contains("X-Mixed: 1") && echoed.ends_with(" 2"), "{echoed}");
        assert!(!echoed.contains(&server.key), "{echoed}");
    }
}
