//! Files that a preparation made or changed in the repository: they hide no file of a commit, and they are no work of a Body
//! until the Body makes them its own.

use fleet::{Force, LandSelection, LandTarget};
use proto::BodyId;
use testkit::{Bodies, body_test, explain};

use crate::{
    ecosystems::{asked, prepared, steps},
    repo::{HostRepo, person, save},
};

/// Writes palisade.toml with one command.
fn settings(command: &str) -> String {
    format!("cat > palisade.toml <<'END'\n[prepare]\ncommands = ['''{command}''']\nEND\n")
}

/// The changed paths that a review shows, and those that it names as skipped.
fn shown(t: &Bodies, body: &BodyId) -> (Vec<String>, usize) {
    let look = t
        .fleet()
        .workspaces()
        .review_files(body, None)
        .unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    let skipped = look.diff.skipped.len();
    (look.diff.files.into_iter().map(|file| file.path).collect(), skipped)
}

#[body_test]
async fn steps_of_another_commit_hide_no_file_of_this_one(t: Bodies) {
    let step = "echo step >> changed; rm deleted; rm -r replaced; mkdir replaced; echo step > replaced/new; rm dir/file; \
                echo step > made; mkdir both && echo step > both/made; true";
    let host = HostRepo::make(
        &t,
        "app",
        &(settings(step)
            + "echo 1 > changed; echo 1 > deleted; mkdir replaced dir; echo 1 > replaced/old; echo 1 > dir/file"),
    );
    let (first, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(steps(&said), 1);
    assert!(said.iter().any(|line| line.starts_with("not kept: ") && line.ends_with(" more")), "{said:?}");
    let state = "cat changed deleted replaced/old dir/file; git status --short --untracked-files=no";
    assert_eq!(t.sh(&first, state).await.ok(), "1\n1\n1\n1", "a Body begins with the files of its commit");
    assert_eq!(t.sh(&first, "cat made both/made").await.ok(), "step\nstep", "and has what the steps made");
    assert_eq!(shown(&t, &first), (vec![], 0));

    // The next commit has a file that the steps made for the first one, and a newer version of one that they changed.
    host.commit("echo 2 > changed; echo mine > made; rm -r both; echo 2 > both", "second");
    let (second, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(steps(&said), 1, "the layer of the first commit hides files of the second: {said:?}");
    assert_eq!(
        t.sh(&second, "cat changed made; git status --short").await.ok(),
        "2\nmine",
        "no file is older"
    );
    assert_eq!(shown(&t, &second), (vec![], 0));
    t.sh(&second, "echo work > work").await.ok();
    let onto = LandTarget::Onto("main".into());
    let landed = t.fleet().workspaces().land(&second, None, onto, LandSelection::All, &person()).await;
    landed.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    assert_eq!(host.git(&["diff", "--name-status", "HEAD~1", "HEAD"]), "A\twork");

    // A commit whose files no layer hides uses the last one.
    host.commit("echo 3 > other", "third");
    let (third, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(steps(&said), 0, "{said:?}");
    for body in [first, second, third] {
        t.fleet().remove(&body, Force::Yes).await.unwrap();
    }
}

#[body_test]
async fn what_a_preparation_made_is_no_work_until_a_body_changes_or_tracks_it(t: Bodies) {
    let step = "mkdir -p modules/a src/cache; echo made | tee modules/a/one modules/a/two made src/cache/x; \
                git init -q modules/a; ln -s made link";
    let host = HostRepo::make(&t, "app", &(settings(step) + "mkdir src; echo 1 > src/file"));
    let (body, _) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(t.sh(&body, "cat modules/a/one link src/cache/x").await.ok(), "made\nmade\nmade");
    assert_eq!(shown(&t, &body), (vec![], 0), "a preparation is no work");
    assert!(save(&t, &body).await.is_empty());

    t.sh(&body, "echo mine > modules/a/two; echo mine > modules/mine; echo mine >> src/file").await.ok();
    let (files, _) = shown(&t, &body);
    assert_eq!(files, ["modules/a/two", "modules/mine", "src/file"]);
    let fork = t.fleet().snapshots().fork(&body, 1).await.unwrap().remove(0).spec.id;
    assert_eq!(shown(&t, &fork).0, files, "a fork has the same work");

    // A file that the Body's git tracks is work, although only the preparation wrote it.
    t.sh(&body, "rm -rf modules; git add made link; git commit -qm track").await.ok();
    assert_eq!(shown(&t, &body).0, ["link", "made", "src/file"]);
    let saved = save(&t, &body).await;
    let tree = |name: &str| host.git(&["ls-tree", "-r", "--name-only", name]);
    assert_eq!(tree(&saved.wip), "link\nmade\npalisade.toml\nsrc/file");
    assert_eq!(tree(&saved.head), tree(&saved.wip));
    for body in [body, fork] {
        t.fleet().remove(&body, Force::Yes).await.unwrap();
    }
}
