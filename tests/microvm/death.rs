//! Ends that a machine has and a process has not.

use std::time::Duration;

use fleet::{Create, ExecRequest, Status};
use proto::launch::End;
use testkit::{Bodies, body_test, leaks, wait};

#[body_test(except(process = "it is about machines"))]
async fn a_hypervisor_that_was_killed_is_noticed_and_explained(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file; sync").await.ok();
    let qemu = leaks::descendants()
        .into_iter()
        .find(|process| process.name.starts_with("qemu-system"))
        .expect("a hypervisor runs");
    leaks::kill(qemu.pid);
    wait::until("its end is noticed", || (t.view(&body).status == Status::Dead).then_some(())).await;
    assert_eq!(t.view(&body).end, Some(End::Exit { code: 71 }));
    let refused = t.try_exec(&body, ExecRequest::new(["true"])).await.unwrap_err();
    assert!(refused.message.contains("its hypervisor ended or was killed"), "{refused}");
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat ~/file").await.ok(), "kept");
}

#[body_test(except(process = "it is about machines"))]
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
    assert_eq!(t.view(&body).end, Some(End::Exit { code: 73 }));
    t.fleet().start(&body).await.unwrap();
    t.run(&body, ["true"]).await.ok();
}

#[body_test(except(process = "it is about machines"))]
async fn time_is_up_for_a_machine_too(t: Bodies) {
    let mut request: Create = t.kept();
    request.limits.wall = Some(Duration::from_secs(3));
    let body = t.make(request).await.spec.id;
    let ran = t.sh(&body, "while :; do :; done").await;
    assert_eq!(ran.ended.body_end, Some(End::Timeout));
}
