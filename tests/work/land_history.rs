//! Landing does what `pal diff` shows, whatever a Body did to its history.

use std::collections::{BTreeMap, BTreeSet};

use fleet::{DiffFormat, Discard, Force, LandResult, LandSelection, LandTarget, UncommittedFiles, UpRequest};
use proto::{BodyId, Kind};
use testkit::{Bodies, body_test, explain};

use crate::{
    property::Chance,
    repo::{HostRepo, pal_command, person, up},
};

/// How many Bodies are tested, and how many operations each makes before each of its landings.
const ROUNDS: u64 = 9;
const STEPS: usize = 7;
const LANDINGS: usize = 3;

/// One operation of git or on files, as a shell line that cannot fail. Paths are those of [`HostRepo::plain`] and a few
/// new ones.
fn operation(chance: &mut Chance) -> String {
    let number = chance.below(10_000);
    let file = chance.of(&["numbers", "src/main.rs", "src/deep/x", "run.sh", "new-a", "src/new-b"]);
    let other = chance.of(&["moved", "src/moved", "deep/er/moved"]);
    let commit = format!("git add -A; git commit -qm 'step {number}'");
    let line = match chance.below(20) {
        0 => format!("echo {number} > {file}"),
        1 => format!("sed -i '1s/.*/{number}/' {file}"),
        2 => format!("echo {number} >> {file}; {commit}"),
        3 => format!("echo {number} > only; git add only; git commit -qm 'only {number}'"),
        4 => format!("git add -A; git commit -q --amend -m 'amended {number}'"),
        5 => "git commit -q --amend --reset-author --no-edit".to_owned(),
        6 => "git reset -q --hard HEAD~1".to_owned(),
        7 => format!("git reset -q --soft HEAD~1; {commit}"),
        8 => "git reset -q HEAD~1".to_owned(),
        9 => format!("git checkout -q --orphan orphan{number}; {commit}"),
        10 => format!("{commit}; git rebase -q --root --exec true"),
        11 => format!("{commit}; git rebase -q --onto HEAD~2 HEAD~1"),
        12 => format!("{commit}; git checkout -q -b side{number}"),
        13 => format!("{commit}; git checkout -q main || git checkout -q -"),
        14 => format!("git rm -q --ignore-unmatch {file}; {commit}"),
        15 => format!("mkdir -p $(dirname {other}); git mv -f {file} {other}"),
        16 => format!("chmod +x {file}; chmod -x run.sh"),
        17 => format!("git stash -q -u; echo {number} > stashed; {commit}"),
        18 => format!(
            "{commit}; git checkout -q -b m{number}; echo {number} > merged; {commit}; git checkout -q -; echo {number} > beside; {commit}; git merge -q --no-edit m{number}"
        ),
        _ => format!("mkdir -p nested; cd nested; git init -q; echo {number} > inner; {commit}"),
    };
    format!("( {line} ) >/dev/null 2>&1 || {{ git rebase --abort; git merge --abort; }} 2>/dev/null; true")
}

async fn land(t: &Bodies, body: &BodyId, how: LandTarget, what: LandSelection) -> LandResult {
    let landed = t.fleet().workspaces().land(body, None, how, what, &person()).await;
    landed.unwrap_or_else(|failure| panic!("{}", explain(&failure)))
}

fn tree(host: &HostRepo, name: &str) -> String {
    host.git(&["rev-parse", &format!("{name}^{{tree}}")])
}

/// The tree of a commit with what `pal diff` prints, as plain git applies it.
fn tree_with_diff(t: &Bodies, host: &HostRepo, commit: &str, body: &BodyId) -> String {
    let look = t.fleet().workspaces().review(body, None).unwrap();
    let patch = look.text(DiffFormat::Patch, &[]).unwrap();
    let (index, file) = (t.dir().join("index"), t.dir().join("patch"));
    std::fs::write(&file, &patch).unwrap();
    let apply = format!(
        "set -e; export GIT_INDEX_FILE={0}; rm -f {0}; git read-tree {commit}; [ ! -s {1} ] || git apply --cached {1}; git write-tree",
        index.display(),
        file.display()
    );
    host.sh(&apply)
}

/// The entries of a tree.
fn entries(host: &HostRepo, tree: &str) -> BTreeMap<String, String> {
    let split = |line: &str| line.split_once('\t').map(|(entry, path)| (path.to_owned(), entry.to_owned()));
    host.git(&["ls-tree", "-r", tree]).lines().filter_map(split).collect()
}

/// The files of a landing that differ from the branch before, or from what the Body did to them. A file that both the
/// user and the Body changed is merged, and not compared.
fn wrong_files(host: &HostRepo, body: &BodyId, before: &str, landed: &str) -> Vec<String> {
    let [base, now, before, landed] =
        [&format!("refs/palisade/{body}/base"), &format!("refs/palisade/{body}/wip"), before, landed]
            .map(|tree| entries(host, tree));
    let paths: BTreeSet<&String> =
        base.keys().chain(now.keys()).chain(before.keys()).chain(landed.keys()).collect();
    let is_wrong = |path: &&String| {
        let [base, now, before, landed] = [&base, &now, &before, &landed].map(|tree| tree.get(*path));
        let both = base != now && base != before && now != before;
        !both && landed != if base == now { before } else { now }
    };
    paths.into_iter().filter(is_wrong).cloned().collect()
}

#[body_test(except(
    user = "what it shows does not depend on who runs it",
    microvm = "hundreds of git commands under emulation take minutes"
))]
async fn a_landing_is_the_base_with_what_diff_shows_whatever_git_did(t: Bodies) {
    let seed: u64 = std::env::var("PAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let host = HostRepo::plain(&t);
    host.commit("echo second > second", "second");
    host.commit("rm second; echo third > third", "third");
    // Uncommitted work of the user, which must not land.
    host.sh("sed -i '500s/.*/mine/' numbers; mkdir mine; echo mine > mine/new; rm binary");
    for round in 0..ROUNDS {
        let mut chance = Chance((seed + round).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let dirty = if round % 3 == 2 { UncommittedFiles::With } else { UncommittedFiles::Without };
        let body = up(&t, UpRequest { dirty, ..host.up(&t) }).await.spec.id;
        let branch = format!("round{round}");
        let mut story = String::new();
        for landing in 0..LANDINGS {
            let lines: Vec<String> = (0..STEPS).map(|_| operation(&mut chance)).collect();
            t.sh(&body, &lines.join("\n")).await.ok();
            story.push_str(&format!("{}\n-- landing {landing}\n", lines.join("\n")));
            let about = |what: &str| format!("seed {seed} round {round}: {what}\n{story}");
            let tip = || host.try_git(&["rev-parse", "--verify", "-q", &branch]);
            let before = tip();
            let landed = t
                .fleet()
                .workspaces()
                .land(&body, None, LandTarget::Branch(branch.clone()), LandSelection::All, &person())
                .await;
            // Work that needs the uncommitted work of the user is refused, with a way on.
            if let Err(failure) = &landed
                && dirty == UncommittedFiles::With
                && failure.kind == Kind::Conflict
            {
                let hinted = failure.hints.iter().any(|hint| hint.contains("--patch"));
                assert!(hinted && tip() == before, "{}", about(&explain(failure)));
                continue;
            }
            let landed = landed.unwrap_or_else(|failure| panic!("{}", about(&explain(&failure))));
            if dirty == UncommittedFiles::With {
                let wrong = wrong_files(&host, &body, "main", &landed.to);
                assert!(wrong.is_empty(), "{}", about(&wrong.join("\n")));
            } else {
                let expected = tree_with_diff(&t, &host, "main", &body);
                let wrong = || host.git(&["diff-tree", "-r", "--name-status", &expected, &landed.to]);
                assert_eq!(tree(&host, &landed.to), expected, "{}", about(&wrong()));
            }
            let committers = host.git(&["log", "--format=%cn", &format!("main..{}", landed.to)]);
            assert!(committers.lines().all(|name| name == "Ann"), "{}", about(&committers));
            assert!(
                host.try_git(&["merge-base", "--is-ancestor", "main", &landed.to]).is_some(),
                "{}",
                about("it is on top of the branch")
            );
            let again = land(&t, &body, LandTarget::Branch(branch.clone()), LandSelection::All).await;
            assert_eq!(again.commits, 0, "{}", about("nothing is new"));
        }
        // On top of a branch that went on elsewhere: its own change stays.
        if dirty == UncommittedFiles::Without {
            host.sh("git branch -qf other main; git worktree add -q ../other other; cd ../other; echo elsewhere > elsewhere; git add -A; git commit -qm elsewhere; git worktree remove ../other");
            let expected = tree_with_diff(&t, &host, "other", &body);
            let landed = land(&t, &body, LandTarget::Onto("other".into()), LandSelection::All).await;
            assert_eq!(tree(&host, &landed.to), expected, "seed {seed} round {round}\n{story}");
        }
        t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
        assert_eq!(
            host.git(&["for-each-ref", &format!("refs/palisade/{body}/landed/")]),
            "",
            "no record outlives its Body"
        );
    }
}

#[body_test]
async fn everything_that_does_not_land_is_named_with_a_command_that_leads_to_it(t: Bodies) {
    let host = HostRepo::plain(&t);
    let lib = HostRepo::make(&t, "lib", "echo lib > lib");
    let mut request = host.up(&t);
    request.repositories.extend(lib.up(&t).repositories);
    let body = up(&t, request).await.spec.id;
    t.sh(
        &body,
        "git checkout -qb fix; echo fix > fix; git add fix; git commit -qm fix; git checkout -q main; git branch same
         echo s > s; git stash -q -u; truncate -s 2G big; git init -q nested; echo inner > nested/inner; echo here > here
         echo changed > /workspace/lib/lib",
    )
    .await
    .ok();
    let look = t.fleet().workspaces().review(&body, None).unwrap();
    let landed = land(&t, &body, LandTarget::Branch("work".into()), LandSelection::All).await;
    let skipped = |all: &[fleet::SkippedPath]| all.iter().map(|one| one.path.clone()).collect::<Vec<_>>();
    assert_eq!(skipped(&landed.skipped), ["big", "nested/.git"]);
    assert_eq!(skipped(&look.diff.skipped), ["big", "nested/.git"]);
    let named = |all: &[fleet::LeftOut]| all.iter().map(|one| one.what.clone()).collect::<Vec<_>>();
    let expected = ["branch fix", "stash palisade-stash/0", "workspace lib"];
    assert_eq!(
        (named(&landed.left_out), named(&look.diff.left_out)),
        (expected.map(str::to_owned).into(), expected.map(str::to_owned).into())
    );
    assert_eq!(
        host.git(&["diff", "--name-only", "main", "work"]),
        "here\nnested/inner",
        "nothing else landed"
    );
    // Each hint is a command that works.
    for left in look.diff.left_out.iter().chain(&landed.left_out) {
        let hint = left.hint.as_ref().unwrap();
        let command = hint.rsplit_once(": ").map_or(hint.as_str(), |(_, command)| command);
        run_hint(&t, &host, command);
    }
    assert_eq!(host.sh("cat fix; git -C ../lib show pal/$(basename $(git -C ../lib for-each-ref --format='%(refname)' refs/heads/pal)):lib"), "fix\nchanged");
    t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
}

/// Runs a hint as a user would: a shell line in the repository, with `pal` on its path.
#[track_caller]
fn run_hint(t: &Bodies, host: &HostRepo, command: &str) {
    let pal = pal_command(t, &[]).iter().map(|part| format!("'{}'", part.display())).collect::<Vec<_>>();
    host.sh(&format!("pal() {{ {} \"$@\"; }}; {command}", pal.join(" ")));
}

#[body_test]
async fn a_conflict_has_a_hint_that_lands_the_work_elsewhere(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "sed -i 1s/.*/theirs/ numbers; git commit -qam theirs").await.ok();
    host.commit("sed -i 1s/.*/ours/ numbers", "ours");
    // The first name for a branch is taken by other work.
    host.git(&["branch", &format!("pal/{body}")]);
    let onto = LandTarget::Onto("main".into());
    let work = t.fleet().workspaces();
    let refused = work.land(&body, None, onto, LandSelection::All, &person()).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict);
    let command = |hint: &str| hint.split_once(": ").unwrap().1.to_owned();
    for hint in &refused.hints {
        run_hint(&t, &host, &command(hint));
    }
    assert_eq!(refused.hints.len(), 2, "{:?}", refused.hints);
    assert_eq!(host.sh(&format!("git show pal/{body}-2:numbers | head -1")), "theirs");
    assert_eq!(
        t.sh(&body, "git log -1 --format=%s host/main").await.ok(),
        "ours",
        "the branch is there, too"
    );
    // A Body that began with uncommitted work of the user: its own lines cannot land without that.
    host.sh("sed -i 10s/.*/mine/ numbers");
    let dirty = up(&t, UpRequest { dirty: UncommittedFiles::With, ..host.up(&t) }).await.spec.id;
    t.sh(&dirty, "sed -i 10s/.*/mine-and-theirs/ numbers; git commit -qam both").await.ok();
    let branch = || LandTarget::Branch("dirty".into());
    let refused = work.land(&dirty, None, branch(), LandSelection::All, &person()).await.unwrap_err();
    assert!(refused.hints[0].contains("commit that first"), "{:?}", refused.hints);
    run_hint(&t, &host, &command(&refused.hints[1]));
    host.sh("git apply work.patch; rm work.patch; git diff --quiet && exit 1; git checkout -q numbers; sed -i 10s/.*/mine/ numbers");
    host.git(&["commit", "-qam", "mine"]);
    let landed = land(&t, &dirty, LandTarget::Onto("main".into()), LandSelection::All).await;
    assert_eq!(
        (landed.commits, host.sh("sed -n 10p numbers; git log -2 --format=%an/%s").as_str()),
        (1, "mine-and-theirs\nagent/both\nAnn/mine")
    );
}

#[body_test(except(user = "ssh-keygen refuses ids without an account"))]
async fn fast_forwards_are_committed_and_signed_by_the_user_and_have_the_users_message(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(
        &body,
        "echo a > a; git add a; git commit -qm 'add a' --date '2001-02-03T04:05:06+0700'; echo b > b",
    )
    .await
    .ok();
    // A key of ssh needs no agent and no network.
    host.sh("ssh-keygen -q -t ed25519 -N '' -f ../key; printf 'ann@example.com %s\\n' \"$(cat ../key.pub)\" > ../signers
        git config gpg.format ssh; git config user.signingKey $PWD/../key; git config gpg.ssh.allowedSignersFile $PWD/../signers; git config commit.gpgSign true");
    let what = LandSelection::AllWithMessage("the rest\n\nwith a body".into());
    let landed = land(&t, &body, LandTarget::Onto("main".into()), what).await;
    assert_eq!(landed.commits, 2);
    assert_eq!(
        host.git(&["log", "-2", "--format=%an/%cn/%G?/%ad/%B", "--date=iso"]).replace("\n\n", "\n"),
        format!(
            "Ann/Ann/G/{}/the rest\nwith a body\nagent/Ann/G/2001-02-03 04:05:06 +0700/add a",
            host.git(&["log", "-1", "--format=%ad", "--date=iso"])
        )
    );
}
