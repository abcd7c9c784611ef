//! Forks and snapshots continue where their microVM was, each with an identity of its own.

use std::{collections::BTreeSet, fs, os::unix::fs::symlink, process::Command};

use fleet::Create;
use proto::event_data::BodyStarted;
use testkit::{Bodies, body_test};

use crate::kills::program;

/// Prints the identity of a microVM, a file of its parent, and a sign that the parent's process continues in
/// it.
const WHO: &str = "cat /etc/hostname /etc/machine-id; hostname; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo; cat ~/file; \
                   a=$(cat /tmp/beat); while test \"$a\" = \"$(cat /tmp/beat)\"; do sleep 0.01; done; echo beats";

#[body_test(except(process = "it tests microVMs"))]
async fn twenty_forks_at_once_are_twenty_machines(t: Bodies) {
    let parent = t.create().await;
    t.sh(&parent, "echo mine > ~/file; (i=0; while :; do i=$((i+1)); echo $i > /tmp/beat; sleep 0.5; done) >/dev/null 2>&1 &").await.ok();
    let forks = t.fleet().snapshots().fork(&parent, 20).await.unwrap();
    let (mut names, mut ids, mut drawn) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for fork in &forks {
        let receipt = fork.receipt.as_ref().expect("a machine has a receipt");
        assert_eq!(
            (receipt.how.as_str(), receipt.receipt.reseeded, receipt.receipt.tree.whole),
            ("thaw", true, true)
        );
        assert_eq!(
            (&receipt.receipt.body, receipt.receipt.generation),
            (fork.id(), 2),
            "it is itself, one thaw after its parent"
        );
        assert!(receipt.clock_offset_ms.abs() <= 500, "{receipt:?}");
        let said = t.sh(fork.id(), WHO).await.ok();
        let lines: Vec<&str> = said.lines().collect();
        let [name, id, host, random, file, beats] = lines[..] else { panic!("{said}") };
        assert_eq!(
            (name, host, file, beats),
            (fork.id().as_str(), fork.id().as_str(), "mine", "beats"),
            "{said}"
        );
        names.insert(name.to_owned());
        ids.insert(id.to_owned());
        drawn.insert(random.to_owned());
    }
    assert_eq!(
        (names.len(), ids.len(), drawn.len()),
        (20, 20, 20),
        "each has a name, an id and randomness of its own"
    );
    let events = t.events();
    let receipts = events
        .iter()
        .filter_map(|event| event.data_as::<BodyStarted>()?.receipt)
        .filter(|receipt| receipt.how == "thaw")
        .count();
    assert_eq!(receipts, 21, "each thaw is written down with its receipt, the warm start of the parent too");
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_snapshot_goes_on_with_what_ran(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo one > ~/file; (while :; do echo x >> /tmp/beat; sleep 0.2; done) >/dev/null 2>&1 &")
        .await
        .ok();
    let snapshot = t.fleet().snapshots().create(&body, Some("s".into())).await.unwrap();
    assert_eq!(t.sh(&body, "echo two > ~/file; cat ~/file").await.ok(), "two", "the parent goes on");
    let thawed = t.make(Create { template: "s".into(), ..t.kept() }).await;
    let beats = "cat ~/file; a=$(wc -c < /tmp/beat); sleep 2; test $(wc -c < /tmp/beat) -gt $a && echo beats";
    assert_eq!(t.sh(thawed.id(), beats).await.ok(), "one\nbeats");
    // Its files without its memory.
    let cold = t.make(Create { template: "s".into(), cold: true, ..t.kept() }).await;
    assert_eq!(cold.receipt.as_ref().map(|receipt| receipt.how.as_str()), Some("boot"));
    let still = "cat ~/file; a=$(wc -c < /tmp/beat); sleep 1; test $(wc -c < /tmp/beat) -eq $a && echo still";
    assert_eq!(t.sh(cold.id(), still).await.ok(), "one\nstill");
    assert!(snapshot.bytes > 1 << 20, "{} bytes", snapshot.bytes);
}

/// Each is a snapshot of a microVM that maps the snapshot of its parent privately.
#[body_test(except(process = "it tests microVMs"))]
async fn memory_goes_on_through_forks_of_forks(t: Bodies) {
    const SUMS: &str = "sha256sum /dev/shm/one /dev/shm/two | cut -c1-64";
    let mut body = t.create().await;
    t.sh(&body, "head -c 6M /dev/urandom > /dev/shm/one; head -c 6M /dev/urandom > /dev/shm/two").await.ok();
    let mut sums = t.sh(&body, SUMS).await.ok();
    for generation in 2..=4 {
        let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0);
        assert_eq!(fork.receipt.as_ref().map(|receipt| receipt.receipt.generation), Some(generation));
        assert_eq!(t.sh(fork.id(), SUMS).await.ok(), sums, "what its parent had");
        sums = t
            .sh(
                fork.id(),
                &format!("head -c 1M /dev/urandom | dd of=/dev/shm/two conv=notrunc status=none; {SUMS}"),
            )
            .await
            .ok();
        let parents = t.sh(&body, SUMS).await.ok();
        assert!(
            parents.lines().next() == sums.lines().next() && parents.lines().last() != sums.lines().last(),
            "and what it changes is its own"
        );
        t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
        body = fork.id().clone();
    }
}

#[body_test(except(process = "it tests microVMs"))]
async fn who_keeps_files_to_himself_can_fork_all_the_same(t: Bodies) {
    let parent = t.create().await;
    t.sh(&parent, "echo mine > ~/file").await.ok();
    let forked = Command::new("sh")
        .args(["-c", "umask 077; exec \"$0\" --data \"$1\" fork \"$2\""])
        .arg(program())
        .arg(t.data())
        .arg(parent.as_str())
        .output()
        .unwrap();
    assert!(forked.status.success(), "{forked:?}");
    let fork = String::from_utf8(forked.stdout).unwrap().trim().parse().unwrap();
    assert_eq!(t.sh(&fork, "cat ~/file").await.ok(), "mine");
}

/// `pal gc` may remove the boot snapshot of a running microVM, because it keeps few of them.
#[body_test(except(process = "it tests microVMs"))]
async fn a_machine_is_forked_when_its_boot_snapshot_is_gone(t: Bodies) {
    let (own, shared) = (t.data().join("vm"), fs::canonicalize(t.data().join("vm")).unwrap());
    fs::remove_file(&own).unwrap();
    fs::create_dir(&own).unwrap();
    for entry in fs::read_dir(shared).unwrap().flatten().filter(|entry| entry.file_name() != "warm") {
        symlink(entry.path(), own.join(entry.file_name())).unwrap();
    }
    let body = t.create().await;
    assert_eq!(t.view(&body).receipt.map(|receipt| receipt.how), Some("thaw".to_owned()));
    t.sh(&body, "echo mine > ~/file; head -c 4M /dev/urandom > /dev/shm/own").await.ok();
    let sum = t.sh(&body, "sha256sum < /dev/shm/own").await.ok();
    fs::remove_dir_all(own.join("warm")).unwrap();
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0);
    assert_eq!(t.sh(fork.id(), "cat ~/file; sha256sum < /dev/shm/own").await.ok(), format!("mine\n{sum}"));
}

/// MicroVMs restored from one snapshot must not generate the same random numbers: the emulated CPU has no
/// generator, so every number comes from the guest's kernel, which gets fresh random bytes at each restore.
#[body_test(except(process = "it tests microVMs"))]
async fn a_machine_has_no_randomness_but_what_it_is_given(t: Bodies) {
    let body = t.create().await;
    let flags = t.sh(&body, "grep -m1 ^flags /proc/cpuinfo").await.ok();
    let has = |wanted: &str| flags.split_ascii_whitespace().any(|flag| flag == wanted);
    assert!(has("sse4_2") && !has("rdrand") && !has("rdseed"), "{flags}");
}
