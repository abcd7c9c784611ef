//! Work of a Body that a diff does not show and a landing does not land, besides files that git cannot hold.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    LandRequest, LandSelection,
    error::WorkspaceError,
    git::{Git, GitError},
    refs::{STASH, TAGS},
};

/// Work of a Body that was left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// The work, such as `branch fix`.
    pub what: String,
    /// The reason.
    pub why: String,
    /// A command that leads to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// A branch, tag or stash of a Body with commits that its current commit lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherBranch {
    /// Its name below `refs/palisade/BODY/heads/`.
    pub name: String,
    /// How many commits it has that the current one lacks.
    pub commits: usize,
}

impl OtherBranch {
    /// Describes the branch, with a command that leads to its commits.
    pub fn left_out(&self, why: &str, hint: String) -> LeftOut {
        let commits = if self.commits == 1 { "1 commit" } else { &format!("{} commits", self.commits) };
        let kind = match self.name.split_once('/') {
            Some((STASH, _)) => "stash",
            Some((TAGS, _)) => "tag",
            _ => "branch",
        };
        LeftOut { what: format!("{kind} {}", self.name), why: format!("{commits} {why}"), hint: Some(hint) }
    }
}

/// Finds the branches with commits that neither `head` nor the commits `known` contain.
pub(crate) fn other_branches(
    git: &Git,
    branches: &BTreeMap<String, String>,
    head: &str,
    known: &[&str],
) -> Result<Vec<OtherBranch>, WorkspaceError> {
    let mut found = Vec::new();
    for (name, id) in branches.iter().filter(|(_, id)| *id != head) {
        let said = git.line(["rev-list", "--count", id, "--not", head].iter().chain(known))?;
        let commits = said.parse().map_err(|_| GitError::Answer("rev-list"))?;
        if commits > 0 {
            found.push(OtherBranch { name: name.clone(), commits });
        }
    }
    Ok(found)
}

/// The work that a landing leaves out.
pub(crate) fn of_landing(git: &Git, request: &LandRequest<'_>) -> Result<Vec<LeftOut>, WorkspaceError> {
    let saved = request.saved;
    let mut left = Vec::new();
    if request.what == LandSelection::Committed && saved.uncommitted {
        left.push(LeftOut {
            what: "uncommitted work".into(),
            why: "only commits were to land".into(),
            hint: None,
        });
    }
    if !matches!(request.what, LandSelection::Pick(_)) {
        let known = [saved.origin.as_str(), &saved.base];
        for other in other_branches(git, &saved.branches, &saved.head, &known)? {
            let name = format!("refs/palisade/{}/heads/{}", request.body, other.name);
            // A stash has up to three parents; a merge would take its commits for changes of a branch.
            let hint = match other.name.split_once('/') {
                Some((STASH, _)) => format!("apply it: git stash apply {name}"),
                _ => format!("merge it: git merge {name}"),
            };
            left.push(other.left_out("did not land", hint));
        }
    }
    Ok(left)
}
