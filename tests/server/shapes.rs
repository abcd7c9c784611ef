//! Answers in the shapes that E2B's clients read: `tests/schema/e2b.txt` is their table, and every row of it is met.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::{Value, json};
use testkit::wait;

use crate::{
    server::TestServer,
    templates::{check, import, status},
};

const TABLE: &str = include_str!("../schema/e2b.txt");

/// The table, and its rows that were not met yet.
struct ShapeTable {
    /// Fields and their types, by shape.
    shapes: BTreeMap<&'static str, Vec<(&'static str, &'static str)>>,
    /// Types by method, path and status.
    routes: BTreeMap<(&'static str, &'static str, u16), &'static str>,
    unmet: RefCell<BTreeSet<(&'static str, &'static str, u16)>>,
}

impl ShapeTable {
    fn read() -> Self {
        let lines = TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let (mut shapes, mut routes) = (BTreeMap::new(), BTreeMap::new());
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["shape", name, ref fields @ ..] => {
                    let fields = fields.iter().map(|field| field.split_once(':').unwrap()).collect();
                    assert!(shapes.insert(name, fields).is_none(), "{name} stands there twice");
                }
                [method, path, status, kind] => {
                    let key = (method, path, status.parse().unwrap());
                    assert!(routes.insert(key, kind).is_none(), "{line} stands there twice");
                }
                _ => panic!("{line:?} is no row"),
            }
        }
        let unmet = RefCell::new(routes.keys().copied().collect());
        Self { shapes, routes, unmet }
    }

    /// Why a value is not of a type.
    fn find_fault(&self, value: &Value, kind: &str) -> Option<String> {
        let faults: Vec<Option<String>> =
            kind.split('|').map(|kind| self.find_fault_of_one(value, kind)).collect();
        let fits = faults.iter().any(Option::is_none);
        faults.into_iter().flatten().next().filter(|_| !fits)
    }

    fn find_fault_of_one(&self, value: &Value, kind: &str) -> Option<String> {
        let text = value.as_str();
        let fits = match kind {
            "string" => text.is_some(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            "time" => text.is_some_and(is_time),
            "uuid" => text.is_some_and(is_uuid),
            _ => {
                let inner = |from: char, to: char| kind.strip_prefix(from)?.strip_suffix(to);
                if let Some(word) = kind.strip_prefix('=') {
                    text == Some(word)
                } else if let (Some(of), Some(items)) = (inner('[', ']'), value.as_array()) {
                    return items.iter().find_map(|item| self.find_fault(item, of));
                } else if let (Some(of), Some(fields)) = (inner('{', '}'), value.as_object()) {
                    return fields.values().find_map(|field| self.find_fault(field, of));
                } else if let (Some(fields), true) = (self.shapes.get(kind), value.is_object()) {
                    return fields.iter().find_map(|(name, of)| self.find_fault_of_field(value, name, of));
                } else {
                    false
                }
            }
        };
        (!fits).then(|| format!("{value} is not {kind}"))
    }

    fn find_fault_of_field(&self, object: &Value, name: &str, kind: &str) -> Option<String> {
        match (object.get(name.trim_end_matches('?')), name.ends_with('?')) {
            (None, true) => None,
            (None, false) => Some(format!("there is no {name} in {object}")),
            (Some(value), _) => self.find_fault(value, kind).map(|fault| format!("{name}: {fault}")),
        }
    }

    /// Sends a request to a route; its answer must have this status and the shape of the table.
    #[track_caller]
    fn meet(&self, server: &TestServer, route: &str, path: &str, status: u16, body: Value) -> Value {
        let (method, pattern) = route.split_once(' ').unwrap();
        let answer = server.ask(method, path, body).expect(status);
        let row = self.routes.iter().find(|(key, _)| **key == (method, pattern, status));
        let (key, kind) = row.unwrap_or_else(|| panic!("the table has no row {route} {status}"));
        self.unmet.borrow_mut().remove(key);
        if *kind == "-" {
            return Value::Null;
        }
        let value = answer.json();
        assert_eq!(self.find_fault(&value, kind), None, "{route} {status}: {value}");
        value
    }

    /// [`ShapeTable::meet`] for a route without parameters.
    #[track_caller]
    fn meet_at(&self, server: &TestServer, route: &str, status: u16, body: Value) -> Value {
        self.meet(server, route, route.split_once(' ').unwrap().1, status, body)
    }
}

/// Whether a text is a time such as `2026-01-31T12:00:00.5Z`.
fn is_time(text: &str) -> bool {
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let (date, time) = text.split_once('T').unwrap_or_default();
    let lens = |parts: &str, by: char| parts.split(by).map(str::len).collect::<Vec<_>>();
    let time = time.strip_suffix('Z').unwrap_or_default();
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    lens(date, '-') == [4, 2, 2]
        && lens(clock, ':') == [2, 2, 2]
        && [date.split('-'), clock.split(':')].into_iter().all(|mut parts| parts.all(digits))
        && !fraction.is_empty()
        && digits(fraction)
}

fn is_uuid(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    parts.iter().map(|part| part.len()).eq([8, 4, 4, 4, 12])
        && parts.iter().all(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Every route of the table answers in its shape.
#[test]
fn answers_have_the_shapes_that_clients_read() {
    check(|pal| {
        import(pal);
        let table = ShapeTable::read();
        let server = TestServer::start(pal);
        meet_sandboxes(&table, &server);
        meet_templates(&table, &server);
        for (route, status) in
            [("GET /volumes", 501), ("POST /secrets", 501), ("GET /nodes", 404), ("GET /api-keys", 404)]
        {
            table.meet_at(&server, route, status, Value::Null);
        }
        assert_eq!(*table.unmet.borrow(), BTreeSet::new(), "rows that no request met");
    });
}

fn meet_sandboxes(table: &ShapeTable, server: &TestServer) {
    let meet = |route: &str, status: u16, body: Value| table.meet_at(server, route, status, body);
    meet("GET /health", 204, Value::Null);
    meet("GET /teams", 200, Value::Null);
    meet("POST /v2/sandboxes", 400, json!({ "templateID": 1 }));
    meet("POST /v2/sandboxes", 404, json!({ "templateID": "none" }));
    let network = json!({ "allowOut": ["1.1.1.1"], "denyOut": ["10.0.0.0/8"], "allowPublicTraffic": false, "maskRequestHost": "a" });
    let asked = json!({ "templateID": "host", "timeout": 300, "metadata": { "a": "b" }, "network": network });
    let id = meet("POST /v2/sandboxes", 201, asked)["sandboxID"].as_str().unwrap().to_owned();
    let other = meet("POST /sandboxes", 201, json!({ "templateID": "host" }))["sandboxID"]
        .as_str()
        .unwrap()
        .to_owned();
    let about = |route: &str, status: u16, body: Value| {
        let path = route.split_once(' ').unwrap().1.replace("{id}", &id);
        table.meet(server, route, &path, status, body)
    };
    about("GET /sandboxes/{id}/metrics", 200, Value::Null);
    let many = table.meet(
        server,
        "GET /sandboxes/metrics",
        &format!("/sandboxes/metrics?sandbox_ids={id}"),
        200,
        Value::Null,
    );
    assert!(many["sandboxes"].get(&id).is_some(), "{many}");
    for route in ["GET /sandboxes/{id}", "GET /sandboxes/{id}/logs", "GET /v2/sandboxes/{id}/logs"] {
        about(route, 200, Value::Null);
    }
    about("POST /sandboxes/{id}/timeout", 204, json!({ "timeout": 300 }));
    about("POST /sandboxes/{id}/refreshes", 204, json!({ "duration": 10 }));
    about("PUT /sandboxes/{id}/network", 204, json!({ "denyOut": ["10.0.0.0/8"] }));
    about("POST /sandboxes/{id}/connect", 200, json!({ "timeout": 300 }));
    about("POST /v2/sandboxes/{id}/connect", 200, json!({}));
    about("POST /sandboxes/{id}/resume", 409, json!({}));
    for wake in ["resume", "connect"] {
        about("POST /sandboxes/{id}/pause", 204, json!({}));
        about("POST /sandboxes/{id}/pause", 409, json!({}));
        about("GET /sandboxes/{id}", 200, Value::Null);
        about(&format!("POST /sandboxes/{{id}}/{wake}"), 201, json!({ "timeout": 300 }));
    }
    let forks = about("POST /sandboxes/{id}/fork", 201, json!({ "count": 1 }));
    assert_eq!(forks.as_array().unwrap().len(), 1);
    about("POST /sandboxes/{id}/snapshots", 201, json!({ "name": "shape" }));
    for route in ["GET /sandboxes", "GET /v2/sandboxes", "GET /snapshots", "GET /templates"] {
        assert!(!meet(route, 200, Value::Null).as_array().unwrap().is_empty(), "{route}");
    }
    server.ask("DELETE", "/templates/shape", Value::Null).expect(204);
    about("DELETE /sandboxes/{id}", 204, Value::Null);
    about("DELETE /sandboxes/{id}", 404, Value::Null);
    about("GET /sandboxes/{id}", 404, Value::Null);
    server.ask("DELETE", &format!("/sandboxes/{other}"), Value::Null).expect(204);
}

fn meet_templates(table: &ShapeTable, server: &TestServer) {
    let meet = |route: &str, status: u16, body: Value| table.meet_at(server, route, status, body);
    let at = |route: &str, id: &str, status: u16, body: Value| {
        let path = route
            .split_once(' ')
            .unwrap()
            .1
            .replace("{id}", id)
            .replace("{name}", id)
            .replace("{hash}", &"ab".repeat(32));
        table.meet(server, route, &path, status, body)
    };
    meet("POST /templates", 501, json!({ "dockerfile": "FROM x" }));
    let asked = meet("POST /v2/templates", 202, json!({ "alias": "two", "cpuCount": 1, "memoryMB": 256 }));
    let two = asked["templateID"].as_str().unwrap();
    // A template that was never built is listed, too.
    for route in ["GET /templates", "GET /v2/templates"] {
        let listed = meet(route, 200, Value::Null);
        assert!(
            listed
                .as_array()
                .unwrap()
                .iter()
                .any(|template| template["templateID"] == two && template["buildCount"] == 0),
            "{listed}"
        );
    }
    at("POST /templates/{id}", two, 501, json!({ "dockerfile": "FROM x" }));
    let asked = meet("POST /v3/templates", 202, json!({ "name": "three:v1", "memoryMB": 256 }));
    let ids = ["templateID", "buildID"].map(|name| asked[name].as_str().unwrap().to_owned());
    let (three, build) = (ids[0].as_str(), ids[1].as_str());
    at("GET /templates/{id}/files/{hash}", three, 201, Value::Null);
    let of_build = |route: &str, status: u16, body: Value| {
        let path = route.split_once(' ').unwrap().1.replace("{id}", three).replace("{build}", build);
        table.meet(server, route, &path, status, body)
    };
    let step = json!({ "type": "RUN", "args": ["echo a"] });
    of_build(
        "POST /v2/templates/{id}/builds/{build}",
        202,
        json!({ "fromTemplate": "small", "steps": [step] }),
    );
    wait::blocking(Duration::from_secs(60), "the build ends", || {
        matches!(status(server, &(three.into(), build.into()), 0)["status"].as_str(), Some("ready" | "error"))
            .then_some(())
    });
    assert_eq!(of_build("GET /templates/{id}/builds/{build}/status", 200, Value::Null)["status"], "ready");
    of_build("GET /templates/{id}/builds/{build}/logs", 200, Value::Null);
    meet("POST /templates/tags", 201, json!({ "target": "three:v1", "tags": ["default", "extra"] }));
    at("GET /templates/{id}/tags", three, 200, Value::Null);
    meet("DELETE /templates/tags", 204, json!({ "name": "three", "tags": ["extra"] }));
    at("GET /templates/{id}", three, 200, Value::Null);
    at("PATCH /templates/{id}", three, 200, json!({ "public": true }));
    at("PATCH /v2/templates/{id}", three, 200, json!({ "public": false }));
    at("GET /templates/aliases/{name}", "three", 200, Value::Null);
    at("GET /templates/aliases/{name}", "none", 404, Value::Null);
    meet("GET /templates", 200, Value::Null);
    for id in [two, three] {
        at("DELETE /templates/{id}", id, 204, Value::Null);
        at("GET /templates/{id}", id, 404, Value::Null);
    }
}

#[test]
fn the_table_finds_faults() {
    let table = ShapeTable::read();
    let whole = json!({ "tag": "a", "buildID": "00000000-0000-4000-8000-000000000000", "createdAt": "2026-01-31T12:00:00.5Z" });
    assert_eq!(table.find_fault(&whole, "Tag"), None);
    assert_eq!(table.find_fault(&json!([whole]), "[Tag]"), None);
    for (field, wrong) in [
        ("tag", json!(null)),
        ("buildID", json!("x")),
        ("createdAt", json!("2026-01-31")),
        ("createdAt", json!(7)),
    ] {
        let mut value = whole.clone();
        value[field] = wrong;
        assert!(table.find_fault(&value, "Tag").is_some(), "{value}");
        value.as_object_mut().unwrap().remove(field);
        assert!(table.find_fault(&value, "Tag").is_some(), "{value}");
    }
    assert!(
        table.find_fault(&whole, "[Tag]").is_some()
            && table.find_fault(&json!({ "a": 1 }), "{string}").is_some()
    );
    assert_eq!(table.find_fault(&json!("paused"), "=running|=paused"), None);
}
