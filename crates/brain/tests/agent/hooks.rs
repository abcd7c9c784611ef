//! Hooks around an agent: they block, ask, add and keep it at work.

use std::sync::{Arc, Mutex};

use brain::agent::{
    BoxFuture, DriveEnd,
    middleware::{HookOutput, HookPlace, HookRun, HookRunner, HookSet, Hooks},
};
use proto::event_data::{AgentPause, ApprovalMode};
use serde_json::Value;

use crate::world::World;

/// A run of a hook: its command, its place and its input.
type SeenRun = (String, HookPlace, Value);

/// Answers hooks by their command and keeps what it was asked.
#[derive(Default)]
struct ScriptedRunner {
    seen: Mutex<Vec<SeenRun>>,
}

impl HookRunner for ScriptedRunner {
    fn run<'a>(&'a self, run: HookRun<'a>) -> BoxFuture<'a, Result<HookOutput, String>> {
        let input: Value = serde_json::from_str(&run.input).unwrap();
        let tool = input["tool_name"].as_str().unwrap_or_default().to_owned();
        let is_active = input["stop_hook_active"] == true;
        let secret = input["prompt"].as_str().is_some_and(|prompt| prompt.contains("secret"));
        self.seen.lock().unwrap().push((run.command.to_owned(), run.place, input));
        let output = |exit_code, stdout: &str, stderr: &str| {
            Ok(HookOutput { exit_code, stdout: stdout.into(), stderr: stderr.into() })
        };
        let answer = match run.command {
            "no-work" if tool == "work" => output(2, "", "work is forbidden"),
            "broken" => Err("no such file".to_owned()),
            "lint" => output(2, "", "line 3 is too long"),
            "prompt" if secret => output(2, "", "no secrets"),
            "prompt" => output(0, "the branch is main", ""),
            "stop" if !is_active => output(2, "", "run the tests"),
            "never-stop" => output(2, "", "more"),
            _ => output(0, "", ""),
        };
        Box::pin(async move { answer })
    }
}

fn world(script: &str, hooks: &str) -> (World, Arc<ScriptedRunner>) {
    let runner = Arc::new(ScriptedRunner::default());
    let mut world = World::new(script, ApprovalMode::Auto);
    let (set, shared) = (HookSet::parse("hooks.toml", hooks).unwrap(), Arc::clone(&runner));
    world.extension = Some(Box::new(move |parts, view| {
        let runner = Arc::clone(&shared) as Arc<dyn HookRunner>;
        let hooks = Hooks::new(set.clone(), runner, view.spec.as_ref().unwrap());
        parts.middleware.push(Arc::new(hooks));
    }));
    (world, runner)
}

fn commands(runner: &ScriptedRunner) -> Vec<String> {
    runner.seen.lock().unwrap().iter().map(|(command, ..)| command.clone()).collect()
}

#[tokio::test]
async fn hooks_block_calls_and_speak_about_results() {
    let hooks = r#"
[[hook]]
event = "PreToolUse"
matcher = "wo*|fail"
command = "no-work"
[[hook]]
event = "PostToolUse"
matcher = "look"
command = "lint"
where = "host"
[[hook]]
event = "PreToolUse"
matcher = "fail"
command = "broken"
"#;
    let script = r#"
[[turns]]
calls = [{ tool = "work" }, { tool = "look", arguments = { path = "/a" } }, { tool = "fail" }]
[[turns]]
expect = ["work was blocked by a hook: work is forbidden", "seen", "A hook of the user says:", "line 3 is too long", "`broken` could not be run: no such file"]
text = "Done."
"#;
    let (world, runner) = world(script, hooks);
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    assert_eq!(world.ledger.lock().unwrap().len(), 1, "only look ran");
    let seen = runner.seen.lock().unwrap();
    let (command, place, input) = seen.last().unwrap();
    assert_eq!((command.as_str(), *place), ("lint", HookPlace::Host));
    assert_eq!(input["hook_event_name"], "PostToolUse");
    assert_eq!(input["tool_input"]["path"], "/a");
    assert_eq!(input["tool_response"]["text"], "seen");
    assert!(
        seen.iter().filter(|(command, ..)| command != "lint").all(|(_, place, _)| *place == HookPlace::Body)
    );
}

#[tokio::test]
async fn hooks_keep_an_agent_at_work_but_not_for_ever() {
    let script = r#"
[[turns]]
text = "Finished."
[[turns]]
expect = ["A hook wants more before you finish:\nrun the tests"]
text = "Tests pass."
"#;
    let (world, runner) = world(script, "[[hook]]\nevent = \"Stop\"\ncommand = \"stop\"\n");
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    assert_eq!(world.view().await.summary.as_deref(), Some("Tests pass."));
    assert_eq!(commands(&runner), ["stop", "stop"]);
    let endless = "[[turns]]\ntext = \"Finished.\"\nrepeat = \"forever\"\n";
    let (world, _) = self::world(endless, "[[hook]]\nevent = \"Stop\"\ncommand = \"never-stop\"\n");
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    assert_eq!(world.view().await.turn, 6);
}

#[tokio::test]
async fn hooks_see_messages_before_the_model_does() {
    let hooks = "[[hook]]\nevent = \"UserPromptSubmit\"\ncommand = \"prompt\"\n\
                 [[hook]]\nevent = \"SessionStart\"\nmatcher = \"startup\"\ncommand = \"start\"\n";
    let script = r#"
[[turns]]
expect = ["do it", "the branch is main"]
calls = [{ tool = "look" }]
[[turns]]
text = "Done."
[[turns]]
text = "Never said."
"#;
    let (world, runner) = world(script, hooks);
    assert_eq!(world.drive().await.unwrap(), DriveEnd::Finished);
    assert_eq!(commands(&runner), ["start", "prompt"]);
    world.say("the secret is 1234");
    for _ in 0..2 {
        match world.drive().await.unwrap() {
            DriveEnd::Paused { reason: AgentPause::Other(reason), why } => {
                assert_eq!(
                    (reason.as_str(), why.as_str()),
                    ("hook", "a hook blocked the message: no secrets")
                );
            }
            other => panic!("{other:?}"),
        }
        world.journal.put(proto::event_data::AgentResumed {});
    }
    let asked = world.requests.lock().unwrap().len();
    assert_eq!(asked, 2, "the model never saw the secret");
}
