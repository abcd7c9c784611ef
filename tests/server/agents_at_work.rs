//! Agents that act in their Bodies, over HTTP: approvals, questions, forks, rewinds, and kills of the server.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    agents::{AgentStream, await_status, create, create_one, events, remove_all, script, show, tell},
    client,
    native::{ask_as, create as create_body, key},
    server::TestServer,
    server_test,
    work::repository,
};

/// The content of a file in the Body of an agent; none if there is no such file.
fn file(server: &TestServer, agent: &Value, path: &str) -> Option<String> {
    let body = agent["body"].as_str().unwrap();
    let answer = server.get(&format!("/v1/bodies/{body}/files?path={path}"));
    (answer.status == 200).then(|| answer.text())
}

/// The results of calls, by the call, in the order of their ends.
fn outcomes(events: &[Value]) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let ended = events.iter().filter(|event| event["type"] == "call.ended");
    ended.map(|event| (text(&event["data"]["call"]), text(&event["data"]["outcome"]))).collect()
}

const ASKING: &str = r#"
[[turns]]
text = "I write four files."
calls = [
  { tool = "execute", arguments = { command = "echo one > /home/user/1" } },
  { tool = "execute", arguments = { command = "echo two > /home/user/2" } },
  { tool = "execute", arguments = { command = "echo three > /home/user/3" } },
  { tool = "execute", arguments = { command = "echo four > /home/user/4" } },
]
[[turns]]
expect = ["not now", "it is there already"]
text = "Now one more."
calls = [{ tool = "execute", arguments = { command = "echo five > /home/user/5" } }]
[[turns]]
text = "And another."
calls = [{ tool = "execute", arguments = { command = "echo six > /home/user/6" } }]
[[turns]]
text = "done"
"#;

server_test! {
    /// Calls wait for a decision: approve, edit, reject, answer instead; for the whole agent only on request.
    fn calls_wait_for_approval(pal) {
        let model = script(pal, "asking", ASKING);
        let server = TestServer::start(pal);
        let (_, run) = key(&server, json!({ "name": "run", "scope": "run", "reach": "all" }));
        let id = create_one(&server, json!({ "task": "go", "model": model, "approve": "ask" }));
        let agent = await_status(&server, &id, "paused");
        assert_eq!(agent["pause"]["reason"], "approval");
        let calls: Vec<String> = agent["approvals"].as_array().unwrap().iter().map(|call| call["call"].as_str().unwrap().to_owned()).collect();
        assert_eq!(calls.len(), 4, "{agent}");
        assert_eq!((&agent["approvals"][0]["tool"], &agent["approvals"][0]["arguments"]["command"]), (&json!("execute"), &json!("echo one > /home/user/1")));
        assert_eq!(file(&server, &agent, "/home/user/1"), None, "it has not run");
        tell(&server, &id, "resume", Value::Null).expect(409);
        let decide = |wanted: Value| ask_as(&server, &run, "POST", &format!("/v1/agents/{id}/approvals"), wanted);
        decide(json!({ "call": calls[0], "decision": "approve", "scope": "rule" })).expect(403);
        decide(json!({ "call": "no-such-call", "decision": "approve" })).expect(409);
        decide(json!({ "call": calls[0], "decision": "approve" })).expect(200);
        decide(json!({ "call": calls[0], "decision": "reject" })).expect(409);
        decide(json!({ "call": calls[1], "decision": "edit", "arguments": { "command": "echo edited > /home/user/2" } })).expect(200);
        decide(json!({ "call": calls[2], "decision": "reject", "message": "not now" })).expect(200);
        let agent = decide(json!({ "call": calls[3], "decision": "answer", "message": "it is there already" })).expect(200).json();
        assert_eq!(agent["approvals"], json!([]));
        let agent = await_status(&server, &id, "paused");
        let files = |agent: &Value| [1, 2, 3, 4, 5, 6].map(|n| file(&server, agent, &format!("/home/user/{n}")).map(|text| text.trim().to_owned()));
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(files(&agent), [some("one"), some("edited"), None, None, None, None]);
        // From here on the agent may do what the rule asks about.
        assert_eq!(agent["approvals"].as_array().unwrap().len(), 1);
        decide(json!({ "decision": "approve", "scope": "agent" })).expect(200);
        let agent = await_status(&server, &id, "finished");
        assert_eq!(files(&agent)[4..], [some("five"), some("six")]);
        remove_all(&server);
    }
}

server_test! {
    /// A question waits for an answer, which the model gets.
    fn a_question_waits_for_its_answer(pal) {
        let model = script(pal, "question", "[[turns]]\ncalls = [{ tool = 'ask_user', arguments = { question = 'Which way?', choices = ['left', 'right'] } }]\n[[turns]]\nexpect = ['right']\ntext = 'right it is'\n");
        let server = TestServer::start(pal);
        let id = create_one(&server, json!({ "task": "go", "model": model }));
        let agent = await_status(&server, &id, "paused");
        assert_eq!((&agent["pause"]["reason"], &agent["questions"][0]["question"]), (&json!("question"), &json!("Which way?")));
        assert_eq!(agent["questions"][0]["choices"], json!(["left", "right"]));
        let call = agent["questions"][0]["call"].clone();
        tell(&server, &id, "answers", json!({ "answer": "right", "call": "other" })).expect(409);
        tell(&server, &id, "answers", json!({ "answer": "right", "call": call })).expect(200);
        assert_eq!(await_status(&server, &id, "finished")["summary"], "right it is");
        tell(&server, &id, "answers", json!({ "answer": "left" })).expect(409);
        remove_all(&server);
    }
}

const WRITING: &str = r#"
[[turns]]
calls = [{ tool = "execute", arguments = { command = "echo 1 >> /home/user/log" } }]
[[turns]]
calls = [{ tool = "execute", arguments = { command = "echo 2 >> /home/user/log" } }]
[[turns]]
text = "two lines"
[[turns]]
calls = [{ tool = "execute", arguments = { command = "echo 3 >> /home/user/log" } }]
[[turns]]
text = "three lines"
"#;

server_test! {
    /// Forks and rewinds take conversation and Body to one turn, and leave what was there before.
    fn conversation_and_body_travel_together(pal) {
        let model = script(pal, "writing", WRITING);
        let server = TestServer::start(pal);
        let (_, owner) = key(&server, json!({ "name": "owner", "scope": "run" }));
        let wanted = json!({ "task": "go", "model": model, "checkpoint_every_ms": 1 });
        let made = ask_as(&server, &owner, "POST", "/v1/agents", wanted).expect(201).json();
        let id = made["items"][0]["id"].as_str().unwrap().to_owned();
        let agent = await_status(&server, &id, "finished");
        let log = |agent: &Value| file(&server, agent, "/home/user/log").unwrap_or_default().replace('\n', "");
        assert_eq!((log(&agent).as_str(), &agent["turn"]), ("12", &json!(3)));
        let turns: Vec<u64> = agent["checkpoints"].as_array().unwrap().iter().map(|one| one["turn"].as_u64().unwrap()).collect();
        assert!(turns.contains(&1), "{agent}");
        let as_owner = |path: &str, wanted: Value| ask_as(&server, &owner, "POST", &format!("/v1/agents/{id}/{path}"), wanted);
        // Two forks of the first turn write the second line again, each in a Body of its own, which the key reaches.
        let forks = as_owner("fork", json!({ "at": 1, "count": 2, "message": "go on" })).expect(201).json();
        let forks: Vec<String> = forks["items"].as_array().unwrap().iter().map(|fork| fork["id"].as_str().unwrap().to_owned()).collect();
        for fork in &forks {
            let agent = await_status(&server, fork, "finished");
            assert_eq!((log(&agent).as_str(), &agent["forked_from"]), ("12", &json!(id)));
            ask_as(&server, &owner, "GET", &format!("/v1/agents/{fork}"), Value::Null).expect(200);
            let owned = ask_as(&server, &owner, "GET", &format!("/v1/bodies/{}", agent["body"].as_str().unwrap()), Value::Null);
            assert_eq!(owned.expect(200).json()["owner"], server.get(&format!("/v1/bodies/{}", show(&server, &id)["body"].as_str().unwrap())).json()["owner"]);
            // Its events begin with those of the agent that it came from, as far as they count.
            let events = events(&server, fork);
            let chains: Vec<&str> = events.iter().map(|event| event["chain"].as_str().unwrap()).collect();
            assert_eq!((chains.first().unwrap(), chains.last().unwrap()), (&&*format!("agent/{id}"), &&*format!("agent/{fork}")));
            assert!(events.windows(2).all(|two| two[0]["pos"].as_u64() < two[1]["pos"].as_u64()));
            assert_eq!(outcomes(&events).len(), 2);
            let mut stream = AgentStream::open(&server, fork, "", &[]);
            let streamed = stream.until(|message| message.data["type"] == "agent.finished" && message.data["chain"] == chains[chains.len() - 1]);
            assert_eq!(streamed.iter().filter_map(|message| message.id).collect::<Vec<_>>(), events.iter().filter_map(|event| event["pos"].as_u64()).collect::<Vec<_>>());
        }
        // A fork of the present has both lines, and goes on with the third.
        let fork = as_owner("fork", json!({ "message": "one more" })).expect(201).json()["items"][0]["id"].as_str().unwrap().to_owned();
        assert_eq!(log(&await_status(&server, &fork, "finished")), "123");
        // Back to the first turn: the Body has one line again, and the Body before stays.
        let rewound = as_owner("rewind", json!({ "turn": 1 })).expect(200).json();
        assert_eq!((log(&rewound).as_str(), &rewound["turn"]), ("1", &json!(1)));
        assert_ne!(rewound["body"], agent["body"]);
        assert_eq!(log(&agent), "12");
        as_owner("messages", json!({ "text": "again" })).expect(200);
        let agent = await_status(&server, &id, "finished");
        assert_eq!((log(&agent).as_str(), &agent["turn"]), ("12", &json!(3)));
        assert_eq!(agent["totals"]["answers"], 5, "what was paid stays paid");
        let cost = server.get(&format!("/v1/agents/{}/cost", forks[0])).expect(200).json();
        assert_eq!(cost["total"]["answers"], 2, "a fork does not pay for its origin: {cost}");
        remove_all(&server);
    }
}

const KILLED: &str = r#"
[[turns]]
text = "a first line"
calls = [{ tool = "execute", arguments = { command = "echo 1 >> /home/user/log; sleep 3; echo 2 >> /home/user/log" } }]
[[turns]]
text = "some words that take a while to arrive"
pause_ms = 200
calls = [{ tool = "execute", arguments = { command = "echo 3 >> /home/user/log" } }]
[[turns]]
text = "three lines"
"#;

server_test! {
    /// `kill -9` of the server in the middle of a call and of an answer: the next server drives the agent on, and each
    /// call has one effect.
    fn an_agent_goes_on_after_kills_of_the_server(pal) {
        let model = script(pal, "killed", KILLED);
        let server = TestServer::start(pal);
        let id = create_one(&server, json!({ "task": "go", "model": model }));
        // In the middle of the call: its first line is written.
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while file(&server, &show(&server, &id), "/home/user/log").as_deref() != Some("1\n") {
            assert!(std::time::Instant::now() < deadline, "{:#}", show(&server, &id));
            std::thread::sleep(Duration::from_millis(20));
        }
        server.kill();
        let server = TestServer::start(pal);
        // In the middle of the second answer: a piece of it came.
        let mut stream = AgentStream::open(&server, &id, "", &[]);
        stream.until(|message| message.name.as_deref() == Some("delta"));
        server.kill();
        let server = TestServer::start(pal);
        let agent = await_status(&server, &id, "finished");
        assert_eq!((file(&server, &agent, "/home/user/log").as_deref(), &agent["summary"]), (Some("1\n2\n3\n"), &json!("three lines")));
        let events = events(&server, &id);
        assert_eq!(outcomes(&events).iter().map(|(_, outcome)| outcome.as_str()).collect::<Vec<_>>(), ["done", "done"]);
        let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).count();
        assert_eq!((of("call.started"), of("model.answered"), of("agent.driven")), (2, 3, 3));
        assert!(of("model.asked") > of("model.answered"), "the answer that was lost was asked for again");
        assert_eq!(server.ask("POST", "/v1/events/verify", Value::Null).expect(200).json()["whole"], true);
        remove_all(&server);
        server.sweep(pal);
    }
}

server_test! {
    /// A server that stops in peace leaves its agents to the next one; an agent at rest stays at rest.
    fn a_stopped_server_leaves_its_agents_to_the_next(pal) {
        let model = script(pal, "killed", KILLED);
        let quick = script(pal, "quick", "[[turns]]\ntext = 'done'\n");
        let server = TestServer::start(pal);
        let at_rest = create_one(&server, json!({ "task": "go", "model": quick }));
        await_status(&server, &at_rest, "finished");
        let id = create_one(&server, json!({ "task": "go", "model": model }));
        let mut stream = AgentStream::open(&server, &id, "", &[]);
        stream.until(|message| message.name.as_deref() == Some("delta"));
        assert_eq!(server.stop(), Some(0));
        let server = TestServer::start(pal);
        let agent = await_status(&server, &id, "finished");
        assert_eq!(file(&server, &agent, "/home/user/log").as_deref(), Some("1\n2\n3\n"));
        let driven = events(&server, &at_rest).iter().filter(|event| event["type"] == "agent.driven").count();
        assert_eq!(driven, 1, "the next server has no reason to drive it");
        remove_all(&server);
        server.sweep(pal);
    }
}

server_test! {
    /// Ten agents that act, each in a Body of its own, and a kill in the middle: each has done its work once.
    fn many_agents_go_on_after_a_kill(pal) {
        let model = script(pal, "work", "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'echo 1 >> /home/user/log; sleep 1' } }]\n[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'echo 2 >> /home/user/log' } }]\n[[turns]]\ntext = 'done'\n");
        let server = TestServer::start(pal);
        let ids = create(&server, json!({ "task": "go", "model": model, "count": 10 }));
        std::thread::sleep(Duration::from_millis(700));
        server.kill();
        let server = TestServer::start(pal);
        for id in &ids {
            let agent = await_status(&server, id, "finished");
            assert_eq!(file(&server, &agent, "/home/user/log").as_deref(), Some("1\n2\n"), "{agent:#}");
        }
        remove_all(&server);
        server.sweep(pal);
    }
}

server_test! {
    /// Content that is too long for an event is read by its hash, through an agent that refers to it and no other.
    fn long_results_are_read_by_their_hash(pal) {
        let model = script(pal, "long", &format!("[[turns]]\ntext = '{}'\n", "x".repeat(200_000)));
        let server = TestServer::start(pal);
        let (_, other) = key(&server, json!({ "name": "other", "scope": "run" }));
        let id = create_one(&server, json!({ "task": "go", "model": model }));
        await_status(&server, &id, "finished");
        let exported = events(&server, &id);
        let answered = exported.iter().find(|event| event["type"] == "model.answered").unwrap();
        assert_eq!(answered["content"][0]["text"].as_str().unwrap().len(), 200_000);
        let sha256 = answered["data"]["message"]["artifact"].as_str().unwrap();
        let blocks = server.get(&format!("/v1/agents/{id}/artifacts/{sha256}")).expect(200).json();
        assert_eq!(blocks, answered["content"]);
        let quick = script(pal, "quick", "[[turns]]\ntext = 'done'\n");
        let made = ask_as(&server, &other, "POST", "/v1/agents", json!({ "task": "go", "model": quick })).expect(201).json();
        let own = made["items"][0]["id"].as_str().unwrap();
        await_status(&server, own, "finished");
        ask_as(&server, &other, "GET", &format!("/v1/agents/{own}/artifacts/{sha256}"), Value::Null).expect(404);
        remove_all(&server);
    }
}

server_test! {
    /// The command line and the server see one set of agents, and drive one at a time.
    fn the_command_line_and_the_server_share_agents(pal) {
        let model = script(pal, "two", "[[turns]]\ntext = 'one'\n[[turns]]\ntext = 'two'\n[[turns]]\ntext = 'three'\n");
        let server = TestServer::start(pal);
        let body = create_body(&server, json!({}));
        let id = create_one(&server, json!({ "task": "go", "model": model, "body": body }));
        await_status(&server, &id, "finished");
        let listed = pal.run(["agent", "ls", "--json"]);
        assert!(listed.out.contains(&id), "{listed:?}");
        let sent = pal.run(["agent", "send", "--detach", &id, "more"]);
        assert_eq!(sent.code, 0, "{sent:?}");
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while show(&server, &id)["summary"] != "two" {
            assert!(std::time::Instant::now() < deadline, "{:#}", show(&server, &id));
            std::thread::sleep(Duration::from_millis(20));
        }
        await_status(&server, &id, "finished");
        tell(&server, &id, "messages", json!({ "text": "and more" })).expect(200);
        assert_eq!(await_status(&server, &id, "finished")["summary"], "three");
        remove_all(&server);
    }
}

server_test! {
    /// A quota bounds the Bodies of agents, forks included; a refused request leaves nothing.
    fn a_quota_bounds_agents(pal) {
        let model = script(pal, "quick", "[[turns]]\ntext = 'done'\n");
        let server = TestServer::start(pal);
        let (_, secret) = key(&server, json!({ "name": "small", "scope": "run", "quota": { "bodies": 2 } }));
        let ask = |path: &str, wanted: Value| ask_as(&server, &secret, "POST", path, wanted);
        let wanted = |count: u32| json!({ "task": "go", "model": model, "count": count });
        let refused: client::HttpAnswer = ask("/v1/agents", wanted(3)).expect(429);
        assert!(refused.header("retry-after").is_some());
        assert_eq!(server.get("/v1/agents").json()["items"], json!([]));
        let id = ask("/v1/agents", wanted(1)).expect(201).json()["items"][0]["id"].as_str().unwrap().to_owned();
        await_status(&server, &id, "finished");
        ask(&format!("/v1/agents/{id}/fork"), json!({ "count": 2 })).expect(429);
        ask(&format!("/v1/agents/{id}/fork"), json!({ "count": 1 })).expect(201);
        ask(&format!("/v1/agents/{id}/rewind"), json!({ "turn": 0 })).expect(429);
        assert_eq!(server.get("/v1/bodies").json()["items"].as_array().unwrap().len(), 2);
        remove_all(&server);
    }
}

server_test! {
    /// The agents of one key remember together; those of another key have other memories.
    fn memories_of_one_key_are_not_there_for_another(pal) {
        let model = script(pal, "memory", "[[turns]]\ntask = 'write'\ncalls = [{ tool = 'write_file', arguments = { file_path = '/memories/team.md', content = 'the secret of one' } }]\n[[turns]]\ntask = 'read'\ncalls = [{ tool = 'read_file', arguments = { file_path = '/memories/team.md' } }]\n[[turns]]\ntext = 'done'\n");
        let server = TestServer::start(pal);
        let (_, one) = key(&server, json!({ "name": "one", "scope": "run" }));
        let (_, other) = key(&server, json!({ "name": "other", "scope": "run" }));
        let work = |secret: &str, task: &str| {
            let made = ask_as(&server, secret, "POST", "/v1/agents", json!({ "task": task, "model": model })).expect(201).json();
            let id = made["items"][0]["id"].as_str().unwrap().to_owned();
            await_status(&server, &id, "finished");
            server.get(&format!("/v1/agents/{id}/export")).expect(200).text()
        };
        work(&one, "write");
        assert!(work(&one, "read").contains("the secret of one"), "the control");
        assert!(!work(&other, "read").contains("the secret of one"));
        remove_all(&server);
    }
}

server_test! {
    /// An agent works in a repository of the host, asked for by an admin; a replay of its calls has the same results.
    fn an_agent_works_in_a_repository(pal) {
        let repository = repository(pal);
        let path = repository.to_str().unwrap();
        let model = script(pal, "edit", "[[turns]]\ncalls = [{ tool = 'edit_file', arguments = { file_path = '/workspace/app/a.txt', old_string = 'one', new_string = 'two' } }]\n[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'cat a.txt' } }]\n[[turns]]\nexpect = ['two']\ntext = 'done'\n");
        let server = TestServer::start(pal);
        let (_, run) = key(&server, json!({ "name": "run", "scope": "run" }));
        let wanted = json!({ "task": "go", "model": model, "up": { "repositories": [path], "prepare": "no" } });
        ask_as(&server, &run, "POST", "/v1/agents", wanted.clone()).expect(403);
        let id = create_one(&server, wanted);
        let agent = await_status(&server, &id, "finished");
        let diff = server.get(&format!("/v1/bodies/{}/diff", agent["body"].as_str().unwrap())).expect(200).json();
        assert_eq!((&diff["files"][0]["path"], &diff["files"][0]["added"]), (&json!("a.txt"), &json!(1)));
        let replayed = tell(&server, &id, "replay", Value::Null).expect(200).json();
        assert_eq!((&replayed["same"], &replayed["differences"]), (&json!(2), &json!([])), "{replayed}");
        assert_eq!(server.get("/v1/bodies").json()["items"].as_array().unwrap().len(), 1, "the Body of the replay is gone");
        remove_all(&server);
    }
}

server_test! {
    /// `kill -9` while agents are created: the repetition of the request completes it, and makes nothing twice.
    fn a_killed_creation_is_completed_by_its_repetition(pal) {
        let model = script(pal, "quick", "[[turns]]\ntext = 'done'\n");
        let mut server = TestServer::start(pal);
        for (round, delay_ms) in [10, 60, 120, 250, 500].into_iter().enumerate() {
            let name = format!("round-{round}");
            let wanted = json!({ "task": name, "model": model, "count": 4 }).to_string();
            let request = |server: &TestServer| {
                let headers = [("X-API-KEY", server.key.clone()), ("Idempotency-Key", name.clone()), ("Content-Type", "application/json".to_owned())];
                let (address, wanted) = (server.address, wanted.clone());
                move || {
                    let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
                    client::ask(address, "POST", "/v1/agents", &headers, wanted.as_bytes())
                }
            };
            let asking = std::thread::spawn(request(&server));
            std::thread::sleep(Duration::from_millis(delay_ms));
            server.kill();
            let first = asking.join().unwrap();
            server = TestServer::start(pal);
            let made = request(&server)().unwrap();
            assert!([200, 201].contains(&made.status), "{}", made.text());
            let items = made.json()["items"].as_array().unwrap().clone();
            assert_eq!(items.len(), 4, "after {delay_ms} ms: {first:?}");
            for agent in &items {
                await_status(&server, agent["id"].as_str().unwrap(), "finished");
            }
            let listed = server.get("/v1/agents?limit=1000").expect(200).json();
            let of_round = listed["items"].as_array().unwrap().iter().filter(|agent| agent["title"] == name.as_str()).count();
            let bodies = server.get("/v1/bodies?limit=1000").expect(200).json()["items"].as_array().unwrap().len();
            assert_eq!((of_round, bodies), (4, 4), "after {delay_ms} ms");
            remove_all(&server);
        }
        server.sweep(pal);
    }
}
