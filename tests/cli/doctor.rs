//! `pal doctor`: what it says is so, because it tried.

use serde_json::Value;

use crate::cli_test;

fn finding<'a>(doctor: &'a Value, name: &str) -> &'a Value {
    doctor["findings"].as_array().unwrap().iter().find(|finding| finding["name"] == name).unwrap_or_else(|| panic!("{name}: {doctor}"))
}

cli_test! {
    fn doctor_makes_a_body_to_find_out(pal) {
        let doctor: Value = serde_json::from_str(&pal.ok("doctor --json")).unwrap();
        let body = finding(&doctor, "process Body");
        assert_eq!((&body["state"], &body["detail"]), (&"enforced".into(), &"a Body was made, ran a command and was removed".into()));
        let layer = &doctor["layers"][0];
        assert_eq!((&layer["layer"], &layer["usable"]), (&"process".into(), &true.into()));
        let made = pal.ok("events --json");
        assert!(made.contains("body.created") && made.contains("body.removed"), "{made}");
        pal.nothing_left(&[]);
    }
}

cli_test! {
    fn doctor_says_how_to_get_what_is_missing(pal) {
        let found: Value = serde_json::from_str(&pal.ok("doctor --json")).unwrap();
        assert_eq!(finding(&found, "git")["state"], "enforced", "a control: it is found where it is");
        let output = pal.command(["doctor", "--json"]).env("PATH", "/nowhere").output().unwrap();
        let missed: Value = serde_json::from_slice(&output.stdout).unwrap();
        let git = finding(&missed, "git");
        assert_eq!(git["state"], "absent");
        assert!(git["fix"].as_str().is_some_and(|fix| fix.contains("apt-get install git")), "{git}");
        let fixless = |finding: &&Value| finding["state"] == "absent" && finding["fix"].is_null() && finding["name"] != "cgroup v2";
        let unexplained: Vec<&Value> = missed["findings"].as_array().unwrap().iter().filter(fixless).collect();
        assert!(unexplained.is_empty(), "absent, and no word of how to get it: {unexplained:?}");
    }
}

cli_test! {
    fn doctor_does_not_call_usable_what_it_could_not_make(pal) {
        assert_eq!(pal.line("doctor").code, 0);
        // Without namespaces left there is no Body, whatever the settings say.
        let script = "echo 0 > /proc/sys/user/max_net_namespaces && exec \"$0\" doctor --json";
        let output = pal.command(["--version"]);
        let program = output.get_program().to_owned();
        let mut starved = std::process::Command::new("unshare");
        starved.args(["--user", "--map-root-user", "sh", "-c", script]).arg(program).env("PAL_DATA", pal.dir().join("starved")).env("HOME", pal.dir());
        let output = starved.stdin(std::process::Stdio::null()).output().unwrap();
        let doctor: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let body = finding(&doctor, "process Body");
        assert_eq!(body["state"], "absent", "{body}");
        assert_eq!(doctor["layers"][0]["usable"], false, "{doctor}");
    }
}
