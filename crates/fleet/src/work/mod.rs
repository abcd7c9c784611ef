//! Repositories in Bodies: import, diff, save, land.
//!
//! Invariant: a Body whose work is not in the user's repository is removed only on explicit request.
//! Invariant: every change to the user's repository is an event.

mod compare;
mod devcontainer;
mod diff;
mod disk_usage;
mod hand_over;
mod home;
mod key_lock;
mod land;
mod prepare;
mod progress;
mod reason;
mod rerun;
mod state;
mod steps;
mod sync;
mod toolchain;
mod unfinished;
mod up;
mod way_out;

pub use compare::{BodyComparison, Comparison, Overlap, QueueResult};
pub use diff::{UnsavedWork, WorkDiff, WorkReview};
pub use disk_usage::DiskShare;
pub use hand_over::{ForkedWork, HandOver, HandOverOutcome, WorkMark};
pub use home::{HomeRecord, HomeView, Homes};
pub use progress::{Progress, ProgressLine};
pub use rerun::PrepareRequest;
pub use state::WorkState;
pub(crate) use state::inherit_landed;
pub(crate) use steps::StepRunner;
pub use sync::{SyncMode, SyncResult};
pub use up::{DevcontainerChoice, ImageResolver, PrepareChoice, RepoSource, RepositoryNetwork, UpRequest};
pub use way_out::way_out;

use std::{sync::Arc, time::SystemTime};

use body::{
    BodyDir, ProcessState, host::SnapshotLower, process, root::WorkspaceLayers, vm::upper_copy::UpperCopy,
};
use proto::{
    BodyId, Failure, Kind, Spec,
    event_data::{BodyRemoved, RemovedBy, WorkspaceSaveFailed, WorkspaceSaved},
    spec::BodyRole,
    workspace::Workspace,
};
use workspace::{BodyWorkspace, SaveResult};

use crate::{BodyView, Fleet, blocking::run_blocking, failures};

/// Whether work that cannot be saved may be discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discard {
    /// It may be discarded.
    Yes,
    /// It must not be discarded.
    No,
}

/// Imports repositories into Bodies, and shows, saves and lands the work in them.
#[derive(Debug, Clone, Copy)]
pub struct Workspaces<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl Workspaces<'_> {
    /// The layers below the repositories of a Body.
    pub(crate) fn workspaces_below(&self, workspaces: &[Workspace]) -> Result<Vec<WorkspaceLayers>, Failure> {
        let token = |workspace: &Workspace| {
            workspace.layers.first().map(proto::workspace::unchanged_token).unwrap_or_default()
        };
        let below = |workspace: &Workspace| -> Result<_, Failure> {
            Ok(WorkspaceLayers {
                at: workspace.at(),
                layers: self.fleet.templates().layers_below(&workspace.layers)?,
                token: token(workspace).to_string(),
            })
        };
        workspaces.iter().map(below).collect()
    }

    /// The paths of a Body's repositories and of its writes to them.
    pub(crate) fn sources(&self, spec: &Spec) -> Result<Vec<BodyWorkspace>, Failure> {
        let below = self.fleet.snapshots().below(spec)?;
        let snapshots: Vec<_> = below.iter().map(|below| below.dir.clone()).collect();
        // A dependency layer above work of another Body may hide files of it, so it counts as work, too.
        let prepared = |workspace: &Workspace| {
            let is_work =
                |below: &SnapshotLower| !below.dependency && below.dir.join(workspace.area_dir()).is_dir();
            below.len() - below.iter().rposition(is_work).map_or(0, |last| last + 1)
        };
        let source = |workspace: &Workspace| BodyWorkspace {
            body: spec.id.clone(),
            dir: self.fleet.body_path(&spec.id),
            upper: self.fleet.upper_path(&spec.id),
            copy: None,
            snapshots: snapshots.clone(),
            prepared: prepared(workspace),
            workspace: workspace.clone(),
            layers: self.fleet.templates().layers_dir(),
            programs: self.fleet.launch_context.programs.clone(),
            ids: spec.ids.clone(),
            inside: String::new(),
            time_max: workspace::TIME_MAX,
        };
        Ok(spec.workspaces.iter().map(source).collect())
    }

    /// The paths from which the work of a Body can be read now. A microVM is paused while its disk is copied; other
    /// Bodies may run on, unless the caller has frozen them.
    pub(crate) fn readable_sources(&self, spec: &Spec) -> Result<Vec<BodyWorkspace>, Failure> {
        let copy = if spec.workspaces.is_empty() { None } else { self.fleet.copy_upper(spec)? };
        self.sources_in(spec, copy)
    }

    fn sources_in(&self, spec: &Spec, copy: Option<UpperCopy>) -> Result<Vec<BodyWorkspace>, Failure> {
        let mut sources = self.sources(spec)?;
        if let Some(copy) = copy.map(Arc::new) {
            for source in &mut sources {
                source.upper = copy.path().to_owned();
                source.copy = Some(copy.clone());
            }
        }
        Ok(sources)
    }

    /// Writes refs to a new Body's base commits into the user's repositories, so that git keeps the objects. This
    /// includes forks and Bodies from snapshots. Removes the Body if that fails.
    pub(crate) fn anchor_objects(&self, view: BodyView) -> Result<BodyView, Failure> {
        // The Body of a step saves no work.
        if view.spec.role == BodyRole::Step {
            return Ok(view);
        }
        let anchor =
            |workspace: &Workspace| workspace::write_refs(view.id(), view.spec.parent.as_ref(), workspace);
        match view.spec.workspaces.iter().try_for_each(anchor) {
            Ok(()) => Ok(view),
            Err(error) => {
                self.undo_create(view.id());
                Err(failures::workspace("cannot write the Body's refs into the repository", error))
            }
        }
    }

    /// Removes a Body that no caller has used yet.
    fn undo_create(&self, id: &BodyId) {
        let Ok((dir, spec, lock)) = self.fleet.lock_body(id) else { return };
        let _ = self.fleet.garbage().withdraw(
            &dir,
            id,
            BodyRemoved { by: Some(RemovedBy::Up), discarded: false },
        );
        let _ = self.fleet.remove_files(&dir, &spec);
        drop(lock);
        drop(self.fleet.supervisors.take(id));
        spec.workspaces.iter().for_each(|workspace| workspace::release(id, workspace));
    }

    /// Saves the work of a Body into the repositories that it came from. Freezes its processes meanwhile.
    pub async fn save(&self, id: &BodyId) -> Result<Vec<SaveResult>, Failure> {
        run_blocking(|| {
            let (dir, spec, _lock) = self.fleet.lock_body(id)?;
            if spec.workspaces.is_empty() {
                return Err(no_workspace(id));
            }
            if let Some(copy) = self.fleet.copy_upper(&spec)? {
                return self.save_sources(self.sources_in(&spec, Some(copy))?);
            }
            self.freeze_for_save(&dir, &spec)?;
            let saved = self.save_work(&spec);
            self.fleet.thaw_interrupted_save(&dir)?;
            saved
        })
    }

    fn freeze_for_save(&self, dir: &BodyDir, spec: &Spec) -> Result<(), Failure> {
        let ProcessState::Running(running) =
            dir.condition().map_err(|error| failures::dir(&spec.id, error))?
        else {
            return Ok(());
        };
        dir.freeze_lock().map_err(|error| {
            Failure::new(Kind::Host, "cannot freeze the Body").because(error).hint("make room: pal gc")
        })?;
        let frozen =
            process::pause(&running).map_err(|error| failures::process("cannot freeze the Body", error));
        frozen.inspect_err(|_| drop(self.fleet.thaw_interrupted_save(dir)))
    }

    /// Saves the work. The caller holds the lock, and no process writes.
    fn save_work(&self, spec: &Spec) -> Result<Vec<SaveResult>, Failure> {
        self.save_sources(self.readable_sources(spec)?)
    }

    fn save_sources(&self, sources: Vec<BodyWorkspace>) -> Result<Vec<SaveResult>, Failure> {
        let (mut all, began) = (Vec::new(), SystemTime::now());
        for source in sources {
            let saved = workspace::save(&source)
                .map_err(|error| failures::workspace("cannot save the work of the Body", error))?;
            self.note_saved(&source, &saved, began)?;
            all.push(saved);
        }
        Ok(all)
    }

    /// Appends the event of a save, once for each state of the work. `began` is when the save began to read.
    fn note_saved(
        &self,
        source: &BodyWorkspace,
        saved: &SaveResult,
        began: SystemTime,
    ) -> Result<(), Failure> {
        let recorded = source.dir.join("git").join(&source.workspace.name).join("recorded");
        let text = serde_json::to_string(saved).unwrap_or_default();
        if std::fs::read_to_string(&recorded).is_ok_and(|before| before == text) {
            state::note_save_time(&recorded, began);
            return Ok(());
        }
        let data = WorkspaceSaved {
            workspace: source.workspace.name.clone(),
            refs: workspace::namespace(&source.body),
            saved: saved.into(),
        };
        self.fleet.write(&source.body, data)?;
        let _ = std::fs::write(&recorded, text);
        state::note_save_time(&recorded, began);
        Ok(())
    }

    /// Saves the work if possible. A failure becomes an event and no error, because the work is still in the Body.
    pub(crate) fn save_if_possible(&self, spec: &Spec) -> Result<(), Failure> {
        if spec.workspaces.is_empty() {
            return Ok(());
        }
        if let Err(failure) = self.save_work(spec) {
            let data = WorkspaceSaveFailed { why: failure.to_string(), causes: failure.causes() };
            self.fleet.write(&spec.id, data)?;
        }
        Ok(())
    }

    /// Fails if some work of a running Body would be lost by its removal. Its processes stand still meanwhile, and go
    /// on afterwards. The caller holds the lock.
    pub(crate) fn check_removal(&self, dir: &BodyDir, spec: &Spec) -> Result<(), Failure> {
        if spec.workspaces.is_empty() {
            return Ok(());
        }
        if let Some(copy) = self.fleet.copy_upper(spec)? {
            return refuse_loss(spec, self.save_sources(self.sources_in(spec, Some(copy))?)).map(drop);
        }
        self.freeze_for_save(dir, spec)?;
        let saved = refuse_loss(spec, self.save_work(spec));
        self.fleet.thaw_interrupted_save(dir)?;
        saved.map(drop)
    }

    /// Saves the work, and fails if some of it would be lost.
    pub(crate) fn save_before_removal(&self, spec: &Spec) -> Result<(), Failure> {
        let saved = refuse_loss(spec, self.save_work(spec))?;
        for (workspace, _) in spec.workspaces.iter().zip(&saved).filter(|(_, saved)| saved.is_empty()) {
            let _ = workspace::forget(&spec.id, workspace);
        }
        Ok(())
    }
}

/// Refuses a removal after which some work would be lost.
fn refuse_loss(spec: &Spec, saved: Result<Vec<SaveResult>, Failure>) -> Result<Vec<SaveResult>, Failure> {
    let id = &spec.id;
    let refused = |failure: Failure| {
        failure.hint(format!("its files are still there; to discard its work: pal rm --discard {id}"))
    };
    let saved = saved.map_err(refused)?;
    for (workspace, saved) in spec.workspaces.iter().zip(&saved) {
        if let Some(commit_error) = &saved.commit_error {
            return Err(refused(Failure::new(
                Kind::Conflict,
                format!("not all work of Body {id} can be saved: {commit_error}"),
            )));
        }
        if let Some(left) = saved.skipped.first() {
            let more = saved.skipped.len() - 1;
            let more = if more > 0 { format!(", and {more} more") } else { String::new() };
            let message =
                format!("not all work of Body {id} can be saved: {} ({}){more}", left.path, left.why);
            return Err(refused(Failure::new(Kind::Conflict, message))
                .hint(format!("bring that one out: {}", way_out(id, &workspace.name, left))));
        }
    }
    Ok(saved)
}

pub(crate) fn no_workspace(id: &BodyId) -> Failure {
    Failure::new(Kind::Usage, format!("Body {id} has no repository in it"))
        .hint("create one that has: pal up, in a git repository")
}
