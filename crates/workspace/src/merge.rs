//! Combines the work of two Bodies of one repository, by their saved commits. No file of a Body or of the user changes.

use crate::{
    Git,
    error::WorkspaceError,
    land::{conflicts, merge},
};

/// The combined work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MergedWork {
    /// The other Body changed nothing that this one lacks.
    Same,
    /// This tree has the work of both.
    Tree(String),
    /// Both changed these files in ways that exclude each other.
    Conflicts(Vec<String>),
}

/// Combines two commits of which each holds all files of a Body. `base` holds the files that both Bodies began with.
pub fn merge_work(git: &Git, base: &str, ours: &str, theirs: &str) -> Result<MergedWork, WorkspaceError> {
    let tree = |commit: &str| git.line(["rev-parse", "--verify", "--quiet", &format!("{commit}^{{tree}}")]);
    let (before, own, other) = (tree(base)?, tree(ours)?, tree(theirs)?);
    if other == before || other == own {
        return Ok(MergedWork::Same);
    }
    match merge(git, base, ours, theirs) {
        Ok(merged) if merged == own => Ok(MergedWork::Same),
        Ok(merged) => Ok(MergedWork::Tree(merged)),
        Err(WorkspaceError::Conflict(_)) => {
            Ok(MergedWork::Conflicts(conflicts(git, &format!("--merge-base={base}"), ours, theirs)))
        }
        Err(error) => Err(error),
    }
}
