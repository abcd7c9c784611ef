//! Lands the work of a Body on a branch of the user's repository.

use proto::{BodyId, Failure, Kind, event_data::WorkspaceLanded};
use workspace::{BodyWorkspace, GitIdentity, LandRequest, LandResult, LandSelection, LandTarget, SaveResult};

use crate::{Workspaces, failures};

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
        let (saved, source) = self.save_one(id, name).await?;
        self.land_saved(id, &source, &saved, how, what, person)
    }

    pub(crate) fn land_saved(
        &self,
        id: &BodyId,
        source: &BodyWorkspace,
        saved: &SaveResult,
        how: LandTarget,
        what: LandSelection,
        person: &GitIdentity,
    ) -> Result<LandResult, Failure> {
        if let Some(commit_error) = &saved.commit_error
            && !matches!(what, LandSelection::Squash { .. })
        {
            return Err(Failure::new(
                Kind::Conflict,
                format!("the commits of Body {id} cannot land: {commit_error}"),
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
        let data = WorkspaceLanded { workspace: source.workspace.name.clone(), landed: (&landed).into() };
        self.fleet.write(id, data)?;
        Ok(landed)
    }
}

fn land_failure(id: &BodyId, error: workspace::WorkspaceError) -> Failure {
    let unsound = matches!(error, workspace::WorkspaceError::Unsound(_));
    let conflict = matches!(error, workspace::WorkspaceError::Conflict(_));
    let unknown = matches!(&error, workspace::WorkspaceError::Git(error) if error.reason() == Some(workspace::GitReason::NoIdentity));
    let failure = failures::workspace(&format!("cannot land the work of Body {id}"), error);
    match (conflict, unknown) {
        _ if unsound => {
            failure.hint(format!("it stays saved; land only the commits: pal land --committed {id}"))
        }
        (true, _) => failure.hint(format!(
            "keep it on a branch of its own and merge it yourself: pal land --branch pal/{id} {id}"
        )),
        (_, true) => failure.hint("set your identity: git config --global user.name NAME, and user.email"),
        _ => failure,
    }
}
