//! Processes through the guest, as a caller sees them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use common::{ProcessStory, TestGuest, request, start};
use http_body_util::BodyExt;
use prost::Message;
use proto::{
    envelope::{self, END},
    wire::process::{ProcessConfig, StartRequest, StartResponse, process_event::Event},
};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

const START: &str = "process.Process/Start";

fn exited(code: i32) -> Value {
    let mut end = json!({"exited": true, "status": format!("exit status {code}")});
    if code != 0 {
        end["exitCode"] = json!(code);
        end["error"] = json!(format!("exit status {code}"));
    }
    end
}

fn killed() -> Value {
    json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"})
}

#[tokio::test]
async fn a_question_without_its_last_byte_starts_nothing() {
    let guest = TestGuest::start();
    let kept = std::env::temp_dir().join(format!("guest-unsaid-{}", std::process::id()));
    let _ = std::fs::remove_file(&kept);
    let body = envelope::seal(0, start(&format!("echo ran > {}", kept.display())).to_string().as_bytes());
    let head = format!(
        "POST /process.Process/Start HTTP/1.1\r\nhost: guest\r\ncontent-type: application/connect+json\r\n\
         connect-protocol-version: 1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let (nearly, last) = body.split_at(body.len() - 1);
    for said in [false, true] {
        let mut line = guest.connect().await;
        line.write_all(head.as_bytes()).await.unwrap();
        line.write_all(nearly).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!((guest.children(), kept.exists()), (0, false), "nothing runs before all is said");
        if said {
            line.write_all(last).await.unwrap();
            guest.wait_for("the command", || kept.exists());
        }
    }
    std::fs::remove_file(kept).unwrap();
}

#[tokio::test]
async fn a_process_starts_writes_and_ends() {
    let guest = TestGuest::start();
    let mut events = guest.sh("echo out $BODY; echo err >&2; exit 3").await;
    assert!(events.pid().await > 0);
    let story = events.rest().await;
    let wanted = ProcessStory {
        stdout: "out yes\n".into(),
        stderr: "err\n".into(),
        end: exited(3),
        last: json!({}),
        ..ProcessStory::default()
    };
    assert_eq!(story, wanted);
}

#[tokio::test]
async fn protobuf_says_the_same_as_json() {
    let guest = TestGuest::start();
    let config = ProcessConfig { cmd: "echo".into(), args: vec!["hi".into()], ..Default::default() };
    let body = StartRequest { process: Some(config), ..Default::default() }.encode_to_vec();
    let headers = [("content-type", "application/connect+proto")];
    let reply = guest.send(request("POST", &format!("/{START}"), &headers, envelope::seal(0, &body))).await;
    assert_eq!(reply.headers()["content-type"], "application/connect+proto");
    let mut opener = envelope::EnvelopeReader::new(1 << 20);
    opener.push(&reply.into_body().collect().await.unwrap().to_bytes());
    let mut kinds = Vec::new();
    while let Some(envelope) = opener.next().unwrap() {
        if envelope.flags == END {
            assert_eq!(envelope.message, "{}");
            continue;
        }
        kinds.push(match StartResponse::decode(envelope.message).unwrap().event.unwrap().event.unwrap() {
            Event::Start(_) => "start".to_owned(),
            Event::Data(data) => format!("{:?}", data.output.unwrap()),
            Event::End(end) => end.status,
            Event::Keepalive(_) => "keepalive".to_owned(),
        });
    }
    assert_eq!(kinds, ["start", "Stdout(b\"hi\\n\")", "exit status 0"]);
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let guest = TestGuest::start();
    let error = async |message: Value| guest.stream(START, message).await.rest().await.last["error"].clone();
    let process = |cmd: &str, cwd: &str| json!({"process": {"cmd": cmd, "cwd": cwd}});
    let words = |code: &str, message: &str| json!({"code": code, "message": message});
    let reasoned =
        |code: &str, message: &str, reason: &str| json!({"code": code, "message": message, "reason": reason});
    assert_eq!(
        error(process("no-such", "/")).await,
        reasoned("not_found", "command not found: no-such", "command_not_found")
    );
    assert_eq!(
        error(process("/etc/passwd", "/")).await,
        reasoned("permission_denied", "not executable: /etc/passwd", "command_not_executable")
    );
    assert_eq!(
        error(process("sh", "/no/such")).await,
        words("invalid_argument", "cwd '/no/such' does not exist")
    );
    assert_eq!(error(json!({})).await, words("invalid_argument", "no process is described"));
    let script = guest.dir.join("script");
    std::fs::write(&script, "no interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let refused = error(process(script.to_str().unwrap(), "/")).await;
    assert_eq!(refused["code"], "permission_denied");
    let headers = [("authorization", "Basic bm9ib2R5LWhlcmU6")];
    let last = guest.stream_with(START, &headers, start("true")).await.rest().await.last;
    assert_eq!(last["error"], words("unauthenticated", "invalid username: 'nobody-here'"));
}

#[tokio::test]
async fn signals_reach_the_leader_and_only_while_it_runs() {
    let guest = TestGuest::start();
    let mut events =
        guest.stream(START, json!({"process": {"cmd": "sleep", "args": ["60"]}, "tag": "t"})).await;
    let pid = events.pid().await;
    let (_, list) = guest.call("process.Process/List", json!({})).await;
    let process = json!({"config": {"cmd": "sleep", "args": ["60"]}, "pid": pid, "tag": "t"});
    assert_eq!(list, json!({"processes": [process]}));
    let signal = |name: &str| json!({"process": {"tag": "t"}, "signal": name});
    assert_eq!(guest.call("process.Process/SendSignal", signal("SIGNAL_SIGKILL")).await, (200, json!({})));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "whoever killed it still finds it");
    assert_eq!(events.rest().await.end, killed());
    let (status, error) = guest.call("process.Process/SendSignal", signal("SIGNAL_SIGTERM")).await;
    assert_eq!((status, &error["code"]), (404, &json!("not_found")));
    assert_eq!(guest.call("process.Process/List", json!({})).await, (200, json!({})));
}

#[tokio::test]
async fn stdin_is_written_streamed_and_closed() {
    let guest = TestGuest::start();
    let mut events = guest.stream(START, json!({"process": {"cmd": "cat"}})).await;
    let pid = events.pid().await;
    let input = |text: &str| json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode(text)}});
    assert_eq!(guest.call("process.Process/SendInput", input("one ")).await.0, 200);
    let messages = [
        json!({"start": {"process": {"pid": pid}}}),
        json!({"keepalive": {}}),
        json!({"data": {"input": {"stdin": STANDARD.encode("two")}}}),
    ];
    let body: Vec<Bytes> =
        messages.iter().map(|message| envelope::seal(0, message.to_string().as_bytes())).collect();
    let headers = [("content-type", "application/connect+json")];
    let (status, answer) =
        guest.ask_with("POST", "/process.Process/StreamInput", &headers, body.concat()).await;
    assert_eq!(
        (status, &answer[..]),
        (200, &[&envelope::seal(0, b"{}")[..], &envelope::seal(END, b"{}")].concat()[..])
    );
    assert_eq!(
        guest.call("process.Process/CloseStdin", json!({"process": {"pid": pid}})).await,
        (200, json!({}))
    );
    assert_eq!(events.rest().await.stdout, "one two");
    assert_eq!(guest.call("process.Process/SendInput", input("x")).await.0, 404);
}

#[tokio::test]
async fn output_that_nobody_heard_is_replayed_once() {
    let guest = TestGuest::start();
    let gates = ["one", "two"].map(|name| guest.dir.join(name));
    for gate in &gates {
        rustix::fs::mkfifoat(rustix::fs::CWD, gate, rustix::fs::Mode::RWXU).unwrap();
    }
    let mut events = guest.sh("echo heard; read x < one; echo missed; read x < two; echo late; exit 5").await;
    let pid = events.pid().await;
    assert_eq!(events.output().await, "heard\n");
    drop(events);
    // No event tells when the guest has noticed that the caller left.
    tokio::time::sleep(Duration::from_millis(200)).await;
    for gate in &gates {
        std::fs::write(gate, "\n").unwrap();
    }
    let connect = json!({"process": {"pid": pid}});
    let mut again = guest.stream("process.Process/Connect", connect.clone()).await;
    assert_eq!(again.pid().await, pid);
    let story = again.rest().await;
    assert_eq!((story.stdout.as_str(), &story.end), ("missed\nlate\n", &exited(5)));
    // The end is kept for a while; received output is not.
    let mut third = guest.stream("process.Process/Connect", connect).await;
    assert_eq!(third.pid().await, pid);
    let story = third.rest().await;
    assert_eq!((story.stdout.as_str(), story.end), ("", exited(5)));
}

#[tokio::test]
async fn everybody_who_listens_hears() {
    let guest = TestGuest::start();
    let mut one = guest.stream(START, json!({"process": {"cmd": "cat"}})).await;
    let pid = one.pid().await;
    let mut two = guest.stream("process.Process/Connect", json!({"process": {"pid": pid}})).await;
    assert_eq!(two.pid().await, pid);
    let input = json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode("both")}});
    assert_eq!(guest.call("process.Process/SendInput", input).await.0, 200);
    guest.call("process.Process/CloseStdin", json!({"process": {"pid": pid}})).await;
    assert_eq!((one.rest().await.stdout, two.rest().await.stdout), ("both".into(), "both".into()));
}

#[tokio::test]
async fn a_process_over_its_time_is_killed_and_its_caller_told() {
    let guest = TestGuest::start();
    let message = json!({"process": {"cmd": "sleep", "args": ["60"]}});
    let mut events = guest.stream_with(START, &[("connect-timeout-ms", "300")], message).await;
    let pid = events.pid().await;
    let begun = Instant::now();
    let story = events.rest().await;
    assert_eq!((story.end, &story.last["error"]["code"]), (Value::Null, &json!("deadline_exceeded")));
    assert!(begun.elapsed() < Duration::from_secs(5));
    let mut late = guest.stream("process.Process/Connect", json!({"process": {"pid": pid}})).await;
    assert_eq!(late.rest().await.end, killed());
}

#[tokio::test]
async fn a_child_left_behind_neither_holds_the_end_nor_dies_of_it() {
    let guest = TestGuest::start();
    let begun = Instant::now();
    let script = "(read go < go; echo ignored; echo alive > alive) & echo done";
    rustix::fs::mkfifoat(rustix::fs::CWD, guest.dir.join("go"), rustix::fs::Mode::RWXU).unwrap();
    let story = guest.sh(script).await.rest().await;
    assert_eq!((story.stdout.as_str(), story.end), ("done\n", exited(0)));
    assert!(begun.elapsed() < Duration::from_secs(5));
    std::fs::write(guest.dir.join("go"), "\n").unwrap();
    guest.wait_for("the child", || guest.dir.join("alive").exists());
}

#[tokio::test]
async fn the_dead_are_buried() {
    let guest = TestGuest::start();
    guest.sh("(sleep 0.05 & (sleep 0.05 &)) ; true").await.rest().await;
    guest.wait_for("the orphans", || guest.children() == 0);
}

#[tokio::test]
async fn a_caller_that_never_reads_slows_the_process_not_the_guest() {
    let guest = TestGuest::start();
    let script = "i=0; while :; do head -c 65536 /dev/zero; i=$((i+1)); echo $i > new; mv new written; done";
    let stalled = guest.sh(script).await;
    let before = guest.memory_kib();
    let written = || {
        std::fs::read_to_string(guest.dir.join("written")).map_or(0, |pieces| pieces.trim().parse().unwrap())
    };
    // The process has stalled when it writes no more.
    let mut last: u64 = 0;
    guest.wait_for("the process to stall", || {
        std::thread::sleep(Duration::from_millis(300));
        let now = written();
        std::mem::replace(&mut last, now) == now && guest.dir.join("written").exists()
    });
    assert!(last < 256, "{last} pieces were taken from a process that nobody reads");
    assert!(guest.memory_kib() < before + 4096);
    assert_eq!(guest.ask("GET", "/health", "").await.0, 204);
    // The guest notices that the caller left, and the process continues without a listener.
    drop(stalled);
    assert_eq!(guest.ask("GET", "/health", "").await.0, 204);
    guest.wait_for("the process to go on", || written() > last + 128);
    assert!(guest.memory_kib() < before + 4096);
}

#[tokio::test]
async fn a_terminal_is_a_terminal() {
    let guest = TestGuest::start();
    let size = |cols: u32, rows: u32| json!({"size": {"cols": cols, "rows": rows}});
    let script = "tty >&2; stty size; read go; stty size; exit 4";
    let message = json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "pty": size(80, 24)});
    let mut events = guest.stream(START, message).await;
    let pid = events.pid().await;
    let mut seen = String::new();
    while !seen.contains("24 80") {
        seen += &events.output().await;
    }
    assert!(seen.contains("/dev/"), "{seen}");
    let update = json!({"process": {"pid": pid}, "pty": size(120, 40)});
    assert_eq!(guest.call("process.Process/Update", update).await, (200, json!({})));
    for (cols, rows) in [(0, 0), (80, 0), (100_000, 24), (80, u32::MAX)] {
        let wrong = json!({"process": {"pid": pid}, "pty": size(cols, rows)});
        assert_eq!(guest.call("process.Process/Update", wrong).await.0, 400, "{cols} {rows}");
        let wrong = json!({"process": {"cmd": "/bin/true"}, "pty": size(cols, rows)});
        assert_eq!(
            guest.stream(START, wrong).await.rest().await.last["error"]["code"],
            "invalid_argument",
            "{cols} {rows}"
        );
    }
    let wrong = json!({"process": {"pid": pid}, "input": {"stdin": ""}});
    assert_eq!(guest.call("process.Process/SendInput", wrong).await.0, 500);
    let enter = json!({"process": {"pid": pid}, "input": {"pty": STANDARD.encode("\n")}});
    assert_eq!(guest.call("process.Process/SendInput", enter).await, (200, json!({})));
    let story = events.rest().await;
    assert!(story.pty.contains("40 120"), "{story:?}");
    assert_eq!(story.end, exited(4));
}

#[tokio::test]
async fn silence_is_broken_by_keepalives() {
    let guest = TestGuest::start();
    let headers = [("keepalive-ping-interval", "1")];
    let mut events = guest.stream_with(START, &headers, start("sleep 60")).await;
    events.pid().await;
    assert_eq!(events.message().await, json!({"event": {"keepalive": {}}}));
}

#[tokio::test]
async fn a_terminals_newest_output_is_replayed_to_who_asks_for_it() {
    let guest = TestGuest::start();
    let process =
        json!({"cmd": "/bin/sh", "args": ["-c", "printf first; read line; printf second; exec sleep 60"]});
    let message = json!({"process": process, "pty": {"size": {"cols": 80, "rows": 24}}, "tag": "t"});
    let mut heard = guest.stream(START, message).await;
    heard.pid().await;
    assert_eq!(heard.output().await, "first");
    drop(heard);
    let connect = async |headers: &[(&str, &str)]| {
        let mut events =
            guest.stream_with("process.Process/Connect", headers, json!({"process": {"tag": "t"}})).await;
        events.pid().await;
        events
    };
    assert_eq!(connect(&[("palisade-replay", "1")]).await.output().await, "first");
    let enter = json!({"process": {"tag": "t"}, "input": {"pty": STANDARD.encode("\n")}});
    guest.call("process.Process/SendInput", enter).await;
    // A caller that did not ask for a replay gets no output that was received before.
    let mut plain = connect(&[]).await;
    let mut said = String::new();
    while !said.ends_with("second") {
        said += &plain.output().await;
    }
    assert!(!said.contains("first"), "{said:?}");
    assert_eq!(connect(&[("palisade-replay", "1")]).await.output().await, format!("first{said}"));
    guest
        .call("process.Process/SendSignal", json!({"process": {"tag": "t"}, "signal": "SIGNAL_SIGKILL"}))
        .await;
}
