//! A Body's work in submodules: saved in their own repositories, and none of it runs on the host.

use fleet::{DiffFormat, Discard, Force, LandSelection, LandTarget};
use proto::BodyId;
use testkit::{Bodies, body_test};

use crate::repo::{HostRepo, git_in, person, save, sh_in};

/// A repository with a submodule, which has a submodule, too.
fn nested(t: &Bodies) -> HostRepo {
    let lib =
        HostRepo::make(t, "lib", "mkdir src; echo lib > src/lib.c; echo old > old; echo '*.o' > .gitignore");
    let deep = HostRepo::make(t, "deep", "echo deep > deep.c");
    HostRepo::around(t, &lib, &deep)
}

/// git in a submodule of the host's work tree.
fn inside(host: &HostRepo, path: &str, args: &[&str]) -> String {
    let output = git_in(&host.dir.join(path), args);
    assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

fn wip(body: &BodyId) -> String {
    format!("refs/palisade/{body}/wip")
}

fn link(host: &HostRepo, commit: &str) -> String {
    host.git(&["ls-tree", commit, "libs/lib"])
}

#[body_test]
async fn work_in_submodules_is_saved_in_their_own_repositories(t: Bodies) {
    let host = nested(&t);
    let idle = host.body(&t).await;
    let body = host.body(&t).await;
    let work = "echo more >> main.c; cd libs/lib; echo mine >> src/lib.c; echo new > new; rm old; echo x > x.o; echo deeper >> vendored/deep/deep.c";
    t.sh(&body, work).await.ok();
    let look = t.fleet().workspaces().review_files(&body, None).unwrap();
    let mut files: Vec<&str> = look.diff.files.iter().map(|file| file.path.as_str()).collect();
    files.sort_unstable();
    let all =
        ["libs/lib/new", "libs/lib/old", "libs/lib/src/lib.c", "libs/lib/vendored/deep/deep.c", "main.c"];
    assert_eq!((files, look.diff.skipped.len()), (all.to_vec(), 0));
    let patch = String::from_utf8(look.text(DiffFormat::Patch, &[]).unwrap()).unwrap();
    assert!(
        patch.contains("+++ b/libs/lib/src/lib.c\n@@ -1 +1,2 @@\n lib\n+mine\n")
            && patch.contains("b/main.c"),
        "{patch}"
    );
    let narrowed =
        String::from_utf8(look.text(DiffFormat::Stat, &["libs/lib/vendored".into()]).unwrap()).unwrap();
    assert!(
        narrowed.contains("1 file changed") && narrowed.contains("libs/lib/vendored/deep/deep.c"),
        "{narrowed}"
    );
    let saved = save(&t, &body).await;
    assert!(saved.is_whole(), "{saved:?}");
    let paths: Vec<&str> = saved.submodules.iter().map(|module| module.path.as_str()).collect();
    assert_eq!(paths, ["libs/lib", "libs/lib/vendored/deep"]);
    assert_eq!(link(&host, &wip(&body)), link(&host, "HEAD"), "it is the submodule it was");
    // It is on top of the submodule's commit, so plain git can merge it.
    assert_eq!(
        inside(&host, "libs/lib", &["rev-parse", &format!("{}~1", wip(&body))]),
        inside(&host, "libs/lib", &["rev-parse", "HEAD"])
    );
    inside(&host, "libs/lib", &["merge", "--quiet", &wip(&body)]);
    inside(&host, "libs/lib/vendored/deep", &["merge", "--quiet", &wip(&body)]);
    assert_eq!(
        host.sh("cd libs/lib; cat src/lib.c new vendored/deep/deep.c; ls old x.o 2>/dev/null; true"),
        "lib\nmine\nnew\ndeep\ndeeper"
    );
    let landed = t
        .fleet()
        .workspaces()
        .land(&body, None, LandTarget::Branch("work".into()), LandSelection::All, &person())
        .await
        .unwrap();
    assert_eq!((landed.submodules.len(), host.git(&["show", "work:main.c"])), (2, "main\nmore".into()));
    // Saved work stays after the Body; a Body without changes leaves no ref.
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    t.fleet().remove(&idle, Force::Yes).await.unwrap();
    assert_eq!(inside(&host, "libs/lib", &["show", &format!("{}:new", wip(&body))]), "new");
    for path in [".", "libs/lib", "libs/lib/vendored/deep"] {
        assert_eq!(inside(&host, path, &["for-each-ref", &format!("refs/palisade/{idle}")]), "", "{path}");
    }
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn a_submodule_that_was_emptied_moved_or_removed_is_saved_as_that(t: Bodies) {
    let host = nested(&t);
    let names = |body: &BodyId| inside(&host, "libs/lib", &["ls-tree", "-r", "--name-only", &wip(body)]);
    let body = host.body(&t).await;
    t.sh(&body, "rm -rf libs; mkdir -p libs/lib; echo only > libs/lib/only").await.ok();
    let saved = save(&t, &body).await;
    assert!(saved.is_whole(), "{saved:?}");
    assert_eq!((names(&body), link(&host, &wip(&body))), ("only".into(), link(&host, "HEAD")));
    // A second look, in a fork, whose lower layer is the parent's.
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0).spec.id;
    t.sh(&fork, "cd /workspace/app; echo more > libs/lib/more").await.ok();
    assert!(save(&t, &fork).await.is_whole());
    assert_eq!(names(&fork), "more\nonly");
    let gone = host.body(&t).await;
    t.sh(&gone, "rm -rf libs/lib").await.ok();
    let saved = save(&t, &gone).await;
    assert!(saved.is_whole() && saved.submodules.is_empty(), "{saved:?}");
    assert_eq!(link(&host, &wip(&gone)), "", "what is not there is not there");
    let moved = host.body(&t).await;
    t.sh(&moved, "mkdir third; cp -r libs/lib third/; rm -rf libs/lib; echo file > libs/lib").await.ok();
    assert!(save(&t, &moved).await.is_whole());
    assert_eq!(
        (
            host.wip_file(&moved, "libs/lib").as_deref(),
            host.wip_file(&moved, "third/lib/src/lib.c").as_deref()
        ),
        (Some("file"), Some("lib"))
    );
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn commits_that_were_made_in_a_submodule_are_saved_and_the_link_follows(t: Bodies) {
    let host = nested(&t);
    let commit = "cd libs/lib && git add -A . && git -c user.name=a -c user.email=a@b commit -qm inside && cd ../.. && git add libs/lib && git commit -qm outside && git rev-parse HEAD";
    for init in [
        "git init -q -b own libs/lib",
        "mkdir .git/modules; git init -q -b own --separate-git-dir=$PWD/.git/modules/own libs/lib",
    ] {
        let body = host.body(&t).await;
        t.sh(&body, &format!("{init}; echo mine > libs/lib/mine; rm -rf libs/lib/vendored; {commit}; echo later > libs/lib/later")).await.ok();
        let saved = save(&t, &body).await;
        assert!(saved.is_whole(), "{init}: {saved:?}");
        let own = format!("refs/palisade/{body}/heads/own");
        assert_eq!(inside(&host, "libs/lib", &["log", "--format=%s", &own]), "inside", "{init}");
        assert_eq!(inside(&host, "libs/lib", &["show", &format!("{}:later", wip(&body))]), "later", "{init}");
        let stands = inside(&host, "libs/lib", &["rev-parse", &own]);
        assert!(link(&host, &wip(&body)).contains(&stands), "{init}: what is uncommitted takes nothing back");
        assert_eq!(saved.wip, saved.head, "{init}: all of the repository around it is committed");
        t.fleet().remove(&body, Force::Yes).await.unwrap();
    }
}

/// A Body's changes to a submodule's `.git`; whether its commits can be saved; and a careless command there.
const TRAPS: &[(&str, bool, &str)] = &[
    ("settings", true, "git init -q libs/lib; git -C libs/lib config core.fsmonitor \"$RUN;false\""),
    (
        "a hook",
        true,
        "git init -q libs/lib; mkdir -p libs/lib/.git/hooks; printf '#!/bin/sh\\n%s\\n' \"$RUN\" > libs/lib/.git/hooks/post-index-change; chmod +x libs/lib/.git/hooks/post-index-change",
    ),
    (
        "a file",
        false,
        "git init -q --separate-git-dir=$PWD/other libs/lib; echo 'gitdir: ../../other' > libs/lib/.git; git --git-dir=other config core.fsmonitor \"$RUN;false\"",
    ),
    (
        "a link",
        false,
        "git init -q other; git -C other config core.fsmonitor \"$RUN;false\"; ln -s ../../other/.git libs/lib/.git",
    ),
    (
        "a filter",
        true,
        "git init -q libs/lib; echo '* filter=x' > libs/lib/.gitattributes; git -C libs/lib config filter.x.clean \"$RUN;cat\"",
    ),
];

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn nothing_that_a_submodule_holds_runs_on_the_host(t: Bodies) {
    let host = nested(&t);
    let mark = t.dir().join("MARK");
    for (name, taken, set) in TRAPS {
        let body = host.body(&t).await;
        t.sh(&body, &format!("RUN='touch {}'\n{set}; echo mine > libs/lib/mine", mark.display())).await.ok();
        let copy = t.dir().join(format!("copy of {name}"));
        let files = t.fleet().files();
        files.copy_out_with(&body, "/workspace/app", &copy, fleet::GitDirs::Copy).await.unwrap();
        sh_in(&copy.join("libs/lib"), "git add -A; git status");
        assert!(mark.exists(), "{name}: a trap that catches nobody proves nothing");
        std::fs::remove_file(&mark).unwrap();
        t.fleet().workspaces().review_files(&body, None).unwrap().text(DiffFormat::Patch, &[]).unwrap();
        let saved = save(&t, &body).await;
        assert_eq!(inside(&host, "libs/lib", &["show", &format!("{}:mine", wip(&body))]), "mine", "{name}");
        let named = saved.skipped.iter().any(|left| left.path == "libs/lib/.git");
        assert_eq!(named, !taken, "{name}: {saved:?}");
        assert_eq!(t.fleet().remove(&body, Force::Yes).await.is_err(), named || !saved.is_whole(), "{name}");
        let _ = t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await;
        assert!(!mark.exists(), "{name}: it ran on the host");
    }
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn what_has_no_repository_on_the_host_is_named_and_keeps_the_body(t: Bodies) {
    let host = nested(&t);
    host.git(&["clone", "--quiet", ".", "../without"]);
    let without = HostRepo { dir: t.dir().join("without") };
    let body = without.body(&t).await;
    t.sh(&body, "echo mine > libs/lib/mine").await.ok();
    let saved = save(&t, &body).await;
    assert_eq!(saved.skipped.iter().map(|left| left.path.as_str()).collect::<Vec<_>>(), ["libs/lib"]);
    assert!(t.fleet().remove(&body, Force::Yes).await.is_err());
    t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
    // The same holds if its repository was removed meanwhile, and the rest is saved.
    let body = host.body(&t).await;
    t.sh(&body, "echo mine > libs/lib/mine; echo more >> main.c").await.ok();
    let modules = host.dir.join(".git/modules");
    std::fs::rename(&modules, t.dir().join("aside")).unwrap();
    let saved = save(&t, &body).await;
    assert_eq!(saved.skipped.iter().map(|left| left.path.as_str()).collect::<Vec<_>>(), ["libs/lib"]);
    assert_eq!(host.wip_file(&body, "main.c").as_deref(), Some("main\nmore"));
    assert!(t.fleet().remove(&body, Force::Yes).await.is_err());
    std::fs::rename(t.dir().join("aside"), &modules).unwrap();
    t.fleet().remove(&body, Force::Yes).await.unwrap();
    assert_eq!(inside(&host, "libs/lib", &["show", &format!("{}:mine", wip(&body))]), "mine");
}
