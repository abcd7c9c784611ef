//! Finds the work that would be lost with a Body: changes that no ref of the user's repositories holds.

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

/// The work that would be lost with a Body.
#[derive(Debug, Default)]
pub struct UnsavedChanges {
    /// Files that differ from the last save, or from the base if there was no save.
    pub files: Vec<ChangedFile>,
    /// Branches with unsaved commits.
    pub branches: Vec<String>,
    /// Paths that cannot be saved.
    pub skipped: Vec<SkippedPath>,
    /// Whether an earlier save exists, which stays.
    pub saved: bool,
}

/// Finds the unsaved work of a Body.
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

/// Branches of the Body whose commits the user's repository lacks.
fn branches(source: &BodyWorkspace) -> Result<Vec<String>, WorkspaceError> {
    let pointers = save::pointers(source)?;
    // Without a valid HEAD and branches, the Body's commits cannot be found, so assume that HEAD is unsaved.
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
