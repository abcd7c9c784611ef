//! Lands the work of a Body on a branch of the user's repository.

use proto::{BodyId, Failure, Kind, event_data::WorkspaceLanded};
use workspace::{
    BodyWorkspace, Git, GitIdentity, LandPlan, LandRequest, LandResult, LandSelection, LandTarget, LeftOut,
    SaveResult, WorkspaceError,
};

use super::{no_workspace, state};
use crate::{Workspaces, failures};

/// A landing of one Body's saved work.
pub(crate) struct SavedLanding<'a> {
    pub(crate) id: &'a BodyId,
    pub(crate) source: &'a BodyWorkspace,
    pub(crate) saved: &'a SaveResult,
    pub(crate) person: &'a GitIdentity,
    pub(crate) how: LandTarget,
    pub(crate) what: LandSelection,
}

impl Workspaces<'_> {
    /// Lands a Body's work on a branch.
    pub async fn land(
        &self,
        id: &BodyId,
        name: Option<&str>,
        how: LandTarget,
        what: LandSelection,
        person: &GitIdentity,
    ) -> Result<LandResult, Failure> {
        let (_, source) = self.workspace_source(id, name)?;
        let (mut own, others): (Vec<_>, Vec<_>) =
            self.save(id).await?.into_iter().partition(|saved| saved.workspace == source.workspace.name);
        let saved = own.pop().ok_or_else(|| no_workspace(id))?;
        let landing = SavedLanding { id, source: &source, saved: &saved, person, how, what };
        let mut landed = landing.carry_out(self, landing.plan()?)?;
        let changed = others.iter().filter(|other| !other.is_empty());
        landed.left_out.extend(changed.map(|other| LeftOut {
            what: format!("workspace {}", other.workspace),
            why: "each workspace lands by itself".into(),
            hint: Some(format!("pal land --workspace {} {id}", other.workspace)),
        }));
        Ok(landed)
    }
}

impl SavedLanding<'_> {
    fn request(&self) -> LandRequest<'_> {
        LandRequest {
            workspace: &self.source.workspace,
            saved: self.saved,
            body: self.id.as_str(),
            dir: &self.source.dir,
            how: self.how.clone(),
            what: self.what.clone(),
            person: self.person,
            time_max: self.source.time_max,
        }
    }

    /// Makes the commits; no branch moves.
    pub(crate) fn plan(&self) -> Result<LandPlan, Failure> {
        if let Some(commit_error) = &self.saved.commit_error
            && !matches!(self.what, LandSelection::Squash { .. })
        {
            let message = format!("the commits of Body {} cannot land: {commit_error}", self.id);
            // The files may be refused for the same reason.
            let squash = LandRequest { what: LandSelection::Squash { message: None }, ..self.request() };
            let hint = match LandPlan::make(&squash) {
                Ok(_) => format!("land its files as one commit of yours: {}", self.command("--squash")),
                Err(_) => self.patch_hint(),
            };
            return Err(Failure::new(Kind::Conflict, message).hint(hint));
        }
        LandPlan::make(&self.request()).map_err(|error| self.failure(error))
    }

    /// Moves the branch, and appends the event.
    pub(crate) fn carry_out(
        &self,
        workspaces: &Workspaces<'_>,
        plan: LandPlan,
    ) -> Result<LandResult, Failure> {
        let landed = plan.carry_out(&self.request()).map_err(|error| self.failure(error))?;
        state::note_landed(self.source, self.saved, &self.what);
        if landed.commits > 0 {
            let workspace = self.source.workspace.name.clone();
            workspaces.fleet.write(self.id, WorkspaceLanded { workspace, landed: (&landed).into() })?;
        }
        Ok(landed)
    }

    /// A command that lands this work in another way.
    fn command(&self, options: &str) -> String {
        let onto = match &self.how {
            LandTarget::Onto(onto) if options == "--squash" || options == "--committed" => {
                format!(" --onto '{onto}'")
            }
            _ => String::new(),
        };
        format!("pal land {options}{onto} --workspace {} {}", self.source.workspace.name, self.id)
    }

    fn patch_hint(&self) -> String {
        format!("take it as a patch: {} > work.patch", self.command("--patch"))
    }

    /// The failure, with commands that lead on.
    fn failure(&self, error: WorkspaceError) -> Failure {
        let (id, workspace) = (self.id, &self.source.workspace);
        let patch = self.patch_hint();
        let mut hints = Vec::new();
        match &error {
            WorkspaceError::Unsound { committed: true, .. } => {
                hints.push(format!("it stays saved; land only the commits: {}", self.command("--committed")));
            }
            WorkspaceError::Unsound { .. } => hints.push(format!("it stays saved; {patch}")),
            // The Body began with uncommitted work of the user, and its own work may need that.
            WorkspaceError::Conflict(_) if workspace.base != workspace.commit => {
                hints.push(
                    "it builds on uncommitted work of yours: commit that first, then land again".into(),
                );
                hints.push(patch);
            }
            WorkspaceError::Conflict(_) => {
                let branch = workspace::free_branch(&Git::at(&workspace.repository), id.as_str());
                let keep = self.command(&format!("--branch {branch}"));
                hints.push(format!("keep it on a branch of its own and merge it yourself: {keep}"));
                if let LandTarget::Onto(onto) = &self.how {
                    let name = &workspace.name;
                    hints.push(format!(
                        "or let its agent resolve it: pal sync --branch '{onto}' --workspace {name} {id}"
                    ));
                }
            }
            WorkspaceError::Hostile(_) => {
                hints.push(format!("land everything as one commit: {}", self.command("--squash")));
            }
            WorkspaceError::Git(error) if error.reason() == Some(workspace::GitReason::NoIdentity) => {
                hints.push("set your identity: git config --global user.name NAME, and user.email".into());
            }
            _ => {}
        }
        let failure = failures::workspace(&format!("cannot land the work of Body {id}"), error);
        hints.into_iter().fold(failure, Failure::hint)
    }
}
