//! Files that git's own checks refuse: saved unchanged, and never landed on a branch.

use fleet::{Discard, Force, LandSelection, LandTarget};
use proto::Kind;
use testkit::{Bodies, body_test, explain};

use crate::repo::{HostRepo, person, save};

/// The file of the Body, its path, and whether it may land.
struct Case {
    name: &'static str,
    set: &'static str,
    path: &'static str,
    lands: bool,
}

const CASES: &[Case] = &[
    Case { name: "a plain file", set: "echo x > plain", path: "plain", lands: true },
    Case {
        name: "attributes with a long line",
        set: "printf 'x%03000d text\\n' 1 > .gitattributes",
        path: ".gitattributes",
        lands: false,
    },
    Case {
        name: "attributes with a long line, further down",
        set: "mkdir -p a/b; printf 'x%03000d text\\n' 1 > a/b/.gitattributes",
        path: "a/b/.gitattributes",
        lands: false,
    },
    Case {
        name: "a module that is an option",
        set: "printf '[submodule \"x\"]\\n\\tpath = x\\n\\turl = -u./run\\n' > .gitmodules",
        path: ".gitmodules",
        lands: false,
    },
    Case {
        name: "a module further down",
        set: "mkdir sub; printf '[submodule \"../x\"]\\n\\tpath = x\\n\\turl = y\\n' > sub/.gitmodules",
        path: "sub/.gitmodules",
        lands: false,
    },
    Case {
        name: "a module file that is a link",
        set: "ln -s ../../etc/passwd .gitmodules",
        path: ".gitmodules",
        lands: false,
    },
    Case {
        name: "a module file that is a directory",
        set: "mkdir .gitmodules; echo x > .gitmodules/x",
        path: ".gitmodules/x",
        lands: false,
    },
    Case {
        name: "no text in its encoding",
        set: "echo '*.u16 text working-tree-encoding=UTF-16' > .gitattributes; printf '\\377\\376x' > odd.u16",
        path: "odd.u16",
        lands: true,
    },
    Case {
        name: "an encoding that is none",
        set: "echo '*.u16 text working-tree-encoding=NO-SUCH' > .gitattributes; echo x > odd.u16",
        path: "odd.u16",
        lands: true,
    },
    Case {
        name: "a filter that nobody has",
        set: "echo '*.f filter=must' > .gitattributes; echo x > a.f",
        path: "a.f",
        lands: true,
    },
    Case {
        name: "line ends",
        set: "echo '* text=auto' > .gitattributes; printf 'a\\nb\\n' > lines",
        path: "lines",
        lands: true,
    },
];

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn contents_that_git_refuses_are_saved_and_do_not_land(t: Bodies) {
    let host = HostRepo::plain(&t);
    for Case { name, set, path, lands } in CASES {
        let body = host.body(&t).await;
        t.sh(&body, "echo good > good; git add good; git commit -qm good").await.ok();
        t.sh(&body, set).await.ok();
        let saved = save(&t, &body).await;
        assert!(saved.is_whole(), "{name}: {saved:?}");
        let hash = |bytes: &str| bytes.split_whitespace().next().unwrap_or_default().to_owned();
        let inside = t.sh(&body, &format!("if [ -L {path} ]; then printf %s \"$(readlink {path})\"; else cat {path}; fi | git hash-object --stdin")).await.ok();
        assert_eq!(
            host.git(&["rev-parse", &format!("refs/palisade/{body}/wip:{path}")]),
            hash(&inside),
            "{name}: byte by byte"
        );
        let all = t
            .fleet()
            .workspaces()
            .land(&body, None, LandTarget::Branch(format!("all-{body}")), LandSelection::All, &person())
            .await;
        let squash = t
            .fleet()
            .workspaces()
            .land(
                &body,
                None,
                LandTarget::Branch(format!("one-{body}")),
                LandSelection::Squash { message: None },
                &person(),
            )
            .await;
        for landed in [all, squash] {
            match landed {
                Ok(_) => assert!(lands, "{name}: it landed"),
                Err(failure) => {
                    assert!(
                        !lands && failure.kind == Kind::Conflict && failure.message.contains("fsck"),
                        "{name}: {}",
                        explain(&failure)
                    );
                    assert!(
                        failure.hints.iter().any(|hint| hint.contains("--committed")),
                        "{name}: {:?}",
                        failure.hints
                    );
                }
            }
        }
        let committed = t
            .fleet()
            .workspaces()
            .land(
                &body,
                None,
                LandTarget::Branch(format!("committed-{body}")),
                LandSelection::Committed,
                &person(),
            )
            .await;
        assert_eq!(
            committed.unwrap_or_else(|failure| panic!("{name}: {}", explain(&failure))).commits,
            1,
            "{name}"
        );
        // If the Body commits it, it does not land either, and its files are still saved.
        if !lands {
            // Without `git add`, which refuses some of these files itself.
            let commit = format!("export GIT_INDEX_FILE=/tmp/index; git read-tree HEAD; h=$(if [ -L {path} ]; then printf %s \"$(readlink {path})\"; else cat {path}; fi | git hash-object -w --stdin)
                t={path}; m=100644; if [ -L {path} ]; then m=120000; fi; n=$(printf '%s blob %s\\t%s\\n' $m $h ${{t##*/}} | git mktree)
                while [ \"$t\" != \"${{t%/*}}\" ]; do t=${{t%/*}}; n=$(printf '040000 tree %s\\t%s\\n' $n ${{t##*/}} | git mktree); done
                c=$(git commit-tree $n -p HEAD -m bad); git update-ref HEAD $c");
            t.sh(&body, &commit).await.ok();
            // Also after its objects were saved before, and so are known.
            let landed = t
                .fleet()
                .workspaces()
                .land(
                    &body,
                    None,
                    LandTarget::Branch(format!("bad-{body}")),
                    LandSelection::Committed,
                    &person(),
                )
                .await;
            let failure = landed.expect_err(name);
            assert_eq!(failure.kind, Kind::Conflict, "{name}");
            // The hint is not the command that just failed.
            assert!(failure.hints.iter().all(|hint| hint.contains("--patch")), "{name}: {:?}", failure.hints);
            assert_eq!(
                host.git(&["rev-parse", &format!("refs/palisade/{body}/wip:{path}")]),
                hash(&inside),
                "{name}"
            );
        }
        t.fleet().remove_with(&body, Force::Yes, Discard::Yes).await.unwrap();
    }
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn commits_that_git_warns_of_a_thousand_times_are_saved_and_land(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    // Modes that old programs wrote; git warns about each tree, and goes on as long as its stderr is read.
    let made = "b=$(echo x | git hash-object -w --stdin)
        for n in $(seq 1000); do printf '100664 blob %s\tf%d\n\n' $b $n; done | git mktree --batch > /tmp/trees
        top=$(n=0; while read t; do n=$((n+1)); printf '040000 tree %s\td%d\n' $t $n; done < /tmp/trees | git mktree)
        git update-ref HEAD $(git commit-tree $top -p HEAD -m many); git rev-parse HEAD";
    let head = t.sh(&body, made).await.ok();
    let saved = save(&t, &body).await;
    assert_eq!((saved.commit_error.as_deref(), saved.head), (None, head.clone()));
    let landed = t
        .fleet()
        .workspaces()
        .land(&body, None, LandTarget::Branch("many".into()), LandSelection::Committed, &person())
        .await;
    let landed = landed.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    let tree = |commit: &str| host.git(&["rev-parse", &format!("{commit}^{{tree}}")]);
    assert_eq!(tree(&landed.to), tree(&head));
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn what_a_body_tracks_is_saved_however_its_index_is_written(t: Bodies) {
    let host = HostRepo::plain(&t);
    for (name, index) in [
        ("as always", "true"),
        ("in two files", "git update-index --split-index"),
        ("with paths cut short", "git update-index --index-version 4"),
        ("with what it knows of untracked files", "git update-index --untracked-cache"),
        ("sparse", "git sparse-checkout set --sparse-index src && git sparse-checkout disable"),
    ] {
        let body = host.body(&t).await;
        // Ignored by name, and tracked all the same.
        t.sh(&body, &format!("echo forced > x.log; git add -f x.log; git commit -qm forced; {index}; echo more >> x.log; echo ignored > y.log; seq 1100 > numbers")).await.ok();
        let saved = save(&t, &body).await;
        assert!(saved.is_whole(), "{name}: {saved:?}");
        assert_eq!(host.wip_file(&body, "x.log").as_deref(), Some("forced\nmore"), "{name}");
        assert_eq!(host.wip_file(&body, "y.log"), None, "{name}");
        assert!(host.wip_file(&body, "numbers").is_some_and(|text| text.ends_with("1100")), "{name}");
        t.fleet().remove(&body, Force::Yes).await.unwrap();
    }
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn what_the_user_ignores_everywhere_does_not_come_in_and_is_saved_if_a_body_makes_it(t: Bodies) {
    let host = HostRepo::plain(&t);
    let home = t.dir().join("home");
    std::fs::create_dir(&home).unwrap();
    std::fs::write(home.join("ignored"), "*.mine\n").unwrap();
    std::fs::write(
        home.join(".gitconfig"),
        format!("[core]\n\texcludesFile = {}\n", home.join("ignored").display()),
    )
    .unwrap();
    host.sh("echo private > notes.mine; echo other > notes.other");
    let whose = fleet::GitIdentity { home, ..person() };
    let up = |person: fleet::GitIdentity| fleet::UpRequest {
        dirty: fleet::UncommittedFiles::With,
        person,
        ..host.up(&t)
    };
    let body = crate::repo::up(&t, up(whose)).await.spec.id;
    assert_eq!(t.sh(&body, "ls notes.*").await.ok(), "notes.other");
    // A user without such a rule imports it.
    let other = crate::repo::up(&t, up(person())).await.spec.id;
    assert_eq!(t.sh(&other, "ls notes.*").await.ok(), "notes.mine\nnotes.other");
    t.sh(&body, "echo made > made.mine").await.ok();
    save(&t, &body).await;
    assert_eq!(
        host.wip_file(&body, "made.mine").as_deref(),
        Some("made"),
        "nothing that a Body makes is dropped for it"
    );
}
