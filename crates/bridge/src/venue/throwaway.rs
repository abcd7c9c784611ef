//! Bodies for one call: a fork of the agent's Body, or a fresh microVM with its files.
//!
//! Invariant: nothing of the call outlives such a Body: it reaches no network, writes to no directory of the host, and
//! its work is never saved. So a call that was interrupted in one is simply repeated in another.
//! Invariant: a Body for one call ends with the process that created it: its supervisor removes it, also after `kill -9`.

use std::{
    future::Future as _,
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
};

use fleet::{
    BodyView, Create, DevcontainerChoice, Discard, Fleet, Force, GitIdentity, LimitRequest, PrepareChoice,
    RepoSource, UncommittedFiles, UpRequest,
};
use proto::{BodyId, Failure, Kind, Layer, SnapshotId, Spec, spec::BodyRole};

/// A Body for one call. Dropping it removes the Body, so that an interrupted call leaves none.
#[derive(Debug)]
pub struct ThrowawayBody {
    fleet: Arc<Fleet>,
    body: Option<BodyId>,
}

impl ThrowawayBody {
    /// A fork of a Body.
    pub async fn fork(fleet: &Arc<Fleet>, body: &BodyId) -> Result<Self, Failure> {
        let view = fleet.snapshots().fork_for_act(body).await?;
        Ok(Self { fleet: Arc::clone(fleet), body: Some(view.id().clone()) })
    }

    /// A Body that begins with a snapshot of another one.
    pub async fn at_snapshot(
        fleet: &Arc<Fleet>,
        body: &BodyId,
        snapshot: &SnapshotId,
    ) -> Result<Self, Failure> {
        let view = fleet.snapshots().fork_for_acts_at(body, snapshot).await?;
        Ok(Self { fleet: Arc::clone(fleet), body: Some(view.id().clone()) })
    }

    /// A microVM with the template of a Body, and with the files of its repository as they are now. A fork of a Body that
    /// is a microVM is one.
    pub async fn microvm(fleet: &Arc<Fleet>, body: &BodyId, person: &GitIdentity) -> Result<Self, Failure> {
        let spec = fleet.view(body)?.spec;
        if spec.layer == Layer::Microvm {
            return Self::fork(fleet, body).await;
        }
        let create = microvm_request(&spec);
        let view = match spec.workspaces.as_slice() {
            [] => fleet.create(create).await?,
            [workspace] => {
                let saved = fleet.workspaces().save(body).await?;
                let wip = saved.into_iter().next().map(|saved| saved.wip);
                let request = UpRequest {
                    repositories: vec![RepoSource::Path(workspace.repository.clone())],
                    reference: wip,
                    dirty: UncommittedFiles::Without,
                    include: Vec::new(),
                    prepare: PrepareChoice::No,
                    devcontainer: DevcontainerChoice::Ignore,
                    person: person.clone(),
                    images: |reference| Ok(fleet::Image::new(reference)),
                    home: None,
                    network: fleet::NetworkRequest::default(),
                    repository_network: fleet::RepositoryNetwork::Ignore,
                    create,
                    count: 1,
                };
                bring_up(Arc::clone(fleet), request).await?
            }
            _ => {
                return Err(Failure::new(
                    Kind::Usage,
                    format!("Body {body} has several repositories, which a microVM for one call cannot have"),
                )
                .hint("choose `run = \"fork\"` for this risk in venues.toml"));
            }
        };
        Ok(Self { fleet: Arc::clone(fleet), body: Some(view.id().clone()) })
    }

    /// The Body.
    pub fn id(&self) -> Option<&BodyId> {
        self.body.as_ref()
    }

    /// Removes the Body, and discards everything in it.
    pub async fn remove(mut self) -> Result<(), Failure> {
        match self.body.take() {
            Some(body) => self.fleet.remove_with(&body, Force::Yes, Discard::Yes).await,
            None => Ok(()),
        }
    }
}

impl Drop for ThrowawayBody {
    fn drop(&mut self) {
        let Some(body) = self.body.take() else { return };
        // A removal blocks and never waits, so one poll completes it.
        let removal = pin!(self.fleet.remove_with(&body, Force::Yes, Discard::Yes));
        let _ = removal.poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// Creates the Body of a request on a thread of its own, because that work cannot move between threads.
async fn bring_up(fleet: Arc<Fleet>, request: UpRequest) -> Result<BodyView, Failure> {
    let not_created = || Failure::new(Kind::Internal, "a microVM was not created");
    let runtime = tokio::runtime::Handle::current();
    let up = move || runtime.block_on(fleet.workspaces().up(request));
    let mut views = tokio::task::spawn_blocking(up).await.map_err(|_| not_created())??;
    views.pop().ok_or_else(not_created)
}

/// The request for a microVM like a Body of another layer, whose own changes a microVM cannot stand on.
fn microvm_request(spec: &Spec) -> Create {
    let template = match (&spec.base, spec.snapshots.is_empty()) {
        (_, true) => spec.template.clone(),
        (Some(base), false) => base.template.to_string(),
        (None, false) => "host".to_owned(),
    };
    Create {
        layer: Some(Layer::Microvm),
        template,
        limits: LimitRequest { memory: Some(spec.limits.memory), ..LimitRequest::default() },
        env: spec.env.clone(),
        role: BodyRole::Step,
        workdir: spec.workdir.clone().filter(|_| !spec.workspaces.is_empty()),
        user: Some(spec.user.clone()),
        ..Create::kept()
    }
}
