//! Signals and `kill -9`: what is passed on, what survives, what is cleared away.

use rustix::process::Signal;

use crate::{
    cli_test,
    pal::{await_word, said, signal},
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
