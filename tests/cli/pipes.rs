//! Pipes: results on standard output, messages on standard error, exit codes of the command.

use crate::{cli_test, pal::said};

cli_test! {
    fn codes_are_passed_on(pal) {
        let cases: [(&[&str], i32); 6] = [
            (&["true"], 0), (&["false"], 1), (&["sh", "-c", "exit 42"], 42), (&["sh", "-c", "kill -9 $$"], 137),
            (&["no-such-command"], 127), (&["/etc/passwd"], 126),
        ];
        for (command, code) in cases {
            let said = pal.run([&["run", "--"], command].concat());
            assert_eq!((said.code, said.out.as_str()), (code, ""), "{command:?}: {said:?}");
            assert_eq!(said.talk.is_empty(), ![126, 127].contains(&code), "{command:?}: {said:?}");
        }
        pal.nothing_left(&[]);
    }
}

cli_test! {
    fn output_is_data_and_complaints_are_talk(pal) {
        let said = pal.run(["run", "--", "sh", "-c", "echo out; echo err >&2"]);
        assert_eq!((said.code, said.out.as_str(), said.talk.as_str()), (0, "out\n", "err\n"));
    }
}

cli_test! {
    fn what_is_piped_in_comes_out_unchanged(pal) {
        assert_eq!(said(pal.feed(["run", "--", "cat"], b"hi\n")).out, "hi\n");
        let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at * 7 + at / 253) as u8).collect();
        let output = pal.feed(["run", "--", "cat"], &bytes);
        assert!(output.status.success() && output.stdout == bytes, "{} bytes came back", output.stdout.len());
        assert_eq!(said(pal.feed(["run", "--", "head", "-c", "2"], &bytes)).code, 0, "who reads less is not waited for");
    }
}

cli_test! {
    fn a_reader_that_goes_ends_the_run(pal) {
        let script = r#""$0" run -- yes | head -c 4; exit ${PIPESTATUS[0]}"#;
        let mut shell = pal.command(["unused"]);
        let mut command = std::process::Command::new("bash");
        command.args(["-c", script]).arg(crate::pal::program()).env_clear().envs(shell.get_envs().filter_map(|(k, v)| Some((k, v?))));
        shell.stdin(std::process::Stdio::null());
        let said = said(command.output().unwrap());
        assert_eq!((said.out.as_str(), said.code, said.talk.as_str()), ("y\ny\n", 141, ""));
        pal.nothing_left(&[]);
    }
}

cli_test! {
    fn missing_streams_are_nobodys(pal) {
        // The first files that are opened would get these numbers, such as the pipes to the launcher.
        let cases = [("<&- >&- 2>&-", ""), (">&-", "talk\n"), ("<&-", "talk\n"), ("<&- >&-", "talk\n")];
        for (closed, talk) in cases {
            let script = format!(r#""$0" run -- sh -c 'echo talk >&2; exit 7' {closed}"#);
            let mut command = std::process::Command::new("bash");
            let envs = pal.command(["unused"]);
            command.args(["-c", &script]).arg(crate::pal::program()).env_clear().envs(envs.get_envs().filter_map(|(k, v)| Some((k, v?))));
            let said = said(command.stdin(std::process::Stdio::null()).output().unwrap());
            assert_eq!((said.out.as_str(), said.talk.as_str(), said.code), ("", talk, 7), "{closed}");
        }
        pal.nothing_left(&[]);
    }
}

cli_test! {
    /// A shell's `$(…)` ends when every writer of its pipe is gone: a kept Body must not hold one that `pal` inherited.
    fn a_kept_body_holds_no_descriptor_of_its_caller(pal) {
        let script = r#"read_by_shell=$("$0" create 9>&1 >"$1")"#;
        let mut command = std::process::Command::new("timeout");
        let envs = pal.command(["unused"]);
        let id = pal.dir().join("id");
        command.args(["20", "bash", "-c", script]).arg(crate::pal::program()).arg(&id);
        command.env_clear().envs(envs.get_envs().filter_map(|(k, v)| Some((k, v?))));
        let said = said(command.stdin(std::process::Stdio::null()).output().unwrap());
        assert_eq!(said.code, 0, "{said:?}");
        pal.ok(&format!("rm --force {}", std::fs::read_to_string(id).unwrap().trim()));
    }
}

cli_test! {
    fn a_command_of_any_length_is_the_first(pal) {
        // Short commands start before the guest serves connections; longer ones arrive in pieces.
        for len in [0, 3_000, 4_000, 5_000, 60_000] {
            let said = pal.run(["run", "--", "sh", "-c", "echo ${#0}; exit 5", &"x".repeat(len)]);
            assert_eq!((said.code, said.out.as_str()), (5, format!("{len}\n").as_str()));
        }
    }
}

cli_test! {
    fn a_body_is_made_used_and_removed(pal) {
        let body = pal.ok("create");
        assert!(body.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit()) && !body.is_empty(), "{body}");
        assert_eq!(pal.ok(&format!("exec {body} -- echo hello")), "hello");
        assert_eq!(pal.run(["exec", &body, "--", "sh", "-c", "exit 9"]).code, 9);
        assert_eq!(pal.run(["exec", &body, "--", "no-such-command"]).code, 127);
        assert!(pal.ok("ls").contains(&body));
        std::fs::write(pal.dir().join("file"), "copied\n").unwrap();
        let file = pal.dir().join("file").display().to_string();
        assert_eq!(pal.run(["cp", &file, &format!("{body}:/home/user/there")]).code, 0);
        assert_eq!(pal.ok(&format!("exec {body} -- cat there")), "copied");
        assert_eq!(pal.run(["cp", &format!("{body}:/home/user/there"), &format!("{file}.back")]).code, 0);
        assert_eq!(std::fs::read_to_string(format!("{file}.back")).unwrap(), "copied\n");
        assert_eq!(pal.line(&format!("logs {body}")).out, "hello\ncopied\n");
        assert_eq!(pal.line(&format!("rm {body}")).code, 122, "it runs");
        assert_eq!(pal.line(&format!("stop {body}")).code, 0);
        assert_eq!(pal.line(&format!("exec {body} -- true")).code, 122, "it does not run");
        assert_eq!(pal.line(&format!("start {body}")).code, 0);
        assert_eq!(pal.ok(&format!("exec {body} -- cat there")), "copied");
        assert_eq!(pal.line(&format!("rm --force {body}")).code, 0);
        pal.nothing_left(&[body]);
    }
}

cli_test! {
    fn json_is_json_and_says_the_same(pal) {
        let made = json(pal, "create --json");
        let body = made["id"].as_str().unwrap().to_owned();
        assert_eq!(made["status"], "running");
        assert_eq!(pal.ok(&format!("exec {body} -- echo kept")), "kept");
        let seen = json(pal, &format!("inspect {body} --json"));
        assert_eq!((&seen["id"], &seen["layer"]), (&body.as_str().into(), &"process".into()));
        let states: Vec<&str> = seen["enforcement"]["mechanisms"].as_array().unwrap().iter().map(|m| m["state"].as_str().unwrap()).collect();
        assert!(states.len() > 15 && states.iter().all(|state| ["enforced", "degraded", "absent"].contains(state)), "{states:?}");
        let events = pal.events();
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["body.created", "body.started", "exec.started", "exec.ended"]);
        assert!(events.windows(2).all(|two| two[1]["prev"] == two[0]["hash"]));
        let failed = pal.line("inspect nosuchbody --json");
        assert_eq!((failed.code, failed.out.as_str()), (121, ""));
        let told: serde_json::Value = serde_json::from_str(failed.talk.lines().last().unwrap()).unwrap();
        assert!(told.to_string().contains("not_found"), "{told}");
    }
}

cli_test! {
    fn a_run_is_in_the_log_from_its_plan_to_its_end(pal) {
        assert_eq!(pal.ok("run -- echo hi"), "hi");
        assert_eq!(pal.line("run -- no-such-command").code, 127);
        let events = pal.events();
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let one = ["body.created", "body.started", "exec.started", "exec.ended", "body.removed"];
        assert_eq!(kinds, [one, one].concat());
        assert_eq!((&events[3]["data"]["exec"], &events[3]["data"]["stdout"]["text"]), (&events[2]["seq"], &"hi\n".into()));
        assert!(events[8]["data"]["error"].as_str().is_some_and(|why| why.contains("no-such-command")), "{}", events[8]);
        assert!(events[1]["data"]["enforcement"]["mechanisms"].as_array().is_some_and(|held| held.len() > 15));
        pal.nothing_left(&[]);
    }
}

cli_test! {
    fn what_a_killed_keeper_set_aside_is_swept(pal) {
        pal.ok("run -- true");
        let aside = pal.data().join("bodies/.abcdefghijkl");
        std::fs::create_dir(&aside).unwrap();
        std::fs::write(aside.join("spec.json"), "half").unwrap();
        assert_eq!(pal.ok("ls --json"), "", "it is no Body");
        assert!(pal.ok("gc --json").contains(".abcdefghijkl"));
        assert!(!aside.exists());
        assert_eq!(pal.ok("gc --json"), "");
    }
}

fn json(pal: &crate::pal::Pal, line: &str) -> serde_json::Value {
    let text = pal.ok(line);
    serde_json::from_str(text.lines().next().unwrap()).unwrap_or_else(|error| panic!("{error}: {text}"))
}

cli_test! {
    fn a_kept_run_says_its_id_and_stays(pal) {
        let said = pal.run(["run", "--keep", "--", "sh", "-c", "echo out; echo file > ~/file"]);
        assert_eq!((said.code, said.out.as_str()), (0, "out\n"));
        let body = pal.bodies().pop().unwrap();
        assert!(said.talk.contains(&body), "{said:?}");
        let shown = pal.line(&format!("inspect {body} --json"));
        assert!(shown.out.contains("\"life\":\"kept\""), "{shown:?}");
    }
}

cli_test! {
    fn snapshots_and_forks(pal) {
        let body = pal.ok("create");
        assert_eq!(pal.run(["exec", &body, "--", "sh", "-c", "echo base > ~/file"]).code, 0);
        assert_eq!(pal.line(&format!("snapshot {body} --name base")).code, 0);
        assert_eq!(pal.ok("run --template base -- cat /home/user/file"), "base");
        let forks: Vec<String> = pal.ok(&format!("fork -n 2 {body}")).lines().map(str::to_owned).collect();
        assert_eq!(forks.len(), 2);
        for fork in &forks {
            assert_eq!(pal.ok(&format!("exec {fork} -- cat /home/user/file")), "base");
        }
        assert_eq!(pal.line("snapshot rm base").code, 0);
    }
}

cli_test! {
    fn events_of_other_versions_are_kept_and_shown(pal) {
        assert_eq!(pal.ok("run -- echo hi"), "hi");
        let body: proto::BodyId = pal.events()[0]["body"].as_str().unwrap().parse().unwrap();
        let newer = serde_json::json!({ "model": "m", "cost": { "usd": 0.25 } });
        use store::EventLog;
        let store = store::Store::open(&pal.data(), store::Durability::Process).unwrap();
        for (kind, data) in [("agent.started", newer.clone()), ("exec.left", serde_json::json!({ "exec": 2, "new": 1 }))] {
            let mut draft = proto::Draft::about(&body, proto::event_data::BodyStopped { grace_ms: 0 });
            (draft.kind, draft.data) = (kind.to_owned(), data);
            store.append_at_end(&proto::ChainId::Body(body.clone()), vec![draft]).unwrap();
        }
        drop(store);
        let events = pal.events();
        assert_eq!((&events[5]["type"], &events[5]["data"]), (&"agent.started".into(), &newer));
        assert_eq!((&events[6]["type"], &events[6]["data"]["new"]), (&"exec.left".into(), &1.into()));
        let shown = pal.ok("events");
        assert!(shown.contains("agent.started") && shown.contains(&newer.to_string()), "{shown}");
        assert!(pal.ok("events verify").starts_with("whole: 7 events in 1 chain,"));
    }
}
