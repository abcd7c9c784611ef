//! Tests of the time limits of look, save and land.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use body::programs::Programs;
use proto::{LayerId, spec::Ids, workspace::Workspace};

use crate::{
    BodyWorkspace, GitError, GitIdentity, LandRequest, LandSelection, LandTarget, TIME_MAX, WorkspaceError,
    land, look, save,
};

/// The temporary directory of one test.
struct BoundsScene(PathBuf);

impl Drop for BoundsScene {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn git(dir: &Path, args: &[&str]) -> String {
    let mut command = Command::new("git");
    command
        .current_dir(dir)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", "/nonexistent");
    for (field, value) in [("NAME", "a"), ("EMAIL", "a@b")] {
        command.env(format!("GIT_AUTHOR_{field}"), value).env(format!("GIT_COMMITTER_{field}"), value);
    }
    let output = command.args(args).output().unwrap();
    assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

/// A Body's directory with one new file in its upper, and the repository that its workspace came from.
fn begin(name: &str, time_max: Duration) -> (BoundsScene, BodyWorkspace) {
    let place = BoundsScene(std::env::temp_dir().join(format!("palisade-{name}-{}", std::process::id())));
    let top = place.0.clone();
    let repository = top.join("app/.git");
    fs::create_dir_all(top.join("app")).unwrap();
    git(&top.join("app"), &["init", "--quiet", "--initial-branch=main"]);
    fs::write(top.join("app/file"), "1\n").unwrap();
    git(&top.join("app"), &["add", "file"]);
    git(&top.join("app"), &["commit", "--quiet", "-m", "first"]);
    let commit = git(&top.join("app"), &["rev-parse", "HEAD"]);
    let (head, files) = (LayerId::from_random([1; 12]), LayerId::from_random([2; 12]));
    let layers = top.join("layers");
    fs::create_dir_all(layers.join(head.as_str()).join("root/.git")).unwrap();
    fs::write(layers.join(head.as_str()).join("root/.git/HEAD"), &commit).unwrap();
    fs::create_dir_all(layers.join(files.as_str())).unwrap();
    fs::copy(repository.join("index"), layers.join(files.as_str()).join("index")).unwrap();
    let workspace = Workspace {
        name: "app".into(),
        repository,
        branch: Some("main".into()),
        commit: commit.clone(),
        base: commit,
        included: false,
        layers: vec![head, files],
        submodules: Vec::new(),
    };
    let upper = top.join("body/disk/upper").join(workspace.area_dir());
    fs::create_dir_all(&upper).unwrap();
    fs::write(upper.join("new"), "new\n").unwrap();
    let source = BodyWorkspace {
        body: "body1".parse().unwrap(),
        dir: top.join("body"),
        upper: top.join("body/disk/upper"),
        copy: None,
        snapshots: Vec::new(),
        prepared: 0,
        workspace,
        layers,
        programs: Programs { launch: "/nonexistent".into() },
        ids: Ids { users: Vec::new(), groups: Vec::new() },
        inside: String::new(),
        time_max,
    };
    (place, source)
}

fn is_over<T: std::fmt::Debug>(done: Result<T, WorkspaceError>) -> bool {
    matches!(done, Err(WorkspaceError::Git(GitError::Limit { .. })))
}

/// How many stage directories an interrupted save or landing left behind.
fn stages(source: &BodyWorkspace) -> usize {
    let entries = fs::read_dir(source.dir.join("git/app")).unwrap().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("stage-")).count()
}

#[test]
fn a_save_whose_time_is_over_changes_nothing_and_the_next_one_has_all() {
    let (place, mut source) = begin("save", Duration::ZERO);
    assert!(is_over(save(&source)));
    let app = place.0.join("app");
    assert_eq!((git(&app, &["for-each-ref", "refs/palisade"]), stages(&source)), (String::new(), 0));
    source.time_max = TIME_MAX;
    let saved = save(&source).unwrap();
    assert!(saved.is_whole(), "{saved:?}");
    assert_eq!(git(&app, &["show", "refs/palisade/body1/wip:new"]), "new");
    assert_eq!(look(&source).unwrap().skipped.len(), 0);
    assert_eq!(stages(&source), 0);
}

#[test]
fn a_landing_whose_time_is_over_moves_nothing() {
    let (place, source) = begin("land", TIME_MAX);
    let saved = save(&source).unwrap();
    let env = ["AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL"]
        .map(|field| (format!("GIT_{field}").into(), "a@b".into()));
    let person = GitIdentity {
        home: "/nonexistent".into(),
        path: "/usr/local/bin:/usr/bin:/bin".into(),
        env: env.to_vec(),
    };
    let app = place.0.join("app");
    let try_in = |time_max: Duration| {
        land(&LandRequest {
            workspace: &source.workspace,
            saved: &saved,
            body: "body1",
            dir: &source.dir,
            how: LandTarget::Onto("main".into()),
            what: LandSelection::All,
            person: &person,
            time_max,
        })
    };
    let before = git(&app, &["rev-parse", "main"]);
    assert!(is_over(try_in(Duration::ZERO)));
    assert_eq!(
        (git(&app, &["rev-parse", "main"]), git(&app, &["status", "--porcelain"]), stages(&source)),
        (before, String::new(), 0)
    );
    assert_eq!(try_in(TIME_MAX).unwrap().to, git(&app, &["rev-parse", "main"]));
    assert_eq!(fs::read_to_string(app.join("new")).unwrap(), "new\n");
}
