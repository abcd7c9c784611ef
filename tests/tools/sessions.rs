//! `exec_command` and `write_stdin`: processes that go on between calls and drivers.

use serde_json::json;
use testkit::{Bodies, body_test};

use crate::world::{ToolWorld, text_of, until};

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_short_command_ends_within_its_call(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let result = world.call("exec_command", json!({"cmd": "echo hi; pwd; exit 4", "workdir": "/usr"})).await;
    let text = text_of(&result);
    let (head, output) = text.split_once("Output:\n").unwrap();
    assert_eq!(output, "hi\n/usr\n");
    assert!(head.starts_with("Wall time: ") && head.contains("\nProcess exited with code 4\n"), "{head}");
    assert_eq!(result.exit_code, Some(4));
    let long = world.text("exec_command", json!({"cmd": "seq 1 100000", "max_output_tokens": 100})).await;
    assert!(
        long.contains("Warning: truncated output (original token count: ") && long.len() < 1000,
        "{long}"
    );
    assert!(
        long.contains("\n\n1\n2\n3") && long.contains(" tokens truncated…") && long.ends_with("100000\n")
    );
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_process_goes_on_between_calls_and_drivers(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let started = world
        .text("exec_command", json!({"cmd": "echo ready; while read x; do echo got $x; done; echo end", "tty": true, "yield_time_ms": 500}))
        .await;
    assert!(
        started.contains("Process running with session ID 1\n") && started.contains("ready"),
        "{started}"
    );
    let fed =
        world.text("write_stdin", json!({"session_id": 1, "chars": "one\n", "yield_time_ms": 500})).await;
    assert!(fed.contains("got one") && !fed.contains("ready"), "{fed}");
    // Another driver knows the session by its number.
    let later = world.reopen(&t);
    let fed =
        later.text("write_stdin", json!({"session_id": 1, "chars": "two\n", "yield_time_ms": 500})).await;
    assert!(fed.contains("got two"), "{fed}");
    let ended =
        later.call("write_stdin", json!({"session_id": 1, "chars": "\u{4}", "yield_time_ms": 2000})).await;
    let text = text_of(&ended);
    assert!(text.contains("Process exited with code 0\n") && text.contains("end"), "{text}");
    assert_eq!(
        later.error("write_stdin", json!({"session_id": 9, "chars": "x"})).await,
        "write_stdin failed: Unknown process id 9"
    );
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_process_without_terminal_takes_only_an_interrupt(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let started = world.text("exec_command", json!({"cmd": "exec sleep 25.3", "yield_time_ms": 250})).await;
    assert!(started.contains("Process running with session ID 1\n"), "{started}");
    assert_eq!(
        world.error("write_stdin", json!({"session_id": 1, "chars": "x"})).await,
        "write_stdin failed: stdin is closed for this session; rerun exec_command with tty=true to keep stdin open"
    );
    let ended =
        world.text("write_stdin", json!({"session_id": 1, "chars": "\u{3}", "yield_time_ms": 5000})).await;
    assert!(ended.contains("Process exited with code 130\n"), "{ended}");
    let gone = || async { t.sh(&world.body, "pgrep -fx 'sleep 25.3' | wc -l").await.ok() == "0" };
    until("it is gone", gone).await;
}
