//! The contents of a Body's workspace.

use fleet::{Force, RepoSource, UncommittedFiles};
use proto::spec::{Access, Mount};
use testkit::{Bodies, body_test};

use crate::repo::{HostRepo, save, up};

#[body_test]
async fn a_body_has_the_files_of_the_commit_and_a_clean_status(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    assert_eq!(t.sh(&body, "pwd").await.ok(), "/workspace/app");
    assert_eq!(t.sh(&body, "git status --porcelain").await.ok(), "");
    assert_eq!(
        t.sh(&body, "git rev-parse HEAD; git symbolic-ref HEAD").await.ok(),
        format!("{}\nrefs/heads/main", host.git(&["rev-parse", "HEAD"]))
    );
    assert_eq!(t.sh(&body, "git fsck --strict 2>&1; git log --format=%s").await.ok(), "first");
    assert_eq!(
        t.sh(&body, "./run.sh; readlink link; od -An -c binary | tr -d ' '; stat -c %a run.sh src/main.rs")
            .await
            .ok(),
        "hi\nsrc/main.rs\na\\0b\n755\n644"
    );
    // The index has matching stat data, so git reads no file again. Without it, git would read every file.
    let racy = t.sh(&body, "git ls-files --debug numbers | grep -c 'size: 3893'; GIT_TRACE2_PERF=/tmp/trace git status >/dev/null; grep -c 'read_object\\|hash' /tmp/trace || true").await;
    assert!(racy.ok().starts_with('1'), "{}", racy.text());
    assert_eq!(t.sh(&body, "git diff-files --name-only").await.ok(), "", "without a refresh");
}

#[body_test]
async fn nothing_of_the_host_is_changed_by_work_in_a_body(t: Bodies) {
    let host = HostRepo::plain(&t);
    let before = host.sh("git status --porcelain --ignored; git for-each-ref refs/heads; find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum");
    let body = host.body(&t).await;
    t.sh(&body, "git rm -rqf . && git commit -qm gone && rm -rf .git && echo bye > left").await.ok();
    save(&t, &body).await;
    let after = host.sh("git status --porcelain --ignored; git for-each-ref refs/heads; find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum");
    assert_eq!(before, after);
    t.fleet().remove_with(&body, Force::Yes, fleet::Discard::Yes).await.unwrap();
}

#[body_test]
async fn uncommitted_untracked_and_ignored_files_come_when_asked_for(t: Bodies) {
    let host = HostRepo::plain(&t);
    host.sh("echo changed >> numbers; echo new > new.txt; rm binary; mkdir target; echo built > target/out; echo other > target/other; echo x > x.log");
    let clean = host.body(&t).await;
    assert_eq!(
        t.sh(&clean, "tail -1 numbers; ls new.txt target x.log 2>&1 | wc -l; ls binary").await.ok(),
        "1000\n3\nbinary"
    );
    let dirty = up(&t, fleet::UpRequest { dirty: UncommittedFiles::With, ..host.up(&t) }).await.spec;
    assert_eq!(t.sh(&dirty.id, "git status --porcelain").await.ok(), " D binary\n M numbers\n?? new.txt");
    assert_eq!(
        t.sh(&dirty.id, "tail -1 numbers; cat new.txt; ls target x.log 2>&1 | wc -l").await.ok(),
        "changed\nnew\n2"
    );
    let look = t.fleet().workspaces().review_files(&dirty.id, None).unwrap();
    assert_eq!(look.diff.files, [], "what the host had is not the Body's work");
    let with =
        up(&t, fleet::UpRequest { include: vec![host.dir.join("target/out")], ..host.up(&t) }).await.spec;
    assert_eq!(t.sh(&with.id, "cat target/out; ls target; git status --porcelain").await.ok(), "built\nout");
    assert_eq!(t.fleet().workspaces().review_files(&with.id, None).unwrap().diff.files, []);
    assert_eq!(
        host.sh("git status --porcelain"),
        " D binary\n M numbers\n?? new.txt",
        "the host's own index is as it was"
    );
}

#[body_test]
async fn a_near_tree_is_made_from_the_one_that_is_there(t: Bodies) {
    let host = HostRepo::make(
        &t,
        "app",
        "mkdir -p a/b c; for i in $(seq 300); do echo $i > a/f$i; done; echo 1 > a/b/x; echo 1 > c/y; echo 1 > swap; echo 1 > gone",
    );
    let first = up(&t, host.up(&t)).await.spec;
    host.commit("rm -r a/b gone; echo 2 > a/f1; rm swap; mkdir swap; echo in > swap/in; rm -r c; echo file > c; echo new > new; chmod +x a/f2", "second");
    let second = up(&t, host.up(&t)).await.spec;
    let describe = "git status --porcelain; find . -name .git -prune -o -printf '%P %y %m %l\\n' | LC_ALL=C sort; cat a/f1 swap/in c new";
    let near = t.sh(&second.id, describe).await.ok();
    // The same layer made from scratch, without a similar one.
    t.fleet().remove(&first.id, Force::Yes).await.unwrap();
    t.fleet().remove(&second.id, Force::Yes).await.unwrap();
    assert_eq!(
        second.workspaces[0].layers[2], first.workspaces[0].layers[1],
        "it stands on the first one's files"
    );
    t.fleet().garbage().remove_unused_layers(proto::Size(0)).unwrap();
    let whole = up(&t, host.up(&t)).await.spec;
    assert_eq!(t.sh(&whole.id, describe).await.ok(), near);
    assert!(near.contains("swap/in f 644") && !near.contains("a/b") && !near.contains("gone"), "{near}");
}

#[body_test]
async fn a_second_body_makes_no_layer(t: Bodies) {
    let host = HostRepo::plain(&t);
    let layers = || {
        std::fs::read_dir(t.data().join("layers"))
            .unwrap()
            .flatten()
            .filter(|entry| entry.path().is_dir())
            .count()
    };
    host.body(&t).await;
    let one = layers();
    let views = t.fleet().workspaces().up(fleet::UpRequest { count: 3, ..host.up(&t) }).await.unwrap();
    assert_eq!((views.len(), layers()), (3, one));
    t.sh(&views[0].spec.id, "echo mine > numbers").await.ok();
    assert_eq!(t.sh(&views[1].spec.id, "tail -1 numbers").await.ok(), "1000", "private from then on");
}

#[body_test]
async fn line_ends_links_modes_and_odd_names_are_as_git_has_them(t: Bodies) {
    let script = r#"printf '*.txt text eol=crlf\n*.bin -text\n' > .gitattributes; printf 'a\r\nb\r\n' > dos.txt; printf 'a\nb\n' > unix.c; printf 'x\r\n' > raw.bin
        mkdir 'sp ace'; echo 1 > 'sp ace/q"uote'; echo 2 > "$(printf 'new\nline')"; echo 3 > "$(printf 'by\377te')"; echo 4 > -dash; echo 5 > ':colon'; echo 6 > 'ba\ck'; ln -s /etc/passwd out; echo 7 > '*'"#;
    let host = HostRepo::make(&t, "odd", script);
    let body = host.body(&t).await;
    assert_eq!(t.sh(&body, "git status --porcelain").await.ok(), "");
    assert_eq!(
        t.sh(&body, "od -An -c dos.txt | tr -d ' '; readlink out").await.ok(),
        "a\\r\\nb\\r\\n\n/etc/passwd"
    );
    // After a change and a save, each file is what plain git would store.
    let change = r#"for f in dos.txt unix.c raw.bin -dash :colon 'ba\ck' '*' "$(printf 'new\nline')" "$(printf 'by\377te')" 'sp ace/q"uote'; do printf 'more\r\n' >> "./$f"; done; ln -sf nowhere out; chmod +x unix.c"#;
    t.sh(&body, change).await.ok();
    save(&t, &body).await;
    host.sh(change);
    host.git(&["add", "--all"]);
    assert_eq!(host.wip_tree(&body), host.git(&["write-tree"]));
}

#[body_test]
async fn worktrees_shallow_bare_and_remote_repositories_come_in(t: Bodies) {
    let host = HostRepo::plain(&t);
    host.commit("echo 2 > second", "second");
    host.git(&["worktree", "add", "--quiet", "-b", "side", "../side"]);
    let side = HostRepo { dir: t.dir().join("side") };
    side.commit("echo side > side", "on the side");
    let body = side.body(&t).await;
    assert_eq!(
        t.sh(
            &body,
            "git symbolic-ref --short HEAD; cat side; git log --oneline | wc -l; git status --porcelain"
        )
        .await
        .ok(),
        "side\nside\n3"
    );
    let url = format!("file://{}", host.dir.display());
    host.git(&["clone", "--quiet", "--depth=1", &url, "../shallow"]);
    let shallow = HostRepo { dir: t.dir().join("shallow") };
    let body = shallow.body(&t).await;
    assert_eq!(t.sh(&body, "git log --oneline | wc -l; git status --porcelain; echo more > more; git add more; git commit -qm more").await.ok(), "1");
    save(&t, &body).await;
    assert_eq!(shallow.wip_file(&body, "more").as_deref(), Some("more"));
    let remote = up(
        &t,
        fleet::UpRequest {
            repositories: vec![RepoSource::Url(url)],
            reference: Some("main".into()),
            ..host.up(&t)
        },
    )
    .await
    .spec;
    assert_eq!(
        (
            remote.workspaces[0].name.as_str(),
            t.sh(&remote.id, "cat second; git status --porcelain").await.ok().as_str()
        ),
        ("app", "2")
    );
    t.sh(&remote.id, "echo r > r; git add r; git commit -qm r").await.ok();
    let saved = save(&t, &remote.id).await;
    assert_eq!(saved.branches.len(), 1);
    let old = up(&t, fleet::UpRequest { reference: Some("main~1".into()), ..host.up(&t) }).await.spec;
    assert_eq!(
        t.sh(
            &old.id,
            "ls second 2>&1 | wc -l; git log --oneline | wc -l; git symbolic-ref -q HEAD || echo detached"
        )
        .await
        .ok(),
        "1\n1\ndetached"
    );
}

#[body_test]
async fn two_repositories_stand_side_by_side(t: Bodies) {
    let (one, two) = (HostRepo::plain(&t), HostRepo::make(&t, "lib", "echo lib > lib.txt"));
    let both = fleet::UpRequest {
        repositories: vec![RepoSource::Path(one.dir.clone()), RepoSource::Path(two.dir.clone())],
        ..one.up(&t)
    };
    let body = up(&t, both).await.spec.id;
    assert_eq!(t.sh(&body, "pwd; cat ../lib/lib.txt; echo more >> ../lib/lib.txt; git status --porcelain; git -C ../lib status --porcelain").await.ok(), "/workspace/app\nlib\n M lib.txt");
    t.fleet().workspaces().save(&body).await.unwrap();
    assert_eq!(two.wip_file(&body, "lib.txt").as_deref(), Some("lib\nmore"));
    assert_eq!(one.wip_tree(&body), one.git(&["rev-parse", "HEAD^{tree}"]));
}

#[body_test]
async fn forks_and_restarts_keep_the_workspace(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "echo one > one; git add one; git commit -qm one; echo two > two; rm numbers; rm -r src; mkdir src; echo n > src/n").await.ok();
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0).spec.id;
    t.sh(&fork, "echo three > three; rm two").await.ok();
    let saved = save(&t, &fork).await;
    assert!(saved.is_whole() && saved.uncommitted, "{saved:?}");
    let there = host.git(&["ls-tree", "-r", "--name-only", &format!("refs/palisade/{fork}/wip")]);
    assert_eq!(
        there.lines().collect::<Vec<_>>(),
        [".gitignore", "binary", "link", "one", "run.sh", "src/n", "three"]
    );
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    assert_eq!(
        t.sh(&body, "git status --porcelain; cat two").await.ok(),
        " D numbers\n D src/deep/x\n D src/main.rs\n?? src/n\n?? two\ntwo"
    );
}

#[body_test]
async fn files_of_submodules_come_in_where_the_host_has_them(t: Bodies) {
    let lib =
        HostRepo::make(&t, "lib", "mkdir src; echo lib > src/lib.c; echo '#!/bin/sh' > run; chmod +x run");
    let deep = HostRepo::make(&t, "deep", "echo deep > deep.c");
    let host = HostRepo::around(&t, &lib, &deep);
    let body = host.body(&t).await;
    assert_eq!(t.sh(&body, "cat main.c libs/lib/src/lib.c libs/lib/vendored/deep/deep.c; test -x libs/lib/run && git status --porcelain").await.ok(), "main\nlib\ndeep");
    t.sh(&body, "echo more >> main.c; git commit -qam more").await.ok();
    let saved = save(&t, &body).await;
    assert!(saved.is_whole(), "{saved:?}");
    assert_eq!(
        host.git(&["ls-tree", &format!("refs/palisade/{body}/wip"), "libs/lib"]),
        host.git(&["ls-tree", "HEAD", "libs/lib"]),
        "it is the submodule it was"
    );
    // A submodule that was never fetched is an empty directory, as in git.
    host.git(&["clone", "--quiet", ".", "../bare-of-it"]);
    let bare = HostRepo { dir: t.dir().join("bare-of-it") };
    let body = bare.body(&t).await;
    assert_eq!(t.sh(&body, "ls libs/lib; git status --porcelain").await.ok(), "");
}

#[body_test]
async fn sparse_checkouts_outside_and_inside_delete_nothing(t: Bodies) {
    let host =
        HostRepo::make(&t, "app", "mkdir a b c; echo 1 > a/f; echo 1 > b/f; echo 1 > c/f; echo 1 > top");
    host.git(&["sparse-checkout", "set", "a"]);
    host.sh("echo 2 > a/f; test ! -e b");
    let dirty = up(&t, fleet::UpRequest { dirty: UncommittedFiles::With, ..host.up(&t) }).await.spec.id;
    assert_eq!(
        t.sh(&dirty, "cat a/f b/f; git status --porcelain").await.ok(),
        "2\n1\n M a/f",
        "all files are there"
    );
    let work = host.git(&["rev-parse", "HEAD^{tree}"]);
    for index in ["--no-sparse-index", "--sparse-index"] {
        let body = host.body(&t).await;
        t.sh(&body, &format!("git sparse-checkout set --cone {index} a && test ! -e b && test ! -e c && git status --porcelain")).await.ok();
        save(&t, &body).await;
        assert_eq!(host.wip_tree(&body), work, "{index}: out of sight is not gone");
        // Really deleted files count as deleted.
        t.sh(&body, "rm a/f top; echo new > a/new").await.ok();
        save(&t, &body).await;
        let there = host.git(&["ls-tree", "-r", "--name-only", &format!("refs/palisade/{body}/wip")]);
        assert_eq!(there.lines().collect::<Vec<_>>(), ["a/new", "b/f", "c/f"], "{index}");
    }
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn what_was_committed_and_taken_out_of_sight_is_saved_as_it_was_committed(t: Bodies) {
    let host = HostRepo::make(
        &t,
        "app",
        "mkdir a b c; echo 1 > a/f; echo 1 > b/f; echo 1 > b/g; echo 1 > c/f; echo 1 > c/x",
    );
    for index in ["--no-sparse-index", "--sparse-index"] {
        let body = host.body(&t).await;
        let change = "echo 2 > b/f; rm b/g; echo 2 > b/new; chmod +x c/x; git add -A; git commit -qm two";
        t.sh(&body, &format!("{change}; git sparse-checkout set --cone {index} a; test ! -e b && git status --porcelain; echo 3 > a/f")).await.ok();
        let look = t.fleet().workspaces().review_files(&body, None).unwrap();
        let files: Vec<&str> = look.diff.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(files, ["a/f", "b/f", "b/g", "b/new", "c/x"], "{index}");
        let saved = save(&t, &body).await;
        assert!(saved.is_whole(), "{index}: {saved:?}");
        let native = HostRepo { dir: t.dir().join(format!("native {index}")) };
        host.git(&["clone", "--quiet", ".", &native.dir.to_string_lossy()]);
        native.commit(&format!("{change}; echo 3 > a/f"), "all");
        assert_eq!(
            host.wip_tree(&body),
            native.git(&["rev-parse", "HEAD^{tree}"]),
            "{index}: as plain git has it"
        );
    }
    // If only the index knew the content and the object is missing, the path is listed.
    let body = host.body(&t).await;
    t.sh(&body, "echo lost > b/f; git add b/f; git update-index --skip-worktree b/f; rm -r b/f; o=$(git rev-parse :b/f); rm -f .git/objects/${o%${o#??}}/${o#??}").await.ok();
    assert_eq!(
        save(&t, &body).await.skipped.iter().map(|left| left.path.as_str()).collect::<Vec<_>>(),
        ["b/f"]
    );
    t.fleet().remove_with(&body, Force::Yes, fleet::Discard::Yes).await.unwrap();
}

#[body_test(except(
    user = "what it shows does not depend on who runs it",
    microvm = "a microVM shows nothing of the host, so no contents either"
))]
async fn pointers_of_lfs_stay_pointers_and_that_is_told(t: Bodies) {
    let pointer = r"printf 'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 5\n'";
    let host = HostRepo::make(
        &t,
        "app",
        &format!(
            "echo '*.bin filter=lfs diff=lfs merge=lfs -text' > .gitattributes; {pointer} > model.bin; {pointer} > other.bin; echo plain > plain"
        ),
    );
    let heard = async |up: fleet::UpRequest| {
        let mut said = Vec::new();
        let views = t
            .fleet()
            .workspaces()
            .up_with_progress(up, &mut |line| said.push(line.to_string()))
            .await
            .unwrap();
        (views[0].spec.id.clone(), said)
    };
    let (_, said) = heard(host.up(&t)).await;
    assert_eq!(
        said,
        Vec::<String>::new(),
        "a repository that keeps nothing elsewhere has the same on the host"
    );
    host.sh("mkdir -p .git/lfs/objects; echo contents > contents; echo contents >> .git/info/exclude");
    let (body, said) = heard(host.up(&t)).await;
    assert_eq!(said[0], "model.bin and 1 more are pointers of Git LFS, not the contents");
    assert!(said[1].ends_with(r#"pal up --mount "$PWD/model.bin:/workspace/app/model.bin""#), "{said:?}");
    assert_eq!(t.sh(&body, "head -c 7 model.bin; git status --porcelain").await.ok(), "version");
    // As the message says: a mounted host file is visible, and is no work of the Body.
    let mut shown = host.up(&t);
    shown.create.mounts.push(Mount {
        source: host.dir.join("contents"),
        target: "/workspace/app/model.bin".into(),
        access: Access::ReadOnly,
    });
    let (body, _) = heard(shown).await;
    assert_eq!(t.sh(&body, "cat model.bin").await.ok(), "contents");
    assert_eq!(t.fleet().workspaces().review_files(&body, None).unwrap().diff.files, []);
}

#[body_test]
async fn what_a_partial_clone_was_promised_is_fetched_first(t: Bodies) {
    let origin = HostRepo::make(&t, "origin", "seq 500 > numbers; mkdir d; echo deep > d/file");
    origin.git(&["config", "uploadpack.allowFilter", "true"]);
    origin.git(&["config", "uploadpack.allowAnySHA1InWant", "true"]);
    let url = format!("file://{}", origin.dir.display());
    for (name, gone) in [("partial", false), ("orphan", true)] {
        origin.git(&["clone", "--quiet", "--filter=blob:none", "--no-checkout", &url, &format!("../{name}")]);
        let partial = HostRepo { dir: t.dir().join(name) };
        let missing = || {
            partial
                .git(&["rev-list", "--objects", "--missing=print", "HEAD"])
                .lines()
                .filter(|line| line.starts_with('?'))
                .count()
        };
        assert_eq!(missing(), 2, "nothing was fetched yet");
        if gone {
            partial.git(&["remote", "set-url", "origin", "file:///nonexistent"]);
            let failure = t.fleet().workspaces().up(partial.up(&t)).await.unwrap_err();
            assert!(
                testkit::explain(&failure).contains("2 files of this partial clone are still with origin"),
                "{}",
                testkit::explain(&failure)
            );
            continue;
        }
        let body = partial.body(&t).await;
        assert_eq!(
            t.sh(
                &body,
                "tail -1 numbers; cat d/file; git status --porcelain; echo x > x; git add x; git commit -qm x"
            )
            .await
            .ok(),
            "500\ndeep"
        );
        assert_eq!(missing(), 0);
        save(&t, &body).await;
        assert_eq!(partial.wip_file(&body, "x").as_deref(), Some("x"));
    }
}

#[body_test]
async fn an_address_that_is_fetched_again_moves_no_branch_that_was_landed_on(t: Bodies) {
    let host = HostRepo::plain(&t);
    let again = || fleet::UpRequest {
        repositories: vec![RepoSource::Url(format!("file://{}", host.dir.display()))],
        reference: Some("main".into()),
        ..host.up(&t)
    };
    let first = up(&t, again()).await.spec;
    let clone = HostRepo { dir: first.workspaces[0].repository.clone() };
    // Nothing landed: the clone follows, even if the remote was rewritten.
    host.commit("echo 2 > second", "second");
    assert_eq!(up(&t, again()).await.spec.workspaces[0].commit, host.git(&["rev-parse", "main"]));
    host.git(&["commit", "--quiet", "--amend", "-m", "second, anew"]);
    assert_eq!(up(&t, again()).await.spec.workspaces[0].commit, host.git(&["rev-parse", "main"]));
    // Landed: the landed commits stay, whatever the remote does.
    let body = up(&t, again()).await.spec.id;
    t.sh(&body, "echo mine > mine; git add mine; git commit -qm mine").await.ok();
    t.fleet()
        .workspaces()
        .land(
            &body,
            None,
            fleet::LandTarget::Onto("main".into()),
            fleet::LandSelection::All,
            &crate::repo::person(),
        )
        .await
        .unwrap();
    let landed = clone.git(&["rev-parse", "main"]);
    host.commit("echo 3 > third", "third");
    assert_eq!(up(&t, again()).await.spec.workspaces[0].commit, landed);
    assert_eq!(
        clone.git(&["rev-parse", "refs/remotes/origin/main"]),
        host.git(&["rev-parse", "main"]),
        "what the remote has is there, too"
    );
    let theirs = fleet::UpRequest { reference: Some("origin/main".into()), ..again() };
    assert_eq!(up(&t, theirs).await.spec.workspaces[0].commit, host.git(&["rev-parse", "main"]));
}

#[body_test]
async fn a_repository_of_sha_256_is_refused_by_name(t: Bodies) {
    let host = HostRepo { dir: t.dir().join("new") };
    std::fs::create_dir(&host.dir).unwrap();
    host.git(&["init", "--quiet", "--object-format=sha256"]);
    host.commit("echo x > x", "first");
    let failure = t.fleet().workspaces().up(host.up(&t)).await.unwrap_err();
    assert!(testkit::explain(&failure).contains("SHA-256"), "{}", testkit::explain(&failure));
}
