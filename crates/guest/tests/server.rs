//! The guest as a server: authorization, refusals, shutdown.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{TestGuest, request, start};
use hyper_util::rt::TokioIo;
use proto::{
    envelope,
    guest::{DIAL_UPGRADE, GENERATION},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

#[tokio::test]
async fn the_token_opens_everything_but_health() {
    let guest = TestGuest::start_with(json!({"token": "tok"}));
    assert_eq!(guest.ask("GET", "/health", "").await, (204, Bytes::new()));
    for path in ["/v1/guest", "/envs", "/metrics", "/process.Process/List", "/files?path=/etc/hostname"] {
        let method = if path.starts_with("/process") { "POST" } else { "GET" };
        let kind = ("content-type", "application/json");
        assert_eq!(guest.ask_with(method, path, &[kind], "{}").await.0, 401, "{path}");
        let right = guest.ask_with(method, path, &[kind, ("x-access-token", "tok")], "{}").await.0;
        assert!(right == 200 || right == 404, "{path} {right}");
        assert_eq!(
            guest.ask_with(method, path, &[kind, ("x-access-token", "tok2")], "{}").await.0,
            401,
            "{path}"
        );
    }
}

#[tokio::test]
async fn requests_that_make_no_sense_are_refused() {
    let guest = TestGuest::start();
    let kind = |kind| [("content-type", kind)];
    let list = "/process.Process/List";
    assert_eq!(guest.ask_with("POST", list, &kind("text/html"), "{}").await.0, 415);
    assert_eq!(guest.ask_with("POST", list, &kind("application/connect+json"), "{}").await.0, 415);
    assert_eq!(
        guest.ask_with("POST", "/process.Process/Start", &kind("application/json"), "{}").await.0,
        415
    );
    assert_eq!(guest.ask_with("POST", "/process.Process/Nope", &kind("application/json"), "{}").await.0, 404);
    assert_eq!(guest.ask("GET", list, "").await.0, 405);
    assert_eq!(guest.ask("POST", "/init", "{}").await.0, 404);
    let (status, error) = guest.ask_with("POST", list, &kind("application/json"), "{broken").await;
    let error: Value = serde_json::from_slice(&error).unwrap();
    assert_eq!((status, &error["code"]), (400, &json!("invalid_argument")));
    let (status, _) = guest.ask_with("POST", list, &kind("application/proto"), "\u{7f}broken").await;
    assert_eq!(status, 400);
    let zipped = [("content-type", "application/json"), ("content-encoding", "gzip")];
    assert_eq!(guest.ask_with("POST", list, &zipped, "{}").await.0, 501);
    let (status, headers) = {
        let reply = guest.send(request("OPTIONS", list, &[], Bytes::new())).await;
        (reply.status(), reply.headers().clone())
    };
    assert_eq!((status.as_u16(), headers["access-control-allow-origin"].to_str().unwrap()), (204, "*"));
}

#[tokio::test]
async fn broken_envelopes_end_their_call_and_nothing_else() {
    let guest = TestGuest::start();
    let kind = [("content-type", "application/connect+json")];
    let twice = [envelope::seal(0, b"{}"), envelope::seal(0, b"{}")].concat();
    for body in
        [&b"\0\xff\xff\xff\xff"[..], b"\x80\0\0\0\0", b"\x01\0\0\0\x02{}", b"\0\0\0\0\x05{}", b"", &twice]
    {
        let (status, answer) = guest.ask_with("POST", "/process.Process/Start", &kind, body.to_vec()).await;
        assert_eq!((status, answer[0]), (200, envelope::END), "{body:?}");
        assert!(String::from_utf8_lossy(&answer[5..]).contains("invalid_argument"), "{answer:?}");
    }
    assert_eq!(guest.ask("GET", "/health", "").await.0, 204);
}

#[tokio::test]
async fn noise_and_callers_that_leave_do_no_harm() {
    let guest = TestGuest::start();
    for noise in [&b"\x16\x03\x01\0\xff"[..], b"GET / HTTP/9.9\r\n\r\n", &[b'A'; 300_000]] {
        let mut stream = guest.connect().await;
        let _ = stream.write_all(noise).await;
    }
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(guest.connect().await);
    }
    // One caller leaves in the middle of an answer, another in the middle of its request.
    let mut stream = guest.sh("yes").await;
    stream.pid().await;
    drop(stream);
    let mut half = guest.connect().await;
    half.write_all(b"POST /files?path=/tmp/never HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
        .await
        .unwrap();
    drop(half);
    let story = guest.sh("echo still here").await.rest().await;
    assert_eq!(story.stdout, "still here\n");
}

#[tokio::test]
async fn the_guest_says_who_it_is() {
    let guest = TestGuest::start();
    let mut events = guest.sh("sleep 60").await;
    events.pid().await;
    let (_, info) = guest.ask("GET", "/v1/guest", "").await;
    let info: Value = serde_json::from_slice(&info).unwrap();
    assert_eq!(
        (&info["generation"], &info["body"], &info["processes"]),
        (&json!(GENERATION), &json!("b1"), &json!(1))
    );
    let (_, envs) = guest.ask("GET", "/envs", "").await;
    let wanted =
        json!({"BODY": "yes", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "b1", "E2B_TEMPLATE_ID": "t"});
    assert_eq!(serde_json::from_slice::<Value>(&envs).unwrap(), wanted);
    let (_, metrics) = guest.ask("GET", "/metrics", "").await;
    assert!(serde_json::from_slice::<Value>(&metrics).unwrap()["mem_total"].as_u64().unwrap() > 0);
}

#[tokio::test]
async fn a_port_inside_is_dialled() {
    let guest = TestGuest::start();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("/v1/dial?port={}", listener.local_addr().unwrap().port());
    let headers = [("connection", "Upgrade"), ("upgrade", DIAL_UPGRADE)];
    let reply = guest.send(request("GET", &uri, &headers, Bytes::new())).await;
    assert_eq!(reply.status(), 101);
    let mut outside = TokioIo::new(hyper::upgrade::on(reply).await.unwrap());
    let (mut inside, _) = listener.accept().await.unwrap();
    outside.write_all(b"ping").await.unwrap();
    let mut got = [0; 4];
    inside.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"ping");
    inside.write_all(b"pong").await.unwrap();
    drop(inside);
    let mut answer = Vec::new();
    outside.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"pong");
    drop(listener);
    let (status, refused) = guest.ask_with("GET", &uri, &headers, "").await;
    let refused: Value = serde_json::from_slice(&refused).unwrap();
    assert_eq!((status, &refused["code"]), (502, &json!(502)));
    assert!(refused["message"].as_str().unwrap().contains("port is not open"));
    assert_eq!(guest.ask_with("GET", "/v1/dial?port=0", &headers, "").await.0, 400);
    assert_eq!(guest.ask("GET", &uri, "").await.0, 426);
}

#[tokio::test]
async fn a_shutdown_ends_everybody_first_gently() {
    let mut guest = TestGuest::start();
    let script = "trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.01; done";
    let mut gentle = guest.sh(script).await;
    gentle.pid().await;
    assert_eq!(gentle.output().await, "ready\n");
    let mut stubborn = guest.sh("trap '' TERM; echo ready; while :; do sleep 0.01; done").await;
    stubborn.pid().await;
    assert_eq!(stubborn.output().await, "ready\n");
    let (status, _) = guest.ask("POST", "/v1/shutdown", json!({"grace_ms": 500}).to_string()).await;
    assert_eq!(status, 200);
    let story = gentle.rest().await;
    assert_eq!((story.stdout.as_str(), &story.end["exitCode"]), ("bye\n", &json!(7)));
    assert_eq!(stubborn.rest().await.end["status"], "signal: killed");
    assert_eq!(guest.wait_end(), Some(0));
}

#[tokio::test]
async fn a_signal_ends_the_guest_as_a_shutdown_does() {
    let mut guest = TestGuest::start();
    let mut events = guest.stream("process.Process/Start", start("echo ready; sleep 60")).await;
    events.pid().await;
    assert_eq!(events.output().await, "ready\n");
    let pid = rustix::process::Pid::from_raw(i32::try_from(guest.pid()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let story = tokio::time::timeout(Duration::from_secs(5), events.rest()).await.unwrap();
    assert_eq!(story.end["status"], "signal: terminated");
    assert_eq!(guest.wait_end(), Some(0));
}
