//! What would be lost with a Body: what no name in the user's repositories holds.

use std::collections::BTreeSet;

use crate::{
    error::WorkspaceError,
    git::Git,
    objects::Objects,
    publish::PublishedRefs,
    refs::namespace,
    review::{self, ChangedFile},
    save::{self, BodyWorkspace, SkippedPath},
};

/// What would be lost, and what would not.
#[derive(Debug, Default)]
pub struct UnsavedChanges {
    /// Files that differ from what was saved last, or from what the Body began with where nothing was.
    pub files: Vec<ChangedFile>,
    /// Branches with commits that were not saved.
    pub branches: Vec<String>,
    /// What could not be saved.
    pub skipped: Vec<SkippedPath>,
    /// Whether something was saved, which stays.
    pub saved: bool,
}

/// Looks for it.
pub fn find_unsaved(source: &BodyWorkspace) -> Result<UnsavedChanges, WorkspaceError> {
    let work = save::look(source)?;
    let mut lost = UnsavedChanges { skipped: work.skipped, ..UnsavedChanges::default() };
    for part in &work.parts {
        let known = PublishedRefs::ask(&Git::at(&part.repository), &namespace(&source.body))?;
        lost.saved |= known.id("wip").is_some();
        let before = match known.tree("wip") {
            Some(tree) => part.wrapped(tree)?,
            None => part.base.clone(),
        };
        lost.files.extend(review::touched(&part.view.git(), &before, &part.tree)?);
    }
    lost.branches = branches(source)?;
    Ok(lost)
}

/// Branches of the Body whose commits are not in the user's repository.
fn branches(source: &BodyWorkspace) -> Result<Vec<String>, WorkspaceError> {
    let pointers = save::pointers(source)?;
    // Where it does not say where it stands, what it has is not to be found.
    if pointers.head.is_none() && pointers.branches.is_empty() {
        return Ok(vec!["HEAD".to_owned()]);
    }
    let tips: Vec<(String, String)> =
        pointers.branches.into_iter().chain(pointers.head.map(|id| ("HEAD".to_owned(), id))).collect();
    let asked: Vec<String> = tips.iter().map(|(_, id)| format!("{id}^{{commit}}")).collect();
    let there = Objects::start(&Git::at(&source.workspace.repository))?.about(&asked)?;
    let mut seen = BTreeSet::new();
    let missing = tips.into_iter().zip(there).filter(|(_, there)| there.is_none()).map(|(tip, _)| tip);
    Ok(missing.filter(|(_, id)| seen.insert(id.clone())).map(|(name, _)| name).collect())
}
