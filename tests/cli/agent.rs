//! `pal agent` with scripted models: the demo, pipes, JSON, several attempts, bad input.

use std::{path::PathBuf, process::Command, time::Duration};

use serde_json::Value;
use testkit::wait;

use crate::{
    cli_test,
    pal::{Pal, PalOutput, said},
};

/// How long an agent may take until it waits or has finished.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The project of the demo, as the documentation has it.
const DEMO: [(&str, &str); 4] = [
    (".gitignore", include_str!("../../docs/demo/login/.gitignore")),
    ("login.py", include_str!("../../docs/demo/login/login.py")),
    ("test_login.py", include_str!("../../docs/demo/login/test_login.py")),
    ("agent.toml", include_str!("../../docs/demo/login/agent.toml")),
];

/// A repository for one test, and the agents in it.
pub struct AgentTest<'a> {
    pub pal: &'a Pal,
    pub repository: PathBuf,
}

impl<'a> AgentTest<'a> {
    /// A repository with these files, in one commit.
    pub fn new(pal: &'a Pal, files: &[(&str, &str)]) -> Self {
        let repository = pal.dir().join("login");
        std::fs::create_dir_all(&repository).unwrap();
        let identity = "[user]\nname = Ada\nemail = ada@example.org\n[init]\ndefaultBranch = main\n";
        std::fs::write(pal.dir().join(".gitconfig"), identity).unwrap();
        for (name, text) in files {
            std::fs::write(repository.join(name), text).unwrap();
        }
        let test = Self { pal, repository };
        test.git(&["init", "-q"]);
        test.git(&["add", "-A"]);
        test.git(&["commit", "-qm", "start"]);
        test
    }

    pub fn git(&self, args: &[&str]) -> String {
        let mut git = Command::new("git");
        git.args(args).current_dir(&self.repository).env_clear().env("HOME", self.pal.dir());
        let done = git.env("PATH", "/usr/local/bin:/usr/bin:/bin").output().unwrap();
        assert!(done.status.success(), "git {args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap().trim_end().to_owned()
    }

    /// Writes the script of a model; returns the model's address.
    pub fn model(&self, turns: &str) -> String {
        let file =
            self.pal.dir().join(format!("model-{}.toml", std::fs::read_dir(self.pal.dir()).unwrap().count()));
        std::fs::write(&file, turns).unwrap();
        format!("script:{}", file.display())
    }

    /// `pal` in the repository.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = self.pal.command(args);
        command.current_dir(&self.repository);
        command
    }

    pub fn run(&self, args: &[&str]) -> PalOutput {
        said(self.command(args).output().unwrap())
    }

    /// Runs `pal`, which must succeed.
    #[track_caller]
    pub fn ok(&self, args: &[&str]) -> String {
        let said = self.run(args);
        assert_eq!(said.code, 0, "pal {args:?}: {said:?}");
        said.out
    }

    /// Starts an agent that nobody watches; returns its id.
    #[track_caller]
    pub fn start(&self, model: &str, options: &[&str]) -> String {
        let args = [&["agent", "run", "-d", "--model", model], options, &["work"]].concat();
        self.ok(&args).split_whitespace().next().unwrap().to_owned()
    }

    /// An agent as `pal agent show --json` prints it.
    pub fn show(&self, id: &str) -> Value {
        serde_json::from_str(&self.ok(&["--json", "agent", "show", id])).unwrap()
    }

    /// The newest agent.
    pub fn newest(&self) -> Value {
        serde_json::from_str(&self.ok(&["--json", "agent", "show"])).unwrap()
    }

    /// Waits until the agent waits or has finished; returns it.
    #[track_caller]
    pub fn settled(&self, id: &str) -> Value {
        let look = || {
            Some(self.show(id))
                .filter(|agent| agent["state"]["status"] != "working" && agent["driven"] == false)
        };
        wait::blocking(PATIENCE, "the agent waits or has finished", look)
    }

    /// The events of an agent's own chain.
    pub fn events(&self, id: &str) -> Vec<Value> {
        let chain = format!("agent/{id}");
        self.pal.events().into_iter().filter(|event| event["chain"] == chain.as_str()).collect()
    }

    /// Waits for an event of the agent's chain.
    #[track_caller]
    pub fn await_event(&self, id: &str, kind: &str) -> Value {
        let look = || self.events(id).into_iter().rfind(|event| event["type"] == kind);
        wait::blocking(PATIENCE, kind, look)
    }

    /// Removes all agents and their Bodies, and so their checkpoints.
    pub fn clear(&self) {
        let listed = self.ok(&["--json", "agent", "ls"]);
        let agents = listed.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let ids: Vec<String> = agents.map(|agent| agent["spec"]["id"].as_str().unwrap().to_owned()).collect();
        for id in ids.iter().rev() {
            self.ok(&["agent", "rm", id, "--body"]);
        }
        for body in self.pal.bodies() {
            self.ok(&["rm", "--force", "--discard", &body]);
        }
        for snapshot in testkit::leaks::entries(&self.pal.data().join("snapshots")) {
            self.ok(&["snapshot", "rm", &snapshot]);
        }
    }
}

/// The text of a field that must be there.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}

fn project_test(test: &AgentTest<'_>) -> bool {
    let mut python = Command::new("python3");
    python.args(["-B", "-m", "unittest", "-q"]).current_dir(&test.repository);
    !python.output().unwrap().stderr.ends_with(b"FAILED (failures=1)\n")
}

cli_test! {
    /// The demo of docs/guides/agent.md, from the bug to the branch of the host.
    fn the_demo_fixes_a_real_bug_that_then_lands(pal) {
        let test = AgentTest::new(pal, &DEMO);
        assert!(!project_test(&test), "the project has the bug");
        let task = "the login test fails on empty passwords; fix it";
        let done = test.run(&["agent", "run", "--model", "script:agent.toml", task]);
        assert_eq!(done.code, 0, "{done:?}");
        for line in [
            "> the login test fails on empty passwords; fix it",
            "✗ execute python3 -m unittest -q  exit 1",
            "✓ read_file /workspace/login/login.py",
            "✓ edit_file /workspace/login/login.py",
            "    -     return users.get(name, \"\") == digest(password)",
            "✓ execute python3 -m unittest -q  exit 0",
            "  [x] Run all tests",
            "Empty passwords are refused now.",
            "✓ finished",
            "  changed  1 file, +4 −1",
            "  test     python3 -m unittest -q  ✓ passed",
        ] {
            assert!(done.out.contains(line), "{line:?} is missing:\n{}", done.out);
        }
        let agent = test.newest();
        let (id, body) = (text(&agent["spec"]["id"]), text(&agent["body"]));
        for command in [format!("pal diff {body}"), format!("pal agent send {id}"), format!("pal land {body}")] {
            assert!(done.out.contains(&command), "{command}:\n{}", done.out);
        }
        assert!(!project_test(&test), "nothing changed on the host");
        assert!(test.ok(&["diff", &body]).contains("+    return bool(stored) and hmac.compare_digest"));
        test.ok(&["land", "--onto", "main", &body]);
        test.git(&["reset", "-q", "--hard", "main"]);
        assert_eq!(test.git(&["log", "-1", "--format=%s"]), "Refuse empty passwords");
        assert!(project_test(&test), "the fix works on the host");
        test.clear();
    }
}

cli_test! {
    fn json_is_the_agents_chain_and_nothing_else(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model("[[turns]]\ntext = 'Hello.'\n");
        let done = test.run(&["--json", "agent", "run", "--model", &model, "greet"]);
        assert_eq!((done.code, done.talk.as_str()), (0, ""), "{done:?}");
        let printed: Vec<Value> = done.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let id = text(&printed[0]["data"]["spec"]["id"]);
        let stored = test.events(&id);
        assert_eq!(printed[..], stored[..printed.len()]);
        assert_eq!(printed.last().unwrap()["type"], "agent.finished");
        test.settled(&id);
        test.clear();
    }
}

cli_test! {
    fn several_attempts_are_agents_of_one_group(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model("[[turns]]\ntext = 'Done.'\n");
        let done = test.run(&["agent", "run", "-n", "3", "--model", &model, "work"]);
        assert_eq!(done.code, 0, "{done:?}");
        assert_eq!(done.out.matches("  finished  ").count(), 3, "{}", done.out);
        let listed = test.ok(&["--json", "agent", "ls"]);
        let agents: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let bodies: Vec<String> = agents.iter().map(|agent| text(&agent["body"])).collect();
        assert_eq!(agents.len(), 3);
        assert!(agents.iter().all(|agent| agent["spec"]["group"] == agents[0]["spec"]["group"]), "{listed}");
        for command in ["pal compare ", "pal land --queue --onto main "] {
            let line = done.out.lines().find(|line| line.contains(command)).unwrap();
            assert!(bodies.iter().all(|body| line.contains(body)), "{line}");
        }
        agents.iter().for_each(|agent| drop(test.settled(&text(&agent["spec"]["id"]))));
        test.clear();
    }
}

cli_test! {
    fn wrong_requests_are_refused_with_a_hint_and_make_nothing(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model("[[turns]]\ntext = 'x'\n");
        for (args, code, word) in [
            (vec!["agent", "show"], 121, "pal agent run"),
            (vec!["agent", "attach", "zzz"], 121, "pal agent ls"),
            (vec!["agent", "run", "work"], 2, "--model"),
            (vec!["agent", "run", "--model", "nonsense", "work"], 2, "hint"),
            (vec!["agent", "run", "--model", &model, "--role", "no-such-role", "work"], 121, "no-such-role"),
            (vec!["agent", "run", "--model", &model, "--plan", "no-such-plan", "work"], 121, "no-such-plan"),
            (vec!["agent", "run", "--model", &model, "--approve", "maybe", "work"], 2, "plan, ask, auto and never"),
            (vec!["agent", "run", "--model", &model, "--budget", "much", "work"], 2, "0.50"),
            (vec!["agent", "run", "--model", &model, "  "], 2, "empty"),
            (vec!["agent", "run", "--model", &model, "--body", "zzz", "work"], 121, "pal ls"),
        ] {
            let refused = test.run(&args);
            assert_eq!(refused.code, code, "{args:?}: {refused:?}");
            assert!(refused.talk.contains(word) && refused.talk.contains("hint:"), "{args:?}: {refused:?}");
        }
        assert_eq!((pal.bodies(), test.ok(&["--json", "agent", "ls"])), (Vec::new(), String::new()));
        test.clear();
    }
}
