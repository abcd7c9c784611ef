//! Preparing a Body: which hosts it reaches, what happens when a step fails, and how to go on.
//!
//! The first test reaches crates.io and PyPI; the others reach nothing but loopback.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    time::Duration,
};

use fleet::{
    BodyView, DevcontainerChoice, Force, LogRange, PrepareChoice, PrepareRequest, UncommittedFiles, UpRequest,
};
use proto::{
    BodyId, Event, Failure, Kind,
    event_data::{ExecStarted, MissingStep, NetworkAllowed, NetworkDenied, WorkspacePrepared},
};
use testkit::{
    Bodies, body_test, explain,
    registry::{CannedResponse, ScriptedServer},
    wait,
};

use crate::{
    ecosystems::{asked, prepared, steps},
    repo::{HostRepo, pal_command, up},
};

/// A shell line that writes a palisade.toml with these commands.
fn settings(commands: &[&str]) -> String {
    let commands: Vec<String> = commands.iter().map(|line| format!("'''{line}'''")).collect();
    format!("cat > palisade.toml <<'END'\n[prepare]\ncommands = [{}]\nEND\n", commands.join(", "))
}

/// A directory whose step fails without a network, and is no required one.
const STRAY: &str = "mkdir web; touch web/go.sum
    printf 'module web\\n\\ngo 1.19\\n\\nrequire example.com/gone v1.0.0\\n\\nreplace example.com/gone => ./gone\\n' > web/go.mod\n";

fn hint<'a>(failure: &'a Failure, word: &str) -> &'a str {
    let found = failure.hints.iter().find(|hint| hint.contains(word));
    found.unwrap_or_else(|| panic!("no hint has {word}: {}", explain(failure)))
}

/// The last word of the hint that has `word`: the id of a Body.
fn id_in_hint(failure: &Failure, word: &str) -> BodyId {
    hint(failure, word).rsplit(' ').next().unwrap().parse().unwrap()
}

fn named(missing: &[MissingStep]) -> Vec<(&str, &str)> {
    missing.iter().map(|step| (step.dir.as_str(), step.name.as_str())).collect()
}

/// How often commands that contain a text were started, in all Bodies.
fn started(t: &Bodies, text: &str) -> usize {
    let starts = t.events().iter().filter_map(Event::data_as::<ExecStarted>).collect::<Vec<_>>();
    starts.iter().filter(|start| start.argv.iter().any(|word| word.contains(text))).count()
}

async fn fails(t: &Bodies, up: UpRequest) -> Failure {
    t.fleet().workspaces().up(up).await.map(|views| views.len()).unwrap_err()
}

#[body_test]
async fn preparing_reaches_the_names_it_may_and_work_reaches_none(t: Bodies) {
    let probe = "curl -sS -m 20 -o /dev/null -w '%{http_code}' https://pypi.org/simple/six/ > open; curl -sS -m 20 https://crates.io/ > closed 2>&1; curl -sS -m 5 --noproxy '*' https://pypi.org/ > direct 2>&1; curl -sS -m 5 http://pypi.org/ > plain 2>&1; true";
    let host = HostRepo::make(
        &t,
        "app",
        &format!(
            "cat > palisade.toml <<'END'\n[prepare]\nallow = [\"pypi.org:443\"]\ncommands = [\"\"\"{probe}\"\"\"]\n[env]\nCOLOUR = \"green\"\nEND"
        ),
    );
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(steps(&said), 1);
    assert_eq!(
        t.sh(&body, "cat open; echo; echo $COLOUR").await.ok(),
        "200\ngreen",
        "the door is open to the name that is allowed"
    );
    let denied = t.sh(&body, "cat closed direct plain").await.ok();
    assert!(denied.contains("403") || denied.contains("CONNECT tunnel failed"), "{denied}");
    let events = t.events();
    let allowed = events.iter().filter_map(Event::data_as).map(|data: NetworkAllowed| data.to);
    let denied = events.iter().filter_map(Event::data_as).map(|data: NetworkDenied| data.to);
    assert!(allowed.collect::<Vec<_>>().contains(&"pypi.org:443".to_owned()), "{events:?}");
    assert!(denied.collect::<Vec<_>>().contains(&"crates.io:443".to_owned()), "{events:?}");
    let now = t.sh(&body, "curl -sS -m 5 https://pypi.org/ 2>&1; curl -sS -m 5 -x http://127.0.0.1:3128 https://pypi.org/ 2>&1; ls /run/palisade 2>&1; env | grep -ci proxy").await;
    assert!(
        !now.text().contains("<html") && now.text().ends_with('0'),
        "the way out is gone: {}",
        now.text()
    );
}

#[body_test]
async fn a_step_that_fails_is_shown_with_its_last_lines_and_can_be_looked_into(t: Bodies) {
    let fails_so = "seq 100; printf 'it ends\\there\\n'; test -e ~/cure";
    let host = HostRepo::make(&t, "app", &settings(&["echo one >> ~/log", fails_so, "echo three >> ~/log"]));
    let failure = fails(&t, asked(&t, &host)).await;
    assert_eq!(failure.kind, Kind::Conflict);
    assert!(failure.message.ends_with("test -e ~/cure ended with code 1"), "{failure}");
    let causes = failure.causes();
    let lines: Vec<&str> = causes[0].lines().collect();
    assert_eq!((lines.len(), lines[1], lines[20]), (21, "82", "it ends\there"), "{causes:?}");
    assert!(hint(&failure, "--keep").contains("pal up") && hint(&failure, "--anyway").contains("pal up"));
    assert_eq!(t.fleet().list().unwrap().len(), 0, "no Body is left");
    let log = t.fleet().execs().find_logged(id_in_hint(&failure, "pal logs").as_str()).unwrap();
    let log = t.fleet().execs().logs(&log, LogRange::All).unwrap();
    assert!(log.iter().any(|entry| entry.output.starts_with(b"1\n2\n3\n")), "the whole output is kept");

    // The Body of a second try begins with what succeeded in the first.
    let keep = UpRequest { prepare: PrepareChoice::Keep, ..asked(&t, &host) };
    let failure = fails(&t, keep).await;
    let body = id_in_hint(&failure, "pal shell");
    let missing = t.view(&body).missing_steps;
    assert_eq!(missing.len(), 2, "{missing:?}");
    assert_eq!(t.sh(&body, "cat ~/log; env | grep -c proxy").await.text(), "one\n0");
    assert_eq!((started(&t, "echo one"), started(&t, "echo three")), (1, 0));

    let failure = t.fleet().workspaces().prepare_again(&body, PrepareRequest::Missing, &mut |_| ()).await;
    assert!(hint(&failure.unwrap_err(), "pal logs").ends_with(body.as_str()), "it fails again, in the Body");
    t.sh(&body, "touch ~/cure").await.ok();
    let again = t.fleet().workspaces().prepare_again(&body, PrepareRequest::Missing, &mut |_| ()).await;
    let view = again.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert!(view.missing_steps.is_empty(), "{:?}", view.missing_steps);
    assert_eq!(t.sh(&body, "cat ~/log; ls /run/palisade 2>&1 | grep -c sock").await.text(), "one\nthree\n0");
    let last = t.events().iter().filter_map(Event::data_as::<WorkspacePrepared>).next_back();
    assert_eq!(last, Some(WorkspacePrepared { layer: None, missing: Vec::new() }));

    let anyway = up(&t, UpRequest { prepare: PrepareChoice::Anyway, ..asked(&t, &host) }).await;
    assert_eq!(named(&anyway.missing_steps), [("", fails_so)]);
    assert_eq!(t.sh(anyway.id(), "cat ~/log").await.ok(), "one\nthree", "the others ran");
    for id in [&body, anyway.id()] {
        t.fleet().remove(id, Force::Yes).await.unwrap();
    }
}

#[body_test(except(microvm = "another way of the same path"))]
async fn a_stray_step_that_fails_is_a_warning_and_the_body_says_so(t: Bodies) {
    let host = HostRepo::make(&t, "app", &format!("{STRAY}{}", settings(&["echo made > ~/made"])));
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(t.sh(&body, "cat ~/made").await.ok(), "made");
    let warned = said.iter().find(|line| line.starts_with("warning: go mod download in web failed: "));
    assert!(warned.is_some_and(|line| line.contains("gone")), "{said:?}");
    let missing = t.view(&body).missing_steps;
    assert_eq!(named(&missing), [("web", "go mod download")]);
    let event = t.events().iter().filter_map(Event::data_as::<WorkspacePrepared>).next_back().unwrap();
    assert!(event.layer.is_some() && event.missing == missing, "{event:?}");
    let inspect = pal_command(&t, &["inspect", body.as_str()]);
    let shown = Command::new(&inspect[0]).args(&inspect[1..]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("in part, without go mod download in web: code 1: "), "{shown}");
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0);
    assert_eq!(t.view(fork.id()).missing_steps, missing, "a fork lacks it, too");
    // Its cause is in the repository, so the next Body does not try again; it says so again.
    let (second, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!((steps(&said), t.view(&second).missing_steps.len()), (0, 1), "{said:?}");
    assert!(
        said.iter().any(|line| line.starts_with("warning: go mod download in web failed before")),
        "{said:?}"
    );
    for id in [&body, fork.id(), &second] {
        t.fleet().remove(id, Force::Yes).await.unwrap();
    }
}

#[body_test(except(microvm = "another way of the same path"))]
async fn a_name_that_cannot_be_reached_is_named_and_tried_again(t: Bodies) {
    let server = ScriptedServer::start(|_| CannedResponse::ok("PACKAGE"));
    let port = server.host().replace("127.0.0.1:", "");
    // Closed until a file says otherwise: the port of a server that does not listen any more.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let fetch =
        |port: &str| format!("curl -sS --fail -x $http_proxy --noproxy '' http://localhost:{port}/x > ~/got");
    let write = |port: &str| {
        format!(
            "cat > palisade.toml <<'END'\n[prepare]\nallow = [\"localhost:{port}+plain+private\"]\ncommands = [\"echo one >> ~/log\", \"{}\"]\nEND",
            fetch(port)
        )
    };
    let host = HostRepo::make(&t, "app", &write(&gone.to_string()));
    let failure = fails(&t, asked(&t, &host)).await;
    let named = hint(&failure, "is allowed, but");
    assert!(
        named.starts_with(&format!(
            "localhost:{gone} is allowed, but no address of it accepts the connection"
        )),
        "{named}"
    );
    let unknown = fails(&t, UpRequest { prepare: PrepareChoice::Yes, ..asked(&t, &host) }).await;
    assert_eq!(
        (started(&t, "echo one"), started(&t, "curl")),
        (1, 2),
        "{unknown}: only what failed runs again"
    );
    host.commit(&write(&port), "another server");
    let (body, _) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(t.sh(&body, "cat ~/got").await.ok(), "PACKAGE", "with the door open it succeeds");
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}

#[body_test(except(microvm = "another way of the same path"))]
async fn a_registry_that_cannot_be_reached_is_a_warning_and_is_tried_again(t: Bodies) {
    let write = |allow: &str| {
        format!(
            "touch go.sum; printf 'module app\n\ngo 1.19\n\nrequire example.com/gone v1.0.0\n' > go.mod
            printf '[prepare]\nallow = [{allow}]\n[env]\nGOPROXY = \"https://registry.invalid\"\nGOSUMDB = \"off\"\n' > palisade.toml"
        )
    };
    let host = HostRepo::make(&t, "app", &write(""));
    let denied = fails(&t, asked(&t, &host)).await;
    assert!(
        hint(&denied, "denied").ends_with("[prepare] allow = [\"registry.invalid:443\"]"),
        "a control: a name that no rule allows is the repository's: {}",
        explain(&denied)
    );
    assert!(hint(&denied, "leave the step out").ends_with("[prepare] skip = [\"go.mod\"]"));
    host.commit(&write("\"registry.invalid:443\""), "allowed, but it does not exist");
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    let shown = said.join("\n");
    for line in [
        "warning: go mod download failed: registry.invalid:443 cannot be reached",
        "hint: registry.invalid:443 is allowed, but its name cannot be resolved",
        "hint: its whole output: pal logs ",
    ] {
        assert!(shown.contains(line), "{line}: {shown}");
    }
    assert_eq!(named(&t.view(&body).missing_steps), [("", "go mod download")]);
    let (second, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(steps(&said), 1, "its cause may have passed: {said:?}");
    let again = t.fleet().workspaces().prepare_again(&body, PrepareRequest::Missing, &mut |_| ()).await;
    assert_eq!(again.map(drop).unwrap_err().kind, Kind::Conflict, "the step alone was asked for");
    for id in [&body, &second] {
        t.fleet().remove(id, Force::Yes).await.unwrap();
    }
}

#[body_test(except(microvm = "another way of the same path"))]
async fn a_step_without_its_tool_is_named_once_and_has_no_output(t: Bodies) {
    let host = HostRepo::make(
        &t,
        "app",
        "echo '{}' > composer.json; printf '[env]\nPATH = \"/nowhere\"\n' > palisade.toml",
    );
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    let named: Vec<&String> = said.iter().filter(|line| line.contains("composer")).collect();
    assert_eq!(
        named,
        [
            "composer.json needs composer, and the Body has none; not run: composer install\n  hint: apt-get install composer"
        ]
    );
    assert!(!said.iter().any(|line| line.contains("pal logs")), "{said:?}");
    assert_eq!(t.view(&body).missing_steps.len(), 1);
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}

#[body_test(except(microvm = "another way of the same path"))]
async fn two_requests_at_once_install_once(t: Bodies) {
    let host = HostRepo::make(&t, "app", &settings(&["echo one >> ~/log; sleep 1"]));
    let second = t.second();
    let mut said = Vec::new();
    let mut say = |line: fleet::ProgressLine<'_>| said.push(line.to_string());
    let (first, other) = (t.fleet().workspaces(), second.workspaces());
    let (one, two) =
        tokio::join!(first.up(asked(&t, &host)), other.up_with_progress(asked(&t, &host), &mut say));
    let views: Vec<BodyView> = [one, two]
        .into_iter()
        .flat_map(|made| made.unwrap_or_else(|failure| panic!("{}", explain(&failure))))
        .collect();
    assert_eq!(started(&t, "echo one"), 1);
    assert!(said.iter().any(|line| line.starts_with("waiting for another `pal`")), "{said:?}");
    for view in &views {
        assert_eq!(t.sh(view.id(), "cat ~/log").await.ok(), "one");
        t.fleet().remove(view.id(), Force::Yes).await.unwrap();
    }
}

#[body_test(except(microvm = "another way of the same path"))]
async fn settings_that_are_not_committed_count_and_a_named_template_wins(t: Bodies) {
    let container =
        "mkdir .devcontainer; echo '{\"image\": \"127.0.0.1:1/none:1\"}' > .devcontainer/devcontainer.json";
    let host = HostRepo::make(&t, "app", container);
    let refused = fails(&t, asked(&t, &host)).await;
    assert!(
        explain(&refused).contains("127.0.0.1:1"),
        "a control: the image is wanted: {}",
        explain(&refused)
    );
    let host_template = || UpRequest { devcontainer: DevcontainerChoice::Ignore, ..asked(&t, &host) };
    let (first, _) = prepared(&t, host_template()).await;
    host.sh(&format!("{}echo 'devcontainer = false' >> palisade.toml", settings(&["echo here > ~/made"])));
    let (second, said) = prepared(&t, asked(&t, &host)).await;
    assert!(said.iter().any(|line| line.contains("palisade.toml of the working tree decides")), "{said:?}");
    assert_eq!(t.sh(&second, "cat ~/made; ls").await.ok(), "here", "the file itself is not in the Body");
    let dirty = UpRequest { dirty: UncommittedFiles::With, ..asked(&t, &host) };
    let (third, said) = prepared(&t, dirty).await;
    assert!(!said.iter().any(|line| line.contains("working tree decides")), "{said:?}");
    assert_eq!(t.sh(&third, "cat ~/made; ls").await.ok(), "here\npalisade.toml");
    let old = UpRequest { reference: Some("main".into()), ..host_template() };
    let (fourth, _) = prepared(&t, old).await;
    assert_eq!(t.sh(&fourth, "ls ~/made").await.code, 2, "a commit has its own settings");
    host.sh("echo nonsense > palisade.toml");
    assert_eq!(fails(&t, asked(&t, &host)).await.kind, Kind::Usage);
    let (fifth, said) = prepared(&t, UpRequest { prepare: PrepareChoice::No, ..asked(&t, &host) }).await;
    assert!(said.iter().any(|line| line.starts_with("no toolchain is set up: ")), "{said:?}");
    for id in [&first, &second, &third, &fourth, &fifth] {
        t.fleet().remove(id, Force::Yes).await.unwrap();
    }
}

#[body_test(except(
    user = "another user cannot read root's toolchain",
    microvm = "this layer has no live mounts"
))]
async fn a_body_without_a_preparation_still_has_its_toolchain(t: Bodies) {
    let make = "printf '[package]\\nname = \"app\"\\nversion = \"0.1.0\"\\nedition = \"2021\"\\n' > Cargo.toml; mkdir src; echo > src/lib.rs";
    let host = HostRepo::make(&t, "app", make);
    let none = up(&t, UpRequest { prepare: PrepareChoice::No, ..asked(&t, &host) }).await.spec.id;
    assert!(t.sh(&none, "cargo --version").await.ok().starts_with("cargo "));
    assert_eq!(started(&t, "cargo fetch"), 0);
    t.fleet().remove(&none, Force::Yes).await.unwrap();
}

#[body_test]
async fn a_name_that_does_not_exist_inside_is_told_at_once(t: Bodies) {
    let body = t.create().await;
    let ask = |name: &str| {
        format!(
            "/usr/bin/python3 -c 'import socket\ntry: print(socket.getaddrinfo(\"{name}\", 80, socket.AF_INET)[0][4][0])\nexcept socket.gaierror as error: print(error.errno == socket.EAI_NONAME)'"
        )
    };
    assert_eq!(t.sh(&body, &ask("localhost")).await.ok(), "127.0.0.1", "a control");
    assert_eq!(t.sh(&body, &ask("registry.npmjs.org")).await.ok(), "True");
    let node =
        "node -e 'require(\"dns\").resolve4(\"registry.npmjs.org\", (error) => console.log(error.code))'";
    assert_eq!(t.sh(&body, node).await.ok(), "ENOTFOUND", "c-ares asks the server itself");
    // npm tries again for 70 seconds by default, whatever the failure is.
    let npm = "cd /tmp; timeout 30 npm view ms version 2>&1 | grep -o ENOTFOUND | head -1";
    assert_eq!(t.sh(&body, npm).await.ok(), "ENOTFOUND", "npm does not try for minutes");
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}

/// Starts `pal up` in a repository.
fn start_up(t: &Bodies, host: &HostRepo, options: &[&str]) -> Child {
    let words = pal_command(t, &[&["up"], options].concat());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).current_dir(&host.dir).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[body_test(except(microvm = "another way of the same path"))]
async fn the_command_line_shows_a_failed_step_in_lines(t: Bodies) {
    let host = HostRepo::make(&t, "app", &settings(&["echo before; echo 'it ends here'; exit 3"]));
    let output = start_up(&t, &host, &[]).wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(output.status.code(), Some(122), "{said}");
    let step = "echo before; echo 'it ends here'; exit 3";
    let expected = [
        &format!("installing: {step}"),
        "  before",
        "  it ends here",
        &format!("error: preparing the repository failed: {step} ended with code 3"),
        "  caused by: the last lines of its output:",
        "    | before",
        "    | it ends here",
    ];
    assert_eq!(lines[..expected.len()], expected, "{said}");
    assert!(lines[expected.len()..].iter().all(|line| line.starts_with("  hint: ")), "{said}");
}

#[body_test(except(microvm = "another way of the same path"))]
async fn an_interrupted_preparation_leaves_no_body(t: Bodies) {
    let host = HostRepo::make(&t, "app", &settings(&["echo runs; sleep 1000"]));
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::KILL] {
        let mut child = start_up(&t, &host, &[]);
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while line.trim() != "runs" {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it ended before its step ran");
        }
        assert_eq!(t.fleet().list().unwrap().len(), 1, "a control: the Body of the step");
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        let status = child.wait().unwrap();
        if signal == rustix::process::Signal::INT {
            assert_eq!((status.code(), t.fleet().list().unwrap().len()), (Some(130), 0));
            let mut rest = String::new();
            said.read_to_string(&mut rest).unwrap();
            assert_eq!(rest, "interrupted\n");
        }
        // After kill -9 its supervisor removes it.
        let gone = || t.fleet().ids().unwrap().is_empty().then_some(());
        wait::blocking(Duration::from_secs(20), "the Body of the step is gone", gone);
    }
    t.fleet().garbage().collect(fleet::GcMode::Remove).await.unwrap();
}
