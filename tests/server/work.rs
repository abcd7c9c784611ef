//! The native API has what `pal` has: repositories, homes, disk usage, settings and templates.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use testkit::roots;

use crate::{
    client,
    native::{ask_as, key},
    pal::Pal,
    server::TestServer,
    server_test,
};

/// Runs git in a directory, with the settings of the test's home.
#[track_caller]
fn git(pal: &Pal, dir: &Path, line: &str) -> String {
    let mut command = Command::new("git");
    command.current_dir(dir).args(line.split(' ')).env_clear().env("HOME", pal.dir());
    let output = command.env("PATH", "/usr/local/bin:/usr/bin:/bin").output().unwrap();
    assert!(output.status.success(), "git {line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

/// Creates a repository with one commit, and an identity for the server's operator.
pub fn repository(pal: &Pal) -> PathBuf {
    fs::write(pal.dir().join(".gitconfig"), "[user]\nname = Ann\nemail = ann@example.com\n").unwrap();
    let dir = pal.dir().join("app");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a.txt"), "one\n").unwrap();
    git(pal, &dir, "init --quiet --initial-branch main");
    git(pal, &dir, "add .");
    git(pal, &dir, "commit --quiet -m first");
    dir
}

/// The JSON of a `pal` command.
#[track_caller]
fn pal_json(pal: &Pal, line: &str) -> Value {
    let said = pal.line(line);
    assert_eq!(said.code, 0, "pal {line}: {said:?}");
    serde_json::from_str(&said.out).unwrap()
}

#[track_caller]
fn exec(server: &TestServer, id: &str, line: &str) {
    let ran = server.ask("POST", &format!("/v1/bodies/{id}/exec"), json!({ "argv": ["sh", "-ec", line] }));
    assert_eq!(ran.expect(200).json()["code"], 0, "{line}");
}

/// The events of a stream: their names and their data.
fn sse(text: &str) -> Vec<(String, Value)> {
    let field = |block: &str, name: &str| {
        block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim().to_owned())
    };
    text.split("\n\n")
        .filter_map(|block| {
            Some((field(block, "event:")?, serde_json::from_str(&field(block, "data:")?).unwrap()))
        })
        .collect()
}

server_test! {
    /// Work goes in and out through the API, and each answer is what `pal --json` prints.
    fn work_goes_in_and_out_over_http(pal) {
        let repository = repository(pal);
        let server = TestServer::start(pal);
        let path = repository.to_str().unwrap();
        let up = server.ask("POST", "/v1/up", json!({ "repositories": [path], "prepare": "no", "count": 2, "body": { "metadata": { "team": "web" } } }));
        let made = up.expect(201).json();
        let ids: Vec<&str> = made["items"].as_array().unwrap().iter().map(|body| body["id"].as_str().unwrap()).collect();
        assert_eq!((ids.len(), &made["items"][0]["metadata"]["team"]), (2, &json!("web")));
        let id = ids[0];
        exec(&server, id, "cd /workspace/app; echo two >> a.txt; git -c user.name=B -c user.email=b@x commit -qam second; echo new > b.txt");
        exec(&server, ids[1], "cd /workspace/app; echo three >> a.txt");

        let diff = server.get(&format!("/v1/bodies/{id}/diff")).expect(200).json();
        assert_eq!(diff, pal_json(pal, &format!("diff --json {id}")));
        assert_eq!(diff["files"].as_array().unwrap().len(), 2);
        let patch = server.get(&format!("/v1/bodies/{id}/patch")).expect(200);
        assert_eq!(patch.header("content-type"), Some("application/octet-stream"));
        assert_eq!(patch.text(), pal.line(&format!("diff {id}")).out);
        let log = server.ask("POST", &format!("/v1/bodies/{id}/log"), Value::Null).expect(200).json();
        assert_eq!(log, pal_json(pal, &format!("log --json {id}")));
        assert_eq!(log["commits"][0]["subject"], "second");
        let saved = server.ask("POST", &format!("/v1/bodies/{id}/save"), Value::Null).expect(200).json();
        assert_eq!(saved["items"][0], pal_json(pal, &format!("save --json {id}")));
        assert_eq!(git(pal, &repository, &format!("rev-parse refs/palisade/{id}/wip")), saved["items"][0]["wip"].as_str().unwrap());
        let compared = server.ask("POST", "/v1/compare", json!({ "bodies": ids })).expect(200).json();
        assert_eq!(compared, pal_json(pal, &format!("compare --json {} {}", ids[0], ids[1])));
        assert_eq!(compared["overlaps"][0]["conflicts"], json!(["a.txt"]));

        let landed = server.ask("POST", &format!("/v1/bodies/{id}/land"), json!({ "branch": "work", "squash": true, "message": "all" })).expect(200).json();
        assert_eq!(git(pal, &repository, "rev-parse work"), landed["to"].as_str().unwrap());
        assert_eq!(git(pal, &repository, "log -1 --format=%cn work"), "Ann");
        let queued = server.ask("POST", "/v1/land", json!({ "bodies": ids, "onto": "main", "test": "true" })).expect(200).json();
        assert!(queued["items"][0]["landed"].is_object() && queued["items"][1]["why"].is_string(), "{queued}");
        for id in &ids {
            server.ask("DELETE", &format!("/v1/bodies/{id}?force=true"), Value::Null).expect(204);
        }
    }
}

server_test! {
    /// A stream shows the progress of long work, and ends with its result or its failure.
    fn long_work_shows_its_progress(pal) {
        let repository = repository(pal);
        let server = TestServer::start(pal);
        let up = |path: &Path| {
            let body = json!({ "repositories": [path], "prepare": "no" }).to_string();
            let headers = [("X-API-KEY", server.key.as_str()), ("Content-Type", "application/json"), ("Accept", "text/event-stream")];
            client::ask(server.address, "POST", "/v1/up", &headers, body.as_bytes()).unwrap()
        };
        let answer = up(&repository).expect(200);
        assert_eq!(answer.header("content-type"), Some("text/event-stream"));
        let (name, data) = sse(&answer.text()).pop().unwrap();
        assert_eq!((name.as_str(), &data["items"][0]["status"]), ("done", &json!("running")));
        let (name, data) = sse(&up(pal.dir()).expect(200).text()).pop().unwrap();
        assert_eq!((name.as_str(), &data["kind"]), ("failed", &json!("not_found")), "{data}");
    }
}

server_test! {
    /// Only the operator's keys name paths of the host, and only absolute ones that exist.
    fn paths_of_the_host_are_for_admin_keys(pal) {
        let repository = repository(pal);
        let server = TestServer::start(pal);
        let path = repository.to_str().unwrap();
        let (_, run) = key(&server, json!({ "name": "run", "reach": "all" }));
        ask_as(&server, &run, "POST", "/v1/up", json!({ "repositories": [path] })).expect(403);
        for (wrong, status) in [("app", 400), ("", 400), ("../app", 400), ("file:///", 400), ("/no/such/place", 404), ("https://", 400)] {
            server.ask("POST", "/v1/up", json!({ "repositories": [wrong] })).expect(status);
            server.ask("POST", "/v1/up", json!({ "repositories": [path], "include": [wrong] })).expect(status);
        }
        for wrong in [json!({ "repositories": [] }), json!({ "repositories": [path], "ref": "main", "uncommitted": true }), json!({ "repositories": [path], "count": 0 })] {
            server.ask("POST", "/v1/up", wrong).expect(400);
        }
        let file = json!({ "name": "x", "dockerfile": "FROM base\nCOPY a.txt /\n", "context": path });
        ask_as(&server, &run, "POST", "/v1/templates/build", file).expect(403);
        let bare = server.ask("POST", "/v1/templates/build", json!({ "name": "x", "dockerfile": "FROM base\nCOPY a.txt /\n" }));
        assert!(bare.expect(400).json()["message"].as_str().unwrap().contains("context"));
        assert_eq!(server.get("/v1/bodies").expect(200).json()["items"], json!([]));
    }
}

server_test! {
    /// Homes, disk usage and settings are what `pal` prints.
    fn the_data_directory_is_managed_over_http(pal) {
        let repository = repository(pal);
        let server = TestServer::start(pal);
        let up = server.ask("POST", "/v1/up", json!({ "repositories": [repository], "prepare": "no", "home": "ann" }));
        let id = up.expect(201).json()["items"][0]["id"].as_str().unwrap().to_owned();
        exec(&server, &id, "echo kept > ~/file");
        server.ask("DELETE", &format!("/v1/bodies/{id}?force=true"), Value::Null).expect(204);
        let homes = server.get("/v1/homes").expect(200).json();
        assert_eq!((&homes["items"][0]["name"], homes["items"].as_array().unwrap().len()), (&json!("ann"), 1));
        server.ask("DELETE", "/v1/homes/ann", Value::Null).expect(204);
        assert_eq!(server.get("/v1/homes").expect(200).json()["items"], json!([]));
        server.ask("DELETE", "/v1/homes/ann", Value::Null).expect(404);

        let usage = server.get("/v1/disk-usage").expect(200).json();
        let kinds = |usage: &Value| usage["shares"].as_array().unwrap().iter().map(|share| share["kind"].clone()).collect::<Vec<_>>();
        assert_eq!(kinds(&usage), kinds(&pal_json(pal, "df --json")));
        assert_eq!(usage["budget"], 20u64 << 30);

        let set = server.ask("PUT", "/v1/config/store.budget", json!({ "value": "5GiB" })).expect(200).json();
        assert_eq!(set, pal_json(pal, "config get store.budget --json"));
        assert_eq!(server.get("/v1/config/store.budget").expect(200).json(), set);
        assert_eq!(server.get("/v1/config").expect(200).json()["store.budget"], set["store.budget"]);
        server.ask("PUT", "/v1/config/store.budget", json!({ "value": "much" })).expect(400);
        server.get("/v1/config/nothing").expect(404);
    }
}

/// A template is imported, built upon, used and removed, through the native API alone.
#[test]
fn templates_are_made_over_http() {
    if !testkit::is_root() {
        return testkit::skip::skip("as root");
    }
    crate::pal::check(|pal| {
        let archive = pal.dir().join("small.tar");
        fs::write(&archive, roots::small()).unwrap();
        fs::write(pal.dir().join("greeting"), "hello").unwrap();
        let server = TestServer::start(pal);
        let imported = server.ask(
            "POST",
            "/v1/templates/import",
            json!({ "name": "small", "source": archive, "sudo": true }),
        );
        assert_eq!(imported.expect(201).json()["name"], "small");
        let (_, run) = key(&server, json!({ "name": "run" }));
        let (_, other) = key(&server, json!({ "name": "other" }));
        let built = ask_as(
            &server,
            &run,
            "POST",
            "/v1/templates/build",
            json!({ "name": "app", "dockerfile": "FROM small\nUSER root\nRUN echo made > /made\n" }),
        );
        let built = built.expect(201).json();
        assert_eq!((&built["name"], built["builds"].as_array().unwrap().len()), (&json!("app"), 1));
        assert_eq!(
            server.get("/v1/templates/app").expect(200).json(),
            pal_json(pal, "template inspect app --json")
        );
        let small = ask_as(&server, &other, "GET", "/v1/templates/small", Value::Null).expect(200).text();
        assert!(!small.contains("small.tar"), "the path of the archive is the operator's: {small}");
        ask_as(&server, &other, "GET", "/v1/templates/app", Value::Null).expect(404);
        ask_as(&server, &other, "DELETE", "/v1/templates/app", Value::Null).expect(404);
        ask_as(&server, &other, "DELETE", "/v1/templates/small", Value::Null).expect(403);
        ask_as(
            &server,
            &other,
            "POST",
            "/v1/templates/build",
            json!({ "name": "app", "dockerfile": "FROM small\n" }),
        )
        .expect(403);
        let files = json!({ "name": "files", "dockerfile": "FROM small\nCOPY greeting /greeting\n", "context": pal.dir() });
        server.ask("POST", "/v1/templates/build", files).expect(201);
        let body = server.ask("POST", "/v1/bodies", json!({ "template": "files" })).expect(201).json();
        exec(&server, body["id"].as_str().unwrap(), r#"[ "$(</greeting)" = hello ]"#);
        server
            .ask(
                "POST",
                "/v1/templates/build",
                json!({ "name": "bad", "dockerfile": "FROM small\nRUN exit 3\n" }),
            )
            .expect(400);
        ask_as(&server, &run, "DELETE", "/v1/templates/app", Value::Null).expect(204);
        server.get("/v1/templates/app").expect(404);
        for name in ["files", "bad", "small"] {
            server.ask("DELETE", &format!("/v1/templates/{name}"), Value::Null).expect(204);
        }
    });
}
