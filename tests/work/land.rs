//! Landing: on branches of the user, with the user as committer.

use fleet::{GitIdentity, LandResult, LandSelection, LandTarget};
use proto::{BodyId, Failure, Kind};
use testkit::{Bodies, body_test, explain};

use crate::repo::{HostRepo, person};

async fn land(
    t: &Bodies,
    body: &BodyId,
    how: LandTarget,
    what: LandSelection,
) -> Result<LandResult, Failure> {
    t.fleet().workspaces().land(body, None, how, what, &person()).await
}

async fn worked(t: &Bodies, host: &HostRepo) -> BodyId {
    let body = host.body(t).await;
    t.sh(&body, "echo one > one; git add one; git commit -qm 'add one'; echo two > two; git add two; git commit -qm 'add two'; echo rest > rest").await.ok();
    body
}

fn subjects(host: &HostRepo, range: &str) -> Vec<String> {
    host.git(&["log", "--format=%an/%cn %s", "--reverse", range]).lines().map(str::to_owned).collect()
}

#[body_test]
async fn work_lands_on_a_branch_of_its_own(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = worked(&t, &host).await;
    let landed = land(&t, &body, LandTarget::Branch("pal/x".into()), LandSelection::All).await.unwrap();
    assert_eq!((landed.commits, landed.from), (3, None));
    assert_eq!(host.git(&["show", "pal/x:rest"]), "rest");
    assert_eq!(
        subjects(&host, "main..pal/x"),
        [
            "agent/Ann add one".to_owned(),
            "agent/Ann add two".into(),
            format!("Ann/Ann uncommitted work of Body {body}")
        ]
    );
    // Again: the branch moves forward by what is new, also where the Body changed landed lines.
    t.sh(
        &body,
        "echo changed > rest; git add -A; git commit -qm 'add rest'; echo more > more; git add more; git commit -qm 'add more'",
    )
    .await
    .ok();
    let again = land(&t, &body, LandTarget::Branch("pal/x".into()), LandSelection::Committed).await.unwrap();
    assert_eq!((again.commits, again.combined), (2, None));
    assert_eq!(host.git(&["show", "pal/x:more"]), "more");
    assert_eq!(host.git(&["rev-parse", "pal/x^{tree}"]), host.wip_tree(&body));
    let committed =
        land(&t, &body, LandTarget::Branch("only".into()), LandSelection::Committed).await.unwrap();
    assert_eq!(
        (committed.commits, host.git(&["rev-parse", "only^{tree}"])),
        (4, host.wip_tree(&body)),
        "on a new branch, all of it"
    );
    // Nothing is new: nothing moves, and no branch is made.
    let before = host.git(&["for-each-ref", "refs/heads/"]);
    assert_eq!(
        land(&t, &body, LandTarget::Branch("only".into()), LandSelection::All).await.unwrap().commits,
        0
    );
    let idle = host.body(&t).await;
    assert_eq!(
        land(&t, &idle, LandTarget::Branch("idle".into()), LandSelection::All).await.unwrap().commits,
        0
    );
    let missing = land(&t, &idle, LandTarget::Onto("none".into()), LandSelection::All).await.unwrap_err();
    let said = explain(&missing);
    assert!(said.contains("there is no branch none; the repository has ") && said.contains("main"), "{said}");
    assert_eq!(host.git(&["for-each-ref", "refs/heads/"]), before);
    assert!(t.kinds(&body).contains(&"workspace.landed".to_owned()));
}

#[body_test]
async fn work_lands_on_top_of_a_branch_that_is_checked_out(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = worked(&t, &host).await;
    host.commit("echo mine > mine", "mine");
    let landed = land(&t, &body, LandTarget::Onto("main".into()), LandSelection::All).await.unwrap();
    assert_eq!(landed.commits, 3);
    assert_eq!(
        host.sh("git status --porcelain; cat one two rest mine"),
        "one\ntwo\nrest\nmine",
        "its files are there, and nothing is left over"
    );
    assert_eq!(
        subjects(&host, "main~3..main")[..2],
        ["agent/Ann add one".to_owned(), "agent/Ann add two".into()]
    );
    // Uncommitted changes of the user are not overwritten.
    let other = host.body(&t).await;
    t.sh(&other, "echo theirs > mine; git commit -qam theirs").await.ok();
    host.sh("echo precious > mine");
    let refused = land(&t, &other, LandTarget::Onto("main".into()), LandSelection::All).await.unwrap_err();
    assert_eq!((refused.kind, host.sh("cat mine").as_str()), (Kind::Conflict, "precious"));
}

#[body_test]
async fn squashing_picking_and_conflicts(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = worked(&t, &host).await;
    let squashed = land(
        &t,
        &body,
        LandTarget::Branch("squashed".into()),
        LandSelection::Squash { message: Some("all of it".into()) },
    )
    .await
    .unwrap();
    assert_eq!(
        (squashed.commits, subjects(&host, "main..squashed")),
        (1, vec!["Ann/Ann all of it".to_owned()])
    );
    assert_eq!(host.git(&["rev-parse", "squashed^{tree}"]), host.wip_tree(&body));
    let two = host.git(&["rev-parse", &format!("refs/palisade/{body}/head")]);
    let picked =
        land(&t, &body, LandTarget::Branch("picked".into()), LandSelection::Pick(vec![two[..10].to_owned()]))
            .await
            .unwrap();
    assert_eq!((picked.commits, host.git(&["diff", "--name-only", "main", "picked"]).as_str()), (1, "two"));
    let foreign = host.git(&["rev-parse", "main"]);
    assert_eq!(
        land(&t, &body, LandTarget::Branch("none".into()), LandSelection::Pick(vec![foreign]))
            .await
            .unwrap_err()
            .kind,
        Kind::NotFound,
        "not a commit of the Body"
    );
    host.commit("echo other > one", "other one");
    let before = host.git(&["rev-parse", "main"]);
    let refused = land(&t, &body, LandTarget::Onto("main".into()), LandSelection::All).await.unwrap_err();
    assert!(refused.kind == Kind::Conflict && refused.message.contains("one"), "{refused}");
    assert_eq!(host.git(&["rev-parse", "main"]), before, "nothing moved");
    assert_eq!(
        land(&t, &body, LandTarget::Onto("no-such".into()), LandSelection::All).await.unwrap_err().kind,
        Kind::NotFound
    );
    assert_eq!(
        land(&t, &body, LandTarget::Branch("../../evil".into()), LandSelection::All).await.unwrap_err().kind,
        Kind::Usage
    );
}

#[body_test]
async fn who_lands_must_have_a_name_and_tools_that_run_things_are_shown(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "mkdir -p .vscode .github/workflows; echo '{}' > .vscode/tasks.json; echo x > .github/workflows/ci.yml; echo plain > plain").await.ok();
    host.commit("echo mine > mine", "mine");
    let nobody = GitIdentity { env: Vec::new(), ..person() };
    let squash = || LandSelection::Squash { message: None };
    let refused = t
        .fleet()
        .workspaces()
        .land(&body, None, LandTarget::Onto("main".into()), squash(), &nobody)
        .await
        .unwrap_err();
    assert!(
        refused.hints.iter().any(|hint| hint.contains("user.name")),
        "{refused}: {:?} {:?}",
        refused.causes(),
        refused.hints
    );
    let landed = land(&t, &body, LandTarget::Onto("main".into()), squash()).await.unwrap();
    assert_eq!(landed.auto_executed, [".github/workflows/ci.yml", ".vscode/tasks.json"]);
}

#[body_test]
async fn a_summary_is_no_patch(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = worked(&t, &host).await;
    let look = t.fleet().workspaces().review(&body, None).unwrap();
    let text = |shape| String::from_utf8(look.text(shape, &[]).unwrap()).unwrap();
    assert!(text(fleet::DiffFormat::Patch).contains("+rest"));
    let summary = text(fleet::DiffFormat::Stat);
    assert!(summary.contains("3 files changed") && !summary.contains("+rest"), "{summary}");
}

#[body_test]
async fn a_landing_never_writes_into_a_git_directory(t: Bodies) {
    let host = HostRepo::plain(&t);
    let outer = t.dir().join("outer");
    let trap = "mkdir -p hooks && printf '#!/bin/sh\\ntouch /tmp/sprung\\n' > hooks/post-checkout && chmod 755 hooks/post-checkout && git add -A && git commit -qm trap";
    // A submodule, whose git directory git lists as its work tree.
    host.sh(&format!("git init -q {0} && cd {0} && git -c protocol.file.allow=always submodule --quiet add {1} sub && git -C sub checkout -q main", outer.display(), host.dir.display()));
    let body = HostRepo { dir: outer.join("sub") }.body(&t).await;
    t.sh(&body, trap).await.ok();
    land(&t, &body, LandTarget::Onto("main".into()), LandSelection::All).await.unwrap();
    assert!(outer.join("sub/hooks/post-checkout").exists(), "a control: its files are where they belong");
    assert!(!outer.join(".git/modules/sub/hooks/post-checkout").exists());
    // A separate git directory, which does not know the path of its files.
    let (apart, files) = (t.dir().join("apart.git"), t.dir().join("apart"));
    host.sh(&format!(
        "git clone -q --separate-git-dir {} {} {}",
        apart.display(),
        host.dir.display(),
        files.display()
    ));
    let body = HostRepo { dir: files }.body(&t).await;
    t.sh(&body, trap).await.ok();
    // The control: writing files to the path that git lists would create hooks.
    let careless = t.dir().join("careless.git");
    let wip = crate::repo::save(&t, &body).await.wip;
    host.sh(&format!("cp -r {0} {1} && git --git-dir={1} --work-tree=$(git --git-dir={1} worktree list --porcelain | sed -n 's/^worktree //p') read-tree -m -u main {wip}", apart.display(), careless.display()));
    assert!(careless.join("hooks/post-checkout").exists(), "a control");
    let landed = land(&t, &body, LandTarget::Onto("main".into()), LandSelection::All).await;
    assert!(!apart.join("hooks/post-checkout").exists(), "{landed:?}");
}
