//! What a Body changed, against the commit that it began with.

use std::{ffi::OsString, path::PathBuf};

use proto::{BodyId, Failure, Kind, Spec};
use serde::Serialize;
use workspace::{BodyWorkspace, ChangedFile, Commit, DiffFormat, Git, SaveResult, SkippedPath, WorkPart};

use super::no_workspace;
use crate::{Workspaces, failures};

/// What a Body changed, against what it began with.
#[derive(Debug, Clone, Serialize)]
pub struct WorkDiff {
    /// The workspace.
    pub workspace: String,
    /// The commit it began with.
    pub base: String,
    /// Its files now.
    pub tree: String,
    /// What differs.
    pub files: Vec<ChangedFile>,
    /// What git cannot hold.
    pub skipped: Vec<SkippedPath>,
}

/// One look at a Body's work; what it needs lies beside the Body and goes with it.
#[derive(Debug)]
pub struct WorkReview {
    /// The workspace itself, and each submodule that was changed.
    parts: Vec<WorkPart>,
    /// What was found.
    pub diff: WorkDiff,
}

/// What goes with a Body whose work is given up, and what does not.
#[derive(Debug, Default)]
pub struct UnsavedWork {
    /// What is lost, as one line each.
    pub lines: Vec<String>,
    /// Whether something was saved before, and stays.
    pub saved: bool,
}

impl WorkReview {
    /// The difference as git writes it, with whatever bytes are in the files.
    pub fn text(&self, shape: DiffFormat, paths: &[OsString]) -> Result<Vec<u8>, Failure> {
        let mut text = Vec::new();
        for part in &self.parts {
            text.extend(
                workspace::diff(&part.view.git(), &part.base, &part.tree, shape, paths)
                    .map_err(|error| failures::workspace("cannot compare", error))?,
            );
        }
        Ok(text)
    }
}

impl Workspaces<'_> {
    fn workspace_source(&self, id: &BodyId, name: Option<&str>) -> Result<(Spec, BodyWorkspace), Failure> {
        let spec = self.fleet.view(id)?.spec;
        let sources = self.sources(&spec)?;
        let wanted = |source: &BodyWorkspace| name.is_none_or(|name| source.workspace.name == name);
        match sources.into_iter().find(wanted) {
            Some(source) => Ok((spec, source)),
            None => Err(name.map_or_else(
                || no_workspace(id),
                |name| {
                    Failure::new(
                        Kind::NotFound,
                        format!("Body {id} has no repository {:?}", proto::text::visible(name)),
                    )
                },
            )),
        }
    }

    /// What a Body changed: committed, uncommitted and untracked. It may run meanwhile.
    pub fn review(&self, id: &BodyId, name: Option<&str>) -> Result<WorkReview, Failure> {
        let (spec, source) = self.workspace_source(id, name)?;
        let mut sources = self.readable_sources(&spec)?;
        sources.retain(|readable| readable.workspace.name == source.workspace.name);
        let source = sources.pop().unwrap_or(source);
        let cannot = |error| failures::workspace("cannot look at the work of the Body", error);
        let work = workspace::look(&source).map_err(cannot)?;
        let tree = work.parts.first().map(|part| part.tree.clone()).unwrap_or_default();
        let diff = WorkDiff {
            workspace: source.workspace.name.clone(),
            base: source.workspace.base.clone(),
            tree,
            files: Vec::new(),
            skipped: work.skipped,
        };
        Ok(WorkReview { parts: work.parts, diff })
    }

    /// The same with the files that differ.
    pub fn review_files(&self, id: &BodyId, name: Option<&str>) -> Result<WorkReview, Failure> {
        let mut look = self.review(id, name)?;
        for part in &look.parts {
            let files = workspace::touched(&part.view.git(), &part.base, &part.tree)
                .map_err(|error| failures::workspace("cannot compare", error))?;
            look.diff.files.extend(files);
        }
        Ok(look)
    }

    /// The commits of a Body, newest first, and what it saved on the way.
    pub async fn log(&self, id: &BodyId, name: Option<&str>) -> Result<(SaveResult, Vec<Commit>), Failure> {
        let (saved, source) = self.save_one(id, name).await?;
        let git = Git::at(&source.workspace.repository);
        let commits = workspace::log(&git, &source.workspace.commit, &saved.head)
            .map_err(|error| failures::workspace("cannot list the commits", error))?;
        Ok((saved, commits))
    }

    pub(crate) async fn save_one(
        &self,
        id: &BodyId,
        name: Option<&str>,
    ) -> Result<(SaveResult, BodyWorkspace), Failure> {
        let (_, source) = self.workspace_source(id, name)?;
        let saved = self.save(id).await?.into_iter().find(|saved| saved.workspace == source.workspace.name);
        Ok((saved.ok_or_else(|| no_workspace(id))?, source))
    }

    /// What would be lost with a Body: what it did that was not saved, or could not be.
    pub fn unsaved_work(&self, id: &BodyId) -> Result<UnsavedWork, Failure> {
        let spec = self.fleet.view(id)?.spec;
        let mut lost = UnsavedWork::default();
        for source in self.readable_sources(&spec)? {
            match workspace::find_unsaved(&source) {
                Ok(found) => {
                    lost.saved |= found.saved;
                    lost.lines.extend(found.files.into_iter().map(|file| file.path));
                    lost.lines.extend(found.branches.iter().map(|name| format!("commits of {name}")));
                    lost.lines
                        .extend(found.skipped.iter().map(|left| format!("{} ({})", left.path, left.why)));
                }
                Err(error) => {
                    let failure = failures::workspace("cannot look at the work of the Body", error);
                    lost.lines.push(format!("everything in {}: {failure}", source.workspace.path()));
                }
            }
        }
        Ok(lost)
    }

    /// Where the repository of a Body is on this host.
    pub fn repository_of(&self, id: &BodyId) -> Result<PathBuf, Failure> {
        Ok(self.workspace_source(id, None)?.1.workspace.repository)
    }
}
