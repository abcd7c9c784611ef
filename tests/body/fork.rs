//! Forks and snapshots: the files of one moment, private from then on.

use std::time::Duration;

use fleet::{Create, Force, Status};
use proto::{BodyId, Kind};
use testkit::{Bodies, body_test};

/// Everything that a file system can hold and a copy can lose.
const FURNISH: &str = r#"
    cd ~ && umask 022
    echo plain > plain; echo secret > private; chmod 600 private; mkdir -m 1777 sticky; echo run > tool; chmod 755 tool
    ln -s plain link; ln -s /no/such dangling; ln plain hard
    truncate -s 64M sparse; printf end >> sparse
    mkdir -p tree/deep/er; echo leaf > tree/deep/er/leaf; mv tree moved
    mkdir gone; echo x > gone/x; rm -r gone; mkdir gone; echo new > gone/y
    f=$(printf 'odd\377\n name'); echo odd > "$f"
    touch -d '2001-02-03 04:05:06 UTC' old; mkfifo pipe
    perl -e 'my $n = (`uname -m` =~ /x86_64/) ? 188 : 5; my ($p, $k, $v) = ("plain", "user.note", "kept"); syscall($n, $p, $k, $v, 4, 0) == 0 or die $!'
"#;

/// A description of all that, equal in the original and in every true copy.
const DESCRIBE: &str = r#"
    cd ~
    find . -mindepth 1 \( -type l -printf '%P %y %l\n' \) -o \( -type d -printf '%P %y %m %U\n' \) -o -printf '%P %y %m %U %n %s %TY\n' | LC_ALL=C sort | cat -v
    cat plain private gone/y moved/deep/er/leaf; tail -c 3 sparse; echo; cat odd*
    [ $(stat -c %i plain) = $(stat -c %i hard) ] && echo one file
    [ $(stat -c %b sparse) -lt 1000 ] && echo sparse
    perl -e 'my $n = (`uname -m` =~ /x86_64/) ? 191 : 8; my ($p, $k, $b) = ("plain", "user.note", " " x 4); syscall($n, $p, $k, $b, 4); print "$b\n"'
"#;

async fn describe(t: &Bodies, body: &BodyId) -> String {
    t.sh(body, DESCRIBE).await.ok()
}

async fn fork(t: &Bodies, body: &BodyId) -> BodyId {
    let views = t
        .fleet()
        .snapshots()
        .fork(body, 1)
        .await
        .unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)));
    assert_eq!(
        (views.len(), views[0].status, views[0].spec.parent.as_ref()),
        (1, Status::Running, Some(body))
    );
    views[0].spec.id.clone()
}

#[body_test]
async fn a_fork_has_every_file_as_it_was(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, FURNISH).await.ok();
    let described = describe(&t, &body).await;
    assert!(
        described.contains("one file") && described.contains("sparse") && described.ends_with("kept"),
        "{described}"
    );
    let child = fork(&t, &body).await;
    assert_eq!(describe(&t, &child).await, described);
    let grandchild = fork(&t, &child).await;
    assert_eq!(describe(&t, &grandchild).await, described, "a fork of a fork");
}

#[body_test]
async fn forks_of_running_paused_and_stopped_bodies_are_alike(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo one > ~/file; (while :; do date > ~/busy; done) >/dev/null 2>&1 &").await.ok();
    let running = fork(&t, &body).await;
    assert_eq!(t.view(&body).status, Status::Running, "it goes on");
    t.fleet().pause(&body).await.unwrap();
    let paused = fork(&t, &body).await;
    assert_eq!(t.view(&body).status, Status::Paused, "it stays paused");
    t.fleet().resume(&body).await.unwrap();
    t.fleet().stop(&body, Duration::from_millis(100)).await.unwrap();
    let stopped = fork(&t, &body).await;
    assert_eq!(t.view(&body).status, Status::Stopped, "it stays stopped");
    for child in [running, paused, stopped] {
        assert_eq!(
            t.sh(&child, "cat ~/file; grep -l '^date' /proc/[0-9]*/cmdline | wc -l").await.text(),
            "one\n0",
            "its processes are its own"
        );
    }
}

#[body_test]
async fn what_is_deleted_and_renamed_stays_so_in_forks(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "mkdir -p ~/a/b ~/full; echo 1 > ~/a/b/f; echo old > ~/full/old; echo x > ~/doomed")
        .await
        .ok();
    let child = fork(&t, &body).await;
    // Now all of this is in a lower layer: deleting makes whiteouts, replacing makes opaque directories.
    t.sh(
        &child,
        "rm ~/doomed; mv ~/a ~/z && echo 2 >> ~/z/b/f; rm -r ~/full; mkdir ~/full; echo new > ~/full/new",
    )
    .await
    .ok();
    const LOOK: &str = "cd ~; find . -mindepth 1 | LC_ALL=C sort; cat z/b/f full/new";
    let expected = t.sh(&child, LOOK).await.ok();
    assert_eq!(expected, "./full\n./full/new\n./z\n./z/b\n./z/b/f\n1\n2\nnew");
    let grandchild = fork(&t, &child).await;
    assert_eq!(t.sh(&grandchild, LOOK).await.ok(), expected);
    t.sh(&grandchild, "echo back > ~/doomed; mkdir -p ~/a/b").await.ok();
    let last = fork(&t, &grandchild).await;
    assert_eq!(t.sh(&last, "cat ~/doomed; ls -A ~/a/b").await.ok(), "back");
    assert_eq!(
        t.sh(&body, "cat ~/doomed ~/a/b/f ~/full/old").await.ok(),
        "x\n1\nold",
        "the first is as it was"
    );
}

#[body_test(except(
    user = "only root of a Body can change files of the host's directories; the account's test covers that"
))]
async fn changes_to_what_the_host_shows_are_forked_too(t: Bodies) {
    let body = t.create().await;
    let root = |script: &str| fleet::ExecRequest {
        user: Some("root".into()),
        ..fleet::ExecRequest::new(["sh", "-c", script])
    };
    t.exec(&body, root("set -e; rm /etc/resolv.conf; echo mine > /etc/mine; printf '#!/bin/sh\necho tool' > /usr/local/bin/own; chmod 755 /usr/local/bin/own")).await.ok();
    let child = fork(&t, &body).await;
    assert_eq!(
        t.sh(&child, "cat /etc/mine; own; ls /etc/resolv.conf 2>&1 | grep -c 'No such file'").await.ok(),
        "mine\ntool\n1"
    );
    assert!(
        std::path::Path::new("/usr/bin/env").exists() && !std::path::Path::new("/usr/local/bin/own").exists(),
        "the host is as it was"
    );
}

#[body_test]
async fn many_forks_are_private_and_outlive_their_parent(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "echo base > ~/file").await.ok();
    let views = t.fleet().snapshots().fork(&body, 3).await.unwrap();
    for (index, view) in views.iter().enumerate() {
        t.sh(view.id(), &format!("echo {index} >> ~/file")).await.ok();
    }
    t.sh(&body, "echo parent >> ~/file").await.ok();
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    let mut seen = Vec::new();
    for (index, view) in views.iter().enumerate() {
        let told = t
            .sh(view.id(), "cat ~/file; hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id")
            .await
            .ok();
        assert!(told.starts_with(&format!("base\n{index}\n")), "{told}");
        let id = told.lines().skip(2).map(str::to_owned).collect::<Vec<_>>();
        assert!(id.iter().all(|line| !seen.contains(line)), "clones are told apart: {id:?}");
        seen.extend(id);
    }
    t.fleet().stop(views[0].id(), Duration::ZERO).await.unwrap();
    t.fleet().start(views[0].id()).await.unwrap();
    assert_eq!(t.sh(views[0].id(), "cat ~/file").await.ok(), "base\n0", "also after a restart");
    for view in &views {
        t.fleet().remove(view.id(), Force::Yes).await.unwrap();
    }
    assert_eq!(
        t.fleet().snapshots().list().unwrap().len(),
        0,
        "what was taken for forks goes with the last of them"
    );
}

#[body_test(except(microvm = "a `pal run` microVM has its files on a disk, too, and can be forked"))]
async fn impossible_forks_are_refused(t: Bodies) {
    let body = t.create().await;
    for count in [0, 1001, u32::MAX] {
        assert_eq!(t.fleet().snapshots().fork(&body, count).await.unwrap_err().kind, Kind::Usage);
    }
    let passing = t.make(t.passing()).await.spec.id;
    let refused = t.fleet().snapshots().fork(&passing, 1).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict, "{refused}");
    assert_eq!(t.fleet().snapshots().list().unwrap().len(), 0, "and leave nothing");
    assert_eq!(t.run(&passing, ["true"]).await.code, 0, "and do no harm");
}

#[body_test]
async fn a_snapshot_is_a_template_by_id_and_by_name(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, FURNISH).await.ok();
    let described = describe(&t, &body).await;
    let snapshot = t.fleet().snapshots().create(&body, Some("base-1".into())).await.unwrap();
    t.sh(&body, "echo later >> ~/plain").await.ok();
    for template in [snapshot.id.to_string(), "base-1".into(), snapshot.id.as_str()[..6].to_owned()] {
        let passing = t.make(Create { template: template.clone(), ..t.passing() }).await;
        assert_eq!(describe(&t, passing.id()).await, described, "{template}");
        t.sh(passing.id(), "rm -rf ~/moved ~/plain; echo other > ~/plain").await.ok();
        t.fleet().remove(passing.id(), Force::Yes).await.unwrap();
    }
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    let kept = t.make(Create { template: "base-1".into(), ..t.kept() }).await;
    assert_eq!(describe(&t, kept.id()).await, described, "it outlives the Body it was taken of");
}

#[body_test(except(microvm = "a snapshot of a microVM is complete in itself and depends on no other"))]
async fn a_snapshot_that_somebody_stands_on_stays(t: Bodies) {
    let body = t.create().await;
    let first = t.fleet().snapshots().create(&body, Some("first".into())).await.unwrap();
    let kept = t.make(Create { template: "first".into(), ..t.kept() }).await;
    let refused = t.fleet().snapshots().remove("first").unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict, "{refused}");
    assert!(refused.message.contains(kept.id().as_str()), "{refused}");
    let second = t.fleet().snapshots().create(kept.id(), None).await.unwrap();
    t.fleet().remove(kept.id(), Force::Yes).await.unwrap();
    let refused = t.fleet().snapshots().remove("first").unwrap_err();
    assert!(refused.message.contains(second.id.as_str()), "{refused}");
    assert_eq!(t.fleet().snapshots().remove(second.id.as_str()).unwrap(), second.id);
    assert_eq!(t.fleet().snapshots().remove("first").unwrap(), first.id);
    assert_eq!(t.fleet().snapshots().remove("first").unwrap_err().kind, Kind::NotFound);
}

#[body_test]
async fn names_of_snapshots_are_plain_and_unique(t: Bodies) {
    let body = t.create().await;
    t.fleet().snapshots().create(&body, Some("taken".into())).await.unwrap();
    assert_eq!(
        t.fleet().snapshots().create(&body, Some("taken".into())).await.unwrap_err().kind,
        Kind::Conflict
    );
    for bad in ["", "host", "a b", "a/b", "..\0", "é", &"x".repeat(65), "\u{1b}[31m"] {
        let refused = t
            .fleet()
            .snapshots()
            .create(&body, Some(bad.into()))
            .await
            .err()
            .unwrap_or_else(|| panic!("{bad:?} was taken"));
        assert_eq!(refused.kind, Kind::Usage, "{bad:?}");
    }
    assert_eq!(t.fleet().snapshots().list().unwrap().len(), 1);
}

#[body_test(except(microvm = "a fork of a microVM holds its memory and its whole disk"))]
async fn a_fork_costs_what_was_changed_and_not_what_is_below(t: Bodies) {
    let body = t.create().await;
    t.sh(&body, "head -c 64M /dev/urandom > ~/large").await.ok();
    let large = kept(&t);
    let first = fork(&t, &body).await;
    let copied = kept(&t) - large;
    assert!(
        copied >= 64 << 20,
        "a control: what was changed is copied, and that shows here ({copied} bytes)"
    );
    t.sh(&first, "echo small > ~/small").await.ok();
    let before = kept(&t);
    let second = fork(&t, &first).await;
    let cost = kept(&t).saturating_sub(before);
    assert!(cost < 1 << 20, "a fork of a small change cost {cost} bytes");
    assert_eq!(t.sh(&second, "cat ~/small; stat -c %s ~/large").await.ok(), format!("small\n{}", 64 << 20));
}

/// Bytes on disk of all Bodies and snapshots.
fn kept(t: &Bodies) -> u64 {
    fn below(path: &std::path::Path) -> u64 {
        let own = std::fs::symlink_metadata(path)
            .map_or(0, |found| std::os::unix::fs::MetadataExt::blocks(&found) * 512);
        let inside = std::fs::read_dir(path).into_iter().flatten().flatten();
        own + inside
            .map(
                |entry| {
                    if entry.file_type().is_ok_and(|kind| kind.is_symlink()) {
                        0
                    } else {
                        below(&entry.path())
                    }
                },
            )
            .sum::<u64>()
    }
    ["bodies", "snapshots"].map(|place| below(&t.data().join(place))).iter().sum()
}
