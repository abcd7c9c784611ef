//! Templates over HTTP: created, their files uploaded, built, watched, tagged, and their visibility.

use std::{io::Write, time::Duration};

use serde_json::{Value, json};
use testkit::{
    registry::{ImageLayer, TAR, TestRegistry, image},
    roots, wait,
};

use crate::{
    client,
    native::{ask_as, key},
    pal::{self, Pal},
    server::TestServer,
};

/// Runs as the user of the suite, if that user has the ids for a root file system.
pub fn check(test: impl Fn(&Pal)) {
    if testkit::is_root() {
        pal::check(test);
    } else {
        testkit::skip::skip("as root");
    }
}

/// Imports the template `small`.
pub fn import(pal: &Pal) {
    let file = pal.dir().join("small.tar");
    std::fs::File::create(&file).unwrap().write_all(&roots::small()).unwrap();
    pal.ok(&format!("templates import small {} --sudo", file.display()));
}

/// Requests a build under a name; returns the ids of template and build.
#[track_caller]
fn ask(server: &TestServer, name: &str) -> (String, String) {
    let asked = server
        .ask("POST", "/v3/templates", json!({ "name": name, "cpuCount": 1, "memoryMB": 256 }))
        .expect(202)
        .json();
    (asked["templateID"].as_str().unwrap().to_owned(), asked["buildID"].as_str().unwrap().to_owned())
}

/// The status of a build, with its log from a line on.
pub fn status(server: &TestServer, (template, build): &(String, String), offset: usize) -> Value {
    server
        .get(&format!("/templates/{template}/builds/{build}/status?logsOffset={offset}&limit=100"))
        .expect(200)
        .json()
}

/// Waits for its end; returns the last status.
#[track_caller]
fn ended(server: &TestServer, ids: &(String, String)) -> Value {
    wait::blocking(Duration::from_secs(60), "the build ends", || {
        let told = status(server, ids, 0);
        matches!(told["status"].as_str(), Some("ready" | "error")).then_some(told)
    })
}

fn run(command: &str) -> Value {
    json!({ "type": "RUN", "args": [command] })
}

fn build(server: &TestServer, name: &str, begin: Value) -> ((String, String), Value) {
    let ids = ask(server, name);
    server.ask("POST", &format!("/v2/templates/{}/builds/{}", ids.0, ids.1), begin).expect(202);
    let told = ended(server, &ids);
    (ids, told)
}

fn lines(told: &Value) -> Vec<String> {
    told["logEntries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["message"].as_str().unwrap().to_owned())
        .collect()
}

/// The whole life of a template, from the first request to its removal.
#[test]
fn a_template_is_built_tagged_used_and_removed() {
    check(|pal| {
        import(pal);
        let server = TestServer::start(pal);
        let ids = ask(&server, "app:v1");
        let (template, build) = &ids;
        assert_eq!(status(&server, &ids, 0)["status"], "waiting");
        // Files: an upload address, an upload, and a second request that finds the file.
        let hash = "ab".repeat(32);
        let place = server.get(&format!("/templates/{template}/files/{hash}")).expect(201).json();
        assert_eq!(place["present"], false);
        let url = place["url"].as_str().unwrap();
        let path = &url[url.find("/templates/").unwrap()..];
        let bare = path.split('?').next().unwrap();
        let archive = roots::files(&[("greeting", b"hello")]);
        for wrong in [bare.to_owned(), format!("{bare}?token=x"), path.replace(&hash, &"cd".repeat(32))] {
            client::ask(server.address, "PUT", &wrong, &[], &archive).unwrap().expect(403);
        }
        client::ask(server.address, "PUT", path, &[], &archive).unwrap().expect(200);
        assert_eq!(
            server.get(&format!("/templates/{template}/files/{hash}")).expect(201).json()["present"],
            true
        );
        let steps = json!([
            { "type": "COPY", "args": ["greeting", "/srv/", "", ""], "filesHash": hash },
            { "type": "ENV", "args": ["WORD", "one"] }, { "type": "WORKDIR", "args": ["/srv"] }, run("echo $WORD; cat greeting"),
        ]);
        let begin =
            json!({ "fromTemplate": "small", "steps": steps, "startCmd": "sleep 1000", "readyCmd": "true" });
        server.ask("POST", &format!("/v2/templates/{template}/builds/{build}"), begin.clone()).expect(202);
        let told = ended(&server, &ids);
        assert_eq!(told["status"], "ready", "{told}");
        assert!(lines(&told).windows(2).any(|pair| pair == ["one", "hello"]), "{told}");
        server.ask("POST", &format!("/v2/templates/{template}/builds/{build}"), begin).expect(409);
        let all = lines(&told).len();
        assert_eq!(
            lines(&status(&server, &ids, all)),
            Vec::<String>::new(),
            "what was read is not told again"
        );
        assert_eq!(
            server.get(&format!("/templates/{template}/builds/{build}/logs")).expect(200).json()["logs"]
                .as_array()
                .unwrap()
                .len(),
            all
        );
        // Names: one tag, no default until a client sets it.
        server.ask("POST", "/v2/sandboxes", json!({ "templateID": "app" })).expect(404);
        server
            .ask("POST", "/templates/tags", json!({ "target": "app:v1", "tags": ["default", "stable"] }))
            .expect(201);
        let tags: Vec<Value> = server
            .get(&format!("/templates/{template}/tags"))
            .expect(200)
            .json()
            .as_array()
            .unwrap()
            .iter()
            .map(|tag| tag["tag"].clone())
            .collect();
        assert_eq!(json!(tags), json!(["default", "stable", "v1"]));
        server.ask("DELETE", "/templates/tags", json!({ "name": "app", "tags": ["stable"] })).expect(204);
        server.ask("DELETE", "/templates/tags", json!({ "name": "app", "tags": ["stable"] })).expect(404);
        assert_eq!(server.get("/templates/aliases/app").expect(200).json()["templateID"], *template);
        let made = server.create(json!({ "templateID": "app" }));
        assert_eq!(server.read(&made, "/srv/greeting").unwrap().expect(200).text(), "hello");
        server.ask("DELETE", &format!("/sandboxes/{}", made.id), Value::Null).expect(204);
        // In both APIs.
        assert!(
            server
                .get("/templates")
                .expect(200)
                .json()
                .as_array()
                .unwrap()
                .iter()
                .any(|told| told["templateID"] == *template)
        );
        assert!(server.get("/v1/templates").expect(200).text().contains("\"app\""));
        // Ownership.
        let (_, other) = key(&server, json!({ "name": "other", "scope": "run" }));
        ask_as(&server, &other, "GET", &format!("/templates/{template}"), Value::Null).expect(404);
        ask_as(&server, &other, "GET", "/templates/aliases/app", Value::Null).expect(403);
        ask_as(&server, &other, "DELETE", &format!("/templates/{template}"), Value::Null).expect(403);
        for key in ["app", "app:v1", template.as_str()] {
            ask_as(&server, &other, "POST", "/v2/sandboxes", json!({ "templateID": key })).expect(403);
            ask_as(&server, &other, "POST", "/v1/bodies", json!({ "template": key })).expect(404);
        }
        assert!(
            !ask_as(&server, &other, "GET", "/v1/templates", Value::Null)
                .expect(200)
                .text()
                .contains("\"app\"")
        );
        server.ask("PATCH", &format!("/v2/templates/{template}"), json!({ "public": true })).expect(200);
        ask_as(&server, &other, "GET", "/templates/aliases/app", Value::Null).expect(200);
        let used =
            ask_as(&server, &other, "POST", "/v1/bodies", json!({ "template": "app" })).expect(201).json();
        ask_as(
            &server,
            &other,
            "DELETE",
            &format!("/v1/bodies/{}?force=true", used["id"].as_str().unwrap()),
            Value::Null,
        )
        .expect(204);
        assert!(
            ask_as(&server, &other, "GET", "/v1/templates", Value::Null)
                .expect(200)
                .text()
                .contains("\"app\"")
        );
        // Only the owner may change a public template.
        ask_as(
            &server,
            &other,
            "GET",
            &format!("/templates/{template}/files/{}", "ef".repeat(32)),
            Value::Null,
        )
        .expect(403);
        server.ask("DELETE", &format!("/templates/{template}"), Value::Null).expect(204);
        server.get("/templates/aliases/app").expect(404);
        server.get(&format!("/templates/{template}/builds/{build}/status")).expect(404);
    });
}

/// Invalid builds are refused in E2B's format, and a failed build names its step.
#[test]
fn bad_builds_are_refused_or_say_where_they_failed() {
    check(|pal| {
        import(pal);
        let server = TestServer::start(pal);
        for body in [
            json!({}),
            json!({ "name": "" }),
            json!({ "name": "a b" }),
            json!({ "name": "host" }),
            json!({ "name": "x", "cpuCount": 0 }),
            json!([]),
            json!({ "name": 7 }),
        ] {
            let refused = server.ask("POST", "/v3/templates", body.clone()).expect(400).json();
            assert_eq!(refused["code"], 400, "{body}");
        }
        let ids = ask(&server, "bad");
        let place = format!("/v2/templates/{}/builds/{}", ids.0, ids.1);
        for body in [
            json!({}),
            json!({ "fromTemplate": "small", "fromImage": "x" }),
            json!({ "fromTemplate": "small", "steps": [{ "type": "ADD", "args": ["x"] }] }),
            json!({ "fromTemplate": "small", "steps": [{ "type": "RUN" }] }),
            json!({ "fromTemplate": "small", "steps": [{ "type": "COPY", "args": ["a", "b"] }] }),
            json!({ "fromTemplate": "small", "steps": [{ "type": "COPY", "args": ["a", "b"], "filesHash": "../../x" }] }),
            json!({ "fromTemplate": "small", "steps": [{ "type": "ENV", "args": ["a"] }] }),
        ] {
            server.ask("POST", &place, body.clone()).expect(400);
        }
        let aws = json!({ "fromImage": "x", "fromImageRegistry": { "type": "aws", "awsAccessKeyId": "a", "awsSecretAccessKey": "b", "awsRegion": "c" } });
        assert_eq!(server.ask("POST", &place, aws).expect(501).json()["error_code"], "not_supported");
        server
            .ask(
                "POST",
                &format!("/v2/templates/{}/builds/00000000-0000-4000-8000-000000000000", ids.0),
                json!({ "fromTemplate": "small" }),
            )
            .expect(404);
        server.get("/templates/nowhere/builds/x/status").expect(404);
        let (_, told) = build(&server, "bad", json!({ "fromTemplate": "no-such" }));
        assert_eq!((&told["status"], &told["reason"]["step"]), (&json!("error"), &json!("base")), "{told}");
        let (_, told) = build(
            &server,
            "bad",
            json!({ "fromTemplate": "small", "steps": [run("true"), run("echo why; exit 3")] }),
        );
        assert_eq!((&told["status"], &told["reason"]["step"]), (&json!("error"), &json!("2")), "{told}");
        assert!(told["reason"]["message"].as_str().unwrap().contains("exit status 3"));
        assert!(lines(&told).contains(&"why".to_owned()));
    });
}

/// The log of a build survives `kill -9`; an interrupted build says so, and can be built again.
#[test]
fn what_a_build_said_survives_the_server() {
    check(|pal| {
        import(pal);
        let server = TestServer::start(pal);
        let (whole, told) =
            build(&server, "whole", json!({ "fromTemplate": "small", "steps": [run("echo words")] }));
        let before = lines(&told);
        let (failed, _) =
            build(&server, "failed", json!({ "fromTemplate": "small", "steps": [run("exit 1")] }));
        let cut = ask(&server, "cut");
        let begin =
            json!({ "fromTemplate": "small", "steps": [run("echo done"), run("echo here; sleep 1000")] });
        server.ask("POST", &format!("/v2/templates/{}/builds/{}", cut.0, cut.1), begin).expect(202);
        wait::blocking(Duration::from_secs(30), "the build is in the middle", || {
            lines(&status(&server, &cut, 0)).contains(&"here".to_owned()).then_some(())
        });
        server.kill();
        let server = TestServer::start(pal);
        let told = status(&server, &whole, 0);
        assert_eq!((&told["status"], lines(&told)), (&json!("ready"), before));
        assert_eq!(status(&server, &failed, 0)["reason"]["step"], "1");
        let told = status(&server, &cut, 0);
        assert_eq!(told["status"], "error", "{told}");
        assert!(
            told["reason"]["message"].as_str().unwrap().contains("interrupted")
                && lines(&told).contains(&"here".to_owned()),
            "{told}"
        );
        // The Body of its step is garbage.
        let (_, told) = build(
            &server,
            "cut",
            json!({ "fromTemplate": "small", "steps": [run("echo done"), run("echo here")] }),
        );
        assert_eq!(told["status"], "ready", "{told}");
        assert!(lines(&told).contains(&"CACHED".to_owned()), "{told}");
        for body in server.get("/v2/sandboxes").expect(200).json().as_array().unwrap() {
            server
                .ask("DELETE", &format!("/sandboxes/{}", body["sandboxID"].as_str().unwrap()), Value::Null)
                .expect(204);
        }
        server.sweep(pal);
        testkit::leaks::reap();
    });
}

/// Images come only from public registries, and from registries of `--registry`.
#[test]
fn images_of_clients_come_from_where_they_may() {
    check(|pal| {
        let registry = TestRegistry::open();
        registry.push("x", "y", &image(&[ImageLayer(TAR, roots::small())], json!({ "Env": ["PATH=/bin"] })));
        let from = json!({ "fromImage": format!("{}/x:y", registry.host()), "steps": [run("id -un")] });
        let server = TestServer::start(pal);
        let (_, told) = build(&server, "inside", from.clone());
        assert!(told["reason"]["message"].as_str().unwrap().contains("private address"), "{told}");
        assert_eq!(server.stop(), Some(0));
        let server =
            TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--registry", &registry.host()]);
        let (_, told) = build(&server, "inside", from);
        assert_eq!(told["status"], "ready", "{told}");
        assert!(lines(&told).contains(&"user".to_owned()), "{told}");
    });
}
