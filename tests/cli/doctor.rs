//! `pal doctor`: its report is true, because it tries everything.

use std::process::{Command, Stdio};

use serde_json::Value;
use testkit::is_root;

use crate::{
    cli_test,
    pal::{Pal, program},
};

fn finding<'a>(doctor: &'a Value, name: &str) -> &'a Value {
    doctor["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|finding| finding["name"] == name)
        .unwrap_or_else(|| panic!("{name}: {doctor}"))
}

/// The report of doctor after a change to the host, made in a mount namespace.
fn doctor_after(pal: &Pal, change: &str) -> Value {
    let mut unshare = Command::new("unshare");
    unshare
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            &format!("{change}; exec \"$0\" doctor --json"),
        ])
        .arg(program());
    let output = unshare
        .env("PAL_DATA", pal.dir().join("changed"))
        .env("HOME", pal.dir())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
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
        let missed = doctor_after(pal, "for at in /usr/local/bin/git /usr/bin/git /bin/git; do ! [ -e $at ] || mount --bind /dev/null $at; done");
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
        if is_root() {
            // In this namespace the host's root is still the host's root, and is never mapped into a Body.
            let doctor = doctor_after(pal, ":");
            assert!(finding(&doctor, "process Body")["detail"].as_str().unwrap().contains("the host's own root id"), "{doctor}");
            return;
        }
        let doctor = doctor_after(pal, ":");
        assert_eq!(finding(&doctor, "process Body")["state"], "enforced", "a control: a namespace alone is no hindrance: {doctor}");
        let doctor = doctor_after(pal, "echo 0 > /proc/sys/user/max_net_namespaces");
        let body = finding(&doctor, "process Body");
        assert_eq!((&body["state"], &doctor["layers"][0]["usable"]), (&"absent".into(), &false.into()), "{doctor}");
        assert!(body["fix"].is_string(), "{body}");
    }
}
