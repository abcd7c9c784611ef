//! What a Body did, looked at and landed.

use std::{ffi::OsString, path::PathBuf};

use proto::{BodyId, Failure, Kind, Spec};
use serde::Serialize;
use serde_json::json;
use workspace::{Commit, Git, How, LandRequest, Landed, LeftOut, Person, Saved, Shape, Source, Touched, What};

use super::no_workspace;
use crate::{Fleet, failures};

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
    pub files: Vec<Touched>,
    /// What git cannot hold.
    pub left_out: Vec<LeftOut>,
}

/// One look at a Body's work; what it needs lies beside the Body and goes with it.
#[derive(Debug)]
pub struct Look {
    git: Git,
    /// What git sees goes with it.
    _view: workspace::View,
    base: String,
    /// What was found.
    pub diff: WorkDiff,
}

impl Look {
    /// The difference as git writes it, with whatever bytes are in the files.
    pub fn text(&self, shape: Shape, paths: &[OsString]) -> Result<Vec<u8>, Failure> {
        workspace::diff(&self.git, &self.base, &self.diff.tree, shape, paths).map_err(|error| failures::workspace("cannot compare", error))
    }
}

impl Fleet {
    fn workspace_source(&self, id: &BodyId, name: Option<&str>) -> Result<(Spec, Source), Failure> {
        let spec = self.view(id)?.spec;
        let sources = self.sources(&spec)?;
        let wanted = |source: &Source| name.is_none_or(|name| source.workspace.name == name);
        match sources.into_iter().find(wanted) {
            Some(source) => Ok((spec, source)),
            None => Err(name.map_or_else(
                || no_workspace(id),
                |name| Failure::new(Kind::NotFound, format!("Body {id} has no repository {:?}", proto::text::visible(name))),
            )),
        }
    }

    /// What a Body changed: committed, uncommitted and untracked. It may run meanwhile.
    pub fn look(&self, id: &BodyId, name: Option<&str>) -> Result<Look, Failure> {
        let (_, source) = self.workspace_source(id, name)?;
        let cannot = |error| failures::workspace("cannot look at the work of the Body", error);
        let work = workspace::look(&source).map_err(cannot)?;
        let base = source.workspace.base.clone();
        let diff = WorkDiff { workspace: source.workspace.name.clone(), base: base.clone(), tree: work.tree, files: Vec::new(), left_out: work.left_out };
        Ok(Look { git: work.view.git(), _view: work.view, base, diff })
    }

    /// The same with the files that differ.
    pub fn look_closely(&self, id: &BodyId, name: Option<&str>) -> Result<Look, Failure> {
        let mut look = self.look(id, name)?;
        look.diff.files = workspace::touched(&look.git, &look.base, &look.diff.tree).map_err(|error| failures::workspace("cannot compare", error))?;
        Ok(look)
    }

    /// The commits of a Body, newest first, and what it saved on the way.
    pub async fn work_log(&self, id: &BodyId, name: Option<&str>) -> Result<(Saved, Vec<Commit>), Failure> {
        let (saved, source) = self.save_one(id, name).await?;
        let git = Git::at(&source.workspace.repository);
        let commits = workspace::log(&git, &source.workspace.commit, &saved.head).map_err(|error| failures::workspace("cannot list the commits", error))?;
        Ok((saved, commits))
    }

    pub(crate) async fn save_one(&self, id: &BodyId, name: Option<&str>) -> Result<(Saved, Source), Failure> {
        let (_, source) = self.workspace_source(id, name)?;
        let saved = self.save(id).await?.into_iter().find(|saved| saved.workspace == source.workspace.name);
        Ok((saved.ok_or_else(|| no_workspace(id))?, source))
    }

    /// Brings a Body's work onto a branch.
    pub async fn land(&self, id: &BodyId, name: Option<&str>, how: How, what: What, person: &Person) -> Result<Landed, Failure> {
        let (saved, source) = self.save_one(id, name).await?;
        self.land_saved(id, &source, &saved, how, what, person)
    }

    pub(crate) fn land_saved(&self, id: &BodyId, source: &Source, saved: &Saved, how: How, what: What, person: &Person) -> Result<Landed, Failure> {
        if let Some(trouble) = &saved.trouble
            && !matches!(what, What::Squash { .. })
        {
            return Err(Failure::new(Kind::Conflict, format!("the commits of Body {id} cannot land: {trouble}"))
                .hint(format!("land its files as one commit of yours: pal land --squash {id}")));
        }
        let request = LandRequest { workspace: &source.workspace, saved, body: id.as_str(), dir: &source.dir, how, what, person };
        let landed = workspace::land(&request).map_err(|error| land_failure(id, error))?;
        self.write("workspace.landed", id, json!({ "workspace": source.workspace.name, "landed": landed }))?;
        Ok(landed)
    }

    /// What would be lost with a Body: its changes since it was made, as one line each.
    pub fn losses(&self, id: &BodyId) -> Result<Vec<String>, Failure> {
        let spec = self.view(id)?.spec;
        let mut lines = Vec::new();
        for workspace in &spec.workspaces {
            match self.look_closely(id, Some(&workspace.name)) {
                Ok(look) => {
                    lines.extend(look.diff.files.iter().map(|file| file.path.clone()));
                    lines.extend(look.diff.left_out.iter().map(|left| format!("{} ({})", left.path, left.why)));
                }
                Err(failure) => lines.push(format!("everything in {}: {failure}", workspace.path())),
            }
        }
        Ok(lines)
    }

    /// Where the repository of a Body is on this host.
    pub fn repository_of(&self, id: &BodyId) -> Result<PathBuf, Failure> {
        Ok(self.workspace_source(id, None)?.1.workspace.repository)
    }
}

fn land_failure(id: &BodyId, error: workspace::WorkspaceError) -> Failure {
    let unsound = matches!(error, workspace::WorkspaceError::Unsound(_));
    let conflict = matches!(error, workspace::WorkspaceError::Conflict(_));
    let unknown = matches!(&error, workspace::WorkspaceError::Git(workspace::GitError::Failed { said, .. }) if said.contains("tell me who you are") || said.contains("empty ident"));
    let failure = failures::workspace(&format!("cannot land the work of Body {id}"), error);
    match (conflict, unknown) {
        _ if unsound => failure.hint(format!("it stays saved; leave out what is not committed: pal land --committed {id}")),
        (true, _) => failure.hint(format!("keep it on a branch of its own and merge it yourself: pal land --branch pal/{id} {id}")),
        (_, true) => failure.hint("say who you are: git config --global user.name NAME, and user.email"),
        _ => failure,
    }
}
