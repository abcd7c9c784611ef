//! Checkpoints: fork, rewind and replay move files and conversation together.

use bridge::{AgentStatus, RemovedBody};
use proto::event_data::CheckpointTaken;
use testkit::{Bodies, body_test, explain};

use crate::world::World;

const STEPS: &str = r#"
[[turns]]
calls = [{ tool = "execute", arguments = { command = "echo one > ~/file; cat ~/file" } }]
[[turns]]
calls = [{ tool = "execute", arguments = { command = "echo two > ~/file; cat ~/file; exit 3" } }]
[[turns]]
calls = [{ tool = "read_file", arguments = { file_path = "/home/user/file" } }]
[[turns]]
text = "first end"
[[turns]]
calls = [{ tool = "execute", arguments = { command = "cat ~/file; echo more >> ~/file" } }]
[[turns]]
text = "second end"
"#;

#[body_test(except(
    user = "what it shows does not depend on who runs it",
    microvm = "snapshots with memory are another matter"
))]
async fn fork_and_rewind_move_files_and_conversation(t: Bodies) {
    let body = t.create().await;
    let world = World::new(&t, STEPS);
    let agent = world.finish(&body).await;
    let taken: Vec<CheckpointTaken> = world.events_of(&agent);
    let turns: Vec<u64> = taken.iter().map(|one| one.turn).collect();
    assert!(
        turns.starts_with(&[0, 1, 2]),
        "before the first answer, and after turns that changed the Body: {turns:?}"
    );
    assert!(!turns.contains(&3), "a turn that only read has none: {turns:?}");
    // A fork at the first turn has its file and its conversation, and goes on from there by itself.
    let forks = world.agents().fork(&agent, Some(1), 2, None).await;
    let forks = forks.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(forks.len(), 2);
    for fork in &forks {
        let view = world.view(&fork.spec.id).await;
        let place = view.body.clone().unwrap();
        assert_eq!(t.sh(&place, "cat ~/file").await.ok(), "one");
        let said = world.conversation(&fork.spec.id).await;
        assert!(said.contains("echo one") && !said.contains("echo two"), "{said}");
        assert_eq!(view.status(), AgentStatus::Working);
    }
    let fork = &forks[0].spec.id;
    assert_eq!(world.drive(fork).await, bridge::DriveEnd::Finished, "{}", world.conversation(fork).await);
    assert!(world.conversation(fork).await.contains("echo two"));
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "two", "the first agent is as it was");
    // A rewind: the agent itself goes back, in a new Body; the one before stays.
    let fresh =
        world.agents().rewind(&agent, 1).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_ne!(fresh, body);
    assert_eq!(t.sh(&fresh, "cat ~/file").await.ok(), "one");
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "two");
    let view = world.view(&agent).await;
    assert_eq!((view.turn, view.body.as_ref()), (1, Some(&fresh)));
    assert!(!world.conversation(&agent).await.contains("echo two"));
    assert_eq!(view.totals.answers, 4, "answers that were paid stay paid");
    let refused = world.agents().rewind(&agent, 2).await.unwrap_err();
    assert!(explain(&refused).contains("turns with a checkpoint: 0, 1"), "{}", explain(&refused));
    world.drive(&agent).await;
    assert_eq!(t.sh(&fresh, "cat ~/file").await.ok(), "two", "it did the second turn again");
}

#[body_test(except(
    user = "what it shows does not depend on who runs it",
    microvm = "snapshots with memory are another matter"
))]
async fn a_replay_finds_the_differences_and_only_those(t: Bodies) {
    let body = t.create().await;
    let world = World::new(
        &t,
        r#"
        [[turns]]
        calls = [
          { tool = "write_todos", arguments = { todos = [{ content = "a", status = "pending" }] } },
          { tool = "execute", arguments = { command = "echo one > ~/file; ls ~/file; exit 3" } },
        ]
        [[turns]]
        calls = [{ tool = "read_file", arguments = { file_path = "/home/user/file" } }]
        [[turns]]
        text = "done"
        "#,
    );
    let agent = world.finish(&body).await;
    let before = world.bodies();
    let report = world.host.replay(&agent).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!((report.same, report.skipped, report.differences.len()), (2, 1, 0), "{report:?}");
    assert_eq!(world.bodies(), before, "the fresh Body is gone");
    // The clock is the difference.
    let world = World::new(
        &t,
        r#"
        [[turns]]
        calls = [{ tool = "execute", arguments = { command = "date +%s%N > ~/now; echo same" } }]
        [[turns]]
        calls = [{ tool = "execute", arguments = { command = "cat ~/now" } }]
        [[turns]]
        text = "done"
        "#,
    );
    let agent = world.finish(&body).await;
    let recorded = t.sh(&body, "cat ~/now").await.ok();
    let report = world.host.replay(&agent).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!((report.same, report.skipped, report.differences.len()), (1, 0, 1), "{report:?}");
    let difference = &report.differences[0];
    assert_eq!((difference.turn, difference.tool.as_str()), (2, "execute"));
    assert!(
        difference.recorded.contains(&recorded) && !difference.replayed.contains(&recorded),
        "{difference:?}"
    );
    assert_eq!(t.sh(&body, "cat ~/now").await.ok(), recorded, "the agent's Body did not change");
}

#[body_test(except(
    user = "what it shows does not depend on who runs it",
    microvm = "snapshots with memory are another matter"
))]
async fn checkpoints_survive_gc_and_go_with_their_agents(t: Bodies) {
    let body = t.create().await;
    let world = World::new(&t, STEPS);
    let agent = world.finish(&body).await;
    let snapshots = || t.fleet().snapshots().list().unwrap().len();
    let count = snapshots();
    assert!(count >= 3);
    t.fleet().garbage().collect(fleet::GcMode::Remove).await.unwrap();
    assert_eq!(snapshots(), count, "an agent needs them");
    // A fork keeps the checkpoints that it can go back to, also after the end of the first agent.
    let fork = world.agents().fork(&agent, Some(1), 1, None).await.unwrap().remove(0).spec.id;
    world.agents().remove_whole(&agent, RemovedBody::Removed).await.unwrap();
    assert!(!world.exists(&body));
    assert_eq!(snapshots(), 2, "those of turn 0 and 1");
    let again = world.agents().fork(&fork, Some(0), 1, None).await;
    let again = again.unwrap_or_else(|failure| panic!("{}", explain(&failure))).remove(0).spec.id;
    let place = world.view(&again).await.body.unwrap();
    assert_eq!(t.sh(&place, "ls ~/file 2>/dev/null; echo none").await.ok(), "none");
    world.agents().remove_whole(&again, RemovedBody::Removed).await.unwrap();
    world.agents().remove_whole(&fork, RemovedBody::Removed).await.unwrap();
    assert_eq!(snapshots(), 0);
    assert!(world.agents().list().unwrap().is_empty());
}
