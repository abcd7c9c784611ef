//! The cost of looking and saving: no growth, few descriptors, and fsync only where it is needed.

use std::{path::Path, process::Command};

use fleet::{Discard, Force, LandSelection, LandTarget};
use testkit::{Bodies, body_test};

use crate::repo::{HostRepo, pal_command, person, save};

fn usage(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(found) if found.is_dir() => usage(&entry.path()),
            Ok(found) => found.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn looking_again_and_again_leaves_nothing(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    let git = t.body_dir(&body).join("git/app");
    t.fleet().workspaces().review_files(&body, None).unwrap();
    let before = usage(&git);
    t.sh(
        &body,
        "head -c 3000000 /dev/urandom > big; truncate -s 96M holes; echo '* text=auto' > .gitattributes",
    )
    .await
    .ok();
    for round in 0..2 {
        t.sh(&body, &format!("echo {round} > file")).await.ok();
        let look = t.fleet().workspaces().review_files(&body, None).unwrap();
        assert_eq!(look.diff.files.len(), 4);
        assert!(usage(&git) < 48 << 20, "holes are no data: {}", usage(&git));
    }
    assert_eq!(usage(&git), before, "nothing of a look stays");
    // The next look removes files that a killed process left.
    let stale = git.join("stage-4294967295-0123456789abcdef");
    std::fs::create_dir_all(stale.join("files")).unwrap();
    t.fleet().workspaces().review(&body, None).unwrap();
    assert!(!stale.exists());
    t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn a_wide_tree_needs_few_descriptors(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "mkdir wide; cd wide; seq 600 | xargs mkdir; for d in *; do echo $d > $d/f; done; git add .; git commit -qm wide").await.ok();
    let said = Command::new("prlimit")
        .args(["--nofile=96:96", "--"])
        .args(pal_command(&t, &["save", body.as_str()]))
        .output()
        .unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    assert_eq!(
        host.git(&["ls-tree", "-r", "--name-only", &format!("refs/palisade/{body}/wip"), "wide/"])
            .lines()
            .count(),
        600
    );
    assert_eq!(
        host.git(&["rev-parse", &format!("refs/palisade/{body}/wip")]),
        host.git(&["rev-parse", &format!("refs/palisade/{body}/head")]),
        "its commit is whole"
    );
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn what_is_saved_is_on_the_disk_before_it_has_a_name(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo a > a; git add a; git commit -qm a; echo b > b").await.ok();
    let trace = t.dir().join("trace");
    let mut traced = Command::new("strace");
    traced
        .args(["-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat,renameat2,link", "-o"])
        .arg(&trace)
        .arg("--");
    let said = traced.args(pal_command(&t, &["save", body.as_str()])).output().expect("strace can be run");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let trace = std::fs::read_to_string(trace).unwrap();
    let objects = host.dir.join(".git/objects").display().to_string();
    let at = |what: &dyn Fn(&str) -> bool| trace.lines().position(what);
    let synced: Vec<usize> = trace
        .lines()
        .enumerate()
        .filter(|(_, line)| line.contains("fsync(") && line.contains(&objects))
        .map(|(at, _)| at)
        .collect();
    let named = at(&|line| line.contains("rename") && line.contains(&format!("refs/palisade/{body}/wip")))
        .expect("the name is set");
    assert!(
        synced.len() >= 2 && synced.iter().all(|at| *at < named),
        "a pack and its index, before the name:\n{trace}"
    );
    assert!(
        trace
            .lines()
            .take(named)
            .any(|line| line.contains("fsync(") && line.contains(&format!("refs/palisade/{body}"))),
        "and the name itself:\n{trace}"
    );
    // A look does not wait for the disk.
    let trace = t.dir().join("trace of a look");
    Command::new("strace")
        .args(["-f", "-y", "-e", "trace=fsync,fdatasync", "-o"])
        .arg(&trace)
        .arg("--")
        .args(pal_command(&t, &["diff", body.as_str()]))
        .output()
        .unwrap();
    let trace = std::fs::read_to_string(trace).unwrap();
    assert!(!trace.contains("git/"), "{trace}");
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn a_quarantine_that_was_torn_costs_nothing(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo a > a; git add a; git commit -qm a; git repack -qad").await.ok();
    assert!(save(&t, &body).await.is_whole());
    let packs = t.body_dir(&body).join("git/app/objects/pack");
    let torn = std::fs::read_dir(&packs)
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|name| name == "pack" || name == "idx"));
    let torn = torn
        .map(|entry| {
            std::fs::set_permissions(entry.path(), std::os::unix::fs::PermissionsExt::from_mode(0o600))
                .and_then(|()| std::fs::write(entry.path(), b""))
                .unwrap()
        })
        .count();
    assert!(torn >= 2, "there is something to tear");
    t.sh(&body, "echo b > b; git add b; git commit -qm b; echo c > c").await.ok();
    let saved = save(&t, &body).await;
    assert!(saved.is_whole(), "{saved:?}");
    assert_eq!(host.git(&["log", "--format=%s", &format!("refs/palisade/{body}/head")]), "b\na\nfirst");
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn commits_without_number_are_not_put_on_top_of_others(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    let many = r#"(for i in $(seq 1001); do printf 'commit refs/heads/main\ncommitter a <a@b> %s +0000\ndata 2\nx\n' $((1700000000 + i)); done) | sed "4a from $(git rev-parse HEAD)" | git fast-import --quiet --force; git rev-list --count HEAD"#;
    assert_eq!(t.sh(&body, many).await.ok(), "1002");
    t.sh(&body, "git reset -q --hard; echo one > one; git add one; git commit -qm one").await.ok();
    host.commit("echo ours > ours", "meanwhile");
    let before = host.git(&["rev-parse", "main"]);
    let land = async |how: LandTarget, what: LandSelection| {
        t.fleet().workspaces().land(&body, None, how, what, &person()).await
    };
    let failure = land(LandTarget::Onto("main".into()), LandSelection::All).await.unwrap_err();
    let told = testkit::explain(&failure);
    assert!(told.contains("more than 1000 commits"), "{told}");
    assert_eq!(host.git(&["rev-parse", "main"]), before, "nothing has moved");
    // They are saved all the same, and land as one commit.
    assert!(failure.hints.iter().any(|hint| hint.contains("--squash")), "{told}");
    let squash = LandSelection::Squash { message: None };
    assert_eq!(land(LandTarget::Branch("many".into()), squash).await.unwrap().commits, 1);
    t.sh(&body, "git reset -q --hard HEAD~1000; echo two > two; git add two; git commit -qm two").await.ok();
    assert_eq!(
        land(LandTarget::Onto("main".into()), LandSelection::All).await.unwrap().commits,
        1,
        "a few go on top, without the empty ones"
    );
}
