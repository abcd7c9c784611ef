//! Plans at work: phases, checks, tools of a phase, amendments, crashes.

use std::sync::{Arc, Mutex};

use brain::{
    agent::{
        AgentView, BoxFuture, DriveEnd,
        middleware::{CheckResult, PhaseChecks, Planning},
    },
    library::PlanTemplate,
};
use proto::event_data::{ApprovalMode, DecodedEvent, EventData};

use crate::world::World;

const PLAN: &str = r#"
name = "two-steps"
description = "d"
[[phase]]
name = "read"
goal = "Look at it."
tools = ["look"]
exit = { question = "Found it?" }
[[phase]]
name = "change"
goal = "Change it."
exit = { command = "make test" }
[[phase]]
name = "report"
goal = "Say it."
"#;

/// Checks that fail as long as a list of exit codes says so. A key runs once.
#[derive(Default)]
struct ScriptedChecks {
    codes: Mutex<Vec<i32>>,
    ran: Mutex<Vec<(String, String, i32)>>,
}

impl PhaseChecks for ScriptedChecks {
    fn run<'a>(&'a self, command: &'a str, key: &'a str) -> BoxFuture<'a, Result<CheckResult, String>> {
        let mut ran = self.ran.lock().unwrap();
        let known = ran.iter().find(|(_, known, _)| known == key).map(|(_, _, code)| *code);
        let exit_code = known.unwrap_or_else(|| {
            let code = self.codes.lock().unwrap().pop().unwrap_or(0);
            ran.push((command.to_owned(), key.to_owned(), code));
            code
        });
        Box::pin(async move { Ok(CheckResult { exit_code, output: format!("output of {command}") }) })
    }
}

fn world(script: &str, plan: Option<&str>, checks: &Arc<ScriptedChecks>) -> World {
    let mut world = World::with_plan(script, ApprovalMode::Auto, plan);
    let checks = Arc::clone(checks);
    world.extension = Some(Box::new(move |parts, view| {
        let template = PlanTemplate::parse("plan.toml", PLAN).unwrap();
        let checks = Arc::clone(&checks) as Arc<dyn PhaseChecks>;
        let planning = Planning::new([template], checks, view);
        planning.tools().into_iter().for_each(|tool| parts.tools.add(tool));
        parts.middleware.insert(0, planning);
    }));
    world
}

/// The phases that an agent entered, and the checks that were written down.
fn phases(world: &World) -> Vec<(Option<String>, Option<String>)> {
    let events = world.journal.events();
    let entered = events.iter().filter_map(|event| match event.decode() {
        DecodedEvent::Known(EventData::PhaseEntered(data)) => Some((data.phase, data.check)),
        _ => None,
    });
    entered.collect()
}

fn names(world: &World) -> Vec<String> {
    phases(world).into_iter().map(|(phase, _)| phase.unwrap_or_else(|| "end".into())).collect()
}

fn summary(view: &AgentView) -> Option<&str> {
    view.summary.as_deref()
}

const FOLLOW: &str = r#"
[[turns]]
calls = [{ tool = "work" }, { tool = "look" }]
[[turns]]
expect = ["not allowed in phase 1 (read)", "seen"]
calls = [{ tool = "next_phase" }]
[[turns]]
expect = ["phase read is not done yet: give `answer` to this question: Found it?"]
calls = [{ tool = "next_phase", arguments = { answer = "line 3" } }]
[[turns]]
expect = ["phase 2 of 3: change", "Change it.", "`make test` succeeds"]
calls = [{ tool = "work" }]
[[turns]]
expect = ["worked"]
calls = [{ tool = "next_phase" }]
[[turns]]
expect = ["phase change is not done yet", "ended with 1", "output of make test"]
text = "I stop here."
[[turns]]
expect = ["phase 2 of 3 (change)"]
calls = [{ tool = "next_phase" }]
[[turns]]
expect = ["phase 3 of 3: report"]
text = "Done."
"#;

#[tokio::test]
async fn a_plan_is_followed_phase_by_phase() {
    let checks = Arc::new(ScriptedChecks { codes: Mutex::new(vec![0, 1]), ..Default::default() });
    let world = world(FOLLOW, Some("two-steps"), &checks);
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    let view = world.view().await;
    assert_eq!(summary(&view), Some("Done."));
    assert_eq!(names(&world), ["read", "change", "report", "end"]);
    let check = |index: usize| phases(&world)[index].1.clone().unwrap_or_default();
    assert!(check(1).contains("Found it?\nline 3") && check(2).contains("`make test` ended with 0"));
    assert_eq!(view.plan.unwrap()["phases"][1]["exit"]["command"], "make test");
}

#[tokio::test]
async fn a_kill_at_every_event_follows_the_same_plan() {
    let checks = Arc::new(ScriptedChecks { codes: Mutex::new(vec![0, 1]), ..Default::default() });
    let whole = world(FOLLOW, Some("two-steps"), &checks);
    whole.drive().await.unwrap();
    for cut in 3..whole.journal.events().len() {
        let checks = Arc::new(ScriptedChecks { codes: Mutex::new(vec![0, 1]), ..Default::default() });
        let world = world(FOLLOW, Some("two-steps"), &checks);
        *world.journal.events_max.lock().unwrap() = cut;
        world.drive().await.unwrap_err();
        *world.journal.events_max.lock().unwrap() = usize::MAX;
        assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished, "cut {cut}");
        assert_eq!(names(&world), ["read", "change", "report", "end"], "cut {cut}");
        assert_eq!(checks.ran.lock().unwrap().len(), 2, "cut {cut}: a check ran twice");
    }
}

#[tokio::test]
async fn a_plan_is_adopted_changed_and_gone_back_in() {
    let script = r#"
[[turns]]
calls = [{ tool = "adopt_plan", arguments = { plan = "none" } }, { tool = "next_phase" }]
[[turns]]
expect = ["The plans are: two-steps.", "you follow no plan"]
calls = [{ tool = "adopt_plan", arguments = { plan = "two-steps" } }]
[[turns]]
expect = ["You follow the plan two-steps now", "phase 1 of 3: read"]
calls = [{ tool = "next_phase", arguments = { phase = "report" } }, { tool = "next_phase", arguments = { phase = "x" } }]
[[turns]]
expect = ["cannot be skipped", "no such phase"]
calls = [{ tool = "amend_plan", arguments = { reason = "r", phases = [{ name = "report" }] } }]
[[turns]]
expect = ["phase change has a check by a command and cannot be removed"]
calls = [{ tool = "amend_plan", arguments = { reason = "r", phases = [{ name = "ask", goal = "Ask.", exit_question = "q?" }, { name = "change", goal = "Less." }] } }]
[[turns]]
expect = ["2. ask: Ask.", "3. change: Less.", "`make test` must succeed"]
calls = [{ tool = "next_phase", arguments = { answer = "a" } }]
[[turns]]
expect = ["phase 2 of 3: ask"]
calls = [{ tool = "next_phase", arguments = { phase = "read" } }]
[[turns]]
expect = ["phase 1 of 3: read"]
text = "Enough."
[[turns]]
expect = ["phase 1 of 3 (read)"]
text = "The rest is not needed."
"#;
    let checks = Arc::new(ScriptedChecks::default());
    let world = world(script, None, &checks);
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    assert_eq!(summary(&world.view().await), Some("The rest is not needed."));
    assert_eq!(names(&world), ["read", "ask", "read"]);
    assert!(checks.ran.lock().unwrap().is_empty());
}
