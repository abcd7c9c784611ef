//! Agents over HTTP, with scripted models: their life, their inputs, their events, and which keys reach them.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tungstenite::{Message, client::IntoClientRequest};

use crate::{
    client,
    native::{ask_as, create as create_body, key},
    pal::Pal,
    server::TestServer,
    server_test,
};

/// Longer than any scripted agent works.
const PATIENCE: Duration = Duration::from_secs(60);

/// Writes a script into the server's directory of scripts; returns the address of its model.
pub fn script(pal: &Pal, name: &str, text: &str) -> String {
    let directory = pal.dir().join(".config/palisade/scripts");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join(format!("{name}.toml")), text).unwrap();
    format!("script:{name}.toml")
}

/// Creates agents; returns their ids.
#[track_caller]
pub fn create(server: &TestServer, wanted: Value) -> Vec<String> {
    let made = server.ask("POST", "/v1/agents", wanted).expect(201).json();
    let items = made["items"].as_array().unwrap().iter();
    items.map(|agent| agent["id"].as_str().unwrap().to_owned()).collect()
}

/// Creates one agent.
#[track_caller]
pub fn create_one(server: &TestServer, wanted: Value) -> String {
    create(server, wanted).remove(0)
}

#[track_caller]
pub fn show(server: &TestServer, id: &str) -> Value {
    server.get(&format!("/v1/agents/{id}")).expect(200).json()
}

/// Sends an input to an agent.
#[track_caller]
pub fn tell(server: &TestServer, id: &str, route: &str, body: Value) -> client::HttpAnswer {
    server.ask("POST", &format!("/v1/agents/{id}/{route}"), body)
}

/// Waits until an agent has a status, and no task drives it.
#[track_caller]
pub fn await_status(server: &TestServer, id: &str, status: &str) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let agent = show(server, id);
        if agent["status"] == status && agent["driven"] == (status == "working") {
            return agent;
        }
        assert!(Instant::now() < deadline, "agent {id} is not {status}: {agent:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The events of an agent.
#[track_caller]
pub fn events(server: &TestServer, id: &str) -> Vec<Value> {
    let text = server.get(&format!("/v1/agents/{id}/export")).expect(200).text();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Removes all agents and their Bodies, the youngest first, because a fork uses a checkpoint of its origin.
pub fn remove_all(server: &TestServer) {
    let listed = server.get("/v1/agents?limit=1000").expect(200).json();
    for agent in listed["items"].as_array().unwrap().iter().rev() {
        let id = agent["id"].as_str().unwrap();
        let remove = |body: bool| {
            server.ask("DELETE", &format!("/v1/agents/{id}?body={body}&force=true"), Value::Null)
        };
        let removed = match remove(true) {
            shared if shared.text().contains("another agent works in Body") => remove(false),
            removed => removed,
        };
        assert!([204, 404].contains(&removed.status), "{}", removed.text());
    }
}

/// A stream of server-sent events.
pub struct AgentStream(BufReader<TcpStream>);

/// One message of a stream.
#[derive(Debug)]
pub struct StreamMessage {
    pub id: Option<u64>,
    pub name: Option<String>,
    pub data: Value,
}

impl AgentStream {
    pub fn open(server: &TestServer, id: &str, query: &str, more: &[(&str, &str)]) -> Self {
        let headers: Vec<(&str, &str)> =
            [("X-API-KEY", server.key.as_str())].into_iter().chain(more.iter().copied()).collect();
        let head = client::head("GET", &format!("/v1/agents/{id}/events{query}"), &headers);
        let mut stream = client::dial(server.address);
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        Self(BufReader::new(stream))
    }

    /// The next message; none at the end of the stream.
    pub fn next(&mut self) -> Option<StreamMessage> {
        let mut message = StreamMessage { id: None, name: None, data: Value::Null };
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap_or(0) == 0 || line == "0\r\n" {
                return None;
            }
            let line = line.trim_end();
            if let Some(id) = line.strip_prefix("id: ") {
                message.id = id.parse().ok();
            } else if let Some(name) = line.strip_prefix("event: ") {
                message.name = Some(name.to_owned());
            } else if let Some(data) = line.strip_prefix("data: ") {
                message.data = serde_json::from_str(data).unwrap();
            } else if line.is_empty() && !message.data.is_null() {
                return Some(message);
            }
        }
    }

    /// Reads messages until one matches.
    pub fn until(&mut self, matches: impl Fn(&StreamMessage) -> bool) -> Vec<StreamMessage> {
        let mut seen = Vec::new();
        loop {
            seen.push(self.next().unwrap_or_else(|| panic!("the stream ended: {seen:#?}")));
            if seen.last().is_some_and(&matches) {
                return seen;
            }
        }
    }
}

const HELLO: &str = "[[turns]]\ntext = 'hello from a script'\n[[turns]]\ntext = 'again'\n";

server_test! {
    /// An agent answers, is listed and shown, takes another message, costs something, and goes with its Body.
    fn an_agent_works_and_is_removed(pal) {
        let model = script(pal, "hello", HELLO);
        let server = TestServer::start(pal);
        let id = create_one(&server, json!({ "task": "say hello\nin two lines", "model": model, "create": { "metadata": { "team": "web" } } }));
        let agent = await_status(&server, &id, "finished");
        assert_eq!((&agent["title"], &agent["model"], &agent["approve"]), (&json!("say hello"), &json!("script:hello.toml"), &json!("auto")));
        assert_eq!((&agent["summary"], &agent["turn"], &agent["totals"]["answers"]), (&json!("hello from a script"), &json!(1), &json!(1)));
        assert_eq!((&agent["approvals"], &agent["questions"]), (&json!([]), &json!([])));
        let body = agent["body"].as_str().unwrap().to_owned();
        assert_eq!(server.get(&format!("/v1/bodies/{body}")).expect(200).json()["metadata"]["team"], "web");
        tell(&server, &id, "messages", json!({ "text": "once more" })).expect(200);
        let agent = await_status(&server, &id, "finished");
        assert_eq!((&agent["summary"], &agent["turn"]), (&json!("again"), &json!(2)));
        let listed = server.get("/v1/agents").expect(200).json();
        assert_eq!((listed["items"].as_array().unwrap().len(), &listed["items"][0]["id"]), (1, &json!(id)));
        let cost = server.get(&format!("/v1/agents/{id}/cost")).expect(200).json();
        assert_eq!((&cost["items"][0]["agent"], &cost["total"]["answers"], &cost["total"]["unpriced_answers"]), (&json!(id), &json!(2), &json!(2)));
        assert!(cost["total"]["tokens"]["output"].as_u64().unwrap() > 0, "{cost}");
        let kinds: Vec<Value> = events(&server, &id).iter().map(|event| event["type"].clone()).collect();
        assert_eq!((&kinds[0], &kinds[1], &kinds[2]), (&json!("agent.created"), &json!("agent.embodied"), &json!("message.received")));
        assert_eq!(kinds.iter().filter(|kind| **kind == "model.answered").count(), 2);
        server.ask("DELETE", &format!("/v1/agents/{id}?body=true"), Value::Null).expect(204);
        server.get(&format!("/v1/agents/{id}")).expect(404);
        server.get(&format!("/v1/bodies/{body}")).expect(404);
        assert_eq!(server.get("/v1/snapshots").expect(200).json()["items"], json!([]), "its checkpoints are gone");
    }
}

server_test! {
    /// A client follows an agent from its first event, comes back without a gap, and sees pieces of answers before they
    /// are events; a WebSocket has the same.
    fn an_agent_is_followed_as_it_works(pal) {
        let slow = script(pal, "slow", "[[turns]]\ntext = 'first'\n[[turns]]\ntext = 'one two three four five six'\npause_ms = 100\n");
        let server = TestServer::start(pal);
        let id = create_one(&server, json!({ "task": "go", "model": slow }));
        await_status(&server, &id, "finished");
        let all = events(&server, &id);
        let mut begun = AgentStream::open(&server, &id, "", &[]);
        let first: Vec<u64> = (0..4).map(|_| begun.next().unwrap().id.unwrap()).collect();
        drop(begun);
        let resumed = |query: &str, more: &[(&str, &str)]| {
            let mut stream = AgentStream::open(&server, &id, query, more);
            let rest = stream.until(|message| message.data["type"] == "agent.finished");
            rest.iter().map(|message| message.id.unwrap()).collect::<Vec<u64>>()
        };
        let last = first[3].to_string();
        for rest in [resumed("", &[("Last-Event-ID", &last)]), resumed(&format!("?after={last}"), &[])] {
            let seen: Vec<u64> = first.iter().copied().chain(rest).collect();
            let wanted: Vec<u64> = all.iter().map(|event| event["pos"].as_u64().unwrap()).collect();
            assert_eq!(seen, wanted, "nothing is missing, and nothing comes twice");
        }
        // Live: the pieces of the second answer.
        let newest = show(&server, &id)["pos"].to_string();
        let mut live = AgentStream::open(&server, &id, &format!("?after={newest}"), &[]);
        let mut request = format!("ws://{}/v1/agents/{id}/events?after={newest}", server.address).into_client_request().unwrap();
        request.headers_mut().insert("x-api-key", server.key.parse().unwrap());
        let (mut socket, _) = tungstenite::client(request, client::dial(server.address)).unwrap();
        tell(&server, &id, "messages", json!({ "text": "more" })).expect(200);
        let seen = live.until(|message| message.data["type"] == "model.answered");
        let named = |name: &str| seen.iter().filter(|message| message.name.as_deref() == Some(name)).count();
        assert_eq!(named("asking"), 1, "{seen:#?}");
        assert!(named("delta") >= 5, "{seen:#?}");
        assert!(seen.iter().all(|message| message.id.is_some() != message.name.is_some()), "a live update has no position: {seen:#?}");
        let (mut deltas, mut answered) = (0, 0);
        while answered == 0 {
            if let Message::Text(text) = socket.read().unwrap() {
                let said: Value = serde_json::from_str(&text).unwrap();
                deltas += usize::from(said["live"]["type"] == "delta");
                answered += usize::from(said["type"] == "model.answered");
            }
        }
        assert!(deltas >= 5, "{deltas}");
        await_status(&server, &id, "finished");
        // The stream of a removed agent ends.
        server.ask("DELETE", &format!("/v1/agents/{id}?body=true"), Value::Null).expect(204);
        while live.next().is_some_and(|message| message.data["type"] != "agent.removed") {}
        assert!(live.next().is_none());
    }
}

server_test! {
    /// At its budget an agent pauses, and goes on when it is raised; it does not go on without.
    fn an_agent_pauses_at_its_budget(pal) {
        let model = script(pal, "count", "[[turns]]\ntext = 'a'\n[[turns]]\ntext = 'b'\n[[turns]]\ntext = 'c'\n");
        let server = TestServer::start(pal);
        let id = create_one(&server, json!({ "task": "go", "model": model, "budget": { "turns": 1, "tokens": 5000 } }));
        let agent = await_status(&server, &id, "finished");
        assert_eq!(agent["budget"], json!({ "turns": 1, "tokens": 5000 }));
        assert_eq!(tell(&server, &id, "resume", Value::Null).expect(409).json()["kind"], "conflict", "it has finished");
        tell(&server, &id, "messages", json!({ "text": "next" })).expect(200);
        assert_eq!(await_status(&server, &id, "paused")["pause"]["reason"], "budget");
        tell(&server, &id, "resume", Value::Null).expect(409);
        tell(&server, &id, "resume", json!({ "budget": { "turns": 0 } })).expect(400);
        tell(&server, &id, "resume", json!({ "budget": { "turns": 2 } })).expect(200);
        let agent = await_status(&server, &id, "finished");
        assert_eq!((&agent["summary"], &agent["budget"]["tokens"]), (&json!("b"), &json!(5000)), "the other limits stay");
        remove_all(&server);
    }
}

server_test! {
    /// An interrupt ends the turn at once; the agent goes on with a message, or where it was.
    fn an_agent_is_interrupted(pal) {
        let model = script(pal, "endless", "[[turns]]\ntext = 'a b c d e f g h'\npause_ms = 20000\n[[turns]]\ntext = 'z'\n");
        let quick = script(pal, "quick", "[[turns]]\ntext = 'a b c d'\npause_ms = 500\nrepeat = 'forever'\n");
        let server = TestServer::start(pal);
        for route in ["interrupt", "stop"] {
            let id = create_one(&server, json!({ "task": "go", "model": model }));
            await_status(&server, &id, "working");
            server.ask("DELETE", &format!("/v1/agents/{id}"), Value::Null).expect(409);
            let agent = tell(&server, &id, route, Value::Null).expect(200).json();
            assert_eq!((&agent["status"], &agent["turn"]), (&json!("paused"), &json!(0)), "{route}: {agent}");
            // One more is no error, and changes nothing.
            tell(&server, &id, route, Value::Null).expect(200);
            assert_eq!(await_status(&server, &id, "paused")["turn"], 0);
        }
        let id = create_one(&server, json!({ "task": "go", "model": quick }));
        await_status(&server, &id, "working");
        tell(&server, &id, "interrupt", Value::Null).expect(200);
        await_status(&server, &id, "paused");
        tell(&server, &id, "resume", Value::Null).expect(200);
        assert_eq!(await_status(&server, &id, "finished")["turn"], 1);
        remove_all(&server);
    }
}

server_test! {
    /// A repeated request creates its agents once, also after a restart; they share a group and have a Body each.
    fn a_repeated_request_makes_its_agents_once(pal) {
        let model = script(pal, "hello", HELLO);
        let server = TestServer::start(pal);
        let again = |server: &TestServer, key: &str, wanted: &Value| {
            let headers = [("X-API-KEY", server.key.as_str()), ("Idempotency-Key", key), ("Content-Type", "application/json")];
            client::ask(server.address, "POST", "/v1/agents", &headers, wanted.to_string().as_bytes()).unwrap()
        };
        let ids = |answer: client::HttpAnswer| {
            let items = answer.json()["items"].as_array().unwrap().clone();
            let mut ids: Vec<String> = items.iter().map(|agent| agent["id"].as_str().unwrap().to_owned()).collect();
            ids.sort();
            ids
        };
        let wanted = json!({ "task": "go", "model": model, "count": 3 });
        let made = again(&server, "three", &wanted).expect(201);
        let items = made.json()["items"].clone();
        assert!(items[0]["group"].is_string() && items[0]["group"] == items[2]["group"] && items[0]["body"] != items[2]["body"], "{items}");
        let first = ids(made);
        assert_eq!(ids(again(&server, "three", &wanted).expect(200)), first);
        again(&server, "three", &json!({ "task": "other", "model": model })).expect(409);
        // In a Body that exists, the agent itself has the mark.
        let body = create_body(&server, json!({}));
        let inside = json!({ "task": "go", "model": model, "body": body });
        let second = ids(again(&server, "inside", &inside).expect(201));
        assert_eq!(ids(again(&server, "inside", &inside).expect(200)), second);
        first.iter().chain(&second).for_each(|id| drop(await_status(&server, id, "finished")));
        server.kill();
        let server = TestServer::start(pal);
        assert_eq!(ids(again(&server, "three", &wanted).expect(200)), first);
        assert_eq!(ids(again(&server, "inside", &inside).expect(200)), second);
        assert_eq!(server.get("/v1/agents").expect(200).json()["items"].as_array().unwrap().len(), 4);
        // Pages hold every agent once.
        let page = server.get("/v1/agents?limit=3").expect(200).json();
        let rest = server.get(&format!("/v1/agents?limit=3&cursor={}", page["next"].as_str().unwrap())).expect(200).json();
        assert_eq!((page["items"].as_array().unwrap().len(), rest["items"].as_array().unwrap().len()), (3, 1));
        assert!(rest["next"].is_null());
        remove_all(&server);
    }
}

server_test! {
    /// A key reaches the agents of its own Bodies, and no other ones. Its owner's requests are the control.
    fn agents_of_one_key_are_not_there_for_another(pal) {
        let model = script(pal, "hello", HELLO);
        let server = TestServer::start(pal);
        let (_, one) = key(&server, json!({ "name": "one", "scope": "run" }));
        let (_, other) = key(&server, json!({ "name": "other", "scope": "run" }));
        let (_, label) = key(&server, json!({ "name": "label", "scope": "run", "reach": "label=team=web" }));
        let made = ask_as(&server, &one, "POST", "/v1/agents", json!({ "task": "go", "model": model, "create": { "metadata": { "team": "web" } } }));
        let id = made.expect(201).json()["items"][0]["id"].as_str().unwrap().to_owned();
        let agent = await_status(&server, &id, "finished");
        let routes: [(&str, &str, Value); 13] = [
            ("GET", "", Value::Null),
            ("GET", "/export", Value::Null),
            ("GET", "/cost", Value::Null),
            ("POST", "/messages", json!({ "text": "x" })),
            ("POST", "/approvals", json!({ "decision": "approve" })),
            ("POST", "/answers", json!({ "answer": "x" })),
            ("POST", "/interrupt", Value::Null),
            ("POST", "/stop", Value::Null),
            ("POST", "/resume", Value::Null),
            ("POST", "/fork", Value::Null),
            ("POST", "/rewind", json!({ "turn": 0 })),
            ("POST", "/replay", Value::Null),
            ("DELETE", "?body=true&force=true", Value::Null),
        ];
        for (method, path, body) in routes {
            let refused = ask_as(&server, &other, method, &format!("/v1/agents/{id}{path}"), body).expect(404);
            assert!(refused.text().contains("there is no agent"), "{path}: {}", refused.text());
        }
        let body = agent["body"].as_str().unwrap();
        ask_as(&server, &other, "POST", "/v1/agents", json!({ "task": "go", "model": model, "body": body })).expect(404);
        assert_eq!(ask_as(&server, &other, "GET", "/v1/agents", Value::Null).expect(200).json()["items"], json!([]));
        assert_eq!(show(&server, &id)["turn"], 1, "nothing happened");
        for secret in [&one, &label] {
            assert_eq!(ask_as(&server, secret, "GET", "/v1/agents", Value::Null).expect(200).json()["items"][0]["id"], id.as_str());
            ask_as(&server, secret, "GET", &format!("/v1/agents/{id}/export"), Value::Null).expect(200);
        }
        // Without its Body the agent is left to the key that created it.
        ask_as(&server, &one, "DELETE", &format!("/v1/bodies/{body}?force=true"), Value::Null).expect(204);
        let get = |secret: &str| ask_as(&server, secret, "GET", &format!("/v1/agents/{id}"), Value::Null).status;
        assert_eq!((get(&one), get(&label), get(&other)), (200, 404, 404));
        ask_as(&server, &one, "POST", &format!("/v1/agents/{id}/fork"), Value::Null).expect(409);
        ask_as(&server, &one, "DELETE", &format!("/v1/agents/{id}"), Value::Null).expect(204);
        assert_eq!(get(&one), 404);
    }
}

server_test! {
    /// The server's own network and files are not for every key: addresses of models and scripts have bounds.
    fn a_key_names_only_models_that_it_may_reach(pal) {
        let model = script(pal, "hello", HELLO);
        fs::write(pal.dir().join(".config/palisade/outside.toml"), HELLO).unwrap();
        let config = "[aliases]\nnear = 'm@http://127.0.0.1:9'\ndefault = 'script:hello.toml'\n";
        fs::write(pal.dir().join(".config/palisade/models.toml"), config).unwrap();
        let server = TestServer::start(pal);
        let (_, run) = key(&server, json!({ "name": "run", "scope": "run" }));
        let status = |secret: &str, model: &str| {
            let answer = ask_as(&server, secret, "POST", "/v1/agents", json!({ "task": "go", "model": model }));
            let text = answer.text();
            assert!(!text.contains(pal.dir().to_str().unwrap()), "a path of the host: {text}");
            answer.status
        };
        let cases = [
            (model.as_str(), 201, 201),
            ("near", 201, 201),
            ("m@http://127.0.0.1:9", 201, 201),
            ("m@http://127.0.0.1:8", 403, 201),
            ("m@http://169.254.169.254/latest", 403, 201),
            ("anthropic:m", 409, 409),
            ("script:../outside.toml", 404, 404),
            ("script:/etc/passwd", 404, 404),
            ("script:none.toml", 404, 404),
            ("no address", 400, 400),
        ];
        for (model, as_run, as_admin) in cases {
            assert_eq!((status(&run, model), status(&server.key, model)), (as_run, as_admin), "{model}");
        }
        let unnamed = create_one(&server, json!({ "task": "go" }));
        assert_eq!(await_status(&server, &unnamed, "finished")["summary"], "hello from a script");
        // An endpoint that is gone pauses the agent, with the reason.
        let gone = create_one(&server, json!({ "task": "go", "model": "near" }));
        tell(&server, &gone, "stop", Value::Null).expect(200);
        remove_all(&server);
    }
}

server_test! {
    /// Invalid requests are refused with the reason, and leave nothing.
    fn nonsense_makes_no_agent(pal) {
        let model = script(pal, "hello", HELLO);
        let server = TestServer::start(pal);
        let body = create_body(&server, json!({}));
        let with = |more: Value| {
            let mut wanted = json!({ "task": "go", "model": model });
            more.as_object().unwrap().iter().for_each(|(name, value)| wanted[name] = value.clone());
            wanted
        };
        let cases = [
            (with(json!({ "task": "" })), 400),
            (with(json!({ "task": " \n" })), 400),
            (with(json!({ "task": "x".repeat(131_073) })), 400),
            (with(json!({ "count": 0 })), 400),
            (with(json!({ "count": 101 })), 400),
            (with(json!({ "count": 2, "body": body })), 400),
            (with(json!({ "count": 2, "create": { "name": "one" } })), 400),
            (with(json!({ "body": body, "create": {} })), 400),
            (with(json!({ "up": { "repositories": ["/nonexistent"] } })), 404),
            (with(json!({ "up": { "repositories": ["/usr"], "count": 2 } })), 400),
            (with(json!({ "body": "nosuchbody" })), 404),
            (with(json!({ "create": { "template": "no-such" } })), 404),
            (with(json!({ "create": [] })), 400),
            (with(json!({ "budget": { "dollars": -1 } })), 400),
            (with(json!({ "budget": { "tokens": 0 } })), 400),
            (with(json!({ "budget": { "wall": 1 } })), 400),
            (with(json!({ "approve": "always" })), 400),
            (with(json!({ "role": "../x" })), 400),
            (with(json!({ "role": "no-such-role" })), 404),
            (with(json!({ "plan": "no-such-plan" })), 404),
            (with(json!({ "checkpoint_every_ms": 86_400_001 })), 400),
            (with(json!({ "key": "sk-secret" })), 400),
            (json!({ "model": model }), 400),
            (json!([]), 400),
        ];
        for (wanted, status) in cases {
            let said = server.ask("POST", "/v1/agents", wanted.clone());
            assert_eq!(said.status, status, "{wanted}: {}", said.text());
            assert!(said.json()["message"].as_str().is_some_and(|message| !message.is_empty()));
        }
        assert_eq!(server.get("/v1/agents").json()["items"], json!([]));
        assert_eq!(server.get("/v1/bodies").json()["items"].as_array().unwrap().len(), 1);
        let id = create_one(&server, with(json!({ "body": body })));
        await_status(&server, &id, "finished");
        let cases = [
            ("messages", json!({ "text": "" }), 400),
            ("approvals", json!({ "decision": "approve" }), 409),
            ("approvals", json!({ "decision": "edit" }), 400),
            ("approvals", json!({ "decision": "edit", "arguments": {} }), 400),
            ("approvals", json!({ "decision": "edit", "arguments": [], "call": "x" }), 400),
            ("approvals", json!({ "decision": "answer" }), 400),
            ("approvals", json!({ "decision": "reject", "scope": "agent" }), 400),
            ("approvals", json!({ "decision": "always" }), 400),
            ("answers", json!({ "answer": "x" }), 409),
            ("fork", json!({ "count": 0 }), 400),
            ("fork", json!({ "at": 99 }), 404),
            ("rewind", json!({ "turn": 99 }), 404),
            ("rewind", json!({}), 400),
        ];
        for (route, wanted, status) in cases {
            let said = tell(&server, &id, route, wanted.clone());
            assert_eq!(said.status, status, "{route} {wanted}: {}", said.text());
        }
        for path in ["/v1/agents/nobody", "/v1/agents/NO", "/v1/agents/nobody/events", &format!("/v1/agents/{id}/artifacts/00")] {
            server.get(path).expect(404);
        }
        server.get(&format!("/v1/agents/{id}/events?after=-1")).expect(400);
        assert_eq!(show(&server, &id)["turn"], 1);
        remove_all(&server);
    }
}

server_test! {
    /// Fifty agents work at once in one server.
    fn fifty_agents_work_at_once(pal) {
        let model = script(pal, "small", "[[turns]]\ntext = 'one two three'\npause_ms = 300\n[[turns]]\ntext = 'done'\n");
        let server = TestServer::start(pal);
        let body = create_body(&server, json!({}));
        let ids: Vec<String> = (0..50).map(|n| create_one(&server, json!({ "task": format!("task {n}"), "model": model, "body": body, "budget": { "turns": 10 } }))).collect();
        for id in &ids {
            let agent = await_status(&server, id, "finished");
            assert_eq!((&agent["summary"], &agent["turn"]), (&json!("one two three"), &json!(1)), "{agent}");
        }
        ids.iter().for_each(|id| drop(tell(&server, id, "messages", json!({ "text": "go on" })).expect(200)));
        for id in &ids {
            assert_eq!(await_status(&server, id, "finished")["summary"], "done");
        }
        assert_eq!(server.ask("POST", "/v1/events/verify", Value::Null).expect(200).json()["whole"], true);
        let metrics = server.get("/metrics").expect(200).text();
        assert!(metrics.lines().any(|line| line == "pal_agents_driven 0"), "{metrics}");
        remove_all(&server);
    }
}
