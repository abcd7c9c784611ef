//! Operations on files through the guest: keys, callers that leave, and refused messages.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs;

use bytes::Bytes;
use common::{TestGuest, request};
use serde_json::{Value, json};

const CALL: &str = "v1/files/call";

async fn call(guest: &TestGuest, message: Value) -> Value {
    let (status, answer) = guest.call(CALL, message).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

fn append(guest: &TestGuest, key: &str) -> Value {
    let path = guest.dir.join("file");
    json!({"key": key, "operation": {"do": "edit", "path": path, "old": "end", "new": "x end", "replace_all": false}})
}

#[tokio::test]
async fn a_key_has_one_effect_and_its_answer_is_kept() {
    let guest = TestGuest::start();
    fs::write(guest.dir.join("file"), "end").unwrap();
    let recall = json!({"operation": {"do": "recall", "key": "k1"}});
    assert_eq!(call(&guest, recall.clone()).await, json!({"is": "unknown"}));
    let edited = json!({"is": "edited", "occurrences": 1});
    for _ in 0..3 {
        assert_eq!(call(&guest, append(&guest, "k1")).await, edited);
    }
    assert_eq!(call(&guest, recall).await, edited);
    assert_eq!(fs::read_to_string(guest.dir.join("file")).unwrap(), "x end");
    assert_eq!(call(&guest, append(&guest, "k2")).await, edited);
    assert_eq!(fs::read_to_string(guest.dir.join("file")).unwrap(), "x x end");
    // A failure stays the answer for its key, and a key means one operation.
    let missing = json!({"key": "k3", "operation": {"do": "delete", "path": guest.dir.join("none")}});
    let error = call(&guest, missing.clone()).await;
    assert_eq!(error["reason"], json!({"kind": "not_found"}));
    fs::write(guest.dir.join("none"), "").unwrap();
    assert_eq!(call(&guest, missing).await, error);
    assert!(guest.dir.join("none").exists());
    let other = json!({"key": "k3", "operation": {"do": "delete", "path": guest.dir.join("file")}});
    assert_eq!(guest.call(CALL, other).await.0, 409);
}

#[tokio::test]
async fn many_callers_with_one_key_at_once_have_one_effect() {
    let guest = TestGuest::start();
    fs::write(guest.dir.join("file"), "end").unwrap();
    let edited = json!({"is": "edited", "occurrences": 1});
    let one = || call(&guest, append(&guest, "k"));
    let (a, b, c, d) = tokio::join!(one(), one(), one(), one());
    assert_eq!([a, b, c, d], [edited.clone(), edited.clone(), edited.clone(), edited]);
    assert_eq!(fs::read_to_string(guest.dir.join("file")).unwrap(), "x end");
}

#[tokio::test]
async fn a_caller_that_leaves_does_not_stop_its_call() {
    let guest = TestGuest::start();
    for key in [Some("k"), None] {
        let file = guest.dir.join(format!("of-{}", key.unwrap_or("nobody")));
        let files = json!([{"path": file, "content": "x".repeat(4 << 20)}]);
        let mut message = json!({"operation": {"do": "write", "files": files}});
        if let Some(key) = key {
            message["key"] = json!(key);
        }
        let body = Bytes::from(message.to_string());
        let asked = request("POST", &format!("/{CALL}"), &[("content-type", "application/json")], body);
        let abandoned = tokio::time::timeout(std::time::Duration::from_millis(5), guest.send(asked)).await;
        drop(abandoned);
        if key.is_some() {
            // Either nothing of it arrived, or all of it was done.
            let recalled = call(&guest, json!({"operation": {"do": "recall", "key": "k"}})).await;
            assert_eq!(recalled == json!({"is": "written"}), file.exists(), "{recalled}");
        }
        let length = fs::metadata(&file).map(|found| found.len()).unwrap_or(4 << 20);
        assert_eq!(length, 4 << 20);
    }
}

#[tokio::test]
async fn messages_that_are_no_calls_are_refused() {
    let guest = TestGuest::start();
    for (body, status) in [
        ("", 400),
        ("{", 400),
        ("{\"operation\": {\"do\": \"format\"}}", 400),
        ("{\"operation\": {\"do\": \"read\", \"path\": \"/x\", \"offset\": -1, \"limit\": 1}}", 400),
        ("{\"key\": \"\", \"operation\": {\"do\": \"delete\", \"path\": \"/x\"}}", 400),
    ] {
        assert_eq!(guest.ask("POST", "/v1/files/call", body).await.0, status, "{body}");
    }
    let long = format!("{{\"key\": \"{}\"", "x".repeat(18 << 20));
    assert_eq!(guest.ask("POST", "/v1/files/call", long).await.0, 413);
    assert_eq!(guest.ask("GET", "/v1/files/call", "").await.0, 404);
    let escaped = json!({"operation": {"do": "write", "files": [
        {"path": guest.dir.join("lines"), "content": "\n".repeat(8 << 20)}]}});
    assert_eq!(call(&guest, escaped).await, json!({"is": "written"}));
    let back = json!({"operation": {"do": "read", "path": guest.dir.join("lines"), "offset": 0, "limit": 9_000_000}});
    assert_eq!(call(&guest, back).await["total_lines"], json!(8 << 20));
    // Every byte of this text takes six in JSON: the answer says so instead of being cut.
    fs::write(guest.dir.join("odd"), vec![1; 4 << 20]).unwrap();
    let odd = json!({"operation": {"do": "read", "path": guest.dir.join("odd"), "offset": 0, "limit": 1}});
    assert_eq!(call(&guest, odd).await["reason"], json!({"kind": "too_large", "len": 4 << 20}));
}

#[tokio::test]
async fn a_guest_that_did_much_holds_little() {
    let guest = TestGuest::start();
    let files = json!([{"path": guest.dir.join("large"), "content": "x".repeat(8 << 20)}]);
    for n in 0..20 {
        let message = json!({"key": n.to_string(), "operation": {"do": "write", "files": files}});
        assert_eq!(call(&guest, message).await, json!({"is": "written"}));
    }
    guest.wait_for("the memory", || guest.memory_kib() < 24 << 10);
}
