//! The `pal serve` of one test.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Stdio},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::wait;

use crate::{
    client::{self, HttpAnswer},
    pal::{self, Pal},
};

/// A running server, until it is dropped.
pub struct TestServer {
    child: Child,
    pub address: SocketAddr,
    pub key: String,
    /// The line that it printed at its start.
    pub told: Value,
    data: PathBuf,
}

/// A sandbox, as the server described it.
#[derive(Debug, Clone)]
pub struct Sandbox {
    pub id: String,
    pub token: String,
    pub said: Value,
}

impl TestServer {
    /// Starts a server on a free port.
    pub fn start(pal: &Pal) -> Self {
        Self::start_with(pal, &["--listen", "127.0.0.1:0"])
    }

    pub fn start_with(pal: &Pal, args: &[&str]) -> Self {
        let mut child =
            pal.command(["serve", "--json"].iter().chain(args)).stderr(Stdio::inherit()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        let address = said["url"].as_str().unwrap().split_once("://").unwrap().1.parse().unwrap();
        let key = std::fs::read_to_string(pal.data().join("serve.key")).unwrap().trim().to_owned();
        Self { child, address, key, told: said, data: pal.data() }
    }

    /// `kill -9`, without waiting.
    pub fn kill_now(&self) {
        pal::signal(&self.child, Signal::KILL);
    }

    /// `kill -9`.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops it, and lets `gc` remove what a killed server left incomplete.
    pub fn sweep(self, pal: &Pal) {
        assert_eq!(self.stop(), Some(0));
        let swept = pal.line("gc");
        assert_eq!(swept.code, 0, "{swept:?}");
    }

    /// Sends SIGTERM; returns its exit code.
    pub fn stop(mut self) -> Option<i32> {
        pal::signal(&self.child, Signal::TERM);
        self.child.wait().unwrap().code()
    }

    /// Sends a request to the control plane.
    pub fn try_ask(&self, method: &str, path: &str, body: &Value) -> std::io::Result<HttpAnswer> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        client::ask(
            self.address,
            method,
            path,
            &[("X-API-KEY", &self.key), ("Content-Type", "application/json")],
            &body,
        )
    }

    #[track_caller]
    pub fn ask(&self, method: &str, path: &str, body: Value) -> HttpAnswer {
        let answer = self.try_ask(method, path, &body).unwrap();
        let data = self.data.to_string_lossy().into_owned();
        assert!(!answer.text().contains(&data), "a path of the host is in an answer: {}", answer.text());
        answer
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> HttpAnswer {
        self.ask("GET", path, Value::Null)
    }

    /// Creates a sandbox of template `host`.
    #[track_caller]
    pub fn create(&self, more: Value) -> Sandbox {
        let mut body = json!({ "templateID": "host", "timeout": 300 });
        more.as_object().into_iter().flatten().for_each(|(name, value)| body[name] = value.clone());
        sandbox(self.ask("POST", "/v2/sandboxes", body).expect(201).json())
    }

    pub fn state(&self, sandbox: &Sandbox) -> Option<String> {
        let answer = self.get(&format!("/sandboxes/{}", sandbox.id));
        (answer.status == 200).then(|| answer.json()["state"].as_str().unwrap().to_owned())
    }

    /// Waits for a state of a sandbox; none means that it does not exist.
    #[track_caller]
    pub fn await_state(&self, sandbox: &Sandbox, wanted: Option<&str>) {
        let look = || (self.state(sandbox).as_deref() == wanted).then_some(());
        wait::blocking(Duration::from_secs(15), &format!("{} is {wanted:?}", sandbox.id), look);
    }

    /// Sends a request to a port of a sandbox, with only the routing headers and the given ones.
    pub fn port(
        &self,
        sandbox: &Sandbox,
        port: u16,
        method: &str,
        path: &str,
        more: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<HttpAnswer> {
        let port = port.to_string();
        let headers: Vec<(&str, &str)> =
            [("E2b-Sandbox-Id", sandbox.id.as_str()), ("E2b-Sandbox-Port", &port)]
                .into_iter()
                .chain(more.iter().copied())
                .collect();
        client::ask(self.address, method, path, &headers, body)
    }

    /// Sends a request to the guest, with its token.
    pub fn envd(
        &self,
        sandbox: &Sandbox,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> std::io::Result<HttpAnswer> {
        let json = [("X-Access-Token", sandbox.token.as_str()), ("Content-Type", "application/json")];
        let bytes =
            [("X-Access-Token", sandbox.token.as_str()), ("Content-Type", "application/octet-stream")];
        let kind = if path.starts_with("/files") { bytes } else { json };
        self.port(sandbox, 49983, method, path, &kind, body)
    }

    pub fn write(&self, sandbox: &Sandbox, path: &str, text: &str) -> std::io::Result<HttpAnswer> {
        self.envd(sandbox, "POST", &format!("/files?path={path}&username=user"), text.as_bytes())
    }

    pub fn read(&self, sandbox: &Sandbox, path: &str) -> std::io::Result<HttpAnswer> {
        self.envd(sandbox, "GET", &format!("/files?path={path}&username=user"), b"")
    }

    /// Starts a shell line and reads its stream to the end, or to where it breaks off.
    pub fn run(&self, sandbox: &Sandbox, line: &str) -> std::io::Result<HttpAnswer> {
        let start =
            json!({ "process": { "cmd": "/bin/sh", "args": ["-c", line] }, "stdin": false }).to_string();
        let mut body = vec![0];
        body.extend_from_slice(&(start.len() as u32).to_be_bytes());
        body.extend_from_slice(start.as_bytes());
        let headers = [
            ("X-Access-Token", sandbox.token.as_str()),
            ("Content-Type", "application/connect+json"),
            ("Connect-Protocol-Version", "1"),
        ];
        self.port(sandbox, 49983, "POST", "/process.Process/Start", &headers, &body)
    }

    /// The command lines of running processes that were started through the guest.
    pub fn processes(&self, sandbox: &Sandbox) -> Vec<String> {
        let listed = self.envd(sandbox, "POST", "/process.Process/List", b"{}").unwrap().expect(200).json();
        let line = |process: &Value| {
            process["config"]["args"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect::<Vec<_>>()
                .join(" ")
        };
        listed["processes"].as_array().into_iter().flatten().map(line).collect()
    }
}

/// Parses the server's description of a sandbox.
pub fn sandbox(said: Value) -> Sandbox {
    let text = |name: &str| said[name].as_str().unwrap_or_else(|| panic!("no {name} in {said}")).to_owned();
    Sandbox { id: text("sandboxID"), token: text("envdAccessToken"), said: said.clone() }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            pal::signal(&self.child, Signal::TERM);
            let _ = self.child.wait();
        }
    }
}
