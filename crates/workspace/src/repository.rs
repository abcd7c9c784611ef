//! Finds a repository on the host and reads its state.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use crate::{
    error::WorkspaceError,
    git::{self, Git, GitError, GitIdentity, GitReason},
};

/// A repository on the host.
#[derive(Debug, Clone)]
pub struct Repository {
    /// Its name, which becomes the directory in the Body.
    pub name: String,
    /// The common git directory, which holds objects and refs.
    pub common: PathBuf,
    /// The git directory of this work tree.
    pub dir: PathBuf,
    /// The top of the work tree; none for a bare repository.
    pub files: Option<PathBuf>,
    /// The current branch.
    pub branch: Option<String>,
    /// The commit that the Body will start from.
    pub commit: String,
    /// The tree of that commit.
    pub tree: String,
    /// Whether the repository is a shallow clone.
    pub shallow: bool,
}

impl Repository {
    /// Finds the repository that contains `path`, at `reference` or at HEAD.
    pub fn find(path: &Path, reference: Option<&str>, person: &GitIdentity) -> Result<Self, WorkspaceError> {
        let asked = [
            "rev-parse",
            "--path-format=absolute",
            "--git-common-dir",
            "--absolute-git-dir",
            "--is-bare-repository",
            "--is-shallow-repository",
            "--show-object-format",
        ];
        let said = git::run_in_directory(path, person, asked).map_err(|error| not_found(path, error))?;
        let mut lines = said.split(|byte| *byte == b'\n');
        let mut next = || lines.next().ok_or(GitError::Answer("rev-parse"));
        let (common, dir) = (path_of(next()?), path_of(next()?));
        let (bare, shallow, format) = (next()? == b"true", next()? == b"true", next()?.to_owned());
        if format != b"sha1" {
            return Err(WorkspaceError::Repository(
                "the repository names its objects by SHA-256, which is not supported yet".into(),
            ));
        }
        // A path of the `.git` directory itself is in no work tree.
        let toplevel = || git::run_in_directory(path, person, ["rev-parse", "--show-toplevel"]).ok();
        let files = if bare { None } else { toplevel().map(|said| path_of(first_line(&said))) };
        let user = Git::at(&dir);
        let wanted = reference.unwrap_or("HEAD");
        let (commit, tree) = resolve(&user, wanted)?;
        let branch = match reference {
            None => user.line(["symbolic-ref", "--quiet", "--short", "HEAD"]).ok(),
            Some(name) => user
                .run(["show-ref", "--verify", "--quiet", &format!("refs/heads/{name}")])
                .ok()
                .map(|_| name.to_owned()),
        };
        let called = files.as_deref().unwrap_or(if common.ends_with(".git") {
            common.parent().unwrap_or(&common)
        } else {
            &common
        });
        let name = called.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let name = proto::workspace::name_for(name.trim_end_matches(".git"));
        Ok(Self { name, common, dir, files, branch, commit, tree, shallow })
    }

    /// Finds the common git directory of the repository that contains `path`; none if there is none.
    pub fn common_dir(path: &Path, person: &GitIdentity) -> Option<PathBuf> {
        let asked = ["rev-parse", "--path-format=absolute", "--git-common-dir"];
        let said = git::run_in_directory(path, person, asked).ok()?;
        Some(path_of(first_line(&said)))
    }

    /// Finds the repository at an address: clones it into a directory of Palisade, or updates that clone.
    pub fn clone_of(
        url: &str,
        place: &Path,
        reference: Option<&str>,
        person: &GitIdentity,
    ) -> Result<Self, WorkspaceError> {
        if !place.join("HEAD").exists() {
            let part = place.with_extension(format!("part{}", std::process::id()));
            git::clone_bare(url, &part, person).inspect_err(|_| drop(std::fs::remove_dir_all(&part)))?;
            if std::fs::rename(&part, place).is_err() {
                let _ = std::fs::remove_dir_all(&part);
            }
        } else {
            let before = branches(place, "refs/remotes/origin/")?;
            git::fetch_all(place, person)?;
            follow(place, &before)?;
        }
        let mut found = Self::find(place, reference, person)?;
        let last = url.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or(url);
        found.name = proto::workspace::name_for(last.trim_end_matches(".git"));
        Ok(found)
    }

    /// git in the repository, with the repository's own settings only.
    pub fn git(&self) -> Git {
        Git::at(&self.common)
    }

    /// How many files differ from the last commit, including untracked ones.
    pub fn uncommitted(&self, person: &GitIdentity) -> Result<usize, WorkspaceError> {
        let Some(files) = &self.files else { return Ok(0) };
        let said = git::run_in_directory(
            files,
            person,
            ["status", "--porcelain", "-z", "--no-renames", "--untracked-files=all"],
        )?;
        Ok(said.split(|byte| *byte == 0).filter(|line| !line.is_empty()).count())
    }
}

/// The addresses of a repository's remotes. `common` is its common git directory.
pub fn remote_addresses(common: &Path) -> Vec<String> {
    let asked = ["config", "--get-regexp", r"^remote\..*\.(url|pushurl)$"];
    let said = Git::at(common).line(asked).unwrap_or_default();
    said.lines().filter_map(|line| line.split_once(' ')).map(|(_, address)| address.to_owned()).collect()
}

/// The branches below a prefix and their commits.
fn branches(dir: &Path, place: &str) -> Result<BTreeMap<String, String>, WorkspaceError> {
    let said = Git::at(dir).line(["for-each-ref", "--format=%(objectname) %(refname)", place])?;
    let named = |line: &str| {
        line.split_once(' ')
            .and_then(|(id, name)| Some((name.strip_prefix(place)?.to_owned(), id.to_owned())))
    };
    Ok(said.lines().filter_map(named).collect())
}

/// Moves the branches of a clone to those of its remote, except branches that something landed on.
fn follow(dir: &Path, before: &BTreeMap<String, String>) -> Result<(), WorkspaceError> {
    let (git, ours) = (Git::at(dir), branches(dir, "refs/heads/")?);
    for (name, id) in branches(dir, "refs/remotes/origin/")? {
        let old = ours.get(&name);
        let is_behind = |old: &String| git.run(["merge-base", "--is-ancestor", old, &id]).is_ok();
        if old == Some(&id) || !old.is_none_or(|old| before.get(&name) == Some(old) || is_behind(old)) {
            continue;
        }
        // Moves it only from the commit read before, because a landing may be running.
        let zeros = "0".repeat(id.len());
        git.run(["update-ref", &format!("refs/heads/{name}"), &id, old.unwrap_or(&zeros)])?;
    }
    Ok(())
}

/// Resolves a name to a commit and its tree.
pub(crate) fn resolve(git: &Git, name: &str) -> Result<(String, String), WorkspaceError> {
    let commit = format!("{name}^{{commit}}");
    let unknown = |_| {
        WorkspaceError::NotFound(format!("the repository has no commit {:?}", proto::text::visible(name)))
    };
    let commit =
        git.line(["rev-parse", "--verify", "--quiet", "--end-of-options", &commit]).map_err(unknown)?;
    let tree = git.line(["rev-parse", "--verify", "--quiet", &format!("{commit}^{{tree}}")])?;
    Ok((commit, tree))
}

fn not_found(path: &Path, error: GitError) -> WorkspaceError {
    match error.reason() {
        Some(GitReason::NoRepository) => {
            WorkspaceError::NotFound(format!("{} is not inside a git repository", path.display()))
        }
        _ => error.into(),
    }
}

fn first_line(said: &[u8]) -> &[u8] {
    said.strip_suffix(b"\n").unwrap_or(said)
}

fn path_of(line: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(line.to_owned()))
}
