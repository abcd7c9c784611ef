//! The repository of one test, and plain git to compare with.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use fleet::{
    BodyView, DevcontainerChoice, GitIdentity, PrepareChoice, RepoSource, SaveResult, UncommittedFiles,
    UpRequest,
};
use proto::BodyId;
use testkit::{Bodies, explain};

/// A repository on the host.
pub struct HostRepo {
    pub dir: PathBuf,
}

/// Sets the only settings that git sees.
fn settings(command: &mut Command) -> &mut Command {
    let who = [
        ("GIT_AUTHOR_NAME", "Ann"),
        ("GIT_AUTHOR_EMAIL", "ann@example.com"),
        ("GIT_COMMITTER_NAME", "Ann"),
        ("GIT_COMMITTER_EMAIL", "ann@example.com"),
    ];
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .envs(who)
}

/// The user who lands.
pub fn person() -> GitIdentity {
    let env = [
        ("GIT_AUTHOR_NAME", "Ann"),
        ("GIT_AUTHOR_EMAIL", "ann@example.com"),
        ("GIT_COMMITTER_NAME", "Ann"),
        ("GIT_COMMITTER_EMAIL", "ann@example.com"),
        ("GIT_CONFIG_NOSYSTEM", "1"),
    ];
    GitIdentity {
        home: "/nonexistent".into(),
        path: "/usr/local/bin:/usr/bin:/bin".into(),
        env: env.map(|(name, value)| (name.into(), value.into())).to_vec(),
    }
}

/// Runs git in a directory.
pub fn git_in(dir: &Path, args: &[&str]) -> Output {
    settings(Command::new("git").current_dir(dir).args(args)).stdin(Stdio::null()).output().unwrap()
}

/// Runs a shell line in a directory, with the same settings.
pub fn sh_in(dir: &Path, script: &str) -> Output {
    settings(Command::new("sh").current_dir(dir).args(["-c", script])).stdin(Stdio::null()).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

impl HostRepo {
    /// Creates a repository with a shell line, and commits its files.
    pub fn make(t: &Bodies, name: &str, script: &str) -> Self {
        let dir = t.dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let host = Self { dir };
        host.git(&["init", "--quiet", "--initial-branch=main"]);
        host.sh(script);
        host.git(&["add", "--all"]);
        host.git(&["commit", "--quiet", "--allow-empty", "-m", "first"]);
        host
    }

    /// The usual repository.
    pub fn plain(t: &Bodies) -> Self {
        let script = r#"printf 'target/\n*.log\n' > .gitignore; mkdir -p src/deep; echo 'fn main() {}' > src/main.rs; echo x > src/deep/x
            printf '#!/bin/sh\necho hi\n' > run.sh; chmod +x run.sh; ln -s src/main.rs link; printf 'a\0b' > binary; seq 1000 > numbers"#;
        Self::make(t, "app", script)
    }

    #[track_caller]
    pub fn git(&self, args: &[&str]) -> String {
        let output = git_in(&self.dir, args);
        assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        text(&output)
    }

    /// Runs git; none if it fails.
    pub fn try_git(&self, args: &[&str]) -> Option<String> {
        let output = git_in(&self.dir, args);
        output.status.success().then(|| text(&output))
    }

    #[track_caller]
    pub fn sh(&self, script: &str) -> String {
        let output = sh_in(&self.dir, script);
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        text(&output)
    }

    /// A repository with the submodule `libs/lib`, which itself has the submodule `vendored/deep`.
    pub fn around(t: &Bodies, lib: &HostRepo, deep: &HostRepo) -> Self {
        let allow = ["-c", "protocol.file.allow=always", "submodule", "add", "--quiet"];
        lib.git(&[&allow[..], &[&format!("{}", deep.dir.display()), "vendored/deep"]].concat());
        lib.commit("true", "a submodule of its own");
        let host = HostRepo::make(t, "app", "echo main > main.c");
        host.git(
            &[&allow[..], &["--name", "its name", &format!("{}", lib.dir.display()), "libs/lib"]].concat(),
        );
        host.git(&[
            "-c",
            "protocol.file.allow=always",
            "submodule",
            "update",
            "--quiet",
            "--init",
            "--recursive",
        ]);
        host.commit("true", "a submodule");
        host
    }

    /// Commits on the host.
    pub fn commit(&self, script: &str, message: &str) {
        self.sh(script);
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "-m", message]);
    }

    /// The request for a Body with this repository.
    pub fn up(&self, t: &Bodies) -> UpRequest {
        UpRequest {
            repositories: vec![RepoSource::Path(self.dir.clone())],
            reference: None,
            dirty: UncommittedFiles::Without,
            include: Vec::new(),
            prepare: PrepareChoice::No,
            devcontainer: DevcontainerChoice::Use,
            person: person(),
            images: |reference| Ok(fleet::Image::new(reference)),
            home: None,
            network: fleet::NetworkRequest::default(),
            repository_network: fleet::RepositoryNetwork::Use,
            create: t.kept(),
            count: 1,
        }
    }

    /// Creates a Body with this repository.
    pub async fn body(&self, t: &Bodies) -> BodyId {
        up(t, self.up(t)).await.spec.id
    }

    /// The tree of a Body's saved work.
    pub fn wip_tree(&self, body: &BodyId) -> String {
        self.git(&["rev-parse", &format!("refs/palisade/{body}/wip^{{tree}}")])
    }

    /// A file of a Body's saved work.
    pub fn wip_file(&self, body: &BodyId, path: &str) -> Option<String> {
        self.try_git(&["show", &format!("refs/palisade/{body}/wip:{path}")])
    }
}

/// Creates the requested Body.
pub async fn up(t: &Bodies, up: UpRequest) -> BodyView {
    let views = t.fleet().workspaces().up(up).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    views.into_iter().next().unwrap()
}

/// Saves a Body's work.
pub async fn save(t: &Bodies, body: &BodyId) -> SaveResult {
    let saved =
        t.fleet().workspaces().save(body).await.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    saved.into_iter().next().unwrap()
}

/// The command line of `pal` with these arguments: program and arguments.
pub fn pal_command(t: &Bodies, args: &[&str]) -> Vec<OsString> {
    let beside = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("pal");
    let pal = testkit::user::pal(&beside.to_string_lossy());
    assert!(pal.is_file(), "there is no {}: run cargo build -p cli first", pal.display());
    let who =
        ["GIT_AUTHOR_NAME=Ann", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=Ann", "GIT_COMMITTER_EMAIL=a@b"]
            .map(OsString::from);
    let mut command: Vec<OsString> = [
        "env",
        "-i",
        "PATH=/usr/local/bin:/usr/bin:/bin",
        "LC_ALL=C.UTF-8",
        "TERM=xterm-256color",
        "PAGER=cat",
    ]
    .map(OsString::from)
    .into();
    command.extend(who);
    for (name, place) in [("HOME=", t.dir().to_owned()), ("PAL_DATA=", t.data())] {
        let mut text = OsString::from(name);
        text.push(place);
        command.push(text);
    }
    command.push(pal.into());
    command.extend(args.iter().map(OsString::from));
    command
}
