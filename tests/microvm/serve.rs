//! MicroVMs behind `pal serve`: created, used, forked and removed over HTTP like any other Body.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::{Bodies, body_test, leaks, wait};

use crate::kills::program;

/// A server on this test's data directory.
struct ServeProcess {
    child: Child,
    url: String,
    key: String,
}

impl ServeProcess {
    fn start(t: &Bodies) -> Self {
        let mut child = Command::new(program())
            .arg("--data")
            .arg(t.data())
            .args(["serve", "--json", "--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        let key = std::fs::read_to_string(t.data().join("serve.key")).unwrap().trim().to_owned();
        Self { child, url: said["url"].as_str().unwrap().to_owned(), key }
    }

    /// Sends a request; returns the status and the answer.
    fn ask(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let said = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "120", "--request", method])
            .args(["--header", &format!("Authorization: Bearer {}", self.key)])
            .args(["--header", "Content-Type: application/json", "--write-out", "\n%{http_code}"])
            .args((!body.is_null()).then(|| ["--data".to_owned(), body.to_string()]).into_iter().flatten())
            .arg(format!("{}{path}", self.url))
            .output()
            .unwrap();
        let text = String::from_utf8(said.stdout).unwrap();
        let (answer, status) = text.rsplit_once('\n').unwrap_or_else(|| panic!("no answer: {text:?}"));
        (status.parse().unwrap(), serde_json::from_str(answer).unwrap_or_default())
    }

    fn runs(&self, body: &Value, script: &str) -> String {
        let path = format!("/v1/bodies/{}/exec", body["id"].as_str().unwrap());
        let (status, ran) = self.ask("POST", &path, json!({ "argv": ["sh", "-c", script] }));
        assert_eq!((status, &ran["code"]), (200, &json!(0)), "{ran}");
        ran["stdout"].as_str().unwrap().trim().to_owned()
    }

    fn remove(&self, body: &Value) {
        let path = format!("/v1/bodies/{}?force=true", body["id"].as_str().unwrap());
        let (status, said) = self.ask("DELETE", &path, Value::Null);
        assert!(status < 300, "{status} {said}");
    }

    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

fn hypervisors() -> usize {
    leaks::reap();
    leaks::descendants().iter().filter(|process| process.name.starts_with("qemu-system")).count()
}

#[body_test(except(process = "tests/server/native.rs has it"))]
async fn machines_are_made_used_and_forked_over_http(t: Bodies) {
    let server = ServeProcess::start(&t);
    let wanted = json!({ "layer": "microvm", "env": { "COLOUR": "green" } });
    let (status, body) = server.ask("POST", "/v1/bodies", wanted.clone());
    assert_eq!((status, &body["layer"]), (201, &json!("microvm")), "{body}");
    let host = rustix::system::uname().release().to_string_lossy().into_owned();
    assert_ne!(server.runs(&body, "uname -r"), host, "a kernel of its own");
    assert_eq!(server.runs(&body, "echo $COLOUR; echo mine > ~/file"), "green");
    let path = format!("/v1/bodies/{}/fork", body["id"].as_str().unwrap());
    let (status, forks) = server.ask("POST", &path, json!({ "count": 1 }));
    assert_eq!(status, 201, "{forks}");
    let fork = &forks["items"][0];
    assert_eq!(server.runs(fork, "cat ~/file; hostname"), format!("mine\n{}", fork["id"].as_str().unwrap()));

    // From the boot snapshot, or from the pool if the host had an idle CPU.
    let (status, next) = server.ask("POST", "/v1/bodies", wanted);
    assert_eq!((status, server.runs(&next, "echo $COLOUR; ls -A ~").as_str()), (201, "green"), "{next}");
    for body in [&body, fork, &next] {
        server.remove(body);
    }
    server.stop();
    // The pooled microVM ends with its server.
    wait::within(Duration::from_secs(20), "no machine is left", || (hypervisors() == 0).then_some(())).await;
}
