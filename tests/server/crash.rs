//! Kills the server under load: nothing that it acknowledged is lost.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use testkit::leaks;

use crate::server::{Sandbox, TestServer, sandbox};

const KILLS: u64 = 50;
const CLIENTS: u64 = 3;
const BODIES_MAX: usize = 4;

/// The acknowledgements of the server to its clients.
#[derive(Default)]
struct ClientRecord {
    /// Sandboxes that were created.
    alive: BTreeMap<String, KnownSandbox>,
    ended: Vec<String>,
}

/// A sandbox, and the actions in it.
struct KnownSandbox {
    made: Sandbox,
    files: BTreeMap<String, String>,
    /// The last process that was started.
    line: Option<String>,
    /// The last terminal, by tag, and the last line typed into it.
    terminal: Option<(String, String)>,
}

/// Fifty kills while clients create sandboxes, write files, start processes, type into terminals and end
/// sandboxes.
#[test]
fn kills_of_the_server_under_load_lose_nothing() {
    crate::pal::check(|pal| {
        let (told, over, turn) =
            (Mutex::new(ClientRecord::default()), AtomicBool::new(false), AtomicU64::new(0));
        let current: Mutex<Option<TestServer>> =
            Mutex::new(Some(TestServer::start_with(pal, &["--listen", "127.0.0.1:0"])));
        let address = current.lock().unwrap().as_ref().unwrap().address.to_string();
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let (told, over, turn, address) = (&told, &over, &turn, &address);
                let key = current.lock().unwrap().as_ref().unwrap().key.clone();
                scope.spawn(move || {
                    let remote = RemoteClient { address: address.parse().unwrap(), key };
                    while !over.load(Ordering::Relaxed) {
                        remote.act(told, client, turn.fetch_add(1, Ordering::Relaxed));
                    }
                });
            }
            for kill in 0..KILLS * 2 {
                // On a slow host a terminal may not be ready between two kills: then there are more kills, at
                // longer intervals.
                let slow = kill >= KILLS;
                if slow && told.lock().unwrap().alive.values().any(|known| known.terminal.is_some()) {
                    break;
                }
                // Long enough for a few requests, and never in step with them.
                std::thread::sleep(Duration::from_millis(60 + kill * 37 % 190 + if slow { 400 } else { 0 }));
                current.lock().unwrap().take().unwrap().kill();
                *current.lock().unwrap() = Some(TestServer::start_with(pal, &["--listen", &address]));
            }
            over.store(true, Ordering::Relaxed);
        });
        let server = current.into_inner().unwrap().unwrap();
        let told = told.into_inner().unwrap();
        eprintln!(
            "{} requests, {} sandboxes alive, {} ended",
            turn.load(Ordering::Relaxed),
            told.alive.len(),
            told.ended.len()
        );
        assert!(turn.load(Ordering::Relaxed) > KILLS, "there was no load");
        let typed = told.alive.values().filter(|known| known.terminal.is_some()).count();
        assert!(typed > 0, "nobody typed anything");
        for KnownSandbox { made, files, line, terminal } in told.alive.values() {
            assert_eq!(server.state(made).as_deref(), Some("running"), "{}", made.id);
            for (path, text) in files {
                assert_eq!(server.read(made, path).unwrap().expect(200).text(), *text, "{} {path}", made.id);
            }
            if let Some(line) = line {
                assert!(
                    server.processes(made).iter().any(|args| args.contains(line)),
                    "{} lost {line}",
                    made.id
                );
            }
            if let Some((tag, word)) = terminal {
                // The terminal keeps running, and a new client can type into it and see the result.
                let asked = format!("echo again-$(({} + 1))", word.len());
                assert!(remote(&server).type_into(made, tag, &asked), "{} lost the terminal {tag}", made.id);
                let wanted = format!("again-{}", word.len() + 1);
                assert!(remote(&server).screen(made, tag, &wanted), "{} has another terminal {tag}", made.id);
                assert_eq!(
                    server.read(made, &format!("typed-{tag}")).unwrap().expect(200).text().trim(),
                    word,
                    "{}",
                    made.id
                );
            }
        }
        for ended in &told.ended {
            server.get(&format!("/sandboxes/{ended}")).expect(404);
        }
        // A sandbox whose client was never answered exists, too, has a deadline, and can be ended.
        for listed in server.get("/v2/sandboxes?limit=100").json().as_array().unwrap() {
            assert_ne!(listed["endAt"], "9999-12-31T23:59:59Z", "{listed}");
            server
                .ask("DELETE", &format!("/sandboxes/{}", listed["sandboxID"].as_str().unwrap()), Value::Null)
                .expect(204);
        }
        assert_eq!(server.stop(), Some(0));
        let swept = pal.line("gc");
        assert_eq!(swept.code, 0, "{swept:?}");
        leaks::reap();
    });
}

fn remote(server: &TestServer) -> RemoteClient {
    RemoteClient { address: server.address, key: server.key.clone() }
}

/// A client that outlives its server.
struct RemoteClient {
    address: std::net::SocketAddr,
    key: String,
}

impl RemoteClient {
    fn ask(&self, method: &str, path: &str, body: &Value) -> Option<crate::client::HttpAnswer> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let asked = crate::client::ask(self.address, method, path, &[("X-API-KEY", &self.key)], &body).ok();
        if asked.is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        asked.filter(|answer| answer.whole)
    }

    fn envd(&self, made: &Sandbox, path: &str, kind: &str, body: &[u8]) -> Option<crate::client::HttpAnswer> {
        let headers = [
            ("E2b-Sandbox-Id", made.id.as_str()),
            ("E2b-Sandbox-Port", "49983"),
            ("X-Access-Token", &made.token),
            ("Content-Type", kind),
        ];
        crate::client::ask(self.address, "POST", path, &headers, body).ok().filter(|answer| answer.whole)
    }

    /// One action, and its acknowledgement.
    fn act(&self, told: &Mutex<ClientRecord>, client: u64, turn: u64) {
        let mine = |told: &ClientRecord| {
            told.alive
                .values()
                .filter(|known| known.made.said["client"] == client)
                .map(|known| known.made.clone())
                .collect::<Vec<_>>()
        };
        let mine = mine(&told.lock().unwrap());
        let chosen = mine.get(turn as usize % mine.len().max(1)).cloned();
        match (turn % 6, chosen) {
            (0, _) if mine.len() < BODIES_MAX => {
                let Some(answer) =
                    self.ask("POST", "/v2/sandboxes", &json!({ "templateID": "host", "timeout": 600 }))
                else {
                    return;
                };
                let mut made = sandbox(answer.expect(201).json());
                made.said["client"] = client.into();
                let known = KnownSandbox { made, files: BTreeMap::new(), line: None, terminal: None };
                told.lock().unwrap().alive.insert(known.made.id.clone(), known);
            }
            (1, Some(made)) if mine.len() == BODIES_MAX => {
                // From here on the state is unknown: it counts as alive again only if the server refused.
                told.lock().unwrap().alive.remove(&made.id);
                if self
                    .ask("DELETE", &format!("/sandboxes/{}", made.id), &Value::Null)
                    .is_some_and(|answer| answer.status == 204)
                {
                    told.lock().unwrap().ended.push(made.id);
                }
            }
            (2, Some(made)) => {
                let line = format!("sleep 7{turn}");
                let start = json!({ "process": { "cmd": "/bin/sh", "args": ["-c", format!("{line} & wait")] }, "stdin": false, "tag": format!("t{turn}") }).to_string();
                let body = [&[0][..], &(start.len() as u32).to_be_bytes(), start.as_bytes()].concat();
                if self.started(&made, &body)
                    && let Some(entry) = told.lock().unwrap().alive.get_mut(&made.id)
                {
                    entry.line = Some(line);
                }
            }
            (3, Some(made)) => self.use_terminal(told, &made, turn),
            (_, Some(made)) => {
                let (path, text) = (format!("f{turn}"), format!("text of {turn}"));
                let written = self.envd(
                    &made,
                    &format!("/files?path={path}&username=user"),
                    "application/octet-stream",
                    text.as_bytes(),
                );
                if written.is_some_and(|answer| answer.status == 200)
                    && let Some(entry) = told.lock().unwrap().alive.get_mut(&made.id)
                {
                    entry.files.insert(path, text);
                }
            }
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
    }

    /// Opens a terminal, or types into the existing one; records the acknowledgement.
    fn use_terminal(&self, told: &Mutex<ClientRecord>, made: &Sandbox, turn: u64) {
        let known = told.lock().unwrap().alive.get(&made.id).and_then(|known| known.terminal.clone());
        let tag = match known {
            Some((tag, _)) => tag,
            None => {
                let tag = format!("p{turn}");
                let start = json!({ "process": { "cmd": "/bin/sh", "args": ["-i"], "cwd": "/home/user" }, "pty": { "size": { "cols": 80, "rows": 24 } }, "tag": tag }).to_string();
                if !self.started(
                    made,
                    &[&[0][..], &(start.len() as u32).to_be_bytes(), start.as_bytes()].concat(),
                ) {
                    return;
                }
                tag
            }
        };
        let word = format!("word{turn}");
        if !self.type_into(made, &tag, &format!("echo {word} > typed-{tag}")) {
            return;
        }
        // Typed is not yet executed: wait for the result of the shell.
        let path = format!("/files?path=typed-{tag}&username=user");
        for _ in 0..200 {
            let headers = [
                ("E2b-Sandbox-Id", made.id.as_str()),
                ("E2b-Sandbox-Port", "49983"),
                ("X-Access-Token", &made.token),
            ];
            let seen = crate::client::ask(self.address, "GET", &path, &headers, b"")
                .ok()
                .filter(|answer| answer.whole && answer.status == 200);
            if seen.is_some_and(|answer| answer.text().trim() == word) {
                if let Some(entry) = told.lock().unwrap().alive.get_mut(&made.id) {
                    entry.terminal = Some((tag, word));
                }
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether the guest accepted a line for a terminal.
    fn type_into(&self, made: &Sandbox, tag: &str, line: &str) -> bool {
        use base64::{Engine, engine::general_purpose::STANDARD};
        let input =
            json!({ "process": { "tag": tag }, "input": { "pty": STANDARD.encode(format!("{line}\n")) } })
                .to_string();
        self.envd(made, "/process.Process/SendInput", "application/json", input.as_bytes())
            .is_some_and(|answer| answer.status == 200)
    }

    /// Whether a terminal shows a text to a new client.
    fn screen(&self, made: &Sandbox, tag: &str, wanted: &str) -> bool {
        use base64::{Engine, engine::general_purpose::STANDARD};
        use std::io::{Read, Write};
        let asked = json!({ "process": { "tag": tag } }).to_string();
        let body = [&[0][..], &(asked.len() as u32).to_be_bytes(), asked.as_bytes()].concat();
        let headers = [
            ("E2b-Sandbox-Id", made.id.as_str()),
            ("E2b-Sandbox-Port", "49983"),
            ("X-Access-Token", made.token.as_str()),
            ("Content-Type", "application/connect+json"),
        ];
        let mut stream = crate::client::dial(self.address);
        let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
        let head = crate::client::head("POST", "/process.Process/Connect", &headers);
        stream
            .write_all(format!("{head}Content-Length: {}\r\n\r\n", body.len()).as_bytes())
            .and_then(|()| stream.write_all(&body))
            .unwrap();
        let (mut heard, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            match stream.read(&mut piece) {
                Ok(0) | Err(_) => return false,
                Ok(read) => heard.extend_from_slice(&piece[..read]),
            }
            let text = String::from_utf8_lossy(&heard).into_owned();
            let shown: String = text
                .split("\"pty\":\"")
                .skip(1)
                .filter_map(|rest| STANDARD.decode(rest.split('"').next()?).ok())
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
                .collect();
            if shown.contains(wanted) {
                return true;
            }
        }
    }

    /// Whether the guest reported that the process runs; its stream is then left open.
    fn started(&self, made: &Sandbox, body: &[u8]) -> bool {
        use std::io::{Read, Write};
        let Ok(mut stream) = std::net::TcpStream::connect(self.address) else { return false };
        let headers = [
            ("E2b-Sandbox-Id", made.id.as_str()),
            ("E2b-Sandbox-Port", "49983"),
            ("X-Access-Token", made.token.as_str()),
            ("Content-Type", "application/connect+json"),
        ];
        let head = crate::client::head("POST", "/process.Process/Start", &headers);
        let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
        let sent = stream
            .write_all(format!("{head}Content-Length: {}\r\n\r\n", body.len()).as_bytes())
            .and_then(|()| stream.write_all(body));
        let (mut heard, mut piece) = (Vec::new(), [0; 1024]);
        while sent.is_ok() && !String::from_utf8_lossy(&heard).contains("\"start\"") {
            match stream.read(&mut piece) {
                Ok(0) | Err(_) => return false,
                Ok(read) => heard.extend_from_slice(&piece[..read]),
            }
        }
        sent.is_ok()
    }
}
