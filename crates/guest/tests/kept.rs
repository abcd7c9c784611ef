//! Kept commands through the guest: known by their tag, with their newest output and their end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use base64::{Engine, engine::general_purpose::STANDARD};
use common::{EventStream, TestGuest, start};
use serde_json::{Value, json};

fn tagged(tag: &str, script: &str) -> Value {
    let mut start = start(script);
    start["tag"] = json!(tag);
    start
}

async fn keep(guest: &TestGuest, tag: &str, script: &str) -> EventStream {
    guest.stream("v1/kept/start", tagged(tag, script)).await
}

async fn follow(guest: &TestGuest, tag: &str) -> EventStream {
    guest.stream("v1/kept/follow", json!({"process": {"tag": tag}})).await
}

/// The text after `from`, where it begins and ends, and how the command ended.
async fn read(guest: &TestGuest, tag: &str, from: u64, wait_ms: u64) -> (String, u64, u64, Value) {
    let state = state(guest, tag, from, wait_ms).await;
    let text = STANDARD.decode(state["base64"].as_str().unwrap()).unwrap();
    let number = |name: &str| state[name].as_u64().unwrap();
    (String::from_utf8(text).unwrap(), number("from"), number("next"), state["end"].clone())
}

async fn state(guest: &TestGuest, tag: &str, from: u64, wait_ms: u64) -> Value {
    let asked = json!({"tag": tag, "from": from, "wait_ms": wait_ms});
    let (status, state) = guest.call("v1/kept/read", asked).await;
    assert_eq!(status, 200, "{state}");
    state
}

#[tokio::test]
async fn a_command_is_started_once_and_told_to_each_caller() {
    let guest = TestGuest::start();
    let file = guest.dir.join("runs");
    let script = format!("echo ran >> {}; echo out; sleep 0.1; echo err >&2; exit 3", file.display());
    let first = keep(&guest, "a", &script).await;
    drop(first);
    let mut second = keep(&guest, "a", &script).await;
    let pid = second.pid().await;
    let story = second.rest().await;
    assert_eq!((story.stdout.as_str(), story.stderr.as_str()), ("out\n", "err\n"));
    assert_eq!(story.end["exitCode"], 3);
    // It has ended, and is told again.
    for mut again in [keep(&guest, "a", &script).await, follow(&guest, "a").await] {
        assert_eq!(again.pid().await, pid);
        assert_eq!(again.rest().await, story);
    }
    assert_eq!(std::fs::read_to_string(file).unwrap(), "ran\n");
    assert_eq!(guest.children(), 0);
}

#[tokio::test]
async fn two_starts_at_once_run_once() {
    let guest = TestGuest::start();
    let file = guest.dir.join("runs");
    let script = format!("echo ran >> {}; sleep 0.1", file.display());
    let (mut one, mut other) = tokio::join!(keep(&guest, "a", &script), keep(&guest, "a", &script));
    assert_eq!(one.pid().await, other.pid().await);
    assert_eq!(one.rest().await, other.rest().await);
    assert_eq!(std::fs::read_to_string(file).unwrap(), "ran\n");
}

#[tokio::test]
async fn output_is_read_in_pages_and_waited_for() {
    let guest = TestGuest::start();
    let gate = guest.dir.join("gate");
    let script =
        format!("printf one; while ! test -e {}; do sleep 0.02; done; printf three; exit 7", gate.display());
    drop(keep(&guest, "b", &script).await);
    assert_eq!(read(&guest, "b", 0, 5000).await, ("one".into(), 0, 3, Value::Null));
    assert_eq!(read(&guest, "b", 1, 0).await, ("ne".into(), 1, 3, Value::Null));
    let began = Instant::now();
    assert_eq!(read(&guest, "b", 3, 200).await, (String::new(), 3, 3, Value::Null));
    assert!(began.elapsed() >= Duration::from_millis(200));
    let waiting = read(&guest, "b", 3, 10_000);
    let opening = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        std::fs::write(&gate, "").unwrap();
    };
    let ((text, from, next, _), ()) = tokio::join!(waiting, opening);
    assert_eq!((text.as_str(), from, next), ("three", 3, 8));
    let (text, _, next, end) = read(&guest, "b", 8, 10_000).await;
    assert_eq!((text.as_str(), next), ("", 8));
    assert_eq!(end, json!({"exited": true, "exit_code": 7, "status": "exit status 7", "timed_out": false}));
    assert_eq!(read(&guest, "b", u64::MAX, 0).await.1, 8, "a position beyond the end is the end");
}

#[tokio::test]
async fn a_tag_names_one_command() {
    let guest = TestGuest::start();
    assert_eq!(state(&guest, "none", 0, 0).await, Value::Null);
    let mut stream = follow(&guest, "none").await;
    assert_eq!(stream.rest().await.last["error"]["code"], "not_found");
    drop(keep(&guest, "a", "true").await);
    for (tag, script, code) in [
        ("a", "false", "already_exists"),
        ("", "true", "invalid_argument"),
        ("plain", "true", "already_exists"),
    ] {
        if tag == "plain" {
            guest.stream("process.Process/Start", tagged(tag, "sleep 1000")).await.pid().await;
        }
        let error = keep(&guest, tag, script).await.rest().await.last["error"]["code"].clone();
        assert_eq!(error, code, "{tag}");
    }
    assert_eq!(state(&guest, "plain", 0, 0).await, Value::Null, "it is not kept");
    let long = "x".repeat(257);
    assert_eq!(keep(&guest, &long, "true").await.rest().await.last["error"]["code"], "invalid_argument");
    let (status, _) = guest.ask("POST", "/v1/kept/read", "{").await;
    assert_eq!(status, 400);
    assert_eq!(guest.ask("POST", "/v1/kept/other", "").await.0, 415);
}

#[tokio::test]
async fn a_terminal_that_ended_leaves_no_descriptor() {
    let guest = TestGuest::start();
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap().count();
    drop(keep(&guest, "warm", "true").await);
    let before = descriptors();
    let mut asked = tagged("tty", "printf hello; exit 4");
    asked["pty"] = json!({"size": {"cols": 80, "rows": 24}});
    let mut stream = guest.stream("v1/kept/start", asked).await;
    assert_eq!(stream.rest().await.pty, "hello");
    drop(stream);
    let state = state(&guest, "tty", 0, 0).await;
    assert_eq!((&state["tty"], &state["end"]["exit_code"]), (&json!(true), &json!(4)));
    guest.wait_for("the descriptors", || descriptors() <= before);
}

#[tokio::test]
async fn the_newest_output_is_kept_and_the_rest_is_counted() {
    let guest = TestGuest::start();
    let mut stream = keep(&guest, "much", "head -c 3000000 /dev/zero | tr '\\0' x; printf end").await;
    let told = stream.rest().await.stdout;
    assert_eq!(told.len(), 3_000_003, "a caller that follows gets all of it");
    let (text, from, next, end) = read(&guest, "much", 0, 0).await;
    assert_eq!((next, end["exit_code"].clone()), (3_000_003, json!(0)));
    assert!(text.ends_with("xend") && from > 1_900_000 && from + text.len() as u64 == next);
    assert_eq!(state(&guest, "much", 0, 0).await["first"].as_u64(), Some(from));
    assert!(guest.memory_kib() < 64 << 10, "{} KiB", guest.memory_kib());
}

#[tokio::test]
async fn a_timeout_is_told_to_each_caller() {
    let guest = TestGuest::start();
    let slow = tagged("slow", "printf x; exec sleep 1000");
    let mut stream = guest.stream_with("v1/kept/start", &[("connect-timeout-ms", "200")], slow).await;
    assert_eq!(stream.rest().await.last["error"]["code"], "deadline_exceeded");
    assert_eq!(follow(&guest, "slow").await.rest().await.last["error"]["code"], "deadline_exceeded");
    assert_eq!(read(&guest, "slow", 0, 0).await.3["timed_out"], json!(true));
}

#[tokio::test]
async fn running_and_ended_commands_have_limits() {
    let guest = TestGuest::start();
    for n in 0..300 {
        assert_eq!(keep(&guest, &format!("e{n}"), "true").await.rest().await.last, json!({}));
    }
    assert_eq!(state(&guest, "e43", 0, 0).await, Value::Null);
    assert_eq!(state(&guest, "e44", 0, 0).await["end"]["exit_code"], json!(0));
    for n in 0..64 {
        keep(&guest, &format!("r{n}"), "sleep 1000").await.pid().await;
    }
    let refused = keep(&guest, "one more", "sleep 1000").await.rest().await.last["error"]["code"].clone();
    assert_eq!(refused, "resource_exhausted");
    assert!(keep(&guest, "r5", "sleep 1000").await.pid().await > 0, "a known one is followed");
}
