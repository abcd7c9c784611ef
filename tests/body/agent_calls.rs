//! Calls of agents: operations on files with keys, and commands that are kept. Each has one effect, whoever asks again.

use std::time::{Duration, Instant};

use bytes::Bytes;
use fleet::{ExecRequest, Fleet, KeptOutput, OutputChunk, Stdin, TtySize};
use proto::{
    BodyId, Kind,
    event_data::{ExecEnded, ExecOutcome, ExecStarted},
    file_call::{FileAnswer, FileCall, FileError, FileOperation, TextMatch, WrittenFile},
};
use testkit::{Bodies, body_test};

const WAIT: Duration = Duration::from_secs(20);

fn kept(tag: &str, script: &str) -> ExecRequest {
    ExecRequest { tag: Some(tag.into()), keep: true, ..ExecRequest::new(["sh", "-c", script]) }
}

async fn call(fleet: &Fleet, body: &BodyId, key: Option<&str>, operation: FileOperation) -> FileAnswer {
    let call = FileCall { key: key.map(str::to_owned), operation };
    fleet.files().call(body, &call).await.unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)))
}

fn write(path: &str, content: &str) -> FileOperation {
    let files = vec![WrittenFile { path: path.into(), content: Some(content.into()) }];
    FileOperation::Write { files }
}

fn reason(answer: FileAnswer) -> FileError {
    match answer {
        FileAnswer::Error { reason, .. } => reason,
        answer => panic!("it was carried out: {answer:?}"),
    }
}

/// Reads a kept command to its end.
async fn read_all(fleet: &Fleet, body: &BodyId, tag: &str) -> (String, i32) {
    let (mut bytes, mut from) = (Vec::new(), 0);
    loop {
        let output = fleet.execs().read_kept(body, tag, from, WAIT).await.unwrap().expect("it is known");
        assert_eq!(output.from, from);
        bytes.extend(output.bytes);
        from = output.next;
        if let Some(code) = output.exit_code {
            return (String::from_utf8(bytes).unwrap(), code);
        }
    }
}

/// The starts and the ends of commands with this tag, as the log has them.
fn recorded(t: &Bodies, tag: &str) -> (usize, Vec<i32>) {
    let events = t.events();
    let starts: Vec<u64> = events
        .iter()
        .filter(|event| event.data_as::<ExecStarted>().is_some_and(|start| start.tag.as_deref() == Some(tag)))
        .map(|event| event.seq)
        .collect();
    let ends = events.iter().filter_map(|event| event.data_as::<ExecEnded>());
    let codes = ends.filter(|end| starts.contains(&end.exec)).map(|end| match end.outcome {
        ExecOutcome::Ended(exit) => exit.code,
        ExecOutcome::NotStarted { error } => panic!("{error}"),
    });
    (starts.len(), codes.collect())
}

#[body_test]
async fn an_edit_that_is_repeated_with_its_key_has_one_effect(t: Bodies) {
    let body = t.create().await;
    let path = "/home/user/project/file";
    assert_eq!(call(t.fleet(), &body, None, write(path, "count: x\n")).await, FileAnswer::Written);
    let edit =
        || FileOperation::Edit { path: path.into(), old: "x".into(), new: "xx".into(), replace_all: false };
    let recall = || FileOperation::Recall { key: "turn-1".into() };
    assert_eq!(call(t.fleet(), &body, None, recall()).await, FileAnswer::Unknown);
    let edited = FileAnswer::Edited { occurrences: 1 };
    assert_eq!(call(t.fleet(), &body, Some("turn-1"), edit()).await, edited);
    // Another process repeats it.
    let second = t.second();
    assert_eq!(call(&second, &body, Some("turn-1"), edit()).await, edited);
    assert_eq!(call(&second, &body, None, recall()).await, edited);
    assert_eq!(
        t.sh(&body, "cat ~/project/file; stat -c '%U %a' ~/project/file ~/project").await.ok(),
        "count: xx\nuser 644\nuser 755"
    );
    assert_eq!(
        reason(call(t.fleet(), &body, Some("turn-2"), edit()).await),
        FileError::Ambiguous { occurrences: 2 }
    );
    let other = FileCall { key: Some("turn-1".into()), operation: write(path, "other") };
    assert_eq!(t.fleet().files().call(&body, &other).await.unwrap_err().kind, Kind::Conflict);
}

#[body_test]
async fn files_are_found_read_and_removed(t: Bodies) {
    let body = t.create().await;
    let path = |path: &str| format!("/home/user/{path}");
    t.sh(&body, "mkdir -p ~/src/x ~/.cache; echo 'fn main() {}' > ~/src/x/main.rs; echo > ~/.cache/a.rs; printf '\\377' > ~/odd").await.ok();
    let glob = FileOperation::Glob { pattern: "**/*.rs".into(), path: path("") };
    let found = FileAnswer::Paths { paths: vec![path("src/x/main.rs")], truncated: false, unreadable: false };
    assert_eq!(call(t.fleet(), &body, None, glob).await, found);
    let grep = FileOperation::Grep {
        pattern: "main()".into(),
        path: path(""),
        glob: Some("*.rs".into()),
        limit: 10,
    };
    let line = TextMatch { path: path("src/x/main.rs"), line: 1, text: "fn main() {}".into() };
    assert_eq!(
        call(t.fleet(), &body, None, grep).await,
        FileAnswer::Matches { matches: vec![line], truncated: false }
    );
    let read = |name: &str| FileOperation::Read { path: path(name), offset: 0, limit: 10 };
    let text =
        FileAnswer::Text { content: "fn main() {}\n".into(), total_lines: 1, start_line: 1, end_line: 1 };
    assert_eq!(call(t.fleet(), &body, None, read("src/x/main.rs")).await, text);
    let binary = FileAnswer::Binary { base64: "/w==".into(), len: 1 };
    assert_eq!(call(t.fleet(), &body, None, read("odd")).await, binary);
    let list = FileOperation::List { path: path("src") };
    let FileAnswer::Entries { entries, truncated: false } = call(t.fleet(), &body, None, list).await else {
        panic!("no entries")
    };
    assert_eq!(
        entries.iter().map(|entry| (entry.path.as_str(), entry.is_dir)).collect::<Vec<_>>(),
        [("/home/user/src/x", true)]
    );
    let delete = FileOperation::Delete { path: path("src") };
    assert_eq!(call(t.fleet(), &body, Some("d"), delete.clone()).await, FileAnswer::Deleted);
    assert_eq!(
        call(t.fleet(), &body, Some("d"), delete.clone()).await,
        FileAnswer::Deleted,
        "from the ledger"
    );
    assert_eq!(reason(call(t.fleet(), &body, None, delete).await), FileError::NotFound);
    let much = write(&path("much"), &"x".repeat((8 << 20) + 1));
    assert_eq!(reason(call(t.fleet(), &body, None, much).await), FileError::TooLarge { len: (8 << 20) + 1 });
}

#[body_test]
async fn file_calls_have_the_rights_of_the_user_and_no_others(t: Bodies) {
    let body = t.create().await;
    // Where a command of the user is denied, the call is denied, and nowhere else. In a Body with one id the user owns
    // everything.
    let read = |path: &str| FileOperation::Read { path: path.into(), offset: 0, limit: 10 };
    let list = |path: &str| FileOperation::List { path: path.into() };
    for (script, operation) in [
        ("echo x > /etc/by-shell", write("/etc/by-call", "x")),
        ("mkdir /usr/by-shell", write("/usr/by-call/file", "x")),
        ("ls /root", list("/root")),
        (": >> /etc/passwd", write("/etc/passwd", &t.sh(&body, "cat /etc/passwd").await.ok())),
        (
            "mv /etc/group /etc/moved && mv /etc/moved /etc/group",
            FileOperation::Delete { path: "/etc/group".into() },
        ),
        ("echo x > /tmp/by-shell", write("/tmp/by-call", "x")),
    ] {
        let allowed = t.sh(&body, script).await.code == 0;
        match call(t.fleet(), &body, None, operation).await {
            FileAnswer::Error { reason, .. } => {
                assert_eq!((reason, allowed), (FileError::PermissionDenied, false), "{script}")
            }
            _ => assert!(allowed, "{script}"),
        }
    }
    for path in ["/proc/self/environ", "/proc/self/maps", "/proc/1/maps"] {
        assert_eq!(
            reason(call(t.fleet(), &body, None, read(path)).await),
            FileError::PermissionDenied,
            "{path}"
        );
    }
    // A link that the user planted does not lead through the guest.
    t.sh(&body, "ln -s /proc/self/fd ~/fd; ln -s /proc/self/root/etc ~/etc").await.ok();
    let list = |path: &str| FileOperation::List { path: path.into() };
    assert_eq!(
        reason(call(t.fleet(), &body, None, list("/home/user/fd")).await),
        FileError::PermissionDenied
    );
    assert!(matches!(
        reason(call(t.fleet(), &body, None, list("/home/user/etc")).await),
        FileError::Other { .. }
    ));
    assert_eq!(call(t.fleet(), &body, None, write("/home/user/mine", "x")).await, FileAnswer::Written);
    assert_eq!(call(t.fleet(), &body, None, write("/tmp/mine", "x")).await, FileAnswer::Written);
    assert_eq!(t.sh(&body, "rm /tmp/mine ~/mine && echo removed").await.ok(), "removed");
}

#[body_test]
async fn a_kept_command_survives_its_follower_and_is_found_ended(t: Bodies) {
    let body = t.create().await;
    let script = "printf begin; while ! test -e ~/go; do sleep 0.02; done; echo err >&2; printf end; exit 9";
    let mut first = t.fleet().execs().start(&body, kept("c1", script)).await.unwrap();
    assert_eq!(first.next().await.unwrap(), Some(OutputChunk::Stdout(Bytes::from_static(b"begin"))));
    // The state after the process that followed it was killed.
    drop(first);
    t.sh(&body, ": > ~/go").await.ok();
    let second = t.second();
    let (text, code) = read_all(&second, &body, "c1").await;
    assert_eq!((text.len(), code), ("beginerr\nend".len(), 9));
    assert!(text.starts_with("begin") && text.contains("err\n") && text.contains("end"), "{text}");
    assert_eq!(recorded(&t, "c1"), (1, vec![9]), "the read recorded its end");
    // It is started again by a process that does not know that it ended.
    let ended = testkit::ran(&second, &body, kept("c1", script), &[]).await.unwrap();
    assert_eq!((ended.text(), ended.complaint(), ended.code), ("beginend".into(), "err".into(), 9));
    assert_eq!(recorded(&t, "c1"), (1, vec![9]));
    let exit = t.last_exit();
    assert_eq!((exit.stdout.unwrap().bytes, exit.stderr.unwrap().bytes), (8, 4));
}

#[body_test]
async fn a_kept_command_that_is_started_twice_runs_once(t: Bodies) {
    let body = t.create().await;
    let script = "echo ran >> ~/runs; sleep 0.3; echo done";
    let first = t.fleet().execs().start(&body, kept("once", script)).await.unwrap();
    let pid = first.pid();
    let second = t.second();
    let mut again = second.execs().start(&body, kept("once", script)).await.unwrap();
    assert_eq!(again.pid(), pid);
    let mut text = Vec::new();
    while let Some(OutputChunk::Stdout(bytes)) = again.next().await.unwrap() {
        text.extend_from_slice(&bytes);
    }
    assert_eq!((text.as_slice(), again.finish().await.unwrap().code), (&b"done\n"[..], 0));
    let mut first = first;
    while first.next().await.unwrap().is_some() {}
    assert_eq!(first.finish().await.unwrap().code, 0);
    assert_eq!(t.sh(&body, "wc -l < ~/runs").await.ok(), "1");
    assert_eq!(recorded(&t, "once"), (1, vec![0]), "both followed it to its end");
    let other = second.execs().start(&body, kept("once", "echo other")).await.err().expect("another command");
    assert_eq!(proto::Failure::from(other).kind, Kind::Conflict);
}

#[body_test]
async fn a_command_whose_driver_was_killed_before_the_guest_heard_of_it_runs_once(t: Bodies) {
    let body = t.create().await;
    let announced = ExecStarted {
        argv: ["sh", "-c", "echo ran >> ~/runs"].map(str::to_owned).to_vec(),
        user: None,
        workdir: None,
        tty: false,
        env: Vec::new(),
        timeout_ms: None,
        tag: Some("early".into()),
        by: None,
        detached: false,
    };
    t.fleet().log().note_about(&body, announced).unwrap();
    let ran = t.exec(&body, kept("early", "echo ran >> ~/runs")).await;
    assert_eq!(ran.code, 0);
    assert_eq!(recorded(&t, "early"), (1, vec![0]));
    assert_eq!(t.sh(&body, "wc -l < ~/runs").await.ok(), "1");
}

#[body_test]
async fn output_of_a_kept_command_comes_in_pages_and_is_waited_for(t: Bodies) {
    let body = t.create().await;
    let execs = t.fleet().execs();
    assert_eq!(execs.read_kept(&body, "none", 0, WAIT).await.unwrap(), None);
    assert!(execs.kept_control(&body, "none").await.unwrap().is_none());
    let request = ExecRequest {
        stdin: Stdin::Open,
        ..kept("talk", "printf hello; read line; printf \"got $line\"; exit 3")
    };
    drop(execs.start(&body, request).await.unwrap());
    let page = |bytes: &[u8], from, exit_code| {
        let next = from + bytes.len() as u64;
        Some(KeptOutput { bytes: bytes.to_vec(), from, next, exit_code })
    };
    assert_eq!(execs.read_kept(&body, "talk", 0, WAIT).await.unwrap(), page(b"hello", 0, None));
    assert_eq!(execs.read_kept(&body, "talk", 2, WAIT).await.unwrap(), page(b"llo", 2, None));
    let began = Instant::now();
    let nothing = execs.read_kept(&body, "talk", 5, Duration::from_millis(300)).await.unwrap();
    assert_eq!(nothing, page(b"", 5, None));
    assert!(began.elapsed() >= Duration::from_millis(300));
    let control = execs.kept_control(&body, "talk").await.unwrap().expect("it runs");
    let (output, sent) =
        tokio::join!(execs.read_kept(&body, "talk", 5, WAIT), control.send(Bytes::from_static(b"you\n")));
    sent.unwrap();
    assert_eq!(output.unwrap().unwrap().bytes[..4], *b"got ");
    assert_eq!(read_all(t.fleet(), &body, "talk").await, ("hellogot you".into(), 3));
    assert_eq!(recorded(&t, "talk"), (1, vec![3]));
    assert!(control.send(Bytes::from_static(b"late")).await.is_err());
}

#[body_test]
async fn a_kept_command_can_be_signalled_and_its_terminal_resized(t: Bodies) {
    let body = t.create().await;
    let request = ExecRequest {
        tty: Some(TtySize { cols: 80, rows: 24 }),
        stdin: Stdin::Open,
        ..kept("tty", "trap 'stty size' WINCH; trap 'exit 4' INT; echo ready; while :; do sleep 0.02; done")
    };
    drop(t.fleet().execs().start(&body, request).await.unwrap());
    let execs = t.fleet().execs();
    let mut from = 0;
    while from < "ready\r\n".len() as u64 {
        from = execs.read_kept(&body, "tty", from, WAIT).await.unwrap().unwrap().next;
    }
    let control = execs.kept_control(&body, "tty").await.unwrap().expect("it runs");
    control.resize(TtySize { cols: 100, rows: 40 }).await.unwrap();
    let mut shown = Vec::new();
    while shown != b"40 100\r\n" {
        let output = execs.read_kept(&body, "tty", from, WAIT).await.unwrap().unwrap();
        assert!(!output.bytes.is_empty(), "{shown:?}");
        shown.extend(output.bytes);
        from = output.next;
    }
    control.send(Bytes::from_static(b"\x03")).await.unwrap();
    loop {
        let output = execs.read_kept(&body, "tty", from, WAIT).await.unwrap().unwrap();
        from = output.next;
        if let Some(code) = output.exit_code {
            assert_eq!(code, 4);
            break;
        }
    }
}

#[body_test]
async fn a_body_that_was_started_again_knows_no_kept_command(t: Bodies) {
    let body = t.create().await;
    let script = "echo ran >> ~/runs; echo ready; exec sleep 1000";
    let mut first = t.fleet().execs().start(&body, kept("life", script)).await.unwrap();
    assert!(first.next().await.unwrap().is_some());
    drop(first);
    t.fleet().stop(&body, Duration::from_secs(2)).await.unwrap();
    let stopped = t.fleet().execs().read_kept(&body, "life", 0, WAIT).await.unwrap_err();
    assert_eq!(stopped.kind, Kind::Conflict);
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.fleet().execs().read_kept(&body, "life", 0, WAIT).await.unwrap(), None);
    let recall = FileOperation::Recall { key: "k".into() };
    assert_eq!(call(t.fleet(), &body, None, recall).await, FileAnswer::Unknown);
    // Its tag is free, and the log tells the second command from the first.
    let again = t.exec(&body, kept("life", "echo ran >> ~/runs; exit 2")).await;
    assert_eq!((again.code, t.sh(&body, "wc -l < ~/runs").await.ok()), (2, "2".into()));
    assert_eq!(recorded(&t, "life"), (2, vec![2]));
}

#[body_test]
async fn a_kept_command_ends_at_its_timeout_for_everybody(t: Bodies) {
    let body = t.create().await;
    let slow = || ExecRequest {
        timeout: Some(t.with_time(Duration::from_millis(300))),
        ..kept("slow", "exec sleep 1000")
    };
    drop(t.fleet().execs().start(&body, slow()).await.unwrap());
    assert_eq!(read_all(t.fleet(), &body, "slow").await.1, 124);
    let again = t.exec(&body, slow()).await;
    assert_eq!((again.code, again.ended.timed_out), (124, true));
    assert_eq!(recorded(&t, "slow"), (1, vec![124]));
}

#[body_test]
async fn requests_that_cannot_be_kept_are_refused(t: Bodies) {
    let body = t.create().await;
    let without = ExecRequest { tag: None, ..kept("x", "true") };
    let long = kept(&"x".repeat(257), "true");
    let hang_up = ExecRequest { on_disconnect: fleet::Disconnect::HangUp, ..kept("x", "true") };
    for request in [without, kept("", "true"), long, hang_up] {
        assert_eq!(t.try_exec(&body, request).await.unwrap_err().kind, Kind::Usage);
    }
    let detached = t.fleet().execs().start_detached(&body, kept("x", "true")).await.unwrap_err();
    assert_eq!(proto::Failure::from(detached).kind, Kind::Usage);
    assert!(!t.kinds(&body).contains(&"exec.started".to_owned()), "nothing was recorded");
    let missing =
        ExecRequest { tag: Some("gone".into()), keep: true, ..ExecRequest::new(["no-such-command"]) };
    for _ in 0..2 {
        assert_eq!(t.try_exec(&body, missing.clone()).await.unwrap_err().kind, Kind::CommandNotFound);
    }
}
