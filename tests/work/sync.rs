//! `pal sync`: new commits of the user's branch in a Body, and landing on top of them.

use fleet::{LandSelection, LandTarget, SyncMode, SyncResult};
use proto::{BodyId, Failure, Kind};
use testkit::{Bodies, body_test, explain};

use crate::repo::{HostRepo, person, up};

async fn sync(t: &Bodies, body: &BodyId, mode: SyncMode) -> Result<SyncResult, Failure> {
    t.fleet().workspaces().sync(body, None, None, mode, &person()).await
}

async fn land_on_main(t: &Bodies, body: &BodyId) -> fleet::LandResult {
    let main = LandTarget::Onto("main".into());
    let landed = t.fleet().workspaces().land(body, None, main, LandSelection::All, &person()).await;
    landed.unwrap_or_else(|failure| panic!("{}", explain(&failure)))
}

fn changed(t: &Bodies, body: &BodyId) -> Vec<String> {
    let look = t.fleet().workspaces().review_files(body, None).unwrap();
    look.diff.files.into_iter().map(|file| file.path).collect()
}

#[body_test]
async fn an_agent_resolves_a_conflict_and_its_work_lands(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "sed -i 1s/.*/theirs/ numbers; git commit -qam theirs; echo rest > rest").await.ok();
    host.commit("sed -i 1s/.*/ours/ numbers; echo more > more", "ours");
    // A hook of the Body, which must not run.
    t.sh(&body, "mkdir -p .git/hooks; for h in reference-transaction post-merge pre-merge-commit; do printf '#!/bin/sh\\ntouch /tmp/sprung\\n' > .git/hooks/$h; chmod +x .git/hooks/$h; done; git update-ref refs/x HEAD; ls /tmp/sprung; rm /tmp/sprung").await.ok();
    let before = t.sh(&body, "git status --porcelain; git rev-parse HEAD; find . -path ./.git -prune -o -type f -print | sort | xargs sha1sum").await.ok();
    let synced =
        sync(&t, &body, SyncMode::Fetch).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(
        (synced.commits, synced.commit, synced.reference.as_str()),
        (1, host.git(&["rev-parse", "main"]), "refs/remotes/host/main")
    );
    assert_eq!(t.sh(&body, "ls /tmp/sprung 2>/dev/null; git status --porcelain; git rev-parse HEAD; find . -path ./.git -prune -o -type f -print | sort | xargs sha1sum").await.ok(), before, "no file and no branch changed, and no hook ran");
    assert!(t.kinds(&body).contains(&"workspace.synced".to_owned()));
    assert_eq!(
        changed(&t, &body),
        ["numbers", "rest"],
        "the base moves only when the Body takes the commits over"
    );
    let refused = sync(&t, &body, SyncMode::Merge).await.unwrap_err();
    assert!(
        refused.kind == Kind::Conflict && refused.causes().join("\n").contains("\nCONFLICT ("),
        "{}",
        explain(&refused)
    );
    t.sh(&body, "rm -f .git/hooks/*; printf 'both\\n' > first; sed -n '/^2$/,$p' numbers | cat first - > fixed; rm first; mv fixed numbers; git add numbers; git commit -qm merged").await.ok();
    assert_eq!(changed(&t, &body), ["numbers", "rest"], "what the user did is not the Body's work");
    let landed = land_on_main(&t, &body).await;
    assert_eq!(
        host.sh("git log --format='%an/%cn %s' --topo-order main; head -1 numbers; cat rest more; git status --porcelain"),
        format!("Ann/Ann uncommitted work of Body {body}\nagent/Ann merged\nAnn/Ann ours\nagent/Ann theirs\nAnn/Ann first\nboth\nrest\nmore"),
        "{landed:?}"
    );
    // The work goes on: another commit of the user, another one of the Body, rebased.
    host.commit("echo later > later", "later");
    t.sh(&body, "git add -A; git commit -qm rest; echo next > next; git add next; git commit -qm next")
        .await
        .ok();
    sync(&t, &body, SyncMode::Rebase).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(changed(&t, &body), ["next"]);
    assert_eq!(land_on_main(&t, &body).await.commits, 1);
    assert_eq!(host.sh("git log -2 --format='%an/%cn %s'"), "agent/Ann next\nAnn/Ann later");
    assert_eq!(land_on_main(&t, &body).await.commits, 0);
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn a_body_cannot_move_its_base_by_itself_and_a_fork_keeps_it(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    host.commit("echo precious > precious", "precious");
    let newest = host.git(&["rev-parse", "main"]);
    // A commit that claims to build on the user's newest one, and has none of its files.
    let forge = format!(
        "git update-ref HEAD $(printf 'tree %s\\nparent {newest}\\nauthor a <a@b> 1 +0000\\ncommitter a <a@b> 1 +0000\\n\\nforged\\n' $(git rev-parse HEAD^{{tree}}) | git hash-object -t commit -w --stdin); echo work > work"
    );
    t.sh(&body, &forge).await.ok();
    assert_eq!(changed(&t, &body), ["work"]);
    land_on_main(&t, &body).await;
    assert_eq!(host.sh("cat precious work"), "precious\nwork", "nothing went that the diff did not show");
    // With the commits in it, the same history says what it does.
    let body = host.body(&t).await;
    host.commit("echo more > more", "more");
    sync(&t, &body, SyncMode::Fetch).await.unwrap();
    t.sh(&body, "git merge -q -s ours --no-edit host/main").await.ok();
    assert_eq!(changed(&t, &body), ["more"], "it removes the user's file, and the diff shows it");
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0).spec.id;
    assert_eq!(changed(&t, &fork), ["more"]);
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn partial_clones_and_rewritten_branches_land_and_sync(t: Bodies) {
    let origin = HostRepo::plain(&t);
    origin.commit("seq 2000 > numbers", "old");
    origin.commit("seq 3000 > numbers; echo new > new", "newest");
    origin.sh("git config uploadpack.allowFilter true; git config uploadpack.allowAnySHA1InWant true; git branch far");
    let dir = t.dir().join("partial");
    origin.sh(&format!("git clone -q --filter=blob:none file://{} {}", origin.dir.display(), dir.display()));
    let host = HostRepo { dir };
    let body = up(&t, host.up(&t)).await.spec.id;
    t.sh(&body, "sed -i '$s/.*/end/' numbers; git commit -qam end").await.ok();
    // The user's branch was rewritten meanwhile, and the Body's commit is not in it.
    origin.sh("git commit -q --amend -m 'newest, again'; sed -i 1s/.*/begin/ numbers; git commit -qam begin");
    host.sh("git fetch -q; git reset -q --hard origin/main");
    assert!(
        host.try_git(&["merge-base", "--is-ancestor", &host.git(&["rev-parse", "@{1}"]), "main"]).is_none()
    );
    host.git(&["branch", "before"]);
    assert_eq!(land_on_main(&t, &body).await.commits, 1);
    assert_eq!(host.sh("head -1 numbers; tail -1 numbers; git log -1 --format=%s"), "begin\nend\nend");
    let branch = Some("before");
    t.fleet()
        .workspaces()
        .sync(&body, None, branch, SyncMode::Rebase, &person())
        .await
        .unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(
        t.sh(&body, "head -1 numbers; tail -1 numbers; git log -2 --format=%s").await.ok(),
        "begin\nend\nend\nbegin"
    );
    assert_eq!(changed(&t, &body), ["numbers"]);
    // A branch whose files the partial clone never had.
    origin.sh("git checkout -q far; sed -i 100s/.*/far/ numbers; git commit -qam far; git checkout -q main");
    host.sh("git fetch -q; git branch far origin/far");
    let far = LandTarget::Onto("far".into());
    let landed = t.fleet().workspaces().land(&body, None, far, LandSelection::All, &person()).await;
    landed.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(host.sh("git show far:numbers | sed -n '1p;100p;$p'"), "1\nfar\nend");
}
