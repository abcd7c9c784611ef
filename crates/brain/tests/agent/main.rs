//! The loop of the agent, with a scripted model and tools that count their effects.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod deadline;
mod hooks;
mod plans;
mod prefix;
mod world;

use brain::agent::{AgentStatus, DriveEnd};
use proto::event_data::{
    AgentInterrupted, AgentPause, ApprovalDecision, ApprovalGiven, ApprovalMode, ApprovalScope,
};
use world::World;

const WORK: &str = r#"
[[turns]]
text = "I look first."
calls = [{ tool = "look", arguments = { path = "/a" } }, { tool = "look", arguments = { path = "/b" } }]
[[turns]]
expect = ["seen"]
calls = [{ tool = "work", arguments = { path = "/a" } }, { tool = "fail" }, { tool = "nothing" }, { tool = "work", arguments = "no json" }]
[[turns]]
expect = ["worked", "not a valid tool", "no JSON object"]
calls = [{ tool = "work", arguments = { path = "/a" } }, { tool = "work", arguments = { path = "/a" } }]
[[turns]]
expect = ["parallel file mutations"]
text = "Done."
"#;

fn texts(view: &brain::agent::AgentView) -> String {
    serde_json::to_string(&view.messages).unwrap()
}

#[tokio::test]
async fn an_agent_works_to_its_end() {
    let world = World::new(WORK, ApprovalMode::Auto);
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    let view = world.view().await;
    assert_eq!((view.turn, view.totals.calls, view.summary.as_deref()), (4, 8, Some("Done.")));
    assert_eq!(world.ledger.lock().unwrap().len(), 5);
    assert_eq!(view.system, Some(vec!["be good".to_owned()]));
}

#[tokio::test]
async fn a_kill_at_every_event_changes_nothing() {
    let whole = World::new(WORK, ApprovalMode::Auto);
    whole.drive().await.unwrap();
    let events = whole.journal.events().len();
    for cut in 3..events {
        let world = World::new(WORK, ApprovalMode::Auto);
        *world.journal.events_max.lock().unwrap() = cut;
        world.drive().await.unwrap_err();
        *world.journal.events_max.lock().unwrap() = usize::MAX;
        assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished, "cut {cut}");
        let (found, expected) = (world.view().await, whole.view().await);
        assert_eq!(texts(&found), texts(&expected), "cut {cut}");
        let ledger = world.ledger.lock().unwrap();
        assert!(ledger.values().all(|count| *count == 1), "cut {cut}: {ledger:?}");
        assert_eq!(ledger.len(), 5);
    }
}

#[tokio::test]
async fn an_approval_is_waited_for_and_may_edit_reject_or_answer() {
    let script = r#"
[[turns]]
calls = [{ tool = "work", arguments = { path = "/a" } }, { tool = "work", arguments = { path = "/b" } }, { tool = "work", arguments = { path = "/c" } }, { tool = "look" }]
[[turns]]
expect = ["worked", "not today", "forty-two", "seen"]
calls = [{ tool = "work", arguments = { path = "/d" } }]
[[turns]]
text = "Done."
"#;
    let world = World::new(script, ApprovalMode::Ask);
    let paused = world.drive().await.unwrap();
    assert!(matches!(paused, DriveEnd::Paused { reason: AgentPause::Approval, .. }), "{paused:?}");
    assert_eq!(world.ledger.lock().unwrap().len(), 1, "only the call that reads ran");
    // A driver that starts meanwhile has nothing to do.
    assert!(matches!(world.drive().await.unwrap(), DriveEnd::Paused { .. }));
    let calls: Vec<String> = world.view().await.open_calls().map(|state| state.call.id.clone()).collect();
    let give = |call: &str, decision, message: Option<&str>, scope| {
        world.journal.put(ApprovalGiven {
            call: call.to_owned(),
            decision,
            arguments: None,
            message: message.map(str::to_owned),
            scope,
        });
    };
    give(&calls[0], ApprovalDecision::Approve, None, ApprovalScope::Agent);
    give(&calls[1], ApprovalDecision::Reject, Some("not today"), ApprovalScope::Once);
    give(&calls[2], ApprovalDecision::Answer, Some("forty-two"), ApprovalScope::Once);
    // The first decision holds for the agent, so the last call needs none.
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    assert_eq!(world.ledger.lock().unwrap().len(), 3);
}

#[tokio::test]
async fn plan_mode_changes_nothing() {
    let script = r#"
[[turns]]
calls = [{ tool = "work" }, { tool = "look" }]
[[turns]]
expect = ["plan mode", "seen"]
text = "I would work."
"#;
    let world = World::new(script, ApprovalMode::Plan);
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    assert!(world.ledger.lock().unwrap().keys().all(|key| !key.contains("work")));
    assert_eq!(world.ledger.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn an_agent_that_repeats_itself_pauses() {
    let script = "[[turns]]\ncalls = [{ tool = \"fail\" }]\nrepeat = 100\n";
    let world = World::new(script, ApprovalMode::Auto);
    let end = world.drive().await.unwrap();
    assert!(matches!(end, DriveEnd::Paused { reason: AgentPause::Stuck, .. }), "{end:?}");
    assert_eq!(world.view().await.turn, 5);
}

#[tokio::test]
async fn a_message_that_arrives_during_an_answer_follows_it() {
    let script = r#"
[[turns]]
text = "slow"
fault = "slow"
pause_ms = 300
[[turns]]
expect = ["and more"]
text = "Both done."
"#;
    let world = World::new(script, ApprovalMode::Auto);
    let (end, ()) = tokio::join!(world.drive(), async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        world.say("and more");
    });
    assert_eq!(end.unwrap(), DriveEnd::Finished);
    assert_eq!(world.view().await.summary.as_deref(), Some("Both done."));
}

#[tokio::test]
async fn an_interrupt_ends_the_turn_and_a_message_goes_on() {
    let script = r#"
[[turns]]
text = "slow"
fault = "slow"
pause_ms = 60000
"#;
    let world = World::new(script, ApprovalMode::Auto);
    let (end, ()) = tokio::join!(world.drive(), async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        world.journal.put(AgentInterrupted { stop: false });
    });
    assert!(matches!(end.unwrap(), DriveEnd::Paused { reason: AgentPause::Interrupted, .. }));
    world.say("go on");
    assert_eq!(world.view().await.status(), AgentStatus::Working);
}

#[tokio::test]
async fn a_script_that_ends_pauses_the_agent_with_the_reason() {
    let world = World::new("[[turns]]\ncalls = [{ tool = \"look\" }]\n", ApprovalMode::Auto);
    match world.drive().await.unwrap() {
        DriveEnd::Paused { reason: AgentPause::Model, why } => assert!(why.contains("script"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn empty_and_cut_answers_are_asked_for_again_and_then_the_agent_waits() {
    let cut = "text = \"I will\"\nstop = \"max_tokens\"";
    for (answer, reminder) in [("", "was empty"), ("text = \" \"", "was empty"), (cut, "was cut off")] {
        let script = format!("[[turns]]\n{answer}\nrepeat = \"forever\"\n");
        let world = World::new(&script, ApprovalMode::Auto);
        let end = world.drive().await.unwrap();
        let DriveEnd::Paused { reason: AgentPause::Model, why } = end else { panic!("{answer}: {end:?}") };
        assert!(why.contains("empty or incomplete"), "{why}");
        let view = world.view().await;
        assert_eq!(view.turn, 4, "{answer}");
        assert!(texts(&view).contains(reminder), "{answer}");
    }
    let mended = format!("[[turns]]\n{cut}\nrepeat = 3\n[[turns]]\ntext = \"Done.\"");
    assert_eq!(World::new(&mended, ApprovalMode::Auto).drive().await.unwrap(), DriveEnd::Finished);
}
