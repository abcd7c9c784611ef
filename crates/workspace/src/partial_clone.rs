//! Partial clones: fetches the files that the host's repository lacks before a Body starts.
//!
//! The user's own git fetches them, as it would by itself when it needs a file. The Body takes no part.

use std::path::Path;

use crate::{
    GitIdentity,
    error::WorkspaceError,
    git::{self, Git, GitError},
};

/// The promisor remote of a partial clone; none if the repository has all objects. `common` is its common git
/// directory.
pub fn remote(common: &Path) -> Option<String> {
    // Partial clones are rare, and starting git would cost a fifth of a warm start, so search the file first.
    let settings = std::fs::read_to_string(common.join("config")).unwrap_or_default().to_ascii_lowercase();
    if !settings.contains("promisor") && !settings.contains("partialclone") {
        return None;
    }
    let git = Git::at(common);
    let said =
        git.line(["config", "--type=bool", "--get-regexp", r"^remote\..*\.promisor$"]).unwrap_or_default();
    let named = |line: &str| {
        line.strip_suffix(" true")?.strip_prefix("remote.")?.strip_suffix(".promisor").map(str::to_owned)
    };
    said.lines().find_map(named).or_else(|| git.line(["config", "--get", "extensions.partialclone"]).ok())
}

/// Fetches the objects that the files of a commit lack.
pub fn fetch_commit(common: &Path, commit: &str, person: &GitIdentity) -> Result<(), WorkspaceError> {
    let Some(remote) = remote(common) else { return Ok(()) };
    let said = Git::at(common).line([
        "rev-list",
        "--objects",
        "--missing=print",
        "--no-object-names",
        &format!("{commit}^{{tree}}"),
    ])?;
    let missing: String =
        said.lines().filter_map(|line| line.strip_prefix('?')).map(|id| format!("{id}\n")).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let count = missing.lines().count();
    git::fetch_objects(common, &remote, missing, person).map_err(|error| {
        let said = match error {
            GitError::Failed { said, .. } => said,
            error => error.to_string(),
        };
        WorkspaceError::Repository(format!(
            "{count} files of this partial clone are still with {}, which git cannot fetch from: {said}",
            proto::text::visible(&remote)
        ))
    })
}
