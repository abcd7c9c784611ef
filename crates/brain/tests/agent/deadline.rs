//! The budget of time during answers and calls that take too long.

use std::{sync::Arc, time::Duration};

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult, DriveEnd},
    model::ToolSchema,
};
use proto::event_data::{AgentBudget, AgentBudgeted, AgentPause, ApprovalMode};
use serde_json::{Map, Value, json};

use crate::world::World;

/// A tool whose calls never end.
struct EndlessTool(&'static str);

impl AgentTool for EndlessTool {
    fn schema(&self) -> ToolSchema {
        let parameters = json!({"type": "object", "properties": {}});
        ToolSchema { name: self.0.into(), description: "never ends".into(), parameters }
    }

    fn plan(&self, _: &Map<String, Value>) -> Result<CallPlan, String> {
        Ok(CallPlan::working("test"))
    }

    fn run(&self, _: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(std::future::pending())
    }
}

fn world(script: &str, wall_ms: u64) -> World {
    let mut world = World::new(script, ApprovalMode::Auto);
    world
        .journal
        .put(AgentBudgeted { budget: AgentBudget { wall_ms: Some(wall_ms), ..AgentBudget::default() } });
    world.extension = Some(Box::new(|parts, _| {
        parts.tools.add(Arc::new(EndlessTool("wait")));
        parts.tools.add(Arc::new(EndlessTool("task")));
    }));
    world
}

fn assert_budget(end: &DriveEnd, during: &str) {
    let DriveEnd::Paused { reason: AgentPause::Budget, why } = end else { panic!("{end:?}") };
    assert!(why.contains(during), "{why}");
}

#[tokio::test]
async fn a_call_ends_with_the_budget_of_time() {
    let script = r#"
[[turns]]
calls = [{ tool = "look" }, { tool = "wait" }, { tool = "wait" }]
[[turns]]
expect = ["seen", "budget of time was used up during this call"]
text = "Done."
"#;
    let world = world(script, 100);
    assert_budget(&world.drive().await.unwrap(), "a call");
    // A driver that takes over finds it used up, and does not work.
    assert_budget(&world.drive().await.unwrap(), "");
    world.journal.put(AgentBudgeted { budget: AgentBudget::default() });
    world.say("go on");
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
}

#[tokio::test]
async fn an_answer_ends_with_the_budget_of_time() {
    let script = "[[turns]]\ntext = \"slow and long\"\nfault = \"slow\"\npause_ms = 60000\n";
    assert_budget(&world(script, 100).drive().await.unwrap(), "an answer");
}

#[tokio::test]
async fn a_sub_agent_keeps_the_budget_itself() {
    let world = world("[[turns]]\ncalls = [{ tool = \"task\" }]\n", 50);
    let drive = tokio::time::timeout(Duration::from_millis(500), world.drive()).await;
    assert!(drive.is_err(), "the call goes on: its sub-agent has the rest of the budget");
}
