//! Inputs of people to agents: approvals, answers, interrupts, budgets; and drivers that are killed.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::wait;

use crate::{
    agent::{AgentTest, PATIENCE, text},
    cli_test,
    pal::Pal,
};

/// A model that runs one command and then says `Done.`, if the result has a text.
fn one_command(command: &str, expected: &str) -> String {
    format!(
        "[[turns]]\ncalls = [{{ tool = 'execute', arguments = {{ command = '''{command}''' }} }}]\n\
         [[turns]]\nexpect = ['{expected}']\ntext = 'Done.'\n"
    )
}

fn asking<'a>(pal: &'a Pal, command: &str, expected: &str) -> (AgentTest<'a>, String) {
    let test = AgentTest::new(pal, &[("a", "1\n")]);
    let model = test.model(&one_command(command, expected));
    let done = test.run(&["agent", "run", "--approve", "ask", "--model", &model, "work"]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.out.contains("? execute") && done.out.contains("needs approval"), "{done:?}");
    let id = text(&test.newest()["spec"]["id"]);
    for command in [format!("pal agent approve {id}"), format!("pal agent deny {id}")] {
        assert!(done.out.contains(&command), "{command}: {done:?}");
    }
    assert_eq!(test.show(&id)["state"]["reason"], "approval");
    (test, id)
}

cli_test! {
    fn an_approved_call_runs_once(pal) {
        let (test, id) = asking(pal, "echo ran >> /tmp/ran; wc -l < /tmp/ran", "1");
        test.ok(&["agent", "approve", &id]);
        let agent = test.settled(&id);
        assert_eq!(agent["state"]["status"], "finished", "{agent}");
        // Nothing waits any more.
        let again = test.run(&["agent", "approve", &id]);
        assert!(again.code == 122 && again.talk.contains("pal agent show"), "{again:?}");
        test.clear();
    }
}

cli_test! {
    fn a_denied_call_does_not_run_and_the_model_learns_the_reason(pal) {
        let (test, id) = asking(pal, "touch /tmp/ran", "not on a Friday");
        test.ok(&["agent", "deny", &id, "not on a Friday"]);
        let agent = test.settled(&id);
        assert_eq!(agent["state"]["status"], "finished", "{agent}");
        let body = text(&agent["body"]);
        assert_eq!(test.run(&["exec", &body, "--", "test", "-e", "/tmp/ran"]).code, 1);
        test.clear();
    }
}

cli_test! {
    fn a_call_can_be_answered_by_a_person(pal) {
        let (test, id) = asking(pal, "uname", "Plan 9");
        test.ok(&["agent", "deny", &id, "--instead", "Plan 9"]);
        assert_eq!(test.settled(&id)["state"]["status"], "finished");
        assert_eq!(test.await_event(&id, "call.ended")["data"]["outcome"], "answered");
        test.clear();
    }
}

cli_test! {
    fn a_call_can_be_approved_with_other_arguments(pal) {
        let (test, id) = asking(pal, "echo first", "second");
        let call = text(&test.show(&id)["waiting"][0]["call"]);
        let refused = test.run(&["agent", "approve", &id, "--call", &call, "--edit", "{"]);
        assert_eq!(refused.code, 2, "{refused:?}");
        test.ok(&["agent", "approve", &id, "--call", &call, "--edit", r#"{"command": "echo second"}"#]);
        assert_eq!(test.settled(&id)["state"]["status"], "finished");
        test.clear();
    }
}

cli_test! {
    fn an_approval_can_hold_for_the_agent(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let call = "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'true' } }]\n";
        let model = test.model(&format!("{call}{call}[[turns]]\ntext = 'Done.'\n"));
        let id = test.start(&model, &["--approve", "ask"]);
        assert_eq!(test.settled(&id)["state"]["reason"], "approval");
        test.ok(&["agent", "approve", &id, "--always", "agent"]);
        assert_eq!(test.settled(&id)["state"]["status"], "finished", "the second call was not asked about");
        test.clear();
    }
}

cli_test! {
    fn an_approval_can_be_kept_as_a_rule_for_all_agents(pal) {
        let (test, id) = asking(pal, "echo kept", "kept");
        test.ok(&["agent", "approve", &id, "--always", "rule"]);
        assert_eq!(test.settled(&id)["state"]["status"], "finished");
        let rules = std::fs::read_to_string(pal.dir().join(".config/palisade/rules.toml")).unwrap();
        assert!(rules.contains(r#"command = ["echo", "kept"]"#), "{rules}");
        let again = test.start(&test.model(&one_command("echo kept", "kept")), &["--approve", "ask"]);
        assert_eq!(test.settled(&again)["state"]["status"], "finished", "the rule allows it");
        let other = test.start(&test.model(&one_command("echo other", "other")), &["--approve", "ask"]);
        assert_eq!(test.settled(&other)["state"]["reason"], "approval", "the rule is about one command");
        test.clear();
    }
}

cli_test! {
    fn a_question_waits_for_its_answer(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'ask_user', arguments = { question = 'Which colour?' } }]\n\
             [[turns]]\nexpect = ['blue']\ntext = 'Done.'\n",
        );
        let done = test.run(&["agent", "run", "--model", &model, "paint"]);
        assert!(done.code == 3 && done.out.contains("Which colour?") && done.out.contains("pal agent answer"), "{done:?}");
        let id = text(&test.newest()["spec"]["id"]);
        let wrong = test.run(&["agent", "resume", &id]);
        assert!(wrong.code == 122 && wrong.talk.contains("pal agent answer"), "{wrong:?}");
        test.ok(&["agent", "answer", &id, "blue"]);
        assert_eq!(test.settled(&id)["state"]["status"], "finished");
        let none = test.run(&["agent", "answer", &id, "red"]);
        assert!(none.code == 122 && none.talk.contains("pal agent send"), "{none:?}");
        test.clear();
    }
}

cli_test! {
    fn an_interrupted_agent_goes_on_after_a_message(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'sleep 1000' } }]\n\
             [[turns]]\nexpect = ['interrupted', 'faster']\ntext = 'Done.'\n",
        );
        let id = test.start(&model, &[]);
        test.await_event(&id, "call.started");
        test.ok(&["agent", "interrupt", &id]);
        let agent = test.settled(&id);
        assert_eq!(agent["state"]["reason"], "interrupted", "{agent}");
        let body = text(&agent["body"]);
        assert!(!test.ok(&["ps", &body]).contains("sleep 1000"), "the interrupted command has ended");
        let done = test.run(&["agent", "send", &id, "faster, please"]);
        assert!(done.code == 0 && done.out.contains("✓ finished"), "{done:?}");
        // An agent that does nothing has nothing to interrupt.
        assert!(test.ok(&["agent", "interrupt", &id]).contains("does nothing now"));
        assert_eq!(test.settled(&id)["state"]["status"], "finished");
        test.clear();
    }
}

cli_test! {
    fn a_stopped_agent_leaves_no_process_and_others_stay(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'exec_command', arguments = { cmd = 'sleep 1001', yield_time_ms = 250 } }]\n\
             [[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'sleep 1002' } }]\n[[turns]]\ntext = 'Done.'\n",
        );
        let id = test.start(&model, &[]);
        let body = text(&test.show(&id)["body"]);
        let mut own = test.command(&["exec", &body, "--", "sleep", "1003"]).spawn().unwrap();
        let runs = |word: &str| test.ok(&["ps", &body]).contains(word);
        wait::blocking(PATIENCE, "both commands run", || (runs("sleep 1001") && runs("sleep 1002") && runs("sleep 1003")).then_some(()));
        test.ok(&["agent", "interrupt", &id]);
        assert_eq!((runs("sleep 1001"), runs("sleep 1002")), (true, false), "an interrupt ends the turn, not the background");
        assert!(test.ok(&["agent", "stop", &id]).contains("is stopped"));
        assert_eq!((runs("sleep 1001"), runs("sleep 1003")), (false, true), "only the agent's own process ended");
        own.kill().unwrap();
        own.wait().unwrap();
        test.settled(&id);
        test.clear();
    }
}

cli_test! {
    fn a_budget_pauses_and_a_higher_one_goes_on(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let call = "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'true' } }]\n";
        let model = test.model(&format!("{call}{call}[[turns]]\ntext = 'Done.'\n"));
        let done = test.run(&["agent", "run", "--max-turns", "1", "--model", &model, "work"]);
        assert!(done.code == 3 && done.out.contains("pal agent resume"), "{done:?}");
        let id = text(&test.newest()["spec"]["id"]);
        let refused = test.run(&["agent", "resume", &id]);
        assert!(refused.code == 122 && refused.talk.contains("--max-turns"), "{refused:?}");
        let done = test.run(&["agent", "resume", &id, "--max-turns", "9"]);
        assert!(done.code == 0 && done.out.contains("✓ finished"), "{done:?}");
        test.settled(&id);
        test.clear();
    }
}

cli_test! {
    /// `kill -9` of the driver while a command runs: the watcher says so, and the next driver gets the result of the
    /// command that went on meanwhile, which runs once.
    fn a_killed_driver_is_noticed_and_the_next_one_goes_on(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(&one_command("echo once >> /tmp/count; sleep 3; wc -l < /tmp/count", "1"));
        let id = test.start(&model, &[]);
        test.await_event(&id, "call.started");
        let pid = test.await_event(&id, "agent.driven")["data"]["pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
        let lost = test.run(&["agent", "attach", &id]);
        assert!(lost.code == 125 && lost.talk.contains(&format!("pal agent resume {id}")), "{lost:?}");
        assert!(test.ok(&["agent", "ls"]).contains("not driven"));
        // Of two who resume, one drives; both see the end.
        let mut other = test.command(&["agent", "resume", &id]).spawn().unwrap();
        let done = test.run(&["agent", "resume", &id]);
        assert!(done.code == 0 && done.out.contains("✓ finished"), "{done:?}");
        assert!(other.wait().unwrap().success());
        let events = test.events(&id);
        let count = |kind: &str| events.iter().filter(|event| event["type"] == kind).count();
        assert_eq!((count("call.started"), count("call.ended"), count("agent.finished")), (1, 1, 1));
        let ended = test.await_event(&id, "call.ended");
        assert_eq!((&ended["data"]["outcome"], &ended["data"]["exit_code"]), (&Value::from("done"), &Value::from(0)));
        test.settled(&id);
        test.clear();
    }
}
