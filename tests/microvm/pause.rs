//! A machine that is paused takes no processor time, and its clock is right when it goes on.

use std::time::Duration;

use fleet::Status;
use testkit::{Bodies, body_test, leaks};

fn hypervisor(name: &str) -> Vec<leaks::Process> {
    leaks::descendants().into_iter().filter(|process| process.name.starts_with(name)).collect()
}

fn ticks(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
}

#[body_test(except(process = "it is about machines"))]
async fn a_paused_machine_stands_still_and_goes_on_in_time(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "(while :; do :; done) >/dev/null 2>&1 &").await.ok();
    let [qemu] = &hypervisor("qemu-system")[..] else { panic!("one hypervisor: {:?}", hypervisor("qemu")) };
    let before = ticks(qemu.pid);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(ticks(qemu.pid) > before, "it is busy");
    assert_eq!(t.fleet().pause(&body).await.unwrap().status, Status::Paused);
    let at_pause = ticks(qemu.pid);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(ticks(qemu.pid), at_pause, "it stands still");
    let view = t.fleet().resume(&body).await.unwrap();
    let receipt = view.receipt.expect("a machine that goes on proves itself");
    assert!(view.status == Status::Running && receipt.clock_offset_ms.abs() <= 500, "{receipt:?}");
    let said: f64 = t.sh(&body, "date +%s.%N").await.ok().parse().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((now - said).abs() < 1.5, "the time of the answer included: {now} {said}");
    let events = t.events();
    let told = events.iter().rev().find(|event| event.kind == "body.receipt").expect("its receipt is written down");
    assert_eq!(told.data["how"], "resume");
}
