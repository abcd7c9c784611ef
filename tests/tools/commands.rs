//! `execute`: results, limits, and the fate of interrupted commands.

use std::{sync::Arc, time::Duration};

use brain::agent::CallEffect;
use proto::launch::RunRecord;
use serde_json::json;
use testkit::{Bodies, body_test};

use crate::world::{LiveLog, ToolWorld, text_of, until};

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_command_has_its_output_and_its_code(t: Bodies) {
    let live = Arc::new(LiveLog::default());
    let world = ToolWorld::in_body(&t, t.create().await, None, live.clone());
    let result = world.call("execute", json!({"command": "echo out; echo err >&2; exit 3"})).await;
    assert_eq!(text_of(&result), "out\nerr\n\n[Command failed with exit code 3]");
    assert_eq!((result.exit_code, result.is_error()), (Some(3), false));
    assert_eq!(*live.0.lock().unwrap(), "out\nerr\n");
    assert_eq!(
        world.text("execute", json!({"command": "pwd"})).await,
        "/home/user\n\n[Command succeeded with exit code 0]"
    );
    assert_eq!(
        world.text("execute", json!({"command": "true"})).await,
        "\n[Command succeeded with exit code 0]"
    );
    // The Body of these tests has bash.
    assert!(
        world.text("execute", json!({"command": "[[ a == a ]] && echo bash"})).await.starts_with("bash\n")
    );
    assert_eq!(
        world.error("execute", json!({"command": ""})).await,
        "Error: Command must be a non-empty string."
    );
    assert_eq!(
        world.error("execute", json!({"command": "x", "timeout": 9999})).await,
        "Error: timeout 9999s exceeds maximum allowed (3600s)."
    );
    let odd = world.text("execute", json!({"command": "printf '\\377\\n'"})).await;
    assert!(odd.starts_with("\u{fffd}\n"));
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_command_that_takes_too_long_is_ended(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let result =
        world.call("execute", json!({"command": "echo begun; sleep 31.4 & sleep 31.4", "timeout": 1})).await;
    assert_eq!(
        text_of(&result),
        "begun\nError: Command timed out after 1 seconds (custom timeout). The command may be stuck or require more time.\n[Command failed with exit code 124]"
    );
    assert_eq!(result.exit_code, Some(124));
    let alive = || async { t.sh(&world.body, "pgrep -fx 'sleep 31.4' | wc -l").await.ok() == "0" };
    until("the children of the command are gone", alive).await;
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_command_that_prints_without_end_costs_little(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let command = "echo first; head -c 2000000000 /dev/zero | tr '\\0' x; echo; echo last";
    let result = world.call("execute", json!({"command": command})).await;
    let text = text_of(&result);
    assert!(text.len() < 11 << 20, "{}", text.len());
    assert!(text.starts_with("first\nxxx") && text.contains(" bytes truncated] ...\n"));
    assert!(text.ends_with(
        "\nlast\n\n[Command succeeded with exit code 0]\n[Output was truncated due to size limits]"
    ));
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn an_interrupted_command_is_killed_with_its_children(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let count = || async { t.sh(&world.body, "pgrep -fx 'sleep 27.1' | wc -l").await.ok() };
    let command = json!({"command": "sleep 27.1 & sleep 27.1"});
    let context = world.begin("execute", command).unwrap();
    {
        let mut running = Box::pin(world.run(context));
        let both = async { until("both run", || async { count().await == "2" }).await };
        tokio::select! {
            result = &mut running => panic!("it ended: {}", text_of(&result)),
            () = both => {}
        }
    }
    until("both are gone", || async { count().await == "0" }).await;
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_command_that_kills_its_body_is_an_answer(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let kill = tokio::time::sleep(Duration::from_millis(300));
    let call = world.call("execute", json!({"command": "echo begun; sleep 60"}));
    tokio::pin!(call, kill);
    let result = tokio::select! {
        result = &mut call => result,
        () = &mut kill => {
            let record = std::fs::read(t.body_dir(&world.body).join("run.json")).unwrap();
            let running: RunRecord = serde_json::from_slice(&record).unwrap();
            testkit::kill(running.pid);
            call.await
        }
    };
    let text = text_of(&result);
    assert!(
        text.starts_with("begun\n") && text.contains("\n[The sandbox ended while the command ran: "),
        "{text}"
    );
    let next = world.error("execute", json!({"command": "true"})).await;
    assert!(next.starts_with("Error executing command: "), "{next}");
}

#[body_test(except(microvm = "no Body is asked"))]
async fn tools_of_the_log_act_in_the_log(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let todos = json!({"todos": [{"content": "it's", "status": "in_progress"}]});
    assert_eq!(
        world.text("write_todos", todos).await,
        "Updated todo list to [{'content': \"it's\", 'status': 'in_progress'}]"
    );
    let loaded = bridge::Agents::new(world.fleet.clone()).load(world.agent()).await.unwrap();
    assert_eq!(loaded.view.todos.len(), 1);
    let asked = world.call("ask_user", json!({"question": "Which one?", "choices": ["a", "b"]})).await;
    assert_eq!(
        asked.effect,
        Some(CallEffect::Ask { question: "Which one?".into(), choices: vec!["a".into(), "b".into()] })
    );
    let compacted = world.call("compact_conversation", json!({})).await;
    assert_eq!(compacted.effect, Some(CallEffect::Compact));
}
