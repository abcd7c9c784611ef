//! A paused microVM uses no CPU time, and its clock is right after the resume.

use std::time::Duration;

use fleet::Status;
use proto::{Event, event_data::BodyReceipt};
use testkit::{Bodies, body_test, leaks};

fn hypervisor(name: &str) -> Vec<leaks::HostProcess> {
    leaks::descendants().into_iter().filter(|process| process.name.starts_with(name)).collect()
}

fn ticks(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().unwrap())
        .sum()
}

#[body_test(except(process = "it tests microVMs"))]
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
    let told: BodyReceipt =
        events.iter().rev().find_map(Event::data_as).expect("its receipt is written down");
    assert_eq!(told.revival.how, "resume");
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_machine_that_is_paused_to_the_disk_takes_no_memory_and_goes_on(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo kept > ~/file; echo memory > /dev/shm/file; (while :; do echo x >> /tmp/beat; sleep 0.2; done) >/dev/null 2>&1 &").await.ok();
    assert_eq!(hypervisor("qemu-system").len(), 1);
    assert_eq!(t.fleet().pause_to_disk(&body).await.unwrap().status, Status::Paused);
    assert_eq!(hypervisor("qemu-system"), Vec::new(), "nothing of it runs");
    for refused in [
        t.try_exec(&body, fleet::ExecRequest::new(["true"])).await.unwrap_err(),
        t.fleet().snapshots().fork(&body, 1).await.unwrap_err(),
        t.fleet().start(&body).await.unwrap_err(),
    ] {
        assert!(refused.hints[0].contains("pal resume"), "{refused}");
    }
    let view = t.fleet().resume(&body).await.unwrap();
    let receipt = view.receipt.expect("a machine that goes on proves itself");
    assert_eq!((view.status, receipt.how.as_str(), receipt.receipt.generation), (Status::Running, "thaw", 2));
    let beats = "cat ~/file /dev/shm/file; a=$(wc -c < /tmp/beat); while test $(wc -c < /tmp/beat) -eq $a; do sleep 0.1; done; echo beats";
    assert_eq!(t.sh(&body, beats).await.ok(), "kept\nmemory\nbeats");
    assert!(!t.data().join("bodies").join(body.as_str()).join("swap").exists(), "and nothing waits any more");
    // Without its memory it is a stopped Body.
    t.fleet().pause_to_disk(&body).await.unwrap();
    assert_eq!(t.fleet().stop(&body, Duration::from_secs(1)).await.unwrap().status, Status::Stopped);
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat ~/file; ls /dev/shm").await.ok(), "kept");
}
