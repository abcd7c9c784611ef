//! Building templates: each step runs in a Body, and each result is a layer.

use std::{path::PathBuf, time::Duration};

use fleet::{BaseImage, BuildJob, BuildRequest, BuildState, BuildStep, Create, Image, Instruction};
use proto::{
    Event, EventData, Failure,
    event_data::{BodyCreated, DecodedEvent},
    template::{StartCommand, TemplateBuild, TemplateSettings},
};
use testkit::{
    Bodies, body_test,
    registry::{CannedResponse, ScriptedServer},
    roots, run_as_account,
};

fn begin(t: &Bodies) {
    let built = t.fleet().builds().import_template(
        "small",
        "a test",
        TemplateSettings { sudo: true, ..TemplateSettings::default() },
        &roots::small()[..],
    );
    built.unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)));
}

fn request(steps: Vec<Instruction>) -> BuildRequest {
    let steps = steps.into_iter().map(|act| BuildStep { act, force: false }).collect();
    BuildRequest {
        from: BaseImage::Template("small".into()),
        steps,
        start: None,
        force: false,
        allow: Vec::new(),
    }
}

fn run(command: &str) -> Instruction {
    Instruction::Run { command: command.into(), user: None }
}

fn copy(t: &Bodies, name: &str, source: &str, target: &str, archive: &[u8]) -> Instruction {
    let path: PathBuf = t.dir().join(name);
    std::fs::write(&path, archive).unwrap();
    Instruction::Copy {
        source: source.into(),
        target: target.into(),
        owner: None,
        mode: None,
        hash: name.into(),
        archive: path,
    }
}

async fn build(
    t: &Bodies,
    name: &str,
    request: BuildRequest,
) -> (Result<TemplateBuild, Failure>, Vec<String>, BuildState) {
    let asked = t.fleet().builds().request(name, &[], None, None).unwrap();
    let job = t.fleet().builds().begin(&asked.template, &asked.id).unwrap();
    let built = t.fleet().builds().build(&job, request).await;
    let (state, said) = job.log_lines(0, usize::MAX);
    (built, said.into_iter().map(|said| said.message).collect(), state)
}

fn made(built: Result<TemplateBuild, Failure>) -> TemplateBuild {
    built.unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)))
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn steps_add_up_and_are_not_done_twice(t: Bodies) {
    begin(&t);
    let files = roots::files(&[("dir/a", b"alpha"), ("dir/sub/b", b"beta"), ("c", b"gamma")]);
    let steps = || {
        vec![
            Instruction::Env(vec![("WORD".into(), "one".into()), ("BOTH".into(), "${WORD}-$WORD".into())]),
            Instruction::Workdir("/work".into()),
            copy(&t, "files", "dir", "in", &files),
            copy(&t, "files", "c", "/etc/gamma", &files),
            copy(&t, "files", "dir/*", "flat/", &files),
            run("echo $BOTH > word; cat in/a in/sub/b flat/a; stat -c %U:%a in/a"),
            Instruction::Run {
                command: "id -u > /root/who; chmod 755 /root".into(),
                user: Some("root".into()),
            },
            run("rm in/sub/b"),
        ]
    };
    let (built, said, state) = build(&t, "app", request(steps())).await;
    let first = made(built);
    assert_eq!(state, BuildState::Ready);
    assert!(said.iter().any(|line| line == "alphabetaalphauser:644"), "{said:?}");
    assert!(!said.iter().any(|line| line == "CACHED"));
    let view = t.make(Create { template: "app".into(), ..t.passing() }).await;
    let look = "pwd; cat word /root/who /etc/gamma; ls in in/sub flat; echo $WORD; stat -c %U /work word";
    assert_eq!(
        t.sh(view.id(), look).await.ok().replace('\n', " "),
        "/work one-one 0 gammaflat: a b  in: a sub  in/sub: one user user"
    );
    let (built, said, _) = build(&t, "app", request(steps())).await;
    assert_eq!(made(built).layers, first.layers);
    assert_eq!(said.iter().filter(|line| *line == "CACHED").count(), 7, "{said:?}");
    let (built, said, _) = build(&t, "app", BuildRequest { force: true, ..request(vec![run("true")]) }).await;
    made(built);
    assert!(!said.iter().any(|line| line == "CACHED"));
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_build_that_fails_names_its_step_and_leaves_nothing(t: Bodies) {
    begin(&t);
    let cases: Vec<(Vec<Instruction>, &str, &str)> = vec![
        (
            vec![run("true"), run("echo no >&2; exit 3")],
            "2",
            "failed to run command 'echo no >&2; exit 3': exit status 3",
        ),
        (
            vec![Instruction::Run { command: "whoami".into(), user: Some("root123".into()) }],
            "1",
            "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'",
        ),
        (
            vec![copy(&t, "missing", "nothing-here", "x", &roots::files(&[("a", b"")]))],
            "1",
            "it ended with code",
        ),
        (
            vec![copy(&t, "hostile", "x", "x", &roots::climbing())],
            "1",
            "cannot copy the uploaded files: the archive holds",
        ),
        (vec![copy(&t, "noise", "x", "x", b"\x1f\x8bnoise")], "1", "cannot copy the uploaded files"),
        (vec![run("echo 'curl: (6) Could not resolve host: x'; exit 6")], "1", "have no network"),
        (vec![Instruction::User("nobody-here".into())], "finalize", "nobody-here"),
        (vec![Instruction::Workdir("/a/../../b".into())], "1", "is not a path"),
    ];
    for (steps, step, message) in cases {
        let (built, said, state) = build(&t, "broken", request(steps)).await;
        let failure = built.unwrap_err();
        let BuildState::Error { step: at, message: told } = state else { panic!("{state:?}") };
        assert_eq!(at.as_deref(), Some(step), "{failure}");
        assert!(told.contains(message) && said.iter().any(|line| line.contains(message)), "{told}: {said:?}");
    }
    for from in
        [BaseImage::Template("no-such".into()), BaseImage::Image(Image::new("127.0.0.1:1/nobody/listens"))]
    {
        let (built, _, state) = build(&t, "broken", BuildRequest { from, ..request(Vec::new()) }).await;
        assert!(
            built.is_err() && matches!(state, BuildState::Error { step: Some(step), .. } if step == "base")
        );
    }
    assert!(t.fleet().list().unwrap().is_empty(), "Bodies of builds are left");
    assert!(t.fleet().create(Create { template: "broken".into(), ..t.passing() }).await.is_err());
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_build_is_called_off_in_the_middle(t: Bodies) {
    begin(&t);
    let asked = t.fleet().builds().request("slow", &[], None, None).unwrap();
    let job = t.fleet().builds().begin(&asked.template, &asked.id).unwrap();
    assert!(t.fleet().builds().begin(&asked.template, &asked.id).is_err(), "a build begins once");
    let off = async |job: &BuildJob| {
        while !job.log_lines(0, usize::MAX).1.iter().any(|said| said.message == "here") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        job.cancel();
    };
    let builds = t.fleet().builds();
    let (built, ()) =
        tokio::join!(builds.build(&job, request(vec![run("echo here; sleep 1000")])), off(&job));
    assert!(built.unwrap_err().to_string().contains("cancelled"));
    assert!(t.fleet().list().unwrap().is_empty());
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn what_it_says_is_bounded_and_what_it_starts_is_tried(t: Bodies) {
    begin(&t);
    let (built, said, _) = build(
        &t,
        "loud",
        request(vec![run("for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero; echo; done")]),
    )
    .await;
    made(built);
    assert!(said.iter().map(String::len).sum::<usize>() < 5 << 20);
    let start =
        Some(StartCommand { command: Some("touch /tmp/up".into()), ready: Some("cat /tmp/up".into()) });
    let (built, _, _) = build(&t, "server", BuildRequest { start, ..request(Vec::new()) }).await;
    assert!(made(built).settings.start.is_some());
    let view = t.make(Create { template: "server".into(), ..t.passing() }).await;
    assert_eq!(t.sh(view.id(), "ls /tmp/up").await.ok(), "/tmp/up");
}

/// Sends a request to the egress proxy, and keeps the answer in a file.
fn through(question: &str) -> Instruction {
    run(&format!(
        "exec 3<>/dev/tcp/127.0.0.1/3128 && printf '{question} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' >&3 && cat <&3 >> ~/said"
    ))
}

#[body_test(except(
    user = "a root file system of its own needs subordinate ids",
    microvm = "Bodies of builds are on layer process"
))]
async fn commands_reach_the_names_they_may_and_what_is_built_reaches_none(t: Bodies) {
    begin(&t);
    let mirror = ScriptedServer::start(|_| CannedResponse::ok("PACKAGE\n"));
    let (port, asked) = (mirror.host().replace("127.0.0.1:", ""), || mirror.asked().len());
    let allow = vec![format!("localhost:{port}+plain+private")];
    let fetch = through(&format!("GET http://localhost:{port}/pool/a.deb"));
    let steps = vec![
        fetch.clone(),
        through("CONNECT evil.example:443"),
        run("echo $https_proxy; cat $SSL_CERT_FILE > /dev/null && ls /run/palisade"),
    ];
    let (built, said, _) = build(&t, "online", BuildRequest { allow: allow.clone(), ..request(steps) }).await;
    made(built);
    assert_eq!(asked(), 1);
    let told = |line: &str| said.iter().filter(|said| *said == line).count();
    assert_eq!(
        told("network: the egress proxy denied evil.example:443: no rule names evil.example:443"),
        1,
        "{said:?}"
    );
    assert_eq!((told("http://127.0.0.1:3128"), told("egress.sock")), (1, 1), "{said:?}");
    let decided: Vec<_> = t
        .events()
        .into_iter()
        .filter_map(|event| match event.decode() {
            DecodedEvent::Known(EventData::NetworkAllowed(data)) => Some((data.allowed, data.to)),
            DecodedEvent::Known(EventData::NetworkDenied(data)) => Some((data.allowed, data.to)),
            _ => None,
        })
        .collect();
    assert_eq!(decided, [(true, format!("localhost:{port}")), (false, "evil.example:443".to_owned())]);
    let records = t.events().into_iter().filter(Event::is::<BodyCreated>);
    let ways: Vec<_> =
        records.map(|event| event.data["spec"]["egress"].clone()).filter(|way| !way.is_null()).collect();
    assert_eq!(
        ways,
        vec![serde_json::json!({ "allow": allow }); 3],
        "each Body of a command says where it may go, and not where its socket is"
    );
    // Bodies of the template have the file, and no egress proxy.
    let view = t.make(Create { template: "online".into(), ..t.passing() }).await;
    let look = t.sh(view.id(), "cat ~/said; echo ---; env; ls /run; (exec 3<>/dev/tcp/127.0.0.1/3128) 2>/dev/null && echo open || echo shut").await.ok();
    let (said, now) = look.split_once("---").unwrap();
    assert!(said.contains("PACKAGE") && said.contains("403 Denied"), "{look}");
    assert!(!now.contains("proxy") && !now.contains("palisade") && now.ends_with("shut"), "{look}");
    // Without a rule there is no egress proxy, and an invalid rule is refused before any step runs.
    let (built, said, _) = build(&t, "offline", BuildRequest { force: true, ..request(vec![fetch]) }).await;
    assert!(built.is_err() && asked() == 1, "{said:?}");
    let (built, _, state) =
        build(&t, "wrong", BuildRequest { allow: vec!["*:443".into()], ..request(Vec::new()) }).await;
    assert!(built.is_err() && matches!(state, BuildState::Error { step: Some(step), .. } if step == "base"));
    // A failed command reports the hosts that the proxy denied.
    let refused = run(
        "exec 3<>/dev/tcp/127.0.0.1/3128 && printf 'GET http://localhost:1/ HTTP/1.1\\r\\n\\r\\n' >&3 && cat <&3; exit 4",
    );
    let (built, _, _) = build(&t, "refused", BuildRequest { allow, ..request(vec![refused]) }).await;
    let failure = built.unwrap_err();
    assert!(
        failure
            .message
            .contains("exit status 4 (the egress proxy denied localhost:1: no rule names localhost:1)")
            && failure.hints.iter().any(|hint| hint.contains("--build-allow localhost:1")),
        "{failure} {:?}",
        failure.hints
    );
    assert!(
        std::fs::read_dir(t.dir().join("data/egress")).map_or(0, Iterator::count) == 0
            && t.fleet().list().unwrap().len() == 1,
        "no way out is left"
    );
}

#[test]
fn as_an_account_with_subordinate_ids() {
    run_as_account("body::builds::steps_add_up_and_are_not_done_twice::process");
}
