//! A guest process for each test, and a small client for it.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::{
    collections::VecDeque,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use proto::envelope::{self, END, EnvelopeReader};
use serde_json::{Value, json};
use tokio::net::UnixStream;

/// A guest that runs as a plain process and ends with its test.
pub struct TestGuest {
    child: Child,
    pub dir: PathBuf,
}

impl TestGuest {
    pub fn start() -> Self {
        Self::start_with(json!({}))
    }

    /// Starts a guest with some of its configuration replaced.
    pub fn start_with(changes: Value) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pal-guest-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        let uid = rustix::process::getuid().as_raw().to_string();
        let mut config = json!({
            "body": "b1", "template": "t", "token": null, "envs": {"BODY": "yes"}, "user": uid,
            "workdir": dir, "ring_bytes": 262_144,
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_pal-guest"))
            .args([OsStr::new("--config"), dir.join("config.json").as_os_str()])
            .args([OsStr::new("--unix"), dir.join("socket").as_os_str()])
            .spawn()
            .unwrap();
        let guest = Self { child, dir };
        guest.wait_for("the socket", || SocketProbe::connects(&guest.dir.join("socket")));
        guest
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Polls for a condition that no event announces.
    pub fn wait_for(&self, what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while !done() {
            assert!(Instant::now() < end, "waited too long for {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the guest has ended; returns its exit code.
    pub fn wait_end(&mut self) -> Option<i32> {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "the guest did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn memory_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Counts the children of the guest, zombies included.
    pub fn children(&self) -> usize {
        let parent =
            |stat: String| stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        let stats = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("stat"));
        stats
            .filter_map(|path| fs::read_to_string(path).ok())
            .filter_map(parent)
            .filter(|pid: &u32| *pid == self.pid())
            .count()
    }

    pub async fn connect(&self) -> UnixStream {
        UnixStream::connect(self.dir.join("socket")).await.unwrap()
    }

    /// Sends one request on a connection of its own.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(self.connect().await)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        sender.send_request(request).await.unwrap()
    }

    /// Sends a request whose answer is small.
    pub async fn ask(&self, method: &str, uri: &str, body: impl Into<Bytes>) -> (u16, Bytes) {
        self.ask_with(method, uri, &[], body).await
    }

    pub async fn ask_with(
        &self,
        method: &str,
        uri: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> (u16, Bytes) {
        let reply = self.send(request(method, uri, headers, body.into())).await;
        let status = reply.status().as_u16();
        (status, reply.into_body().collect().await.unwrap().to_bytes())
    }

    /// Makes a unary call in JSON.
    pub async fn call(&self, method: &str, message: Value) -> (u16, Value) {
        let headers = [("content-type", "application/json")];
        let (status, body) =
            self.ask_with("POST", &format!("/{method}"), &headers, message.to_string()).await;
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Makes a streaming call in JSON.
    pub async fn stream(&self, method: &str, message: Value) -> EventStream {
        self.stream_with(method, &[], message).await
    }

    pub async fn stream_with(&self, method: &str, headers: &[(&str, &str)], message: Value) -> EventStream {
        let mut headers = headers.to_vec();
        headers.push(("content-type", "application/connect+json"));
        let body = envelope::seal(0, message.to_string().as_bytes());
        let reply = self.send(request("POST", &format!("/{method}"), &headers, body)).await;
        assert_eq!(reply.status(), 200);
        EventStream { body: reply.into_body(), opener: EnvelopeReader::new(16 << 20), ready: VecDeque::new() }
    }

    /// Starts a shell script.
    pub async fn sh(&self, script: &str) -> EventStream {
        self.stream("process.Process/Start", start(script)).await
    }
}

impl Drop for TestGuest {
    fn drop(&mut self) {
        // This guest has no pid namespace that would end its processes, so their groups are killed.
        let started =
            fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.child.id())).unwrap_or_default();
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in started
            .split_ascii_whitespace()
            .filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
        {
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

struct SocketProbe;

impl SocketProbe {
    fn connects(path: &Path) -> bool {
        std::os::unix::net::UnixStream::connect(path).is_ok()
    }
}

/// The message that starts a shell script.
pub fn start(script: &str) -> Value {
    json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false})
}

pub fn request(method: &str, uri: &str, headers: &[(&str, &str)], body: Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(uri).header("host", "guest");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(body)).unwrap()
}

/// The messages of a streaming answer.
pub struct EventStream {
    body: Incoming,
    opener: EnvelopeReader,
    ready: VecDeque<(u8, Value)>,
}

impl EventStream {
    /// Reads the next message and its flags; `None` when the stream was closed or broke.
    pub async fn next(&mut self) -> Option<(u8, Value)> {
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Some(message);
            }
            let frame = self.body.frame().await?.ok()?;
            self.opener.push(frame.data_ref()?);
            while let Some(envelope) = self.opener.next().unwrap() {
                self.ready.push_back((envelope.flags, serde_json::from_slice(&envelope.message).unwrap()));
            }
        }
    }

    /// Reads the next message, which is not the last.
    pub async fn message(&mut self) -> Value {
        let (flags, message) = self.next().await.expect("the stream broke");
        assert_eq!(flags, 0, "{message}");
        message
    }

    /// Reads the pid from the start event, which comes first.
    pub async fn pid(&mut self) -> u64 {
        self.message().await["event"]["start"]["pid"].as_u64().expect("no start event")
    }

    /// Reads the next piece of output of any stream.
    pub async fn output(&mut self) -> String {
        let message = self.message().await;
        let data = message["event"]["data"].as_object().expect("no output").values().next().unwrap().clone();
        decoded(&data)
    }

    /// Reads everything to the end.
    pub async fn rest(&mut self) -> ProcessStory {
        let mut story = ProcessStory::default();
        while let Some((flags, message)) = self.next().await {
            if flags == END {
                story.last = message;
                continue;
            }
            let event = &message["event"];
            story.stdout += &decoded(&event["data"]["stdout"]);
            story.stderr += &decoded(&event["data"]["stderr"]);
            story.pty += &decoded(&event["data"]["pty"]);
            if !event["end"].is_null() {
                story.end = event["end"].clone();
            }
        }
        story
    }
}

/// Everything that a process wrote, and its end.
#[derive(Debug, Default, PartialEq)]
pub struct ProcessStory {
    pub stdout: String,
    pub stderr: String,
    pub pty: String,
    pub end: Value,
    pub last: Value,
}

fn decoded(text: &Value) -> String {
    String::from_utf8(STANDARD.decode(text.as_str().unwrap_or_default()).unwrap()).unwrap()
}
