//! Commands in a Body: their input, output, environment and leftovers.

use std::time::{Duration, Instant};

use bytes::Bytes;
use fleet::{ExecRequest, OutputChunk, Stdin, TtySize};
use proto::{
    Kind, Size,
    event_data::{ExecEnded, ExecOutcome, ExecOutput, OutputContent},
};
use sha2::{Digest, Sha256};
use testkit::{Bodies, body_test};

#[body_test]
async fn output_and_codes_come_back_as_they_were(t: Bodies) {
    let body = t.create().await;
    let ran = t.sh(&body, "echo out; echo err >&2; exit 7").await;
    assert_eq!((ran.text(), ran.complaint(), ran.code), ("out".into(), "err".into(), 7));
    for (script, code) in [
        ("true", 0),
        ("exit 255", 255),
        ("kill -TERM $$", 128 + 15),
        ("kill -KILL $$", 128 + 9),
        ("kill -SEGV $$", 128 + 11),
    ] {
        let ran = t.sh(&body, script).await;
        assert_eq!(ran.code, code, "{script}");
        assert_eq!(ran.ended.signal, (code > 128 && code != 255).then(|| code - 128), "{script}");
    }
}

#[body_test]
async fn what_is_missing_or_cannot_be_run_is_said_and_written_down(t: Bodies) {
    let body = t.create().await;
    t.sh(
        &body,
        "echo x > ~/plain; mkdir ~/dir; printf '#!/no/such/interpreter\\n' > ~/lost; chmod +x ~/lost",
    )
    .await
    .ok();
    let cases = [
        ("no-such-command", Kind::CommandNotFound),
        ("/no/such/file", Kind::CommandNotFound),
        ("/home/user/lost", Kind::CommandNotFound),
        ("/home/user/plain", Kind::CommandNotExecutable),
        ("/home/user/dir", Kind::CommandNotExecutable),
        ("/", Kind::CommandNotExecutable),
        (".", Kind::CommandNotExecutable),
    ];
    for (command, kind) in cases {
        let failure = t
            .try_exec(&body, ExecRequest::new([command]))
            .await
            .err()
            .unwrap_or_else(|| panic!("{command} was run"));
        assert_eq!(failure.kind, kind, "{command}: {failure}");
        assert!(failure.message.contains(command), "it says which: {failure}");
        let ended = t.events().pop().unwrap().data_as::<ExecEnded>().unwrap();
        assert_eq!(ended.outcome, ExecOutcome::NotStarted { error: failure.message });
    }
}

#[body_test]
async fn odd_commands_are_refused_or_run_but_never_crash(t: Bodies) {
    let body = t.create().await;
    for argv in [vec![], vec![""], vec!["a\0b"], vec!["echo", "a\0b"], vec!["echo\n"], vec!["\u{1b}[31m"]] {
        let failure = t
            .try_exec(&body, ExecRequest::new(argv.clone()))
            .await
            .err()
            .unwrap_or_else(|| panic!("{argv:?} was run"));
        assert!(
            [Kind::Usage, Kind::CommandNotFound].contains(&failure.kind),
            "{argv:?}: {}",
            testkit::explain(&failure)
        );
    }
    let long = "x".repeat(4096);
    assert_eq!(
        t.try_exec(&body, ExecRequest::new([long.as_str()])).await.unwrap_err().kind,
        Kind::CommandNotFound
    );
    assert_eq!(t.run(&body, ["echo", "-n", &long]).await.text(), long);
    let endless = vec!["x".repeat(100_000); 40];
    assert!(t.try_exec(&body, ExecRequest::new([vec!["echo".to_owned()], endless].concat())).await.is_err());
    assert_eq!(t.run(&body, ["true"]).await.code, 0, "the guest is well");
}

#[body_test]
async fn the_environment_is_the_bodys_and_the_commands_own(t: Bodies) {
    // The Body must not see a variable of the caller.
    assert!(std::env::var("PATH").is_ok());
    let mut request = t.kept();
    request.env.insert("OF_BODY".into(), "one two".into());
    request.env.insert("BOTH".into(), "body".into());
    let body = t.make(request).await.spec.id;
    let mut exec = ExecRequest::new(["env"]);
    exec.env.insert("BOTH".into(), "exec".into());
    exec.env.insert("ODD".into(), "=\n'\"$x".into());
    let text = t.exec(&body, exec).await.ok();
    for line in ["OF_BODY=one two", "BOTH=exec", "ODD==", "HOME=/home/user", "USER=user"] {
        assert!(text.lines().any(|seen| seen == line), "{line} is missing in\n{text}");
    }
    for name in ["TESTKIT_PROBE", "CARGO", "RUST_BACKTRACE", "NEXTEST", "PAL_TOKEN"] {
        assert!(
            !text.lines().any(|seen| seen.starts_with(&format!("{name}="))),
            "{name} of the host is seen in\n{text}"
        );
    }
}

#[body_test]
async fn commands_run_where_and_as_whom_they_are_told(t: Bodies) {
    let body = t.create().await;
    assert_eq!(t.sh(&body, "pwd; id -un; id -u; id -G").await.ok(), "/home/user\nuser\n1000\n1000");
    let at = |dir: &str| ExecRequest { workdir: Some(dir.into()), ..ExecRequest::new(["pwd"]) };
    assert_eq!(t.exec(&body, at("/usr/bin")).await.ok(), "/usr/bin");
    let missing = t.try_exec(&body, at("/no/such/dir")).await.unwrap_err();
    assert!([Kind::Usage, Kind::NotFound].contains(&missing.kind), "{:?}: {missing}", missing.kind);
    assert!(missing.message.contains("/no/such/dir"), "{missing}");
    let nobody = ExecRequest { user: Some("no-such-user".into()), ..ExecRequest::new(["id"]) };
    let nobody = t.try_exec(&body, nobody).await.unwrap_err();
    assert!(
        [Kind::Usage, Kind::NotFound, Kind::Denied].contains(&nobody.kind),
        "{:?}: {nobody}",
        nobody.kind
    );
}

#[body_test(except(
    user = "a user with only one id has no root in the Body; the account's test covers that",
    microvm = "its files are on a disk of its own, which the host does not read"
))]
async fn root_inside_is_nobody_outside(t: Bodies) {
    let body = t.create().await;
    let root =
        |script: &str| ExecRequest { user: Some("root".into()), ..ExecRequest::new(["sh", "-c", script]) };
    assert_eq!(
        t.exec(&body, root("id -u; pwd; echo $HOME; touch /etc/of-root && echo made")).await.ok(),
        "0\n/root\n/root\nmade"
    );
    let file = t.body_dir(&body).join("disk/upper/etc/of-root");
    assert!(std::os::unix::fs::MetadataExt::uid(&file.metadata().unwrap()) >= 0x7000_0000);
    assert_ne!(t.sh(&body, "echo x > /etc/of-root").await.code, 0, "`user` is not root");
}

#[body_test]
async fn a_command_reads_ten_megabytes_and_writes_them_back(t: Bodies) {
    let body = t.create().await;
    let pieces: Vec<Bytes> = (0..160u32)
        .map(|at| (0..65_536u32).map(|i| (i * 31 + at * 7 + i / 251) as u8).collect::<Vec<u8>>().into())
        .collect();
    let sent = hash(&pieces.concat());
    let ran = t.feed(&body, ["cat"], &pieces).await;
    assert_eq!((hash(&ran.stdout), ran.stdout.len(), ran.code), (sent.clone(), 160 * 65_536, 0));
    let ran = t.feed(&body, ["sha256sum"], &pieces).await;
    assert_eq!(ran.text().split(' ').next(), Some(sent.as_str()));
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[body_test]
async fn a_command_that_stops_reading_ends_all_the_same(t: Bodies) {
    let body = t.create().await;
    let pieces: Vec<Bytes> = (0..64).map(|_| Bytes::from(vec![b'x'; 65_536])).collect();
    assert_eq!(t.feed(&body, ["head", "-c", "3"], &pieces).await.text(), "xxx");
    let closed = ExecRequest { stdin: Stdin::Null, ..ExecRequest::new(["cat"]) };
    assert_eq!(t.exec(&body, closed).await.ok(), "");
}

#[body_test]
async fn a_hundred_megabytes_of_output_pass_in_little_memory(t: Bodies) {
    let mut request = t.kept();
    request.limits.output = Some(Size::mib(1));
    let body = t.make(request).await.spec.id;
    let before = own_kib("VmHWM");
    let mut exec =
        t.fleet().exec(&body, ExecRequest::new(["head", "-c", "104857600", "/dev/zero"])).await.unwrap();
    let mut seen = 0u64;
    while let Some(OutputChunk::Stdout(bytes)) = exec.next().await.unwrap() {
        seen += bytes.len() as u64;
    }
    assert_eq!((seen, exec.finish().await.unwrap().code), (100 << 20, 0));
    let grown = own_kib("VmHWM") - before;
    assert!(grown < 32 << 10, "memory grew by {grown} KiB");
    let stdout = t.last_exit().stdout.unwrap();
    assert_eq!((stdout.bytes, stdout.truncated_to), (100 << 20, Some(1 << 20)));
    let logs = t.fleet().logs(&body).unwrap();
    assert_eq!((logs[0].output.len(), logs[0].truncated), (1 << 20, true));
}

fn own_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap()
}

#[body_test]
async fn bytes_that_are_no_text_stay_as_they_are(t: Bodies) {
    let body = t.create().await;
    let ran = t.sh(&body, r"printf '\377\376\000\200x'").await;
    assert_eq!(ran.stdout, [0xff, 0xfe, 0, 0x80, b'x']);
    let hex = OutputContent::Hex("fffe008078".into());
    assert_eq!(t.last_exit().stdout, Some(ExecOutput { content: hex, bytes: 5, truncated_to: None }));
    assert_eq!(t.fleet().logs(&body).unwrap()[0].output, ran.stdout);
    let script = r#"f=$(printf '/home/user/\377\n\033[31m'); echo odd > "$f"; ls /home/user | od -An -c | head -1; cat "$f""#;
    assert!(t.sh(&body, script).await.ok().ends_with("odd"));
}

#[body_test]
async fn what_is_left_in_the_background_goes_on_without_its_parent(t: Bodies) {
    let body = t.create().await;
    let began = Instant::now();
    t.sh(&body, "(sleep 0.3; echo late > /home/user/late) >/dev/null 2>&1 &").await.ok();
    assert!(began.elapsed() < Duration::from_secs(5), "the command did not wait for its child");
    t.sh(&body, "while ! test -s /home/user/late; do sleep 0.02; done").await.ok();
    // The guest is the parent of orphans, and reaps them.
    t.sh(&body, "for i in 1 2 3 4 5 6 7 8 9; do (sleep 0 &); done").await.ok();
    assert_eq!(t.sh(&body, "sleep 0.1; grep -l '^State:.Z' /proc/[0-9]*/status | wc -l").await.text(), "0");
}

#[body_test]
async fn a_timeout_ends_the_command_and_not_the_body(t: Bodies) {
    let body = t.create().await;
    let slow = ExecRequest {
        timeout: Some(t.with_time(Duration::from_millis(300))),
        ..ExecRequest::new(["sh", "-c", "echo early; exec sleep 1000"])
    };
    let ran = t.exec(&body, slow).await;
    assert_eq!((ran.text(), ran.code, ran.ended.timed_out), ("early".into(), 124, true));
    let gone = "for i in $(seq 100); do grep -q '^sleep' /proc/[0-9]*/cmdline || exit 0; perl -e 'select(undef, undef, undef, 0.02)'; done; exit 1";
    t.sh(&body, gone).await.ok();
    // The timeout also kills what the command waits for.
    let slow = ExecRequest {
        timeout: Some(Duration::from_millis(300)),
        ..ExecRequest::new(["sh", "-c", "sleep 1000 | cat; true"])
    };
    assert!(t.exec(&body, slow).await.ended.timed_out);
    t.sh(&body, gone).await.ok();
}

#[body_test]
async fn signals_reach_the_command(t: Bodies) {
    let body = t.create().await;
    let mut exec = t
        .fleet()
        .exec(
            &body,
            ExecRequest::new([
                "sh",
                "-c",
                "trap 'echo got; exit 3' INT; echo ready; while :; do sleep 0.01; done",
            ]),
        )
        .await
        .unwrap();
    let control = exec.control();
    let mut text = Vec::new();
    while let Some(OutputChunk::Stdout(bytes)) = exec.next().await.unwrap() {
        if text.is_empty() {
            control.signal(2).await.unwrap();
        }
        text.extend_from_slice(&bytes);
    }
    assert_eq!(
        (String::from_utf8(text).unwrap().as_str(), exec.finish().await.unwrap().code),
        ("ready\ngot\n", 3)
    );
}

#[body_test]
async fn a_terminal_is_one_and_changes_its_size(t: Bodies) {
    let body = t.create().await;
    let mut request = ExecRequest::new([
        "sh",
        "-c",
        "tty; stty size; trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.01; done",
    ]);
    request.tty = Some(TtySize { cols: 81, rows: 23 });
    request.stdin = Stdin::Open;
    let mut exec = t.fleet().exec(&body, request).await.unwrap();
    let control = exec.control();
    let mut text = String::new();
    let mut resized = false;
    while let Some(OutputChunk::Tty(bytes)) = exec.next().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&bytes));
        if text.contains("ready") && !resized {
            resized = true;
            control.resize(TtySize { cols: 100, rows: 40 }).await.unwrap();
        }
    }
    assert_eq!(exec.finish().await.unwrap().code, 0);
    assert_eq!(text, "/dev/pts/0\r\n23 81\r\nready\r\n40 100\r\n");
}

#[body_test]
async fn commands_at_the_same_time_do_not_mix(t: Bodies) {
    let body = t.create().await;
    let one = |n: u32| {
        let (t, body) = (t.clone(), body.clone());
        async move { t.sh(&body, &format!("for i in $(seq 200); do echo {n}; done; exit {n}")).await }
    };
    let all = tokio::join!(one(1), one(2), one(3), one(4), one(5), one(6), one(7), one(8));
    for (n, ran) in [all.0, all.1, all.2, all.3, all.4, all.5, all.6, all.7].into_iter().enumerate() {
        let n = n as i32 + 1;
        assert_eq!((ran.code, ran.text()), (n, vec![n.to_string(); 200].join("\n")));
    }
}

#[body_test]
async fn ending_the_body_ends_the_command_and_says_so(t: Bodies) {
    let view = t.make(t.kept()).await;
    let mut exec =
        t.fleet().exec(view.id(), ExecRequest::new(["sh", "-c", "echo ready; sleep 1000"])).await.unwrap();
    assert!(exec.next().await.unwrap().is_some());
    testkit::kill(view.pid.unwrap());
    assert_eq!(exec.next().await.unwrap(), None);
    let ended = exec.finish().await.unwrap();
    assert_eq!((ended.code, ended.body_end), (137, Some(proto::launch::GuestEnd::Killed { signal: 9 })));
}

#[body_test]
async fn a_tagged_terminal_is_found_again_with_its_newest_output(t: Bodies) {
    let body = t.create().await;
    let request = ExecRequest {
        tag: Some("terminal".into()),
        tty: Some(TtySize { cols: 80, rows: 24 }),
        stdin: Stdin::Open,
        ..ExecRequest::new(["sh", "-c", "printf before; read line; exit 5"])
    };
    let mut first = t.fleet().exec(&body, request).await.unwrap();
    assert_eq!(first.next().await.unwrap(), Some(OutputChunk::Tty(Bytes::from_static(b"before"))));
    // The state after the process that held it is gone.
    drop(first);
    assert_eq!(t.fleet().tagged_execs(&body).await.unwrap().len(), 1);
    let second = t.second();
    assert!(second.attach(&body, "another").await.unwrap().is_none());
    let mut found = second.attach(&body, "terminal").await.unwrap().expect("it runs");
    assert_eq!(found.next().await.unwrap(), Some(OutputChunk::Tty(Bytes::from_static(b"before"))));
    found.control().send(Bytes::from_static(b"\n")).await.unwrap();
    while found.next().await.unwrap().is_some() {}
    assert_eq!(found.finish().await.unwrap().code, 5);
    let kinds = t.kinds(&body);
    assert_eq!(&kinds[kinds.len() - 2..], ["exec.started", "exec.ended"]);
}
