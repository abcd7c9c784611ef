//! Signals and `kill -9`: what is forwarded, what survives, what is cleaned up.

use std::time::Duration;

use rustix::process::Signal;
use testkit::{
    leaks,
    registry::{CannedResponse, ScriptedServer},
    wait,
};

use crate::{
    cli_test,
    pal::{Pal, await_word, said, signal},
};

cli_test! {
    fn signals_are_passed_to_the_command(pal) {
        for (sent, name) in [(Signal::TERM, "TERM"), (Signal::INT, "INT"), (Signal::HUP, "HUP")] {
            let script = format!("trap 'echo got {name}; exit 5' {name}; echo ready; while :; do sleep 0.02; done");
            let mut child = pal.command(["run", "--", "sh", "-c", &script]).spawn().unwrap();
            await_word(&mut child, "ready\n");
            signal(&child, sent);
            let said = said(child.wait_with_output().unwrap());
            assert_eq!((said.code, said.out.as_str()), (5, format!("got {name}\n").as_str()), "{said:?}");
        }
        pal.nothing_left(&[]);
    }
}

cli_test! {
    fn a_command_that_a_signal_ends_ends_the_run(pal) {
        let mut child = pal.command(["run", "--", "sh", "-c", "echo ready; exec sleep 1000"]).spawn().unwrap();
        await_word(&mut child, "ready\n");
        signal(&child, Signal::TERM);
        assert_eq!(said(child.wait_with_output().unwrap()).code, 143);
        pal.nothing_left(&[]);
    }
}

cli_test! {
    fn a_killed_run_leaves_nothing(pal) {
        for _ in 0..5 {
            let mut child = pal.command(["run", "--", "sh", "-c", "setsid sleep 1000 & echo ready; sleep 1000"]).spawn().unwrap();
            await_word(&mut child, "ready\n");
            let body = pal.running();
            child.kill().unwrap();
            child.wait().unwrap();
            pal.nothing_left(&[body]);
        }
    }
}

cli_test! {
    fn a_paused_run_that_is_killed_leaves_nothing(pal) {
        let mut child = pal.command(["run", "--", "sh", "-c", "echo ready; sleep 1000"]).spawn().unwrap();
        await_word(&mut child, "ready\n");
        let body = pal.running();
        assert_eq!(pal.line(&format!("pause {body}")).code, 0);
        child.kill().unwrap();
        child.wait().unwrap();
        pal.nothing_left(&[body]);
    }
}

cli_test! {
    fn a_body_outlives_every_pal(pal) {
        let body = pal.ok("create");
        let mut child = pal.command(["exec", &body, "--", "sh", "-c", "echo ready; sleep 1000"]).spawn().unwrap();
        await_word(&mut child, "ready\n");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(pal.ok(&format!("exec {body} -- echo still here")), "still here");
        assert_eq!(pal.line(&format!("stop {body}")).code, 0);
        assert_eq!(pal.line(&format!("start {body}")).code, 0);
        assert_eq!(pal.ok(&format!("exec {body} -- echo again")), "again");
    }
}

cli_test! {
    fn a_killed_shell_ends_what_ran_in_it(pal) {
        let body = pal.ok("create");
        let running = |mark: &str| pal.line(&format!("exec {body} -- pgrep -f ^sleep.{mark}")).code == 0;
        let shell = |mark: &str, terminal: bool| {
            let mut child = if terminal {
                crate::terminal::terminal(pal, &format!("echo $$ > \"$DIR/pid\"; exec \"$PAL\" shell {body}"))
            } else {
                pal.command(["shell", &body]).stdin(std::process::Stdio::piped()).spawn().unwrap()
            };
            std::io::Write::write_all(child.stdin.as_mut().unwrap(), format!("sleep {mark}\n").as_bytes()).unwrap();
            wait::blocking(Duration::from_secs(20), "the command runs", || running(mark).then_some(()));
            child
        };
        let mut piped = shell("4321", false);
        let on_terminal = shell("4322", true);
        // The control: what a shell put into the background of another session stays, as after a hang-up.
        let background = ["exec", &body, "--", "sh", "-c", "setsid sleep 4323 >/dev/null 2>&1 &"];
        assert!(pal.command(background).status().unwrap().success());
        piped.kill().unwrap();
        let pid = std::fs::read_to_string(pal.dir().join("pid")).unwrap();
        testkit::kill(pid.trim().parse().unwrap());
        for mark in ["4321", "4322"] {
            wait::blocking(Duration::from_secs(10), "the command ends", || (!running(mark)).then_some(()));
        }
        assert!(running("4323"));
        for mut child in [piped, on_terminal] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }
}

cli_test! {
    fn a_dead_body_is_shown_with_its_reason(pal) {
        let body = pal.ok("create");
        let run: serde_json::Value = serde_json::from_slice(&std::fs::read(pal.data().join("bodies").join(&body).join("run.json")).unwrap()).unwrap();
        testkit::kill(run["pid"].as_i64().unwrap() as i32);
        let shown = || pal.ok("ls").contains("dead").then_some(());
        testkit::wait::blocking(std::time::Duration::from_secs(5), "the death is shown", shown);
        let said = pal.line(&format!("exec {body} -- true"));
        assert!(said.code == 122 && said.talk.contains("killed by signal 9") && said.talk.contains(&format!("pal start {body}")), "{said:?}");
        assert_eq!(pal.line(&format!("start {body}")).code, 0);
    }
}

/// A shell line that requests a path from a server through the egress proxy of its Body.
fn fetch(server: &str, path: &str) -> String {
    format!(
        r"exec 3<>/dev/tcp/127.0.0.1/3128; printf 'GET http://{server}{path} HTTP/1.1\r\n\r\n' >&3; cat <&3"
    )
}

/// Starts `pal up` in a repository whose preparation requests `/first` and then runs `last`, in one step.
fn up(pal: &Pal, name: &str, server: &str, last: &str) -> std::process::Child {
    let repo = pal.dir().join(name);
    std::fs::create_dir(&repo).unwrap();
    std::fs::write(repo.join("fetch.sh"), fetch(server, "/first")).unwrap();
    let policy = format!(
        "[prepare]\nallow = [\"{server}+plain+private\"]\ncommands = [\"bash fetch.sh && {last}\"]\n"
    );
    std::fs::write(repo.join("palisade.toml"), policy).unwrap();
    let made = std::process::Command::new("sh")
        .args(["-c", "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm first"])
        .current_dir(&repo)
        .env("HOME", pal.dir())
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    pal.command(["up"]).current_dir(&repo).spawn().unwrap()
}

/// Decisions about a server in the log: type and count.
fn decisions(pal: &Pal, server: &str) -> Vec<(String, Option<u64>)> {
    let events = pal.ok("events --json");
    let events = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let about = events.filter(|event| event["data"]["to"] == server);
    about.map(|event| (event["type"].as_str().unwrap().to_owned(), event["data"]["count"].as_u64())).collect()
}

cli_test! {
    fn egress_decisions_outlive_a_killed_pal(pal) {
        let server = ScriptedServer::start(|asked| CannedResponse::ok(format!("GOT {}", asked.path)));
        let name = server.host().replace("127.0.0.1", "localhost");
        let allowed = ("network.allowed".to_owned(), None);
        // A preparation that fails by itself: its Body is removed.
        let said = said(up(pal, "whole", &name, "false").wait_with_output().unwrap());
        assert!(said.code != 0 && said.talk.contains("preparing the repository failed"), "{said:?}");
        assert_eq!(decisions(pal, &name), std::slice::from_ref(&allowed));
        pal.nothing_left(&[]);

        let mut child = up(pal, "cut", &name, "echo ready > /tmp/ready; sleep 1000");
        let body = pal.running();
        let ready = || (pal.line(&format!("exec {body} -- cat /tmp/ready")).code == 0).then_some(());
        wait::blocking(Duration::from_secs(20), "the second command runs", ready);
        child.kill().unwrap();
        child.wait().unwrap();
        // Its supervisor removes the Body of the step; the decisions stay until a `pal` reads them.
        let gone = || (!pal.data().join("bodies").join(&body).exists()).then_some(());
        wait::blocking(Duration::from_secs(20), "the Body of the step is gone", gone);
        assert_eq!(server.asked().len(), 2);
        assert_eq!(decisions(pal, &name), [allowed.clone(), allowed]);
        assert_eq!(pal.line("gc").code, 0);
        pal.nothing_left(std::slice::from_ref(&body));
        assert!(leaks::entries(&pal.data().join("egress")).is_empty());
    }
}
