//! The authorisation matrix: every route, every kind of key, and Bodies that it owns, reaches or neither.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Write},
};

use serde_json::{Value, json};

use crate::{
    agents::{remove_all, script},
    client,
    native::{ask_as, key},
    server::TestServer,
};

/// The scope that a route needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum NeededScope {
    Read,
    Run,
    Admin,
}
use NeededScope::{Admin, Read, Run};

/// One route: method, path, request, and the scope that it needs. `ID` stands for a Body, `{agent}` for an agent in it.
type RouteCase = (&'static str, &'static str, &'static str, NeededScope);

/// The routes of the native API. `/v1/events` without a Body has a test of its own.
const NATIVE: &[RouteCase] = &[
    ("GET", "/v1/bodies", "", Read),
    ("POST", "/v1/bodies", r#"{"timeout_ms":0}"#, Run),
    ("GET", "/v1/bodies/{id}", "", Read),
    ("GET", "/v1/bodies/{id}/files?path=/etc/hostname", "", Read),
    ("PUT", "/v1/bodies/{id}/files?path=/tmp/x", "x", Run),
    ("GET", "/v1/bodies/{id}/logs", "", Read),
    ("GET", "/v1/bodies/{id}/processes", "", Read),
    ("GET", "/v1/bodies/{id}/network", "", Read),
    ("GET", "/v1/bodies/{id}/terminals", "", Read),
    ("GET", "/v1/bodies/{id}/pty?mode=watch", "", Read),
    ("GET", "/v1/bodies/{id}/diff", "", Read),
    ("GET", "/v1/bodies/{id}/patch", "", Read),
    ("POST", "/v1/bodies/{id}/exec", r#"{"argv":["true"]}"#, Run),
    ("POST", "/v1/bodies/{id}/log", "", Run),
    ("POST", "/v1/bodies/{id}/save", "", Run),
    ("POST", "/v1/bodies/{id}/land", "", Admin),
    ("POST", "/v1/bodies/{id}/sync", "", Admin),
    ("POST", "/v1/bodies/{id}/prepare", "", Admin),
    ("POST", "/v1/compare", r#"{"bodies":["ID","ID"]}"#, Run),
    ("POST", "/v1/land", r#"{"bodies":["ID"],"onto":"main"}"#, Admin),
    ("POST", "/v1/up", r#"{"repositories":["/nonexistent"]}"#, Admin),
    ("POST", "/v1/bodies/{id}/snapshot", r#"{"name":"-/-"}"#, Run),
    ("PUT", "/v1/bodies/{id}/access", r#"{"ports":"private"}"#, Run),
    ("POST", "/v1/bodies/{id}/fork", r#"{"count":1}"#, Run),
    ("PUT", "/v1/bodies/{id}/network", r#"{}"#, Run),
    ("PATCH", "/v1/bodies/{id}/network", r#"{}"#, Run),
    ("GET", "/v1/secrets", "", Admin),
    ("PUT", "/v1/secrets/{secret}", r#"{"value":"x"}"#, Admin),
    ("DELETE", "/v1/secrets/{secret}", "", Admin),
    ("PUT", "/v1/bodies/{id}/secrets/{secret}", "", Admin),
    ("DELETE", "/v1/bodies/{id}/secrets/{secret}", "", Admin),
    ("PATCH", "/v1/bodies/{id}/limits", r#"{"pids":2000}"#, Admin),
    ("POST", "/v1/bodies/{id}/suspend", "", Run),
    ("POST", "/v1/bodies/{id}/pause", "", Run),
    ("POST", "/v1/bodies/{id}/resume", "", Run),
    ("POST", "/v1/bodies/{id}/stop", r#"{"grace_ms":0}"#, Run),
    ("POST", "/v1/bodies/{id}/start", "", Run),
    ("DELETE", "/v1/bodies/{id}", "", Run),
    ("GET", "/v1/snapshots", "", Read),
    ("GET", "/v1/snapshots/{snapshot}", "", Read),
    ("DELETE", "/v1/snapshots/{snapshot}", "", Run),
    ("GET", "/v1/templates", "", Read),
    ("GET", "/v1/templates/{template}", "", Read),
    ("DELETE", "/v1/templates/{template}", "", Run),
    ("POST", "/v1/templates/build", r#"{"name":"x","dockerfile":"?"}"#, Run),
    ("POST", "/v1/templates/import", r#"{"name":"x","source":"?"}"#, Admin),
    ("GET", "/v1/events?body=ID", "", Read),
    ("GET", "/v1/events/stream?body=ID", "", Read),
    ("POST", "/v1/events/verify", "", Admin),
    ("GET", "/v1/agents", "", Read),
    ("POST", "/v1/agents", r#"{"task":""}"#, Run),
    ("GET", "/v1/agents/{agent}", "", Read),
    ("GET", "/v1/agents/{agent}/events", "", Read),
    ("GET", "/v1/agents/{agent}/export", "", Read),
    ("GET", "/v1/agents/{agent}/cost", "", Read),
    ("GET", "/v1/agents/{agent}/artifacts/{sha256}", "", Read),
    ("POST", "/v1/agents/{agent}/approvals", r#"{"decision":"approve"}"#, Run),
    ("POST", "/v1/agents/{agent}/answers", r#"{"answer":"x"}"#, Run),
    ("POST", "/v1/agents/{agent}/fork", r#"{"at":999}"#, Run),
    ("POST", "/v1/agents/{agent}/rewind", r#"{"turn":999}"#, Run),
    // The agent works, so it is not removed.
    ("DELETE", "/v1/agents/{agent}", "", Run),
    ("POST", "/v1/agents/{agent}/interrupt", "", Run),
    ("POST", "/v1/agents/{agent}/messages", r#"{"text":"go on"}"#, Run),
    ("POST", "/v1/agents/{agent}/resume", "", Run),
    ("POST", "/v1/agents/{agent}/stop", "", Run),
    ("POST", "/v1/agents/{agent}/replay", "", Run),
    ("GET", "/v1/keys", "", Admin),
    ("POST", "/v1/keys", r#"{"name":""}"#, Admin),
    ("DELETE", "/v1/keys/{key}", "", Admin),
    ("GET", "/v1/homes", "", Admin),
    ("DELETE", "/v1/homes/{home}", "", Admin),
    ("GET", "/v1/disk-usage", "", Admin),
    ("GET", "/v1/config", "", Admin),
    ("GET", "/v1/config/{setting}", "", Admin),
    ("PUT", "/v1/config/{setting}", r#"{"value":""}"#, Admin),
    ("GET", "/v1/version", "", Read),
    ("POST", "/v1/doctor", "", Admin),
    ("POST", "/v1/gc", r#"{"dry_run":true}"#, Admin),
];

/// The routes of the E2B API that name a sandbox; those that end it come last, and are only tried where they are denied.
const E2B: &[RouteCase] = &[
    ("GET", "/sandboxes/{id}", "", Read),
    ("GET", "/sandboxes/{id}/metrics", "", Read),
    ("GET", "/sandboxes/{id}/logs", "", Read),
    ("GET", "/v2/sandboxes/{id}/logs", "", Read),
    ("POST", "/sandboxes/{id}/connect", r#"{"timeout":300}"#, Run),
    ("POST", "/v2/sandboxes/{id}/connect", r#"{"timeout":300}"#, Run),
    ("POST", "/sandboxes/{id}/resume", r#"{"timeout":300}"#, Run),
    ("POST", "/sandboxes/{id}/timeout", r#"{"timeout":300}"#, Run),
    ("POST", "/sandboxes/{id}/refreshes", r#"{"duration":300}"#, Run),
    ("PUT", "/sandboxes/{id}/network", "{}", Run),
    ("POST", "/sandboxes/{id}/fork", r#"{"count":0}"#, Run),
    ("POST", "/sandboxes/{id}/pause", "", Run),
    ("POST", "/sandboxes/{id}/snapshots", r#"{"name":"-/-"}"#, Run),
    ("DELETE", "/sandboxes/{id}", "", Run),
];

/// A kind of key, and the Bodies that it reaches.
struct KeyKind {
    name: &'static str,
    secret: String,
    scope: Option<NeededScope>,
    /// Whether it reaches the Body without a label, and the one with it.
    reaches: [bool; 2],
}

/// Sends a request; returns the status, and whether the server denies that there is such a Body. Of a stream, only the
/// head is read.
fn ask(
    server: &TestServer,
    secret: &str,
    (method, path, body, _): RouteCase,
    BodyWithAgent { body: id, agent }: &BodyWithAgent,
) -> (u16, bool) {
    let path = path.replace("{id}", id).replace("ID", id).replace("{agent}", agent).replace(['{', '}'], "");
    let bearer = format!("Bearer {secret}");
    let kind = if path.contains("/files") { "application/octet-stream" } else { "application/json" };
    let mut headers = vec![("Content-Type", kind)];
    if !secret.is_empty() {
        headers.push(("Authorization", &bearer));
    }
    let body = body.replace("ID", id);
    if path.contains("/stream") || (path.starts_with("/v1/agents") && path.ends_with("/events")) {
        let mut stream = client::dial(server.address);
        let head = client::head(method, &path, &headers);
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        let status: u16 = line.split(' ').nth(1).unwrap().parse().unwrap();
        return (status, status == 404);
    }
    let answer = client::ask(server.address, method, &path, &headers, body.as_bytes()).unwrap();
    let text = answer.text();
    let denies = ["there is no Body", "there is no agent"].iter().any(|denial| text.contains(denial));
    (answer.status, answer.status == 404 && (denies || path.contains("sandboxes")))
}

/// The paths with methods of the API's own description.
fn described(server: &TestServer) -> BTreeSet<(String, String)> {
    // Without a key: the server listens on loopback.
    let document = client::ask(server.address, "GET", "/openapi.json", &[], b"").unwrap().expect(200).json();
    let paths = document["paths"].as_object().unwrap().clone();
    let methods = |(path, methods): (String, Value)| {
        let methods: Vec<String> = methods.as_object().unwrap().keys().cloned().collect();
        methods.into_iter().map(move |method| (method.to_uppercase(), path.clone()))
    };
    paths.into_iter().flat_map(methods).collect()
}

/// A Body, and an agent that works in it.
struct BodyWithAgent {
    body: String,
    agent: String,
}

/// Creates one key of every kind, and the two Bodies of the first, each with an agent of the model.
fn make_keys(server: &TestServer, model: &str) -> (Vec<KeyKind>, [BodyWithAgent; 2]) {
    let kind = |name, scope: NeededScope, reach: Option<&str>, reaches| {
        let mut wanted = json!({ "name": name, "scope": format!("{scope:?}").to_lowercase() });
        reach.into_iter().for_each(|reach| wanted["reach"] = reach.into());
        KeyKind { name, secret: key(server, wanted).1, scope: Some(scope), reaches }
    };
    let kinds = vec![
        kind("owner", Run, None, [true, true]),
        KeyKind { name: "nobody", secret: String::new(), scope: None, reaches: [false, false] },
        KeyKind { name: "unknown", secret: "e2b_00".into(), scope: None, reaches: [false, false] },
        kind("read", Read, None, [false, false]),
        kind("read own", Read, Some("own"), [false, false]),
        kind("read label", Read, Some("label=team=web"), [false, true]),
        kind("read another label", Read, Some("label=team=we"), [false, false]),
        kind("read all", Read, Some("all"), [true, true]),
        kind("run", Run, None, [false, false]),
        kind("run label", Run, Some("label=team=web"), [false, true]),
        kind("run all", Run, Some("all"), [true, true]),
        kind("admin", Admin, None, [true, true]),
    ];
    let body = |wanted| {
        let wanted = json!({ "task": "go", "model": model, "create": wanted });
        let made = ask_as(server, &kinds[0].secret, "POST", "/v1/agents", wanted).expect(201).json();
        let text = |name: &str| made["items"][0][name].as_str().unwrap().to_owned();
        BodyWithAgent { body: text("body"), agent: text("id") }
    };
    let bodies = [body(json!({})), body(json!({ "metadata": { "team": "web" } }))];
    (kinds, bodies)
}

/// Every route of both APIs, with every kind of key, for a Body that the key owns, reaches or neither.
#[test]
fn every_route_keeps_to_scope_and_reach() {
    crate::pal::check(|pal| {
        // It never ends its answer: the agent works until it is interrupted.
        let model =
            script(pal, "endless", "[[turns]]\ntext = 'a b'\npause_ms = 600000\nrepeat = 'forever'\n");
        let server = TestServer::start(pal);
        let plain = |path: &str| path.split('?').next().unwrap().to_owned();
        let tested: BTreeSet<_> =
            NATIVE.iter().map(|(method, path, ..)| ((*method).to_owned(), plain(path))).collect();
        assert_eq!(tested, described(&server), "the matrix has every route, and no other");
        let (kinds, bodies) = make_keys(&server, &model);
        for route @ (method, path, body, need) in NATIVE.iter().chain(E2B) {
            let names_body =
                ["{id}", "{agent}", "ID"].iter().any(|name| path.contains(name)) || body.contains("ID");
            for kind in &kinds {
                for (id, reaches) in bodies.iter().zip(kind.reaches) {
                    let allowed = kind.scope.is_some_and(|scope| scope >= *need);
                    if allowed && reaches && *method == "DELETE" && path.starts_with("/sandboxes") {
                        continue;
                    }
                    let (status, no_body) = ask(&server, &kind.secret, *route, id);
                    let at = format!("{method} {path} as {}: {status}", kind.name);
                    match kind.scope {
                        None => assert_eq!(status, 401, "{at}"),
                        Some(_) if !allowed => assert_eq!(status, 403, "{at}"),
                        Some(_) if names_body && !reaches => assert!(no_body, "{at}"),
                        Some(_) => {
                            assert!(!no_body && ![401, 403].contains(&status) && status < 500, "{at}");
                        }
                    }
                    if !names_body {
                        break;
                    }
                }
            }
        }
        lists_hold_what_is_reached(&server, &kinds, &bodies);
        tokens_are_for_keys_that_run(&server, &kinds, &bodies);
        remove_all(&server);
    });
}

/// Lists and the feed of events hold exactly the Bodies that a key reaches.
fn lists_hold_what_is_reached(server: &TestServer, kinds: &[KeyKind], bodies: &[BodyWithAgent; 2]) {
    for kind in kinds.iter().filter(|kind| kind.scope.is_some()) {
        for path in ["/v1/bodies?limit=1000", "/v2/sandboxes?limit=100"] {
            let text = ask_as(server, &kind.secret, "GET", path, Value::Null).expect(200).text();
            let found = [0, 1].map(|at| text.contains(&bodies[at].body));
            assert_eq!(found, kind.reaches, "{path} as {}", kind.name);
        }
        let text =
            ask_as(server, &kind.secret, "GET", "/v1/agents?limit=1000", Value::Null).expect(200).text();
        assert_eq!(
            [0, 1].map(|at| text.contains(&bodies[at].agent)),
            kind.reaches,
            "agents as {}",
            kind.name
        );
        let feed = ask_as(server, &kind.secret, "GET", "/v1/events?limit=1000", Value::Null);
        let reaches_all = ["read all", "run all", "admin"].contains(&kind.name);
        assert_eq!(feed.status, if reaches_all { 200 } else { 403 }, "{}", kind.name);
        if reaches_all {
            let events = feed.json();
            let about_none = events["items"].as_array().unwrap().iter().any(|event| event["body"].is_null());
            assert_eq!(
                about_none,
                kind.name == "admin",
                "{}: requests and keys are the operator's",
                kind.name
            );
        }
    }
}

/// A key that only reads sees no token: with one it could do more.
fn tokens_are_for_keys_that_run(server: &TestServer, kinds: &[KeyKind], bodies: &[BodyWithAgent; 2]) {
    for kind in kinds.iter().filter(|kind| kind.reaches[1]) {
        let runs = kind.scope >= Some(Run);
        let get = |path: String| ask_as(server, &kind.secret, "GET", &path, Value::Null).expect(200).json();
        let native = get(format!("/v1/bodies/{}", bodies[1].body));
        assert_eq!(native["traffic_token"].is_string(), runs, "{}", kind.name);
        assert_eq!(get("/v1/bodies".into()).to_string().contains("traffic_token"), runs, "{}", kind.name);
        let e2b = get(format!("/sandboxes/{}", bodies[1].body));
        assert_eq!(e2b["envdAccessToken"].is_string(), runs, "{}", kind.name);
    }
}
