//! `--json`: every command prints JSON Lines, one object on each line, as docs/reference/json.md says.

use std::{collections::BTreeSet, io::Read, process::Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::{
    cli_test,
    pal::{Pal, await_word, signal},
};

/// Asserts that standard output has one object on each line; returns them.
#[track_caller]
fn objects(line: &str, out: &str) -> Vec<Value> {
    let object = |text: &str| {
        let value: Value =
            serde_json::from_str(text).unwrap_or_else(|error| panic!("pal {line}: {error}: {text:?}"));
        assert!(value.is_object(), "pal {line}: {text}");
        value
    };
    assert!(out.is_empty() || out.ends_with('\n'), "pal {line}: {out:?}");
    out.lines().map(object).collect()
}

/// Commands and subcommands, as the help lists them.
fn verbs(pal: &Pal, of: &str) -> BTreeSet<String> {
    let help = pal.line(&format!("{of} --help")).out;
    let commands = help.split_once("\nCommands:\n").map_or("", |(_, rest)| rest);
    let listed = commands.lines().take_while(|line| !line.is_empty());
    let name = |line: &str| {
        line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty()).map(str::to_owned)
    };
    listed.filter_map(name).collect()
}

/// Runs commands with `--json`, and remembers them.
struct VerbWalk<'a> {
    pal: &'a Pal,
    seen: BTreeSet<String>,
}

impl VerbWalk<'_> {
    /// Runs a command that succeeds.
    #[track_caller]
    fn ok(&mut self, line: &str) -> Vec<Value> {
        self.of(line, &line.split_whitespace().collect::<Vec<_>>(), 0)
    }

    /// Runs a command that fails: it prints no result, and its failure is one object on standard error.
    #[track_caller]
    fn refused(&mut self, line: &str, code: i32) {
        let said = self.of(line, &line.split_whitespace().collect::<Vec<_>>(), code);
        assert_eq!(said, Vec::<Value>::new(), "pal {line}");
    }

    /// Runs a command that may succeed or fail.
    #[track_caller]
    fn either(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.seen.insert(words[..2].join(" "));
        objects(line, &self.pal.run(["--json"].iter().chain(&words)).out);
    }

    #[track_caller]
    fn of(&mut self, line: &str, words: &[&str], code: i32) -> Vec<Value> {
        let names: Vec<&str> =
            line.split_whitespace().take_while(|word| !word.starts_with('-')).take(2).collect();
        self.seen.insert(names[0].to_owned());
        self.seen.insert(names.join(" "));
        let said = self.pal.run(["--json"].iter().chain(words));
        assert_eq!(said.code, code, "pal {line}: {said:?}");
        if code != 0 {
            objects(
                line,
                said.talk.lines().last().map(|last| format!("{last}\n")).unwrap_or_default().as_str(),
            );
        }
        objects(line, &said.out)
    }
}

fn id(lines: &[Value]) -> String {
    lines[0]["id"].as_str().unwrap_or_else(|| panic!("{lines:?}")).to_owned()
}

/// A repository with one commit, and a git identity.
fn repository(pal: &Pal) -> String {
    let dir = pal.dir().join("repo");
    let script = "git init -q -b main \"$1\" && cd \"$1\" && echo one > file && git add . && git commit -qm one && \
                  git config --global user.name Me && git config --global user.email me@example.org";
    let git = std::process::Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(&dir)
        .env("HOME", pal.dir())
        .env("GIT_AUTHOR_NAME", "Me")
        .env("GIT_AUTHOR_EMAIL", "me@example.org")
        .env("GIT_COMMITTER_NAME", "Me")
        .env("GIT_COMMITTER_EMAIL", "me@example.org")
        .output()
        .unwrap();
    assert!(git.status.success(), "{git:?}");
    dir.to_str().unwrap().to_owned()
}

/// The output of `serve` until it is stopped.
fn served(pal: &Pal) -> String {
    let mut server =
        pal.command(["serve", "--json", "--listen", "127.0.0.1:0"]).stderr(Stdio::null()).spawn().unwrap();
    let mut out = await_word(&mut server, "\n");
    signal(&server, Signal::TERM);
    server.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    server.wait().unwrap();
    out
}

cli_test! {
    fn every_verb_prints_one_object_a_line(pal) {
        let mut walk = VerbWalk { pal, seen: BTreeSet::new() };
        for empty in ["ls", "snapshot ls", "home ls", "home", "template ls", "template", "keys ls", "secret ls", "gc", "events"] {
            assert_eq!(walk.ok(empty), Vec::<Value>::new(), "{empty}: an empty list is no line");
        }
        // Bodies and commands in them.
        let body = id(&walk.ok("create"));
        assert_eq!(walk.ok("ls").len(), 1);
        walk.ok(&format!("inspect {body}"));
        assert_eq!(walk.ok(&format!("ps {body}"))[0]["pid"], 1);
        assert_eq!(walk.ok(&format!("limit {body} --pids 100"))[0]["limits"]["pids"], 100);
        walk.ok(&format!("net show {body}"));
        assert_eq!(walk.ok(&format!("net allow {body} pypi.org:443"))[0]["generation"], 1);
        walk.ok(&format!("net deny {body} evil.test"));
        walk.ok(&format!("net test {body} pypi.org:443"));
        walk.ok(&format!("net ask {body} perhaps.test:443"));
        walk.ok(&format!("net accept {body} app:5432"));
        walk.ok(&format!("net reject {body} app:5432"));
        walk.ok(&format!("net learn {body}"));
        assert_eq!(walk.ok("secret set key --to a.test -- printf value").len(), 1);
        assert_eq!(walk.ok("secret ls").len(), 1);
        assert_eq!(walk.ok(&format!("secret grant {body} key")).len(), 1);
        assert_eq!(walk.ok(&format!("secret revoke {body} key")).len(), 1);
        assert_eq!(walk.ok("secret rm key").len(), 1);
        let heard = walk.ok(&format!("exec {body} -- echo hello"));
        assert_eq!(heard.last().unwrap()["data"]["stdout"]["text"], "hello\n");
        walk.ok("run -- true");
        walk.ok(&format!("shell {body}"));
        assert!(walk.ok(&format!("logs {body}")).len() >= 2);
        let file = pal.dir().join("file");
        std::fs::write(&file, "x").unwrap();
        walk.ok(&format!("cp {} {body}:/tmp", file.display()));
        walk.refused(&format!("suspend {body}"), 2);
        walk.ok(&format!("pause {body}"));
        walk.ok(&format!("resume {body}"));
        walk.ok(&format!("snapshot {body} --name one"));
        walk.ok(&format!("snapshot {body} --name two"));
        assert_eq!(walk.ok("snapshot ls").len(), 2);
        assert_eq!(walk.ok(&format!("fork -n 2 {body}")).len(), 2);
        assert_eq!(walk.ok("ls").len(), 3);
        assert_eq!(walk.ok("snapshot rm one two").len(), 2);
        walk.ok(&format!("stop --grace 0s {body}"));
        walk.ok(&format!("start {body}"));
        walk.ok(&format!("rm --force {body}"));
        // Repositories.
        let repo = repository(pal);
        let made = walk.ok(&format!("up --repo {repo} --no-prepare -n 2"));
        let (one, two) = (id(&made), id(&made[1..]));
        for (body, name) in [(&one, "one"), (&two, "two")] {
            walk.ok(&format!("exec {body} -- touch {name}"));
        }
        walk.ok(&format!("prepare {one}"));
        walk.ok(&format!("diff {one}"));
        walk.ok(&format!("log {one}"));
        walk.ok(&format!("save {one}"));
        walk.ok(&format!("compare {one} {two}"));
        let patch = walk.ok(&format!("land --patch {one}"));
        assert!(patch[0]["patch"]["text"].as_str().unwrap().contains("one"), "{patch:?}");
        walk.ok(&format!("land {one}"));
        walk.ok(&format!("sync {one}"));
        let queued = format!("land --queue --onto main --test true {one} {two}");
        assert_eq!(walk.ok(&queued).len(), 2);
        walk.ok(&format!("rm --force {one} {two}"));
        let home = id(&walk.ok(&format!("up --repo {repo} --no-prepare --home mine")));
        walk.ok(&format!("exec {home} -- touch /home/user/kept"));
        walk.ok(&format!("rm --force {home}"));
        assert_eq!(walk.ok("home ls").len(), 1);
        walk.ok("home rm mine");
        // All other commands.
        template(&mut walk);
        let key = id(&walk.ok("keys create ci"));
        assert_eq!(walk.ok("keys ls").len(), 1);
        walk.ok(&format!("keys revoke {key}"));
        walk.ok("config set store.budget 20GiB");
        walk.ok("config get store.budget");
        walk.ok("df");
        walk.ok("doctor");
        assert!(walk.ok("events").len() > 10);
        walk.ok("events verify");
        walk.ok("completions bash");
        agents(&mut walk, &repo);
        walk.refused("setup nothing-of-that-name", 2);
        let served = objects("serve", &served(pal));
        assert_eq!(served.len(), 1, "{served:?}");
        let fields: Vec<&str> = served[0].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields, ["certificate", "pid", "secret", "secret_file", "url"], "a key is named by its id, and used by its secret");
        walk.seen.insert("serve".into());
        // They follow a Body until it is removed, or forward until they are stopped.
        walk.seen.extend(["net watch", "port", "port forward"].map(str::to_owned));
        pal.line("gc");
        // Every command of the help was run.
        let mut all = verbs(pal, "");
        for group in ["template", "snapshot", "home", "keys", "config", "events", "agent", "net", "port", "secret"] {
            all.extend(verbs(pal, group).into_iter().map(|verb| format!("{group} {verb}")));
        }
        all.retain(|verb| !verb.ends_with(" help"));
        assert!(all.len() > 35, "{all:?}");
        let left_out: Vec<&String> = all.difference(&walk.seen).collect();
        assert_eq!(left_out, Vec::<&String>::new(), "verbs that no line of this test runs");
    }
}

/// Agents, with a model that asks a question and then says `Done.` to everything.
fn agents(walk: &mut VerbWalk<'_>, repo: &str) {
    let script = walk.pal.dir().join("model.toml");
    let turns = "[[turns]]\ncalls = [{ tool = 'ask_user', arguments = { question = 'Now?' } }]\n\
                 [[turns]]\nrepeat = 'forever'\ntext = 'Done.'\n";
    std::fs::write(&script, turns).unwrap();
    let run = format!("agent run --repo {repo} --no-prepare --model script:{} work", script.display());
    let events = walk.of(&run, &run.split_whitespace().collect::<Vec<_>>(), 3);
    let id = events[0]["data"]["spec"]["id"].as_str().unwrap().to_owned();
    let body = walk.ok(&format!("agent show {id}"))[0]["body"].as_str().unwrap().to_owned();
    assert_eq!(walk.ok("agent ls").len(), 1);
    walk.refused(&format!("agent approve {id}"), 122);
    walk.refused(&format!("agent deny {id}"), 122);
    assert_eq!(walk.ok(&format!("agent answer {id} yes"))[0]["agent"], id.as_str());
    assert_eq!(walk.ok(&format!("agent attach {id}")).last().unwrap()["type"], "agent.finished");
    assert_eq!(walk.ok(&format!("agent send {id} more")).last().unwrap()["type"], "agent.finished");
    for verb in ["interrupt", "stop", "cost", "replay"] {
        assert_eq!(walk.ok(&format!("agent {verb} {id}")).len(), 1, "{verb}");
    }
    assert!(walk.ok(&format!("agent export {id}")).len() > 10);
    let fork = walk.ok(&format!("agent fork {id}"))[0]["agent"].as_str().unwrap().to_owned();
    assert_eq!(walk.ok(&format!("agent rewind {id} --to 0"))[0]["turn"], 0);
    walk.ok(&format!("agent resume {id} -d"));
    let attach = format!("agent attach {id}");
    walk.of(&attach, &attach.split_whitespace().collect::<Vec<_>>(), 3);
    assert_eq!(walk.ok(&format!("agent rm {fork} {id} --body")).len(), 2);
    walk.ok(&format!("rm --force {body}"));
}

/// Templates. A user without subordinate ids cannot have any, and gets a failure in the same form.
fn template(walk: &mut VerbWalk<'_>) {
    let archive = walk.pal.dir().join("root.tar");
    std::fs::write(&archive, testkit::roots::small()).unwrap();
    let steps = walk.pal.dir().join("Dockerfile");
    std::fs::write(&steps, "FROM mine\nENV A=b\n").unwrap();
    let import = format!("template import mine {} --user root", archive.display());
    let build = format!("template build other {}", steps.display());
    if !testkit::is_root() {
        walk.refused(&import, 125);
        ["template inspect mine", build.as_str(), "template rm mine"]
            .into_iter()
            .for_each(|line| walk.either(line));
        return;
    }
    walk.ok(&import);
    walk.ok("template inspect mine");
    walk.ok(&build);
    assert_eq!(walk.ok("template ls").len(), 2);
    assert_eq!(walk.ok("template rm mine other").len(), 2);
}
