//! The log: what happened, in order, and nothing else.

use fleet::{ExecRequest, Force, LogRange, LogVerdict};
use proto::{
    Kind,
    event_data::{ExecEnded, ExecOutput, ExecStarted, OutputContent},
};
use testkit::{Bodies, body_test};

#[body_test]
async fn a_life_is_written_in_order(t: Bodies) {
    let body = t.create().await;
    t.run(&body, ["true"]).await;
    t.fleet().pause(&body).await.unwrap();
    t.fleet().resume(&body).await.unwrap();
    t.fleet().snapshots().create(&body, None).await.unwrap();
    t.fleet().stop(&body, std::time::Duration::from_secs(1)).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    let mut expected = vec![
        "body.created",
        "body.started",
        "exec.started",
        "exec.ended",
        "body.paused",
        "body.resumed",
        "snapshot.created",
        "body.stopped",
        "body.started",
        "body.removed",
    ];
    if t.layer() == proto::Layer::Microvm {
        // A resumed microVM sends a receipt.
        expected.insert(6, "body.receipt");
    }
    assert_eq!(t.kinds(&body), expected);
    let events = t.events();
    assert!(
        events
            .iter()
            .enumerate()
            .all(|(at, event)| event.seq == at as u64 + 1 && event.body.as_ref() == Some(&body))
    );
    assert!(events.windows(2).all(|two| two[0].hash == two[1].prev && two[0].chain == two[1].chain));
    let whole = t.fleet().log().verify().unwrap();
    assert!(
        matches!(whole, LogVerdict::Whole { events, .. } if events >= expected.len() as u64),
        "{whole:?}"
    );
}

#[body_test]
async fn an_exec_is_told_whole(t: Bodies) {
    let body = t.create().await;
    let mut request = ExecRequest::new(["sh", "-c", "echo out; echo err >&2; exit 3"]);
    request.env.insert("TOKEN".into(), "hush".into());
    t.exec(&body, request).await;
    let events = t.fleet().log().events(0, Some(&body), usize::MAX).unwrap();
    let (started, ended) = (&events[2], events[3].data_as::<ExecEnded>().unwrap());
    let asked = started.data_as::<ExecStarted>().unwrap();
    assert_eq!(asked.argv, ["sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(asked.env, ["TOKEN"], "names only");
    assert!(
        !serde_json::to_string(&events).unwrap().contains("hush"),
        "values of variables are nobody's business"
    );
    assert_eq!(ended.exec, started.seq);
    let wrote = |text: &str| {
        Some(ExecOutput { content: OutputContent::Text(text.into()), bytes: 4, truncated_to: None })
    };
    let exit = t.last_exit();
    assert_eq!((exit.code, exit.stdout, exit.stderr), (3, wrote("out\n"), wrote("err\n")));
}

#[body_test]
async fn long_output_is_kept_beside_the_log(t: Bodies) {
    let body = t.create().await;
    let ran = t.sh(&body, "seq 10000").await;
    let event = t.events().pop().unwrap();
    let stdout = t.last_exit().stdout.unwrap();
    assert_eq!(stdout.bytes, ran.stdout.len() as u64);
    assert!(matches!(&stdout.content, OutputContent::Artifact(sha256) if sha256.len() == 64), "{stdout:?}");
    assert!(serde_json::to_string(&event).unwrap().len() < 1000, "the event is short");
    let logs = t.fleet().execs().logs(&body, LogRange::All).unwrap();
    assert_eq!((logs[0].output == ran.stdout, logs[0].truncated, logs[0].code), (true, false, Some(0)));
}

#[body_test]
async fn events_are_read_from_a_place_on(t: Bodies) {
    let (one, two) = (t.create().await, t.create().await);
    t.run(&one, ["true"]).await;
    let log = t.fleet().log();
    let all = log.events(0, None, usize::MAX).unwrap();
    assert_eq!(log.last_pos().unwrap(), all.last().unwrap().pos);
    assert_eq!(log.events(all[2].pos, None, 2).unwrap(), all[3..5]);
    assert_eq!(t.kinds(&two), ["body.created", "body.started"]);
    assert_eq!(log.events(u64::MAX, None, 1).unwrap(), []);
}

#[body_test]
async fn what_cannot_be_written_down_does_not_happen(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file").await.ok();
    let written = t.events().len();
    // A log that accepts no new event, as on a full disk.
    let log = rusqlite::Connection::open(t.data().join(store::FILE)).unwrap();
    log.execute_batch("ALTER TABLE events RENAME TO aside").unwrap();
    let refused = |kind: Kind, what: &str| assert_eq!(kind, Kind::Host, "{what}");
    refused(t.fleet().create(t.kept()).await.unwrap_err().kind, "create");
    refused(t.fleet().create(t.passing()).await.unwrap_err().kind, "create");
    let failure = t.try_exec(&body, ExecRequest::new(["touch", "/home/user/made"])).await.unwrap_err();
    assert!(failure.message.contains("not taken") && !failure.hints.is_empty(), "{failure}");
    refused(t.fleet().pause(&body).await.unwrap_err().kind, "pause");
    refused(t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap_err().kind, "stop");
    refused(t.fleet().snapshots().create(&body, None).await.unwrap_err().kind, "snapshot");
    refused(t.fleet().snapshots().fork(&body, 2).await.unwrap_err().kind, "fork");
    refused(t.fleet().remove(&body, Force::Yes).await.unwrap_err().kind, "remove");
    std::fs::write(t.dir().join("file"), "x").unwrap();
    refused(
        t.fleet().files().copy_in(&body, &t.dir().join("file"), "/home/user/made").await.unwrap_err().kind,
        "cp in",
    );
    log.execute_batch("ALTER TABLE aside RENAME TO events").unwrap();
    drop(log);
    assert_eq!(t.events().len(), written);
    assert_eq!(
        t.sh(&body, "cat ~/file; ls ~").await.ok(),
        "kept\nfile",
        "and it lives as if nothing was asked"
    );
    let bodies = std::fs::read_dir(t.data().join("bodies")).unwrap().count();
    let snapshots = std::fs::read_dir(t.data().join("snapshots")).unwrap().count();
    assert_eq!((bodies, snapshots), (1, 0), "nothing is left of what was refused");
}

#[body_test]
async fn a_changed_log_shows(t: Bodies) {
    let body = t.create().await;
    t.run(&body, ["true"]).await;
    let log = rusqlite::Connection::open(t.data().join(store::FILE)).unwrap();
    let whole = t.fleet().log().verify().unwrap();
    assert!(matches!(whole, LogVerdict::Whole { .. }), "{whole:?}");
    let chain = format!("body/{body}");
    assert_eq!(log.execute("DELETE FROM events WHERE chain = ?1 AND seq = 3", [&chain]).unwrap(), 1);
    let cut = t.fleet().log().verify().unwrap();
    assert!(
        matches!(&cut, LogVerdict::Broken { chain: Some(found), seq: Some(3), .. } if *found == chain),
        "{cut:?}"
    );
}

#[body_test]
async fn values_of_variables_are_in_no_event_and_no_view(t: Bodies) {
    let mut request = t.kept();
    request.env.insert("TOKEN".into(), "hush-4711".into());
    let view = t.make(request).await;
    assert_eq!(t.sh(view.id(), "echo $TOKEN | rev").await.ok(), "1174-hsuh", "a control: the command has it");
    let told = serde_json::to_string(&(t.events(), t.view(view.id()))).unwrap();
    assert!(told.contains("TOKEN") && !told.contains("hush-4711"), "{told}");
}
