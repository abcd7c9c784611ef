//! Work that cannot be lost: saved before anything ends; if that fails, the command is refused.

use std::time::Duration;

use fleet::{Discard, Force};
use proto::Kind;
use testkit::{Bodies, body_test};

use crate::repo::{HostRepo, save};

const WORK: &str = "echo committed > committed; git add committed; git commit -qm committed; echo staged > staged; git add staged; echo new > new; echo forced > x.log; git add -f x.log; mkdir target; echo junk > target/junk; rm numbers";

fn names(host: &HostRepo, body: &proto::BodyId) -> Vec<String> {
    host.git(&["ls-tree", "-r", "--name-only", &format!("refs/palisade/{body}/wip")])
        .lines()
        .map(str::to_owned)
        .collect()
}

const SAVED: [&str; 9] =
    [".gitignore", "binary", "committed", "link", "new", "run.sh", "src/deep/x", "src/main.rs", "staged"];

fn saved() -> Vec<String> {
    let mut all: Vec<String> = SAVED.iter().map(|name| (*name).to_owned()).collect();
    all.push("x.log".into());
    all
}

#[body_test]
async fn removing_and_stopping_save_everything_tracked_and_untracked(t: Bodies) {
    let host = HostRepo::plain(&t);
    let stopped = host.body(&t).await;
    t.sh(&stopped, WORK).await.ok();
    t.fleet().stop(&stopped, Duration::ZERO).await.unwrap();
    assert_eq!(names(&host, &stopped), saved());
    let removed = host.body(&t).await;
    t.sh(&removed, WORK).await.ok();
    t.fleet().remove(&removed, Force::Yes).await.unwrap();
    assert_eq!(names(&host, &removed), saved());
    assert_eq!(
        host.git(&["log", "-1", "--format=%an %s", &format!("refs/palisade/{removed}/head")]),
        "agent committed"
    );
    assert!(t.kinds(&removed).contains(&"workspace.saved".to_owned()));
    // A Body without changes leaves nothing behind.
    let idle = host.body(&t).await;
    t.fleet().remove(&idle, Force::Yes).await.unwrap();
    assert_eq!(host.git(&["for-each-ref", &format!("refs/palisade/{idle}/")]), "");
}

#[body_test]
async fn a_body_that_died_can_still_be_saved(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    // A kernel that dies with its Body keeps what was synced.
    t.sh(&body, &format!("{WORK}; sync")).await.ok();
    testkit::kill(t.view(&body).pid.unwrap());
    testkit::wait::blocking(Duration::from_secs(5), "it is dead", || {
        (t.view(&body).pid.is_none()).then_some(())
    });
    save(&t, &body).await;
    assert_eq!(names(&host, &body), saved());
    // Starting it again saves by itself.
    let other = host.body(&t).await;
    t.sh(&other, &format!("{WORK}; sync")).await.ok();
    testkit::kill(t.view(&other).pid.unwrap());
    testkit::wait::blocking(Duration::from_secs(5), "it is dead", || {
        (t.view(&other).pid.is_none()).then_some(())
    });
    t.fleet().start(&other).await.unwrap();
    assert_eq!(names(&host, &other), saved());
}

#[body_test]
async fn a_broken_git_costs_its_commits_and_no_file_and_removal_waits_for_a_word(t: Bodies) {
    let host = HostRepo::plain(&t);
    for (what, breaking) in [
        ("gone", "rm -rf .git"),
        ("a file", "rm -rf .git; echo 'gitdir: /tmp/x' > .git"),
        ("a link", "rm -rf .git; ln -s /etc .git"),
        ("a pipe", "rm -rf .git; mkfifo .git"),
        ("refs that are pipes", "rm -rf .git/refs .git/packed-refs; mkfifo .git/refs"),
        ("a head that is a pipe", "rm .git/HEAD; mkfifo .git/HEAD"),
        ("no head", "echo nonsense > .git/HEAD"),
        ("a head that is nowhere", "echo 'ref: refs/heads/none' > .git/HEAD"),
        ("a commit that is nowhere", "git rev-parse HEAD | tr 0-9 1-90 > .git/refs/heads/main"),
        ("cut objects", "find .git/objects -type f -size +0 | grep -v pack | xargs -n1 truncate -s 5"),
        ("an index of noise", "head -c 100000 /dev/urandom > .git/index"),
    ] {
        let body = host.body(&t).await;
        t.sh(
            &body,
            "echo committed > committed; git add committed; git commit -qm committed; echo new > new",
        )
        .await
        .ok();
        t.sh(&body, &format!("chmod -R u+w .git; {breaking}")).await.ok();
        let saved = save(&t, &body).await;
        assert_eq!(host.wip_file(&body, "committed").as_deref(), Some("committed"), "{what}");
        assert_eq!(host.wip_file(&body, "new").as_deref(), Some("new"), "{what}");
        let refused = t.fleet().remove(&body, Force::Yes).await;
        if what == "an index of noise" {
            assert!(saved.is_whole(), "{what}: {saved:?}");
            refused.unwrap();
            continue;
        }
        assert!(saved.commit_error.is_some(), "{what}: {saved:?}");
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind, Kind::Conflict, "{what}: {refused}");
        assert!(refused.hints.iter().any(|hint| hint.contains("--discard")), "{what}");
        let lost = t.fleet().workspaces().unsaved_work(&body).unwrap();
        assert!(
            lost.saved
                && !lost.lines.is_empty()
                && lost.lines.iter().all(|line| line.starts_with("commits of ")),
            "{what}: {lost:?}"
        );
        t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
    }
}

#[body_test]
async fn what_git_cannot_hold_keeps_the_body(t: Bodies) {
    let host = HostRepo::plain(&t);
    for (what, script, path) in [
        ("a repository inside", "git init -q inner; echo x > inner/x", "inner/.git"),
        ("a huge file", "truncate -s 3G huge", "huge"),
        ("a name like .git", "mkdir .GIT; echo x > .GIT/config", ".GIT"),
        ("too deep", "p=.; for i in $(seq 140); do p=$p/d; done; mkdir -p $p; echo x > $p/x", "d/d"),
    ] {
        let body = host.body(&t).await;
        // The control: without it everything is saved.
        t.sh(&body, "echo fine > fine").await.ok();
        assert!(save(&t, &body).await.is_whole(), "{what}");
        t.sh(&body, script).await.ok();
        let saved = save(&t, &body).await;
        assert!(saved.skipped.iter().any(|left| left.path.starts_with(path)), "{what}: {saved:?}");
        assert_eq!(host.wip_file(&body, "fine").as_deref(), Some("fine"), "{what}");
        let sleeper = t.sh(&body, "setsid sleep 4321 >/dev/null 2>&1 & echo $!").await.ok();
        let refused = t.fleet().remove(&body, Force::Yes).await.unwrap_err();
        assert_eq!(refused.kind, Kind::Conflict, "{what}");
        assert!(t.body_dir(&body).join("spec.json").exists(), "{what}: it is still there");
        // A refusal ends nothing, and its hint names one path and not the whole workspace.
        t.sh(&body, &format!("kill -0 {sleeper}")).await.ok();
        let copies: Vec<&String> = refused.hints.iter().filter(|hint| hint.contains("pal cp")).collect();
        let named = path.trim_end_matches("/.git");
        assert!(!copies.is_empty() && copies.iter().all(|hint| hint.contains(named)), "{what}: {copies:?}");
        // A git directory comes out as a bundle: `pal cp` refuses the directory itself.
        assert_eq!(copies[0].contains(" bundle create "), path.ends_with("/.git"), "{what}: {copies:?}");
        t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
    }
}

#[body_test]
async fn without_the_repository_nothing_is_removed(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo work > work").await.ok();
    let moved = t.dir().join("moved");
    std::fs::rename(&host.dir, &moved).unwrap();
    assert_eq!(t.fleet().remove(&body, Force::Yes).await.unwrap_err().kind, Kind::NotFound);
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat work").await.ok(), "work", "nothing happened to it");
    std::fs::rename(&moved, &host.dir).unwrap();
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert_eq!(host.wip_file(&body, "work").as_deref(), Some("work"));
}

#[body_test]
async fn saving_twice_changes_nothing_and_saving_while_it_runs_disturbs_nobody(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "(while :; do date > busy; done) >/dev/null 2>&1 & echo work > work").await.ok();
    let one = save(&t, &body).await;
    assert_eq!(t.view(&body).status, fleet::Status::Running);
    t.sh(&body, "pkill -f 'while :' || kill $(pgrep -f busy) 2>/dev/null; sleep 0.1; git status --porcelain")
        .await;
    t.fleet().stop(&body, Duration::ZERO).await.unwrap();
    let two = save(&t, &body).await;
    let three = save(&t, &body).await;
    assert_eq!(two, three);
    assert_eq!(one.head, two.head);
    let told = t.kinds(&body).iter().filter(|kind| *kind == "workspace.saved").count();
    assert!(told <= 3, "an event for each state, not for each look: {told}");
}

#[body_test]
async fn what_is_put_aside_tagged_or_oddly_named_is_saved_too(t: Bodies) {
    let host = HostRepo::plain(&t);
    host.git(&["checkout", "-q", "-b", "fix/#123"]);
    let body = host.body(&t).await;
    let work = "echo aside > aside; git add aside; git stash -q; echo other > other; git add other; git stash -q
        git checkout -q --detach; echo tagged > tagged; git add tagged; git commit -qm tagged; git tag mark; git checkout -q 'fix/#123'
        rm -r src; ln -s nowhere src; git add -A; git branch a; git commit -qm linked";
    t.sh(&body, work).await.ok();
    let saved = save(&t, &body).await;
    assert_eq!(saved.commit_error, None);
    let own = |name: &str| format!("refs/palisade/{body}/heads/{name}");
    assert_eq!(host.git(&["show", &format!("{}:aside", own("palisade-stash/0"))]), "aside");
    assert_eq!(host.git(&["show", &format!("{}:other", own("palisade-stash/1"))]), "other");
    assert_eq!(host.git(&["show", &format!("{}:tagged", own("palisade-tags/mark"))]), "tagged");
    assert_eq!(host.git(&["log", "-1", "--format=%s", &format!("refs/palisade/{body}/head")]), "linked");
    // A branch that is replaced by one below it.
    t.sh(&body, "git branch -D a; git branch a/b").await.ok();
    assert_eq!(save(&t, &body).await.commit_error, None);
    assert!(host.try_git(&["rev-parse", "--verify", &own("a/b")]).is_some());
    let landed = t
        .fleet()
        .workspaces()
        .land(
            &body,
            None,
            fleet::LandTarget::Onto("fix/#123".into()),
            fleet::LandSelection::All,
            &crate::repo::person(),
        )
        .await;
    assert!(landed.is_ok(), "{landed:?}");
}

#[body_test]
async fn a_submodule_stays_what_it_is(t: Bodies) {
    let lib = HostRepo::make(&t, "lib", "echo lib > lib");
    let host = HostRepo::plain(&t);
    host.sh(&format!(
        "git -c protocol.file.allow=always submodule --quiet add {} sub; git commit -qm sub",
        lib.dir.display()
    ));
    let body = host.body(&t).await;
    let link = || host.git(&["ls-tree", &format!("refs/palisade/{body}/wip"), "sub"]);
    t.sh(&body, "touch sub/x; rm sub/x; echo more > more").await.ok();
    assert_eq!(save(&t, &body).await.skipped, []);
    assert!(link().starts_with("160000 commit"), "{}", link());
    t.sh(&body, "echo inside > sub/inside").await.ok();
    assert_eq!(save(&t, &body).await.skipped, []);
    assert!(link().starts_with("160000 commit"), "{}", link());
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert_eq!(host.sh(&format!("git -C sub show refs/palisade/{body}/wip:inside")), "inside");
}

#[body_test]
async fn what_is_listed_as_lost_is_what_was_not_saved(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    let lost = || t.fleet().workspaces().unsaved_work(&body).unwrap();
    t.sh(&body, "echo a > a; echo b > b; git checkout -qb side; git add a; git commit -qm a").await.ok();
    assert_eq!(
        (lost().lines, lost().saved),
        (vec!["a".to_owned(), "b".into(), "commits of side".into()], false)
    );
    save(&t, &body).await;
    assert_eq!((lost().lines, lost().saved), (Vec::new(), true), "all of it is in the user's repository");
    t.sh(&body, "echo more >> a; rm b; echo c > c; git checkout -qb other; git commit -qm c --allow-empty; git init -q inner").await.ok();
    let said = std::process::Command::new("env")
        .args(crate::repo::pal_command(&t, &["rm", "--force", "--discard", body.as_str()]))
        .output()
        .unwrap();
    assert!(said.status.success());
    let talk = String::from_utf8_lossy(&said.stderr).into_owned();
    let lines: Vec<&str> =
        talk.lines().filter(|line| line.starts_with("lost: ") || line.contains("stays")).collect();
    assert_eq!(lines[..4], ["lost: a", "lost: b", "lost: c", "lost: commits of other"], "{talk}");
    assert!(
        lines[4].starts_with("lost: inner/.git (")
            && lines[5] == format!("the last save stays: refs/palisade/{body}/wip")
            && lines.len() == 6,
        "{talk}"
    );
    assert_eq!(host.wip_file(&body, "b").as_deref(), Some("b"), "and it does");
}

#[body_test(except(
    user = "what it shows does not depend on who runs it",
    microvm = "an emulated microVM takes longer to boot than the time limit of this test"
))]
async fn a_death_that_nobody_noticed_is_noticed_by_gc(t: Bodies) {
    let host = HostRepo::plain(&t);
    let killed = host.body(&t).await;
    let mut brief = host.up(&t);
    brief.create.limits.wall = Some(Duration::from_secs(6));
    let timed = crate::repo::up(&t, brief).await.spec.id;
    for body in [&killed, &timed] {
        t.sh(body, WORK).await.ok();
    }
    testkit::kill(t.view(&killed).pid.unwrap());
    testkit::wait::blocking(Duration::from_secs(20), "both are dead", || {
        [&killed, &timed].iter().all(|body| t.view(body).pid.is_none()).then_some(())
    });
    t.fleet().garbage().collect(fleet::GcMode::DryRun).await.unwrap();
    assert!(
        host.try_git(&["rev-parse", "--verify", &format!("refs/palisade/{killed}/wip")]).is_none(),
        "a dry run does nothing"
    );
    t.fleet().garbage().collect(fleet::GcMode::Remove).await.unwrap();
    for body in [&killed, &timed] {
        assert_eq!(names(&host, body), saved());
        assert!(t.body_dir(body).join("spec.json").exists(), "and its files stay");
    }
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn a_fork_keeps_what_it_stands_on_and_is_saved_like_its_parent(t: Bodies) {
    let host = HostRepo::plain(&t);
    host.sh("echo dirty > dirty");
    let parent =
        crate::repo::up(&t, fleet::UpRequest { dirty: fleet::UncommittedFiles::With, ..host.up(&t) })
            .await
            .spec;
    t.sh(&parent.id, "echo ours > ours").await.ok();
    let fork = t.fleet().snapshots().fork(&parent.id, 1).await.unwrap().remove(0).spec.id;
    let snapshot = t.fleet().snapshots().create(&parent.id, Some("state".into())).await.unwrap();
    let copy = t.make(fleet::Create { template: snapshot.id.to_string(), ..t.kept() }).await.spec.id;
    t.sh(&fork, "cd /workspace/app; echo fork > fork").await.ok();
    t.sh(&copy, "cd /workspace/app; echo copy > copy").await.ok();
    // Only their own refs hold their base commit.
    t.fleet().remove_with(&parent.id, Force::Yes, Discard::Yes).await.unwrap();
    host.sh("rm dirty; git for-each-ref --format='delete %(refname)' refs/palisade/ | grep -v ' refs/palisade/' | git update-ref --stdin; git reflog expire --expire=now --all; git gc -q --prune=now");
    for (body, name) in [(&fork, "fork"), (&copy, "copy")] {
        assert_eq!(
            host.git(&["rev-parse", &format!("refs/palisade/{body}/base")]),
            parent.workspaces[0].base,
            "{name}"
        );
        t.fleet()
            .remove(body, Force::Yes)
            .await
            .unwrap_or_else(|failure| panic!("{name}: {}", testkit::explain(&failure)));
        for path in ["ours", "dirty", name] {
            assert!(host.wip_file(body, path).is_some(), "{name}: {path}");
        }
    }
    // A Body that is discarded before it did any work leaves no ref.
    let idle = host.body(&t).await;
    t.fleet().remove_with(&idle, Force::Yes, Discard::Yes).await.unwrap();
    assert_eq!(host.git(&["for-each-ref", &format!("refs/palisade/{idle}/")]), "");
}
