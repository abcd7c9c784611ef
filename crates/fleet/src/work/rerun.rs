//! `pal prepare BODY`: runs the missing prepare steps again, in the Body itself, with the files that it has now.
//!
//! The Body is restarted with an egress proxy, and after the steps once more without it.
//!
//! Invariant: the policy of the proxy is never written to the Body's spec, and the Body ends with this process until
//! it runs without the proxy again. So a killed `pal prepare` leaves no Body that reaches the network.
//! Trust: the rules come from the user's repository on the host, never from the files of the Body.

use std::time::Duration;

use proto::{
    BodyId, Failure, Kind, Spec,
    event_data::{MissingStep, WorkspacePrepared},
    workspace::Workspace,
};
use workspace::Needs;

use super::{
    Progress, ProgressLine, devcontainer, no_workspace,
    steps::{AfterFailure, PlannedStep, StepContext, StepOutcome, StepRunner},
    up::uncommitted_settings,
};
use crate::{
    BodyView, Status, Workspaces, blocking::run_blocking, create::StartOccasion, egress::EgressSession,
    lifecycle::paused_failure,
};

/// How long processes of the Body may take to end before its restart.
const GRACE: Duration = Duration::from_secs(5);

/// The steps that run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrepareRequest {
    /// Those that the Body lacks.
    Missing,
    /// All steps of its repositories.
    All,
}

impl Workspaces<'_> {
    /// Runs prepare steps in an existing Body, which is restarted for it. The Body records the steps that it still
    /// lacks, also if a required one of them fails.
    pub async fn prepare_again(
        &self,
        id: &BodyId,
        request: PrepareRequest,
        say: Progress<'_>,
    ) -> Result<BodyView, Failure> {
        let view = self.fleet.view(id)?;
        if view.spec.workspaces.is_empty() {
            return Err(no_workspace(id));
        }
        if view.status == Status::Paused {
            return Err(paused_failure(id));
        }
        if request == PrepareRequest::Missing && view.missing_steps.is_empty() {
            say(ProgressLine::Note("the Body lacks no step; to run all of them again: pal prepare --all"));
            return Ok(view);
        }
        let all = self.needs_of_body(&view.spec, say)?;
        let steps = all.iter().flat_map(|(workspace, needs)| {
            needs.steps.iter().map(|step| PlannedStep { workspace, step }).collect::<Vec<_>>()
        });
        let wanted = |planned: &PlannedStep<'_>| {
            request == PrepareRequest::All
                || view.missing_steps.iter().any(|missing| planned.matches(missing))
        };
        let planned: Vec<PlannedStep<'_>> = steps.filter(wanted).collect();
        if planned.is_empty() {
            return Err(Failure::new(Kind::Conflict, "the repository has no such steps any more")
                .hint(format!("run all steps that it has now: pal prepare --all {id}")));
        }
        let mut egress = self.open_egress(&all)?;
        let needs: Vec<&Needs> = all.iter().map(|(_, needs)| needs).collect();
        let ran = self.run_restarted(&view, &needs, &planned, &mut egress, say).await;
        let outcome = match ran {
            Ok(outcome) => outcome,
            // A step that could not even be started leaves the record as it is.
            Err(failure) => {
                self.leave_preparation(&view).await?;
                return Err(failure);
            }
        };
        let kept = |missing: &&MissingStep| !planned.iter().any(|planned| planned.matches(missing));
        let before = view.missing_steps.iter().filter(kept).cloned();
        let missing: Vec<MissingStep> = outcome.missing.into_iter().chain(before).collect();
        self.record_missing(id, &missing)?;
        let view = self.leave_preparation(&view).await?;
        match outcome.failure {
            None => Ok(view),
            Some(failure) => Err(failure
                .hint(format!("its whole output: pal logs {id}"))
                .hint(format!("look into the Body: pal shell {id}"))),
        }
    }

    /// The needs of a Body's repositories, with the variables of its template.
    fn needs_of_body<'a>(
        &self,
        spec: &'a Spec,
        say: Progress<'_>,
    ) -> Result<Vec<(&'a Workspace, Needs)>, Failure> {
        let origin = spec.snapshots.iter().find_map(|id| {
            body::snapshot::read(&self.fleet.snapshots().path(id)).ok().and_then(|manifest| manifest.origin)
        });
        let footing = self.base_template_of(origin.unwrap_or_else(|| spec.template.clone()))?;
        let mut all = Vec::new();
        for workspace in &spec.workspaces {
            let files = workspace.repository.parent();
            let settings = files.and_then(|files| uncommitted_settings(files, workspace));
            let mut needs = self.needs(workspace, settings.as_deref())?;
            devcontainer::resolve_variables(&footing, workspace, &mut needs, &spec.env, say);
            all.push((workspace, needs));
        }
        Ok(all)
    }

    /// Restarts the Body with an egress proxy, and runs the steps.
    async fn run_restarted(
        &self,
        view: &BodyView,
        needs: &[&Needs],
        planned: &[PlannedStep<'_>],
        egress: &mut EgressSession,
        say: Progress<'_>,
    ) -> Result<StepOutcome, Failure> {
        let id = view.id();
        if view.status == Status::Running {
            say(ProgressLine::Activity("stopping the Body"));
            self.fleet.stop(id, GRACE).await?;
        }
        run_blocking(|| {
            let (dir, spec, _lock) = self.fleet.lock_body(id)?;
            let spec = Spec { egress: Some(egress.spec.clone()), ..spec };
            self.fleet.start_ended(id, &dir, &spec, StartOccasion::Prepare)
        })?;
        let runner = StepRunner { fleet: self.fleet };
        let gaps = runner.find_gaps(id, needs, planned).await?;
        let context = StepContext { body: id, env: egress.env(), gaps, after_failure: AfterFailure::Stop };
        runner.run_steps(&context, planned, egress, say).await
    }

    /// Ends the egress proxy, and starts the Body again if it ran before.
    async fn leave_preparation(&self, view: &BodyView) -> Result<BodyView, Failure> {
        let id = view.id();
        self.fleet.stop(id, Duration::ZERO).await?;
        run_blocking(|| self.fleet.egress().close(id))?;
        match view.status {
            Status::Running => self.fleet.start(id).await,
            _ => self.fleet.view(id),
        }
    }

    fn record_missing(&self, id: &BodyId, missing: &[MissingStep]) -> Result<(), Failure> {
        self.fleet.write(id, WorkspacePrepared { layer: None, missing: missing.to_vec() })?;
        body::BodyDir::at(self.fleet.body_path(id)).write_missing_steps(missing).map_err(|error| {
            Failure::new(Kind::Host, "cannot record the missing steps")
                .because(error)
                .hint("make room: pal gc")
        })
    }
}
