//! Partial clones: files that the host's repository was promised and does not have are fetched before a Body begins.
//!
//! It is the person's own git that asks, as it would itself when a file is needed: nothing of a Body takes part.

use crate::{
    GitIdentity, Repository,
    error::WorkspaceError,
    git::{self, GitError},
};

/// The remote that promised what a repository does not have; none where it has everything.
pub fn remote(repository: &Repository) -> Option<String> {
    // Seldom, and asking git costs as much as a fifth of a warm start.
    let settings =
        std::fs::read_to_string(repository.common.join("config")).unwrap_or_default().to_ascii_lowercase();
    if !settings.contains("promisor") && !settings.contains("partialclone") {
        return None;
    }
    let git = repository.git();
    let said =
        git.line(["config", "--type=bool", "--get-regexp", r"^remote\..*\.promisor$"]).unwrap_or_default();
    let named = |line: &str| {
        line.strip_suffix(" true")?.strip_prefix("remote.")?.strip_suffix(".promisor").map(str::to_owned)
    };
    said.lines().find_map(named).or_else(|| git.line(["config", "--get", "extensions.partialclone"]).ok())
}

/// Fetches what is missing of the files at the repository's commit.
pub fn fetch(repository: &Repository, person: &GitIdentity) -> Result<(), WorkspaceError> {
    let Some(remote) = remote(repository) else { return Ok(()) };
    let git = repository.git();
    let said = git.line([
        "rev-list",
        "--objects",
        "--missing=print",
        "--no-object-names",
        &format!("{}^{{tree}}", repository.commit),
    ])?;
    let missing: String =
        said.lines().filter_map(|line| line.strip_prefix('?')).map(|id| format!("{id}\n")).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let count = missing.lines().count();
    git::fetch_objects(&repository.common, &remote, missing, person).map_err(|error| {
        let said = match error {
            GitError::Failed { said, .. } => said,
            error => error.to_string(),
        };
        WorkspaceError::Repository(format!(
            "{count} files of this partial clone are still with {}, which cannot be asked: {said}",
            proto::text::visible(&remote)
        ))
    })
}
