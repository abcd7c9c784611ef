//! What a Body did, looked at and landed.

use std::{ffi::OsString, path::PathBuf};

use proto::{BodyId, Failure, Kind, Spec};
use serde::Serialize;
use serde_json::json;
use workspace::{
    Commit, Git, How, LandRequest, Landed, LeftOut, Part, Person, Saved, Shape, Source, Touched, What,
};

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
    /// The workspace itself, and each submodule that was changed.
    parts: Vec<Part>,
    /// What was found.
    pub diff: WorkDiff,
}

/// What goes with a Body whose work is given up, and what does not.
#[derive(Debug, Default)]
pub struct Lost {
    /// What is lost, as one line each.
    pub lines: Vec<String>,
    /// Whether something was saved before, and stays.
    pub saved: bool,
}

impl Look {
    /// The difference as git writes it, with whatever bytes are in the files.
    pub fn text(&self, shape: Shape, paths: &[OsString]) -> Result<Vec<u8>, Failure> {
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

impl Fleet {
    fn workspace_source(&self, id: &BodyId, name: Option<&str>) -> Result<(Spec, Source), Failure> {
        let spec = self.view(id)?.spec;
        let sources = self.sources(&spec)?;
        let wanted = |source: &Source| name.is_none_or(|name| source.workspace.name == name);
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
    pub fn look(&self, id: &BodyId, name: Option<&str>) -> Result<Look, Failure> {
        let (_, source) = self.workspace_source(id, name)?;
        let cannot = |error| failures::workspace("cannot look at the work of the Body", error);
        let work = workspace::look(&source).map_err(cannot)?;
        let tree = work.parts.first().map(|part| part.tree.clone()).unwrap_or_default();
        let diff = WorkDiff {
            workspace: source.workspace.name.clone(),
            base: source.workspace.base.clone(),
            tree,
            files: Vec::new(),
            left_out: work.left_out,
        };
        Ok(Look { parts: work.parts, diff })
    }

    /// The same with the files that differ.
    pub fn look_closely(&self, id: &BodyId, name: Option<&str>) -> Result<Look, Failure> {
        let mut look = self.look(id, name)?;
        for part in &look.parts {
            let files = workspace::touched(&part.view.git(), &part.base, &part.tree)
                .map_err(|error| failures::workspace("cannot compare", error))?;
            look.diff.files.extend(files);
        }
        Ok(look)
    }

    /// The commits of a Body, newest first, and what it saved on the way.
    pub async fn work_log(&self, id: &BodyId, name: Option<&str>) -> Result<(Saved, Vec<Commit>), Failure> {
        let (saved, source) = self.save_one(id, name).await?;
        let git = Git::at(&source.workspace.repository);
        let commits = workspace::log(&git, &source.workspace.commit, &saved.head)
            .map_err(|error| failures::workspace("cannot list the commits", error))?;
        Ok((saved, commits))
    }

    pub(crate) async fn save_one(&self, id: &BodyId, name: Option<&str>) -> Result<(Saved, Source), Failure> {
        let (_, source) = self.workspace_source(id, name)?;
        let saved = self.save(id).await?.into_iter().find(|saved| saved.workspace == source.workspace.name);
        Ok((saved.ok_or_else(|| no_workspace(id))?, source))
    }

    /// Brings a Body's work onto a branch.
    pub async fn land(
        &self,
        id: &BodyId,
        name: Option<&str>,
        how: How,
        what: What,
        person: &Person,
    ) -> Result<Landed, Failure> {
        let (saved, source) = self.save_one(id, name).await?;
        self.land_saved(id, &source, &saved, how, what, person)
    }

    pub(crate) fn land_saved(
        &self,
        id: &BodyId,
        source: &Source,
        saved: &Saved,
        how: How,
        what: What,
        person: &Person,
    ) -> Result<Landed, Failure> {
        if let Some(trouble) = &saved.trouble
            && !matches!(what, What::Squash { .. })
        {
            return Err(Failure::new(
                Kind::Conflict,
                format!("the commits of Body {id} cannot land: {trouble}"),
            )
            .hint(format!("land its files as one commit of yours: pal land --squash {id}")));
        }
        let request = LandRequest {
            workspace: &source.workspace,
            saved,
            body: id.as_str(),
            dir: &source.dir,
            how,
            what,
            person,
            time_max: source.time_max,
        };
        let landed = workspace::land(&request).map_err(|error| land_failure(id, error))?;
        self.write("workspace.landed", id, json!({ "workspace": source.workspace.name, "landed": landed }))?;
        Ok(landed)
    }

    /// What would be lost with a Body: what it did that was not saved, or could not be.
    pub fn losses(&self, id: &BodyId) -> Result<Lost, Failure> {
        let spec = self.view(id)?.spec;
        let mut lost = Lost::default();
        for source in self.sources(&spec)? {
            match workspace::losses(&source) {
                Ok(found) => {
                    lost.saved |= found.saved;
                    lost.lines.extend(found.files.into_iter().map(|file| file.path));
                    lost.lines.extend(found.branches.iter().map(|name| format!("commits of {name}")));
                    lost.lines
                        .extend(found.left_out.iter().map(|left| format!("{} ({})", left.path, left.why)));
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

fn land_failure(id: &BodyId, error: workspace::WorkspaceError) -> Failure {
    let unsound = matches!(error, workspace::WorkspaceError::Unsound(_));
    let conflict = matches!(error, workspace::WorkspaceError::Conflict(_));
    let unknown = matches!(&error, workspace::WorkspaceError::Git(workspace::GitError::Failed { said, .. }) if said.contains("tell me who you are") || said.contains("empty ident"));
    let failure = failures::workspace(&format!("cannot land the work of Body {id}"), error);
    match (conflict, unknown) {
        _ if unsound => failure
            .hint(format!("it stays saved; leave out what is not committed: pal land --committed {id}")),
        (true, _) => failure.hint(format!(
            "keep it on a branch of its own and merge it yourself: pal land --branch pal/{id} {id}"
        )),
        (_, true) => failure.hint("say who you are: git config --global user.name NAME, and user.email"),
        _ => failure,
    }
}
