//! Agents that go back in time: fork, rewind, replay, export, cost, rm.

use serde_json::Value;

use crate::{
    agent::{AgentTest, text},
    cli_test,
};

/// Writes a file in the first turn, changes it in the second, and then answers each further message.
const TWO_STEPS: &str = "
[[turns]]
calls = [{ tool = 'execute', arguments = { command = 'echo one > file' } }]
[[turns]]
calls = [{ tool = 'execute', arguments = { command = 'echo two >> file' } }]
[[turns]]
text = 'Both steps are done.'
[[turns]]
repeat = 'forever'
text = 'Yes.'
";

fn finished(test: &AgentTest<'_>) -> (String, String) {
    let id = test.start(&test.model(TWO_STEPS), &["--checkpoint-every", "0s"]);
    let agent = test.settled(&id);
    assert_eq!(agent["state"]["status"], "finished", "{agent}");
    (id, text(&agent["body"]))
}

fn file_in(test: &AgentTest<'_>, body: &str) -> String {
    test.run(&["exec", body, "--", "cat", "/workspace/login/file"]).out
}

cli_test! {
    fn a_fork_has_conversation_and_files_of_the_turn(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let (id, body) = finished(&test);
        let made = test.ok(&["--json", "agent", "fork", &id, "--at", "1", "-n", "2"]);
        let forks: Vec<Value> = made.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(forks.len(), 2);
        for fork in &forks {
            assert_eq!(file_in(&test, &text(&fork["body"])), "one\n");
            assert_eq!(test.show(&text(&fork["agent"]))["turn"], 1);
        }
        assert_eq!(file_in(&test, &body), "one\ntwo\n", "the agent itself stays as it was");
        assert_eq!(test.ok(&["agent", "ls"]).matches(" ready ").count(), 2);
        let missing = test.run(&["agent", "fork", &id, "--at", "99"]);
        assert!(missing.code == 121 && missing.talk.contains("turns with a checkpoint"), "{missing:?}");
        // A fork of now, with a message, goes on by itself.
        let made = test.ok(&["--json", "agent", "fork", &id, "is it done?"]);
        let fork: Value = serde_json::from_str(&made).unwrap();
        let agent = test.settled(&text(&fork["agent"]));
        assert_eq!((&agent["state"]["status"], &agent["summary"]), (&"finished".into(), &"Yes.".into()), "{agent}");
        assert_eq!(file_in(&test, &text(&fork["body"])), "one\ntwo\n");
        test.clear();
    }
}

cli_test! {
    fn a_rewound_agent_is_where_it_was(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let (id, before) = finished(&test);
        let spent = test.show(&id)["totals"].clone();
        let rewound = test.ok(&["agent", "rewind", &id, "--to", "1"]);
        assert!(rewound.contains("is at turn 1"), "{rewound}");
        let agent = test.show(&id);
        let body = text(&agent["body"]);
        assert_ne!(body, before);
        assert_eq!((file_in(&test, &body), file_in(&test, &before)), ("one\n".into(), "one\ntwo\n".into()));
        assert_eq!((&agent["turn"], &agent["totals"]), (&Value::from(1), &spent), "tokens that were spent stay spent");
        let done = test.run(&["agent", "send", &id, "go on"]);
        assert!(done.code == 0 && done.out.contains("Both steps are done."), "{done:?}");
        test.settled(&id);
        assert_eq!(file_in(&test, &body), "one\ntwo\n");
        test.clear();
    }
}

cli_test! {
    fn a_replay_reports_results_that_differ(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'cat a' } }]\n\
             [[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'cat /proc/sys/kernel/random/uuid' } }]\n\
             [[turns]]\ntext = 'Done.'\n",
        );
        let id = test.start(&model, &[]);
        assert_eq!(test.settled(&id)["state"]["status"], "finished");
        let replayed = test.run(&["agent", "replay", &id]);
        assert_eq!(replayed.code, 1, "{replayed:?}");
        assert!(replayed.out.contains("1 the same, 1 different"), "{replayed:?}");
        let json: Value = serde_json::from_str(&test.run(&["--json", "agent", "replay", &id]).out).unwrap();
        assert_eq!((&json["same"], &json["differences"][0]["turn"]), (&1.into(), &2.into()), "{json}");
        test.clear();
    }
}

cli_test! {
    fn an_exported_agent_is_its_events_or_a_page(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\nthink = 'hm'\ntext = '```'\n\
             calls = [{ tool = 'execute', arguments = { command = 'printf \"\\\\033[2J\"; seq 100000' } }]\n\
             [[turns]]\ntext = 'Done.'\n",
        );
        let id = test.start(&model, &[]);
        test.settled(&id);
        let exported: Vec<Value> =
            test.ok(&["agent", "export", &id]).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let stored = test.events(&id);
        assert_eq!(exported.len(), stored.len());
        for (exported, stored) in exported.iter().zip(&stored) {
            assert_eq!(exported["hash"], stored["hash"]);
        }
        let page = test.ok(&["agent", "export", &id, "--as", "markdown"]);
        assert!(page.starts_with("# work\n") && page.contains("## Turn 1"), "{page}");
        assert!(page.contains("````markdown\n```\n````") && page.contains("exit code 0"), "{page}");
        assert!(!page.contains('\u{1b}'), "no escape sequence is in it");
        test.clear();
    }
}

cli_test! {
    fn costs_are_added_up_and_a_removed_agent_leaves_its_events(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let config = pal.dir().join(".config/palisade");
        std::fs::create_dir_all(&config).unwrap();
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'true' } }]\nusage = { input = 1000, output = 100, cache_read = 3000, cache_write = 0 }\n\
             [[turns]]\ntext = 'Done.'\nusage = { input = 1000, output = 100, cache_read = 3000, cache_write = 0 }\n",
        );
        let price = format!("[models.\"{model}\"]\nprice = {{ input = 3.0, output = 15.0, cache_read = 0.3, cache_write = 3.75 }}\n");
        std::fs::write(config.join("models.toml"), price).unwrap();
        let id = test.start(&model, &[]);
        let agent = test.settled(&id);
        assert_eq!(agent["totals"]["cost_microdollars"], 2 * (3_000 + 1_500 + 900), "{agent}");
        let cost: Value = serde_json::from_str(&test.ok(&["--json", "agent", "cost", &id])).unwrap();
        let numbers = ["answers", "input", "cache_read", "output", "cost_microdollars", "calls"].map(|name| cost[name].as_u64().unwrap());
        assert_eq!(numbers, [2, 2_000, 6_000, 200, 10_800, 1], "{cost}");
        assert!(test.ok(&["agent", "cost"]).contains("$0.0108"));
        let body = text(&agent["body"]);
        test.ok(&["agent", "rm", &id]);
        assert_eq!(test.ok(&["--json", "agent", "ls"]), "");
        assert_eq!(test.events(&id).last().unwrap()["type"], "agent.removed");
        assert_eq!(pal.bodies(), [body], "the Body stays");
        assert!(testkit::leaks::entries(&pal.data().join("snapshots")).is_empty(), "its checkpoints are gone");
        test.clear();
    }
}
