//! Shows what a Body did: diffs, commits and changed files.

use std::ffi::OsString;

use serde::Serialize;

use crate::{
    error::WorkspaceError,
    git::{Git, GitError},
};

/// The format of a diff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiffFormat {
    /// A patch.
    Patch,
    /// One line for each file.
    Stat,
}

/// A changed file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangedFile {
    /// Its path; bytes that are not UTF-8 are escaped.
    pub path: String,
    /// Number of added lines; none for a binary file.
    pub added: Option<u64>,
    /// Number of removed lines; none for a binary file.
    pub removed: Option<u64>,
}

/// A commit of a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Commit {
    /// The commit id.
    pub id: String,
    /// The author's name, as the commit states it.
    pub author: String,
    /// The author's e-mail address.
    pub email: String,
    /// The author's time, in seconds since 1970.
    pub at: i64,
    /// The first line of its message.
    pub subject: String,
}

/// The diff of two trees or commits as git prints it, with the raw bytes of the files.
pub fn diff(
    git: &Git,
    from: &str,
    to: &str,
    shape: DiffFormat,
    paths: &[OsString],
) -> Result<Vec<u8>, WorkspaceError> {
    // `--binary` implies `--patch`.
    let shape = match shape {
        DiffFormat::Patch => "--binary",
        DiffFormat::Stat => "--stat",
    };
    let args = [
        "diff-tree",
        "-r",
        "--no-commit-id",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--full-index",
        "--find-renames",
        shape,
        from,
        to,
        "--",
    ];
    let args = args.map(OsString::from).into_iter().chain(paths.iter().cloned());
    Ok(git.clone().env("GIT_LITERAL_PATHSPECS", "1").run(args)?)
}

/// The files that differ between two trees or commits.
pub fn touched(git: &Git, from: &str, to: &str) -> Result<Vec<ChangedFile>, WorkspaceError> {
    let said = git.run([
        "diff-tree",
        "-r",
        "-z",
        "--no-commit-id",
        "--no-ext-diff",
        "--no-textconv",
        "--no-renames",
        "--numstat",
        from,
        to,
    ])?;
    let mut all = Vec::new();
    for record in said.split(|byte| *byte == 0).filter(|record| !record.is_empty()) {
        let mut fields = record.splitn(3, |byte| *byte == b'\t');
        let (Some(added), Some(removed), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            return Err(GitError::Answer("diff-tree").into());
        };
        let count = |field: &[u8]| std::str::from_utf8(field).ok().and_then(|text| text.parse().ok());
        all.push(ChangedFile {
            path: String::from_utf8_lossy(path).into_owned(),
            added: count(added),
            removed: count(removed),
        });
    }
    Ok(all)
}

/// The names of the files that differ.
pub(crate) fn names(git: &Git, from: &str, to: &str) -> Result<Vec<String>, WorkspaceError> {
    let said =
        git.run(["diff-tree", "-r", "-z", "--no-commit-id", "--no-renames", "--name-only", from, to])?;
    Ok(said
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect())
}

/// The commits of `to` that `from` lacks, newest first.
pub fn log(git: &Git, from: &str, to: &str) -> Result<Vec<Commit>, WorkspaceError> {
    let said = git.run([
        "log",
        "-z",
        "--no-show-signature",
        "--no-color",
        "--format=%H%x1f%an%x1f%ae%x1f%at%x1f%s",
        &format!("{from}..{to}"),
        "--",
    ])?;
    let mut all = Vec::new();
    for record in said.split(|byte| *byte == 0).filter(|record| !record.is_empty()) {
        let text = String::from_utf8_lossy(record).into_owned();
        let mut fields = text.splitn(5, '\u{1f}').map(str::to_owned);
        let mut next = || fields.next().unwrap_or_default();
        all.push(Commit {
            id: next(),
            author: next(),
            email: next(),
            at: next().parse().unwrap_or(0),
            subject: next(),
        });
    }
    Ok(all)
}

/// Whether a tool of the user may execute a file by itself; such files are shown before they land.
pub fn is_auto_executed(path: &str) -> bool {
    const DIRS: &[&str] = &[
        ".claude/",
        ".codex/",
        ".cursor/",
        ".vscode/",
        ".idea/",
        ".devcontainer/",
        ".github/",
        ".gitlab/",
        ".circleci/",
        ".husky/",
        ".cargo/",
    ];
    const NAMES: &[&str] = &[
        ".envrc",
        ".mcp.json",
        ".gitmodules",
        ".gitattributes",
        ".gitlab-ci.yml",
        ".travis.yml",
        ".pre-commit-config.yaml",
        "package.json",
        "build.rs",
        "conftest.py",
        "setup.py",
        "Makefile",
        "justfile",
        "Jenkinsfile",
        "palisade.toml",
        ".npmrc",
        ".yarnrc.yml",
        "AGENTS.md",
        "CLAUDE.md",
    ];
    let name = path.rsplit('/').next().unwrap_or(path);
    DIRS.iter().any(|dir| path.starts_with(dir) || path.contains(&format!("/{dir}"))) || NAMES.contains(&name)
}
