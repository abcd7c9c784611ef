//! Memory that a microVM frees goes back to the host, and the rest stays intact.

use std::time::{Duration, Instant};

use testkit::{Bodies, body_test, leaks};

/// How much memory the microVM uses and frees.
const TAKEN_MIB: u64 = 100;
/// Its kernel reports free blocks every two seconds, and keeps some for itself.
const BACK_MIB: u64 = 70;
const PATIENCE: Duration = Duration::from_secs(60);

/// Anonymous memory of the hypervisor.
fn own_mib() -> u64 {
    let qemu = leaks::descendants()
        .into_iter()
        .find(|process| process.name.starts_with("qemu-system"))
        .expect("a hypervisor runs");
    let status = std::fs::read_to_string(format!("/proc/{}/status", qemu.pid)).unwrap();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .to_owned();
    kib.parse::<u64>().unwrap() >> 10
}

async fn gives_back(t: &Bodies, body: &proto::BodyId) {
    t.sh(body, "head -c 6M /dev/urandom > /dev/shm/kept").await.ok();
    let sum = t.sh(body, "sha256sum /dev/shm/kept").await.ok();
    let before = own_mib();
    t.sh(body, &format!("head -c {TAKEN_MIB}M /dev/zero | tr '\\0' x > /dev/shm/big")).await.ok();
    let taken = own_mib();
    assert!(taken >= before + TAKEN_MIB - 10, "it took {TAKEN_MIB} MiB: {before} before, {taken} now");
    t.sh(body, "rm /dev/shm/big").await.ok();
    let deadline = Instant::now() + PATIENCE;
    while own_mib() + BACK_MIB > taken {
        assert!(
            Instant::now() < deadline,
            "{taken} MiB when it had {TAKEN_MIB} more, {} since it gave them up",
            own_mib()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(t.sh(body, "sha256sum /dev/shm/kept").await.ok(), sum, "what it keeps is what it was");
    let again = format!(
        "head -c {TAKEN_MIB}M /dev/zero | tr '\\0' y > /dev/shm/big; tr -d y < /dev/shm/big | wc -c; rm /dev/shm/big"
    );
    assert_eq!(t.sh(body, &again).await.ok(), "0", "and it can take as much again");
}

/// A restored microVM maps a file privately that others are restored from, too.
#[body_test(except(process = "it tests microVMs"))]
async fn a_thawed_machine_gives_memory_back_and_what_it_was_thawed_from_stays(t: Bodies) {
    let body = t.create().await;
    assert_eq!(t.view(&body).receipt.map(|receipt| receipt.how), Some("thaw".to_owned()));
    gives_back(&t, &body).await;
    let sum = t.sh(&body, "sha256sum /dev/shm/kept").await.ok();
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0);
    assert_eq!(t.sh(fork.id(), "sha256sum /dev/shm/kept").await.ok(), sum, "a fork of it has what it has");
    t.run(&t.create().await, ["true"]).await.ok();
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_booted_machine_gives_memory_back(t: Bodies) {
    let body = t.make(fleet::Create { cold: true, ..t.kept() }).await.spec.id;
    gives_back(&t, &body).await;
}

#[body_test(except(process = "it tests microVMs"))]
async fn what_a_machine_uses_is_measured(t: Bodies) {
    let body = t.create().await;
    let before = t.fleet().access().metrics(&body).expect("one that runs is measured");
    assert_eq!(before.machine_bytes, Some(t.view(&body).spec.limits.memory.0));
    assert!(before.memory_bytes > 1 << 20, "{before:?}");
    t.sh(&body, "head -c 20M /dev/urandom > ~/file; sync; sha256sum /bin/sh").await.ok();
    let after = t.fleet().access().metrics(&body).expect("and again");
    assert!(after.cpu_ms > before.cpu_ms, "{before:?} {after:?}");
    let written = after.disks["upper"].written_bytes - before.disks["upper"].written_bytes;
    assert!((20 << 20..60 << 20).contains(&written), "{written}");
    assert!(after.disks.contains_key("image0") && after.disks["image0"].written_bytes == 0, "{after:?}");
    t.fleet().pause(&body).await.unwrap();
    assert_eq!(t.fleet().access().metrics(&body), None, "one that stands still is not asked");
    t.fleet().resume(&body).await.unwrap();
}
