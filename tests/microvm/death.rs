//! Ends that only a microVM can have.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use fleet::{Create, Exec, ExecRequest, OutputChunk, Status};
use proto::launch::GuestEnd;
use testkit::{Bodies, body_test, leaks, wait};

use crate::kills::program;

#[body_test(except(process = "it tests microVMs"))]
async fn a_hypervisor_that_was_killed_is_noticed_and_explained(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file; sync").await.ok();
    let qemu = leaks::descendants()
        .into_iter()
        .find(|process| process.name.starts_with("qemu-system"))
        .expect("a hypervisor runs");
    leaks::kill(qemu.pid);
    wait::until("its end is noticed", || (t.view(&body).status == Status::Dead).then_some(())).await;
    assert_eq!(t.view(&body).end, Some(GuestEnd::Exit { code: 71 }));
    let refused = t.try_exec(&body, ExecRequest::new(["true"])).await.unwrap_err();
    assert!(refused.message.contains("its hypervisor ended or was killed"), "{refused}");
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "kept");
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_kernel_that_panics_ends_its_machine(t: Bodies) {
    let body = t.create().await;
    let request = ExecRequest {
        user: Some("root".into()),
        timeout: Some(Duration::from_secs(20)),
        ..ExecRequest::new(["sh", "-c", "echo c > /proc/sysrq-trigger"])
    };
    let ran = t.exec(&body, request).await;
    assert_ne!(ran.code, 0);
    wait::until("its end is noticed", || (t.view(&body).status == Status::Dead).then_some(())).await;
    assert_eq!(t.view(&body).end, Some(GuestEnd::Exit { code: 73 }));
    t.fleet().start(&body).await.unwrap();
    t.run(&body, ["true"]).await.ok();
}

#[body_test(except(process = "it tests microVMs"))]
async fn time_is_up_for_a_machine_too(t: Bodies) {
    let mut request: Create = t.kept();
    request.limits.wall = Some(Duration::from_secs(3));
    let body = t.make(request).await.spec.id;
    let ran = t.sh(&body, "while :; do :; done").await;
    assert_eq!(ran.ended.body_end, Some(GuestEnd::Timeout));
}

async fn hear(exec: &mut Exec<'_>, word: &str) {
    let mut said = Vec::new();
    while !String::from_utf8_lossy(&said).contains(word) {
        match exec.next().await.unwrap() {
            Some(OutputChunk::Stdout(bytes)) => said.extend_from_slice(&bytes),
            Some(_) => {}
            None => panic!("it ended before it said {word:?}"),
        }
    }
}

#[body_test(except(process = "tests/body/death.rs has it"))]
async fn a_machine_that_was_told_to_end_is_not_taken_to_run(t: Bodies) {
    let body = t.create().await;
    let before = t.view(&body).pid;
    let script =
        "echo kept > ~/file; trap 'echo told; sleep 4; exit' TERM; echo ready; while :; do sleep 0.1; done";
    let mut exec = t.fleet().exec(&body, ExecRequest::new(["sh", "-c", script])).await.unwrap();
    hear(&mut exec, "ready").await;
    let mut pal = Command::new(program())
        .arg("--data")
        .arg(t.data())
        .args(["stop", "--grace", "30s", body.as_str()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    hear(&mut exec, "told").await;
    pal.kill().unwrap();
    pal.wait().unwrap();
    let started = t.fleet().start(&body).await.unwrap();
    assert_ne!(started.pid, before, "one that is ending is taken to run");
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "kept");
}
