//! Calls that an earlier driver began: each has one effect, and what cannot be known is not guessed.

use serde_json::json;
use std::{sync::Arc, time::Duration};
use testkit::{Bodies, body_test};

use crate::world::{ToolWorld, text_of, until};

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_call_is_repeated_without_a_second_effect(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    t.sh(&world.body, "echo a > ~/f; echo b > ~/g").await.ok();
    let patch = "*** Begin Patch\n*** Update File: g\n@@\n-b\n+c\n*** End Patch";
    let calls = [
        ("execute", json!({"command": "echo x >> ~/effects; cat ~/effects"})),
        ("exec_command", json!({"cmd": "echo x >> ~/more; cat ~/more"})),
        ("edit_file", json!({"file_path": "/home/user/f", "old_string": "a", "new_string": "aa"})),
        ("apply_patch", json!({"input": patch})),
        ("delete", json!({"file_path": "/home/user/f"})),
        ("write_file", json!({"file_path": "/memories/m.md", "content": "m"})),
        ("edit_file", json!({"file_path": "/memories/m.md", "old_string": "m", "new_string": "mm"})),
        ("delete", json!({"file_path": "/memories/m.md"})),
    ];
    for (tool, arguments) in calls {
        let context = world.begin(tool, arguments).unwrap();
        let first = text_of(&world.run(context.clone()).await);
        // The driver died before it could record the result.
        let again = world.reopen(&t).recover(context).await.unwrap_or_else(|| panic!("{tool} is unknown"));
        let strip = |text: &str| {
            text.lines().filter(|line| !line.starts_with("Wall time")).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(strip(&text_of(&again)), strip(&first), "{tool}");
        assert!(!again.is_error(), "{tool}: {first}");
    }
    assert_eq!(t.sh(&world.body, "cat effects more g").await.ok(), "x\nx\nc");
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_call_that_never_reached_the_guest_is_carried_out(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    for (tool, arguments) in [
        ("execute", json!({"command": "echo x >> ~/effects"})),
        ("write_file", json!({"file_path": "/home/user/f", "content": "a"})),
        ("edit_file", json!({"file_path": "/home/user/f", "old_string": "a", "new_string": "b"})),
        ("write_file", json!({"file_path": "/agent/n", "content": "n"})),
        ("apply_patch", json!({"input": "*** Begin Patch\n*** Add File: p\n+p\n*** End Patch"})),
    ] {
        let context = world.begin(tool, arguments).unwrap();
        let result = world.reopen(&t).recover(context).await.unwrap_or_else(|| panic!("{tool} is unknown"));
        assert!(!result.is_error(), "{tool}: {}", text_of(&result));
    }
    assert_eq!(t.sh(&world.body, "cat effects f p").await.ok(), "x\nbp");
    assert_eq!(world.text("read_file", json!({"file_path": "/agent/n"})).await, "@@ lines 1-1 of 1 @@\nn");
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_command_goes_on_while_no_driver_lives(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let command = json!({"command": "echo begun; while [ ! -e ~/go ]; do sleep 0.05; done; echo ended"});
    let context = world.begin("execute", command).unwrap();
    // A driver that is killed runs no destructor: its future is not polled any more, and not dropped.
    let mut running = Box::pin(world.run(context.clone()));
    let begun = async {
        until("it has begun", || async {
            t.sh(&world.body, "pgrep -f 'echo ended' | wc -l").await.ok() != "0"
        })
        .await
    };
    tokio::select! {
        result = &mut running => panic!("it ended: {}", text_of(&result)),
        () = begun => {}
    }
    let later = Arc::new(world.reopen(&t));
    let (next, ahead) = (later.clone(), context.clone());
    let recovering = tokio::spawn(async move { next.recover(ahead).await });
    t.sh(&world.body, "touch ~/go").await.ok();
    let result = recovering.await.unwrap().expect("the guest knows the command");
    assert_eq!(text_of(&result), "begun\nended\n\n[Command succeeded with exit code 0]");
    assert_eq!(running.await, result, "both drivers would have read the same");
}

#[body_test(except(microvm = "a slow emulated machine adds nothing: the tools only use the guest's calls"))]
async fn a_call_of_an_earlier_life_is_unknown(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let mut contexts = Vec::new();
    for (tool, arguments) in [
        ("execute", json!({"command": "echo x >> ~/effects"})),
        ("exec_command", json!({"cmd": "echo x >> ~/effects"})),
        ("write_file", json!({"file_path": "/home/user/f", "content": "a"})),
        ("apply_patch", json!({"input": "*** Begin Patch\n*** Add File: p\n+p\n*** End Patch"})),
    ] {
        contexts.push(world.begin(tool, arguments).unwrap());
    }
    t.fleet().stop(&world.body, Duration::ZERO).await.unwrap();
    t.fleet().start(&world.body).await.unwrap();
    let later = world.reopen(&t);
    for context in contexts {
        let tool = context.tool.clone();
        assert!(later.recover(context).await.is_none(), "{tool}");
    }
    assert_eq!(t.sh(&world.body, "ls ~").await.ok(), "");
    // A call that only reads is simply made again.
    let reading = world.begin("ls", json!({"path": "/home/user"})).unwrap();
    assert_eq!(text_of(&later.recover(reading).await.unwrap()), "No files found");
}
