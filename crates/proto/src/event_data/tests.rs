//! Tests that the types read logs of older and newer versions.

use serde_json::{Value, json};

use super::*;
use crate::{ChainHead, ChainId};

/// An event as the store returns it.
fn stored(kind: &str, data: Value) -> Event {
    let mut draft = Draft::new(BodyStopped { grace_ms: 0 });
    draft.kind = kind.to_owned();
    draft.data = data;
    Event::place(draft, ChainId::OneChain, &ChainHead::genesis(), "2026-01-02T03:04:05.000006Z".into())
}

/// Data of every kind, as version 0.1.0 wrote it before it was typed.
fn written_before() -> Vec<(&'static str, Value)> {
    let spec = json!({
        "v": 1, "id": "abc", "created_at": "2026-01-02T03:04:05.000006Z", "layer": "process", "template": "host",
        "snapshots": [], "limits": {"memory": 536870912, "cpu_milli": 1000, "pids": 256, "disk": 1073741824,
        "files": 1024, "inodes": 65536, "output": 1048576, "wall_ms": null}, "env": ["TOKEN"],
        "mounts": [{"source": "/src", "target": "/dst", "access": "ro"}], "user": "user", "network": "closed",
        "egress": {"allow": ["pypi.org:443"]}, "life": "kept",
        "ids": {"users": [{"inside": 1000, "outside": 100000, "count": 1}], "groups": []},
    });
    let lease = json!({
        "owner": "k", "deadline_ms": 7, "timeout_ms": 5, "then": {"pause": "memory"}, "auto_resume": false,
        "resumed_by_traffic": false, "since": "2026-01-02T03:04:05.000006Z", "metadata": {"a": "b"},
    });
    let receipt = json!({
        "how": "boot", "clock_offset_ms": -3, "took_ms": 900, "board": 1, "body": "abc",
        "generation": 1, "clock_ns": 5, "spent_ns": 6, "reseeded": true, "processes": 0,
        "tree": {"hash": "00", "entries": 1, "whole": true}, "kernel": "6.1", "trouble": [],
    });
    let started = json!({
        "argv": ["sh"], "user": null, "workdir": null, "tty": false, "env": ["TOKEN"], "timeout_ms": null,
    });
    let agent = json!({
        "id": "a2", "model": "script:f", "title": "fix it", "mode": "auto", "budget": {"tokens": 5},
        "parent": {"agent": "a1", "call": "c1", "depth": 1},
    });
    let with = |mut data: Value, name: &str, value: Value| {
        data[name] = value;
        data
    };
    vec![
        ("body.created", json!({"spec": spec.clone()})),
        ("body.created", json!({"spec": spec, "lease": lease.clone()})),
        (
            "body.started",
            json!({"pid": 7, "enforcement": {"mechanisms": [{"name": "seccomp", "state": "enforced", "reason": "r"}]}}),
        ),
        ("body.started", json!({"pid": 7, "enforcement": {"mechanisms": []}, "receipt": receipt.clone()})),
        ("body.failed", json!({"why": "w", "causes": ["c"]})),
        ("body.paused", json!({})),
        ("body.paused", json!({"swap": true})),
        ("body.resumed", json!({})),
        ("body.receipt", receipt),
        ("body.stopped", json!({"grace_ms": 10000})),
        ("body.leased", lease),
        ("body.expired", json!({"deadline_ms": 7, "then": "kill"})),
        ("body.expired", json!({"deadline_ms": null, "then": {"pause": "files"}})),
        ("body.limited", json!({"memory": 4294967296u64, "pids": 100})),
        ("body.forked", json!({"snapshot": "s1", "bodies": ["a", "b"]})),
        ("body.removed", json!({})),
        ("body.removed", json!({"by": "gc"})),
        ("body.removed", json!({"discarded": true})),
        ("config.changed", json!({"store.budget": 21474836480_u64})),
        ("config.changed", json!({"microvm.firecracker": null})),
        (
            "workspace.brought",
            json!({"workspace": "app", "branch": null, "commit": "c", "base": "b", "layers": ["l1"]}),
        ),
        ("workspace.unsaved", json!({"why": "w", "causes": []})),
        ("home.kept", json!({"home": "h", "body": "abc", "layer": "l1"})),
        ("home.removed", json!({"home": "h"})),
        ("network.allowed", json!({"to": "pypi.org:443", "allowed": true, "why": "w"})),
        ("network.denied", json!({"to": "evil.example:443", "allowed": false, "why": "w"})),
        ("network.asked", json!({"to": "a.example:443", "allowed": false, "why": "w"})),
        ("network.counted", json!({"to": "a.example:443", "allowed": true, "why": "w", "count": 3})),
        ("network.named", json!({"to": "pypi.org", "address": "198.18.0.1"})),
        ("network.spent", json!({"to": "allow a.example:443", "bytes": 65536, "why": "w"})),
        (
            "network.changed",
            json!({"generation": 2, "rules": [{"to": "pypi.org:443"}, {"action": "deny", "to": "*", "why": "w"}]}),
        ),
        ("network.changed", json!({"generation": 3, "rules": [], "secrets": ["github"]})),
        ("secret.stored", json!({"secret": "github", "hosts": ["github.com"]})),
        ("secret.removed", json!({"secret": "github"})),
        ("exec.started", started.clone()),
        ("exec.started", with(started.clone(), "tag", json!("t"))),
        ("exec.started", with(started, "by", json!("envd"))),
        ("exec.ended", json!({"exec": 3, "error": "command not found: x"})),
        (
            "exec.ended",
            json!({
                "exec": 3, "code": 137, "signal": 9, "out_of_memory": true, "timed_out": false,
                "body_end": {"why": "killed", "signal": 9}, "duration_ms": 12,
                "stdout": {"text": "hi\n", "bytes": 3}, "stderr": {"hex": "fffe", "bytes": 2},
            }),
        ),
        (
            "exec.ended",
            json!({
                "exec": 3, "code": 0, "out_of_memory": false, "timed_out": false, "duration_ms": 12,
                "stdout": {"artifact": "0e28", "bytes": 20000, "truncated_to": 8192}, "stderr": {"text": "", "bytes": 0},
            }),
        ),
        ("exec.left", json!({"exec": 3})),
        ("file.written", json!({"path": "/x", "by": "cp"})),
        ("file.read", json!({"path": "/x", "by": "cp"})),
        ("snapshot.created", json!({"snapshot": "s1", "name": null})),
        ("snapshot.removed", json!({"snapshot": "s1", "name": "n"})),
        (
            "image.pulled",
            json!({"image": "i", "digest": "sha256:0", "platform": "linux/amd64", "layers": ["l1"]}),
        ),
        ("template.created", json!({"template": "t1", "name": "n"})),
        ("template.built", json!({"template": "t1", "build": BUILD, "tags": ["latest"], "bytes": 5})),
        ("template.failed", json!({"template": "t1", "build": BUILD, "step": "base", "why": "w"})),
        (
            "template.changed",
            json!({"template": "t1", "name": "n", "public": true, "tags": {"latest": {"build": BUILD, "since": "s"}}}),
        ),
        ("template.removed", json!({"template": "t1", "name": "n"})),
        ("key.created", json!({"key": "k", "name": "n", "scope": "run", "quota": {"bodies": 3}})),
        ("key.revoked", json!({"key": "k"})),
        ("log.sealed", json!({"heads": [{"chain": "body/abc", "seq": 3, "hash": "00"}]})),
        ("request.accepted", json!({"key": "k", "method": "POST", "path": "/v1/bodies"})),
        (
            "request.denied",
            json!({"key": null, "method": "GET", "path": "/", "why": "w", "unwritten_before": 2}),
        ),
        ("agent.created", json!({"spec": agent.clone()})),
        ("agent.created", json!({"spec": agent, "forked_from": {"agent": "a1", "through": 7}})),
        ("agent.driven", json!({"fence": 2, "pid": 77})),
        ("agent.embodied", json!({"body": "abc"})),
        ("agent.instructed", json!({"system": {"blocks": ["be good"]}})),
        ("message.received", json!({"from": "user", "text": "fix it"})),
        (
            "model.asked",
            json!({"turn": 1, "attempt": 0, "model": "script:f", "messages": 1, "bytes": 9, "prefix_bytes": 0}),
        ),
        (
            "model.answered",
            json!({"turn": 1, "message": {"artifact": "00", "artifact_bytes": 9}, "stop": "tool_use",
                "usage": {"input": 1, "output": 2, "cache_read": 3, "cache_write": 4}, "cost_microdollars": null, "took_ms": 5}),
        ),
        ("model.failed", json!({"turn": 1, "attempt": 1, "why": "w", "retry_ms": 10})),
        (
            "call.started",
            json!({"call": "c1", "tool": "ls", "arguments": {"path": "/"}, "risk": "read", "venue": "body", "why": "w", "key": "k"}),
        ),
        (
            "call.ended",
            json!({"call": "c1", "outcome": "done", "result": {"blocks": []}, "exit_code": 1, "took_ms": 5}),
        ),
        ("approval.asked", json!({"call": "c1", "tool": "ls", "arguments": {}, "why": "w"})),
        ("approval.given", json!({"call": "c1", "decision": "reject", "message": "no", "scope": "once"})),
        ("question.asked", json!({"call": "c1", "question": "q", "choices": ["a"]})),
        ("question.answered", json!({"call": "c1", "answer": "a"})),
        ("plan.changed", json!({"todos": [{"content": "c", "status": "in_progress"}]})),
        ("plan.adopted", json!({"plan": "fix-bug", "template": {"phases": []}, "why": "w"})),
        ("phase.entered", json!({"plan": "fix-bug", "phase": null, "check": "passed"})),
        ("checkpoint.taken", json!({"turn": 1, "snapshot": "s1", "took_ms": 5})),
        ("checkpoint.removed", json!({"snapshot": "s1"})),
        ("subagent.started", json!({"call": "c1", "agent": "a2", "role": "tester", "body": "abc"})),
        (
            "subagent.ended",
            json!({"call": "c1", "agent": "a2", "outcome": "done", "answers": 3, "unpriced_answers": 1,
                "usage": {"input": 1, "output": 2, "cache_read": 3, "cache_write": 4}, "cost_microdollars": 5}),
        ),
        (
            "work.merged",
            json!({"body": "abc", "outcome": "conflict", "files": ["a"], "reference": "refs/x", "note": "n"}),
        ),
        ("agent.file_written", json!({"path": "/notes.md", "artifact": "0".repeat(64), "artifact_bytes": 9})),
        ("agent.file_removed", json!({"path": "/notes.md"})),
        (
            "history.compacted",
            json!({"messages": 4, "summary": "s", "file": "/f",
                "usage": {"input": 1, "output": 2, "cache_read": 3, "cache_write": 4}, "cost_microdollars": 5}),
        ),
        ("agent.paused", json!({"reason": "approval", "why": "w"})),
        ("agent.interrupted", json!({"stop": false})),
        ("agent.resumed", json!({})),
        ("agent.budgeted", json!({"budget": {"turns": 3}})),
        ("agent.finished", json!({"summary": "s"})),
        ("agent.rewound", json!({"through": 7, "turn": 1})),
        ("agent.removed", json!({"body_removed": true})),
        (
            "workspace.synced",
            json!({"workspace": "app", "branch": "main", "commit": "c", "reference": "refs/remotes/host/main"}),
        ),
        (
            "workspace.prepared",
            json!({"layer": "m2hfx4pak3v9", "missing": [{"workspace": "app", "dir": "web", "name": "npm ci", "why": "code 1", "retry": true}]}),
        ),
    ]
}

const BUILD: &str = "01234567-89ab-4cde-8f01-23456789abcd";

fn known(kind: &str, data: Value) -> EventData {
    match stored(kind, data).decode() {
        DecodedEvent::Known(data) => data,
        unknown => panic!("{unknown:?}"),
    }
}

#[test]
fn data_of_earlier_versions_is_read_and_written_as_it_was() {
    for (kind, data) in written_before() {
        assert_eq!(known(kind, data.clone()).write().unwrap(), data, "{kind}");
    }
    let kinds: Vec<&str> = written_before().into_iter().map(|(kind, _)| kind).collect();
    let compared_elsewhere = ["workspace.saved", "workspace.landed"];
    for (_, names) in kinds::sections() {
        let seen = names.iter().any(|name| kinds.contains(name) || compared_elsewhere.contains(name));
        assert!(seen, "{names:?} has no data here");
    }
}

#[test]
fn kinds_and_fields_with_new_names_are_read_by_their_earlier_ones() {
    for (earlier, now) in [
        ("workspace.brought", "workspace.imported"),
        ("workspace.unsaved", "workspace.save_failed"),
        ("exec.left", "exec.detached"),
    ] {
        let (_, data) = written_before().into_iter().find(|(kind, _)| *kind == earlier).unwrap();
        assert_eq!(
            (known(earlier, data.clone()).kind(), known(earlier, data.clone())),
            (now, known(now, data))
        );
    }
    let work = |skipped: &str, commit_error: &str| {
        json!({"workspace": "app", "refs": "refs/palisade/abc", "saved": {
            "workspace": "app", "base": "b", "head": "h", "wip": "w", "uncommitted": true, "branches": {"main": "h"},
            skipped: [{"path": "p", "why": "w"}], commit_error: "c",
            "submodules": [{"path": "p", "base": "b", "head": "h", "wip": "w"}],
        }})
    };
    let saved = known("workspace.saved", work("left_out", "trouble"));
    assert_eq!(saved.write().unwrap(), work("skipped", "commit_error"));
    let landing = |auto_executed: &str| json!({"workspace": "app", "landed": {"branch": "main", "from": "a", "to": "b", "commits": 2, auto_executed: ["Makefile"]}});
    let landed = known("workspace.landed", landing("runs_something"));
    assert_eq!(landed.write().unwrap(), landing("auto_executed"));
}

#[test]
fn shorter_forms_of_an_exec_are_read() {
    let template = json!({"argv": ["sh"], "by": "template", "detached": true});
    let started = stored("exec.started", template).data_as::<ExecStarted>().unwrap();
    assert_eq!((started.by, started.detached, started.tty), (Some(StartedBy::Template), true, false));
    let envd = json!({"exec": 3, "code": 0, "signal": null, "timed_out": false, "duration_ms": 4});
    let ended = stored("exec.ended", envd).data_as::<ExecEnded>().unwrap();
    let ExecOutcome::Ended(exit) = ended.outcome else { panic!("{ended:?}") };
    assert_eq!((exit.code, exit.out_of_memory, exit.stdout), (0, None, None));
}

#[test]
fn what_a_newer_version_wrote_is_kept() {
    let newer = stored("agent.started", json!({"model": "m"}));
    assert_eq!(newer.decode(), DecodedEvent::Unknown { kind: "agent.started", data: &json!({"model": "m"}) });
    // A known kind with data that this version does not know.
    let odd = stored("body.expired", json!({"deadline_ms": 1, "then": "archive"}));
    assert!(matches!(odd.decode(), DecodedEvent::Unknown { kind: "body.expired", .. }));
    assert_eq!((odd.is::<BodyExpired>(), odd.data_as::<BodyExpired>()), (true, None));
    // Unknown fields and words: the data is typed, and the event keeps all of it.
    let more = json!({"by": "scheduler", "discarded": true, "reason": {"new": 1}});
    let event = stored("body.removed", more.clone());
    let removed = BodyRemoved { by: Some(RemovedBy::Other("scheduler".into())), discarded: true };
    assert_eq!(event.decode(), DecodedEvent::Known(removed.into()));
    let again: Event = serde_json::from_str(&serde_json::to_string(&event).unwrap()).unwrap();
    assert_eq!((again.digest(), &again.data), (event.hash.clone(), &more));
}

#[test]
fn an_event_tells_no_value_of_a_variable() {
    let (_, data) = written_before().swap_remove(0);
    let mut spec: crate::Spec =
        (*stored("body.created", data).data_as::<BodyCreated>().unwrap().spec).clone();
    spec.env.insert("TOKEN".into(), "hush".into());
    let created = BodyCreated { spec: crate::spec::PublicSpec::new(&spec), lease: None };
    let draft = Draft::about(&"abc".parse().unwrap(), created.clone());
    assert!(!format!("{created:?} {draft:?}").contains("hush"));
    assert_eq!(draft.data["spec"]["env"], json!(["TOKEN"]));
}
