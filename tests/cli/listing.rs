//! Which Body is which: names, `pal ls`, `pal ps`, commands without an id, and limits that change.

use std::{path::PathBuf, process::Command, time::Duration};

use serde_json::Value;
use testkit::wait;

use crate::{
    cli_test,
    pal::{Pal, PalOutput, said},
};

/// Creates a repository with one commit.
fn repository(pal: &Pal, name: &str) -> PathBuf {
    let dir = pal.dir().join(name);
    let script = "git init -q -b main \"$1\" && cd \"$1\" && printf 'target/\\n' > .gitignore && echo one > file && \
                  git add . && git commit -qm one";
    let who = ["GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"];
    let made = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(&dir)
        .env("HOME", pal.dir())
        .envs(who.map(|name| (name, "me@example.org")))
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    dir
}

/// Runs a line in a directory, as a user with a name does.
fn line_in(pal: &Pal, dir: &std::path::Path, line: &str) -> PalOutput {
    let mut command = pal.command(line.split_whitespace());
    let who = ["GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"];
    said(command.current_dir(dir).envs(who.map(|name| (name, "me@example.org"))).output().unwrap())
}

#[track_caller]
fn ok_in(pal: &Pal, dir: &std::path::Path, line: &str) -> String {
    let said = line_in(pal, dir, line);
    assert_eq!(said.code, 0, "pal {line}: {said:?}");
    said.out.trim_end().to_owned()
}

fn object(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// The row of `pal ls` that begins with an id.
fn row(listed: &str, id: &str) -> String {
    listed
        .lines()
        .find(|line| line.starts_with(id))
        .unwrap_or_else(|| panic!("{id} is not in {listed}"))
        .to_owned()
}

cli_test! {
    /// Every command that takes an id takes a name, and a name means one Body.
    fn a_name_is_taken_wherever_an_id_is(pal) {
        let id = pal.ok("create --name fix-login");
        for line in ["inspect fix-login", "exec fix-login -- true", "logs fix-login", "events --body fix-login", "pause fix-login", "resume fix-login", "ps fix-login", "stop --grace 0s fix-login", "start fix-login"] {
            let ran = pal.line(line);
            assert_eq!(ran.code, 0, "{line}: {ran:?}");
        }
        assert_eq!(object(&pal.ok("inspect --json fix-login"))["id"], id.as_str());
        let file = pal.dir().join("file");
        std::fs::write(&file, "x").unwrap();
        assert_eq!(pal.line(&format!("cp {} fix-login:/tmp", file.display())).code, 0);
        assert_eq!(pal.ok("exec fix-login -- cat /tmp/file"), "x");
        assert!(row(&pal.ok("ls"), &id).contains(" fix-login "));
        // One name, one Body; a name is free again when its Body is gone.
        let again = pal.line("create --name fix-login");
        assert!(again.code == 122 && again.talk.contains("named fix-login already") && again.talk.contains("hint:"), "{again:?}");
        let same = pal.line(&format!("create --name {id}"));
        assert!(same.code == 122 && same.talk.contains("is the id of a Body"), "{same:?}");
        assert_eq!(pal.bodies().len(), 1);
        // Forks get names of their own, all or none of them.
        let forks = pal.ok("fork -n 2 --name twin fix-login");
        let names = ["twin-1", "twin-2"].map(|name| object(&pal.ok(&format!("inspect --json {name}")))["id"].as_str().unwrap().to_owned());
        assert_eq!(forks.lines().collect::<Vec<_>>(), names);
        pal.ok("rm --force twin-2");
        assert_eq!(pal.line("fork -n 2 --name twin fix-login").code, 122);
        assert_eq!(pal.bodies().len(), 2);
        pal.ok("rm --force twin-1 fix-login");
        assert_eq!(pal.line("inspect fix-login").code, 121);
        assert_eq!(pal.line("run --name fix-login -- true").code, 0);
        pal.ok("create --name fix-login");
    }
}

cli_test! {
    /// A name that looks like the beginning of an id means its own Body.
    fn an_exact_name_wins_over_the_beginning_of_an_id(pal) {
        let first = pal.ok("create");
        let name = &first[..4];
        let found = |key: &str| object(&pal.ok(&format!("inspect --json {key}")))["id"].as_str().unwrap().to_owned();
        assert_eq!(found(name), first, "the positive control");
        let second = pal.ok(&format!("create --name {name}"));
        assert_eq!(found(name), second);
        assert_eq!(found(&first[..5]), first);
        assert_eq!(found(&first), first);
    }
}

cli_test! {
    /// Processes that ask for one name at the same time do not both get it.
    fn two_creators_do_not_get_one_name(pal) {
        let creators: Vec<_> = (0..4).map(|_| pal.command(["create", "--name", "same"]).spawn().unwrap()).collect();
        let codes: Vec<i32> = creators.into_iter().map(|child| said(child.wait_with_output().unwrap()).code).collect();
        assert_eq!(codes.iter().filter(|code| **code == 0).count(), 1, "{codes:?}");
        assert_eq!(codes.iter().filter(|code| **code == 122).count(), 3, "{codes:?}");
        assert_eq!(pal.bodies().len(), 1);
    }
}

cli_test! {
    /// `ls` says what a Body is for, and which of its work did not land.
    fn a_listing_says_what_each_body_is_for(pal) {
        let (app, other) = (repository(pal, "app"), repository(pal, "other"));
        let plain = pal.ok("create --memory 64MiB");
        let elsewhere = ok_in(pal, &other, "up --no-prepare --committed");
        let body = ok_in(pal, &app, "up --no-prepare --committed --name web");
        let listed = ok_in(pal, &app, "ls");
        let ids: Vec<&str> = listed.lines().skip(1).map(|line| line.split(' ').next().unwrap()).collect();
        assert_eq!(ids, [&*body, &*plain, &*elsewhere], "its own come first: {listed}");
        assert_eq!(ok_in(pal, &other, "ls").lines().nth(1).unwrap().split(' ').next(), Some(&*elsewhere));
        assert!(row(&listed, &body).contains(" web ") && row(&listed, &body).contains(" app@main "), "{listed}");
        assert!(row(&listed, &plain).ends_with("64MiB memory") && !row(&listed, &body).contains("memory"), "{listed}");
        let shown = ok_in(pal, &app, "inspect web");
        assert!(shown.contains(&format!("{}\n", app.display())) && shown.contains("app@main at /workspace/app"), "{shown}");
        // Work: none, changed, unlanded, landed, and changed again.
        let work = || object(&ok_in(pal, &app, "inspect --json web"))["work"]["app"].as_str().unwrap().to_owned();
        assert_eq!(work(), "none");
        pal.ok("exec web -- git status --short");
        assert_eq!(work(), "none", "git's own files are no work");
        pal.ok("exec web -- touch new");
        assert_eq!(work(), "changed");
        pal.ok("save web");
        assert_eq!(work(), "unlanded");
        ok_in(pal, &app, "land web");
        assert_eq!(work(), "landed");
        assert!(row(&ok_in(pal, &app, "ls"), &body).contains(" landed "));
        pal.run(["exec", "web", "--", "sh", "-c", "git add . && git -c user.name=a -c user.email=a@b commit -qm new"]);
        assert_eq!(work(), "unlanded");
        ok_in(pal, &app, "land --onto main web");
        assert_eq!(work(), "landed");
        let fork = ok_in(pal, &app, "fork web");
        let inherited = object(&ok_in(pal, &app, &format!("inspect --json {fork}")))["work"]["app"].clone();
assert_eq!(inherited, "changed", "its commits landed, and nothing was saved from the fork yet");
        assert_eq!(pal.line(&format!("rm --force --discard {fork} {elsewhere}")).code, 0);
        pal.ok("stop --grace 0s web");
        assert_eq!(work(), "landed");
        pal.ok("rm web");
    }
}

cli_test! {
    /// In a repository with one Body, that one is meant; else the error lists the choices.
    fn the_only_body_of_a_repository_needs_no_id(pal) {
        let app = repository(pal, "app");
        let none = line_in(pal, pal.dir(), "shell");
        assert!(none.code == 2 && none.talk.contains("in no repository"), "{none:?}");
        let none = line_in(pal, &app, "exec -- true");
        assert!(none.code == 121 && none.talk.contains("pal up"), "{none:?}");
        pal.ok("create");
        let body = ok_in(pal, &app, "up --no-prepare --committed");
        assert_eq!(ok_in(pal, &app, "exec -- sh -c pwd"), "/workspace/app");
        ok_in(pal, &app, "exec -- touch new");
        let mut shell = pal.command(["shell"]);
        shell.current_dir(&app).stdin(std::fs::File::open(app.join("file")).unwrap());
        assert_eq!(said(shell.output().unwrap()).code, 127, "the shell reads `one`, which is no command");
        assert!(ok_in(pal, &app, "ps").contains("pal-guest"));
        assert!(ok_in(pal, &app, "diff --stat").contains("new"));
        assert_eq!(line_in(pal, &app, "log").talk, "no commits\n");
        ok_in(pal, &app, "land");
        let second = ok_in(pal, &app, "up --no-prepare --committed --name second");
        let torn = line_in(pal, &app, "exec -- true");
        assert_eq!((torn.code, torn.out.as_str()), (2, ""), "{torn:?}");
        for choice in [format!("name one: {body} (running)"), format!("name one: {second} second (running)")] {
            assert!(torn.talk.contains(&choice), "{torn:?}");
        }
        pal.ok("rm --force second");
        ok_in(pal, &app, "exec -- true");
        pal.ok(&format!("rm --force {body}"));
    }
}

cli_test! {
    /// `ps` shows every process, with its pid inside, also those that no `exec` started.
    fn the_processes_of_a_body_are_listed(pal) {
        let body = pal.ok("create");
        let child = pal.command(["exec", &body, "--", "sh", "-c", "sleep 61 & echo begun; wait"]).spawn().unwrap();
        let listed = wait::blocking(Duration::from_secs(20), "the command runs", || {
            Some(pal.ok(&format!("ps --json {body}"))).filter(|listed| listed.contains("\"61\""))
        });
        let processes: Vec<Value> = listed.lines().map(object).collect();
        let of = |word: &str| processes.iter().find(|process| process["command"].to_string().contains(word)).unwrap();
        let (shell, sleep) = (of("echo begun"), of("[\"sleep\",\"61\"]"));
        assert_eq!((processes[0]["pid"].as_i64(), &processes[0]["command"][0]), (Some(1), &Value::from("pal-guest")));
        assert_eq!((&sleep["parent"], &sleep["user"]), (&shell["pid"], &Value::from("user")));
        assert!(sleep["memory_bytes"].as_u64().unwrap() > 0 && sleep["age_ms"].as_u64().unwrap() < 60_000, "{sleep}");
        let inside = pal.ok(&format!("exec {body} -- cat /proc/{}/comm", sleep["pid"]));
        assert_eq!(inside, "sleep", "the pid is that of the inside");
        assert!(pal.ok(&format!("ps {body}")).contains("sleep 61"));
        pal.ok(&format!("stop --grace 0s {body}"));
        child.wait_with_output().unwrap();
        let stopped = pal.line(&format!("ps {body}"));
        assert!(stopped.code == 122 && stopped.talk.contains("pal start"), "{stopped:?}");
    }
}

/// How many of 20 processes a Body can start at once: the shell ends when it cannot start another.
fn started(pal: &Pal, body: &str) -> usize {
    let script = "for i in $(seq 20); do sleep 2 & echo $i; done";
    pal.run(["exec", body, "--", "/bin/sh", "-c", script]).out.lines().count()
}

cli_test! {
    /// A raised limit counts at once, or `pal` says that it counts from the next start on.
    fn limits_can_be_raised(pal) {
        let body = pal.ok("create --pids 16 --memory 64MiB");
        assert!(started(pal, &body) < 20, "the positive control");
        let changed = object(&pal.ok(&format!("limit {body} --pids 200 --memory 96MiB --json")));
        assert_eq!((&changed["limits"]["pids"], &changed["limits"]["memory"]), (&200.into(), &(96u64 << 20).into()));
        if !changed["at_next_start"].as_array().unwrap().is_empty() {
            assert!(!testkit::is_root() || changed["at_next_start"].to_string().contains("cgroup"), "{changed}");
            pal.ok(&format!("stop --grace 0s {body}"));
            pal.ok(&format!("start {body}"));
        }
        assert_eq!(started(pal, &body), 20);
        let shown = object(&pal.ok(&format!("inspect --json {body}")));
        assert_eq!(shown["limits"]["pids"], 200);
        assert!(shown["enforcement"].to_string().contains("200 by") && !shown["enforcement"].to_string().contains("\"16 by"), "{shown}");
        let events = pal.events();
        let event = events.iter().find(|event| event["type"] == "body.limited").unwrap();
        assert_eq!(event["data"], serde_json::json!({ "pids": 200, "memory": 96u64 << 20 }));
        // Limits survive, and impossible ones change nothing.
        pal.ok(&format!("stop --grace 0s {body}"));
        pal.ok(&format!("limit {body} --cpus 0.5"));
        pal.ok(&format!("start {body}"));
        assert_eq!(started(pal, &body), 20);
        for bad in ["--memory 1000TiB", "--memory 1KiB", "--cpus 100000", ""] {
            assert_eq!(pal.line(&format!("limit {body} {bad}")).code, 2, "{bad}");
        }
        let after = object(&pal.ok(&format!("inspect --json {body}")));
        assert_eq!((&after["limits"]["cpu_milli"], &after["limits"]["memory"]), (&500.into(), &(96u64 << 20).into()));
    }
}

cli_test! {
    /// The supervisor of a running Body keeps to a changed time limit, and `ls` says why another one died.
    fn a_time_limit_can_be_raised_and_a_dead_body_says_why(pal) {
        let (long, short) = (pal.ok("create --timeout 2s"), pal.ok("create --timeout 2s"));
        pal.ok(&format!("limit {long} --timeout 1h"));
        let listed = wait::blocking(Duration::from_secs(20), "one of them is dead", || {
            Some(pal.ok("ls")).filter(|listed| row(listed, &short).contains("dead"))
        });
        assert!(row(&listed, &short).contains("time limit"), "{listed}");
        std::thread::sleep(Duration::from_millis(500));
        assert!(row(&pal.ok("ls"), &long).contains("running"));
        assert_eq!(pal.ok(&format!("exec {long} -- echo alive")), "alive");
    }
}

cli_test! {
    /// The locale inside is one of UTF-8 where the user's is, and nothing else of it comes in.
    fn the_locale_is_utf_8_where_the_users_is(pal) {
        let lang = |set: &[(&str, &str)], more: &[&str]| {
            let words = [&["run"], more, &["--", "sh", "-c", "echo \"$LANG$LC_ALL\""]].concat();
            said(pal.command(words).envs(set.iter().copied()).output().unwrap()).out.trim().to_owned()
        };
        assert_eq!(lang(&[("LANG", "de_DE.UTF-8")], &[]), "C.UTF-8");
        assert_eq!(lang(&[("LANG", "C"), ("LC_ALL", "en_GB.utf8")], &[]), "C.UTF-8");
        assert_eq!(lang(&[("LANG", "en_GB.UTF-8"), ("LC_ALL", "C")], &[]), "");
        assert_eq!(lang(&[], &[]), "");
        assert_eq!(lang(&[("LANG", "de_DE.UTF-8")], &["--env", "LANG=C"]), "C");
    }
}
