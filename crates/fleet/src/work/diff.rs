//! The changes of a Body since the commit that it began with.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use proto::{BodyId, Failure, Kind, Spec};
use serde::Serialize;
use workspace::{
    BodyWorkspace, ChangedFile, Commit, DiffFormat, Git, GitIdentity, LeftOut, Repository, SaveResult,
    SkippedPath, WorkPart,
};

use super::no_workspace;
use crate::{Workspaces, failures};

/// The changes in one workspace of a Body.
#[derive(Debug, Clone, Serialize)]
pub struct WorkDiff {
    /// The workspace's name.
    pub workspace: String,
    /// The commit that the files are compared with: the one that it began with, or a later one of the user that
    /// `pal sync` brought in and the Body took over.
    pub base: String,
    /// The git tree of its current files.
    pub tree: String,
    /// The changed files.
    pub files: Vec<ChangedFile>,
    /// The files that git cannot store.
    pub skipped: Vec<SkippedPath>,
    /// Other work of the Body, which the diff does not show.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
}

/// A review of a Body's work. Its temporary files are next to the Body and are removed with it.
#[derive(Debug)]
pub struct WorkReview {
    /// The workspace itself, and each changed submodule.
    parts: Vec<WorkPart>,
    /// The changes.
    pub diff: WorkDiff,
}

/// The work that is lost if a Body is discarded.
#[derive(Debug, Default)]
pub struct UnsavedWork {
    /// The lost files and commits, one per line.
    pub lines: Vec<String>,
    /// Whether some work was saved before; it stays.
    pub saved: bool,
}

impl WorkReview {
    /// The diff as git prints it; it may contain arbitrary bytes of the files.
    pub fn text(&self, shape: DiffFormat, paths: &[OsString]) -> Result<Vec<u8>, Failure> {
        let mut text = Vec::new();
        for part in &self.parts {
            text.extend(
                workspace::diff(&part.view.git(), &part.base, &part.tree, shape, paths)
                    .map_err(|error| failures::workspace("cannot compute the diff", error))?,
            );
        }
        Ok(text)
    }
}

impl Workspaces<'_> {
    pub(crate) fn workspace_source(
        &self,
        id: &BodyId,
        name: Option<&str>,
    ) -> Result<(Spec, BodyWorkspace), Failure> {
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

    /// Reviews the changes of a Body: committed, uncommitted and untracked. The Body may run meanwhile.
    pub fn review(&self, id: &BodyId, name: Option<&str>) -> Result<WorkReview, Failure> {
        let (spec, source) = self.workspace_source(id, name)?;
        let (mut own, others): (Vec<_>, Vec<_>) = self
            .readable_sources(&spec)?
            .into_iter()
            .partition(|readable| readable.workspace.name == source.workspace.name);
        let source = own.pop().unwrap_or(source);
        let cannot = |error| failures::workspace("cannot read the work of the Body", error);
        let work = workspace::look(&source).map_err(cannot)?;
        let first = work.parts.first();
        let base = first.map_or_else(|| source.workspace.base.clone(), |part| part.base.clone());
        let mut left_out: Vec<LeftOut> = work
            .branches
            .iter()
            .map(|other| {
                let name = format!("refs/palisade/{id}/heads/{}", other.name);
                other.left_out(
                    "not in the Body's files",
                    format!("pal save {id} && git log -p {base}..{name}"),
                )
            })
            .collect();
        for other in others {
            let work = workspace::look(&other).map_err(cannot)?;
            if work.is_changed().map_err(cannot)? {
                left_out.push(LeftOut {
                    what: format!("workspace {}", other.workspace.name),
                    why: "a diff shows one workspace".into(),
                    hint: Some(format!("pal diff --workspace {} {id}", other.workspace.name)),
                });
            }
        }
        let diff = WorkDiff {
            workspace: source.workspace.name.clone(),
            base,
            tree: first.map(|part| part.tree.clone()).unwrap_or_default(),
            files: Vec::new(),
            skipped: work.skipped,
            left_out,
        };
        Ok(WorkReview { parts: work.parts, diff })
    }

    /// Reviews the changes of a Body, with the list of changed files.
    pub fn review_files(&self, id: &BodyId, name: Option<&str>) -> Result<WorkReview, Failure> {
        let mut look = self.review(id, name)?;
        for part in &look.parts {
            let files = workspace::touched(&part.view.git(), &part.base, &part.tree)
                .map_err(|error| failures::workspace("cannot compute the diff", error))?;
            look.diff.files.extend(files);
        }
        Ok(look)
    }

    /// Saves the work of a Body, and returns the saved state and the Body's commits, newest first.
    pub async fn log(&self, id: &BodyId, name: Option<&str>) -> Result<(SaveResult, Vec<Commit>), Failure> {
        let (saved, source) = self.save_one(id, name).await?;
        let git = Git::at(&source.workspace.repository);
        let commits = workspace::log(&git, &saved.origin, &saved.head)
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

    /// Finds the work that would be lost with a Body: work that was not saved, or that cannot be.
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
                    let failure = failures::workspace("cannot read the work of the Body", error);
                    lost.lines.push(format!("everything in {}: {failure}", source.workspace.path()));
                }
            }
        }
        Ok(lost)
    }

    /// The common git directory of the repository that contains a path; none outside of repositories.
    pub fn repository_at(&self, path: &Path, person: &GitIdentity) -> Option<PathBuf> {
        Repository::common_dir(path, person)
    }

    /// The path on this host of the repository that a Body came from.
    pub fn repository_of(&self, id: &BodyId) -> Result<PathBuf, Failure> {
        Ok(self.workspace_source(id, None)?.1.workspace.repository)
    }
}
