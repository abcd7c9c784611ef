//! Snapshots of Bodies, and forks from them.

use std::path::{Path, PathBuf};

use body::{
    BodyDir,
    host::SnapshotLower,
    root::RootfsStack,
    snapshot::{self, SnapshotManifest},
};
use proto::{
    AgentId, BodyId, BodyName, Failure, Kind, SnapshotId, Spec,
    event_data::{BodyForked, MissingStep, SnapshotCreated, SnapshotRemoved},
    spec::{Access, BodyRole, Egress, Home, Life, Mount},
};

use crate::{
    BodyView, Create, Fleet, Lease, LimitRequest, SnapshotView, blocking::run_blocking, egress::proxy_env,
    failures, names::Names, work::inherit_landed,
};

/// The purpose of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SnapshotPurpose {
    /// A caller asked for it; it stays until it is removed.
    Kept,
    /// Forks start from it; it is removed with the last of them.
    Forks,
    /// It belongs to a checkpoint of an agent, and is removed with the agent.
    Checkpoint(AgentId),
}

/// The properties of a dependency layer that is about to be taken.
#[derive(Debug, Clone)]
pub(crate) struct DependencyLayer {
    /// The template that the Body was requested with.
    pub origin: String,
    /// A hash of the inputs of the preparation.
    pub key: String,
    /// The steps that failed or did not run.
    pub missing_steps: Vec<MissingStep>,
}

/// Most forks in one request.
const FORKS_MAX: u32 = 1000;

/// Snapshots of Bodies, and forks.
#[derive(Debug, Clone, Copy)]
pub struct Snapshots<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl Snapshots<'_> {
    pub(crate) fn path(&self, id: &SnapshotId) -> PathBuf {
        self.fleet.data.join("snapshots").join(id.as_str())
    }

    /// Takes a snapshot of a Body, with a name if one is given.
    pub async fn create(&self, id: &BodyId, name: Option<String>) -> Result<SnapshotView, Failure> {
        run_blocking(|| {
            if let Some(name) = &name {
                self.check_name(name)?;
            }
            let (dir, spec, _lock) = self.fleet.lock_body(id)?;
            self.take(&dir, &spec, name, SnapshotPurpose::Kept).map(view)
        })
    }

    /// Takes a snapshot of a Body for a checkpoint of an agent.
    pub async fn create_checkpoint(&self, id: &BodyId, agent: &AgentId) -> Result<SnapshotView, Failure> {
        run_blocking(|| {
            let (dir, spec, _lock) = self.fleet.lock_body(id)?;
            self.take(&dir, &spec, None, SnapshotPurpose::Checkpoint(agent.clone())).map(view)
        })
    }

    fn check_name(&self, name: &str) -> Result<(), Failure> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(plain) || name == "host" {
            return Err(Failure::new(
                Kind::Usage,
                format!("{:?} cannot name a snapshot", proto::text::visible(name)),
            )
            .hint("use 1 to 64 letters, digits, `-`, `_` or `.`, but not `host`"));
        }
        match self.manifests().iter().find(|manifest| manifest.name.as_deref() == Some(name)) {
            Some(taken) => Err(Failure::new(
                Kind::Conflict,
                format!("snapshot {} has the name {name} already", taken.id),
            )
            .hint("choose another name, or remove that one: pal snapshot rm NAME")),
            None => Ok(()),
        }
    }

    /// Takes a snapshot. The Body is frozen only while its changes are copied. The caller holds the Body's lock.
    fn take(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        name: Option<String>,
        purpose: SnapshotPurpose,
    ) -> Result<SnapshotManifest, Failure> {
        self.take_as(dir, spec, name, purpose, None)
    }

    /// Takes a snapshot of a prepared Body that does not run, as a dependency layer that later requests find by `key`.
    pub(crate) fn take_dependencies(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        layer: &DependencyLayer,
    ) -> Result<SnapshotId, Failure> {
        self.take_as(dir, spec, None, SnapshotPurpose::Kept, Some(layer)).map(|manifest| manifest.id)
    }

    fn take_as(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        name: Option<String>,
        purpose: SnapshotPurpose,
        dependency: Option<&DependencyLayer>,
    ) -> Result<SnapshotManifest, Failure> {
        let manifest = self.announce(dir, spec, name, purpose, dependency)?;
        let to = self.path(&manifest.id);
        let taken = self.fleet.driver(spec)?.snapshot(dir, spec, &to, manifest);
        taken.inspect_err(|_| drop(snapshot::remove(&self.fleet.launch_context.programs, &spec.ids, &to)))
    }

    /// Appends the event of a snapshot that is about to be taken, and drafts its manifest.
    fn announce(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        name: Option<String>,
        purpose: SnapshotPurpose,
        dependency: Option<&DependencyLayer>,
    ) -> Result<SnapshotManifest, Failure> {
        let id = &spec.id;
        if dir.is_swapped() {
            return Err(crate::lifecycle::paused_failure(id));
        }
        let drawn = sys::random::bytes().map_err(|error| {
            Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
        })?;
        let manifest = SnapshotManifest {
            id: SnapshotId::from_random(drawn),
            name,
            body: id.clone(),
            owner: self.fleet.leases().get(id).ok().flatten().and_then(|lease| lease.owner),
            created_at: store::clock::now(),
            template: spec.template.clone(),
            below: spec.snapshots.clone(),
            base: spec.base.clone(),
            workspaces: spec.workspaces.clone(),
            home: spec.home.clone().map(|home| Home { name: None, ..home }),
            at_start: spec.at_start.clone(),
            ports: spec.ports.clone(),
            ids: spec.ids.clone(),
            bytes: 0,
            for_forks: purpose == SnapshotPurpose::Forks,
            checkpoint_of: match purpose {
                SnapshotPurpose::Checkpoint(agent) => Some(agent),
                SnapshotPurpose::Kept | SnapshotPurpose::Forks => None,
            },
            dependency: dependency.map(|layer| layer.key.clone()),
            origin: dependency.map(|layer| layer.origin.clone()),
            missing_steps: match dependency {
                Some(layer) => layer.missing_steps.clone(),
                None => self.fleet.workspaces().missing_steps(spec),
            },
            layer: spec.layer,
            machine: None,
        };
        self.fleet
            .write(id, SnapshotCreated { snapshot: manifest.id.clone(), name: manifest.name.clone() })?;
        Ok(manifest)
    }

    /// All snapshots that users took, oldest first.
    pub fn list(&self) -> Result<Vec<SnapshotView>, Failure> {
        let mut views: Vec<SnapshotView> =
            self.manifests().into_iter().filter(|manifest| manifest.dependency.is_none()).map(view).collect();
        views.sort_by(|a, b| (&a.created_at, &a.id).cmp(&(&b.created_at, &b.id)));
        Ok(views)
    }

    pub(crate) fn manifests(&self) -> Vec<SnapshotManifest> {
        let entries = std::fs::read_dir(self.fleet.data.join("snapshots")).into_iter().flatten().flatten();
        entries.filter_map(|entry| snapshot::read(&entry.path()).ok()).collect()
    }

    /// Finds a snapshot by its whole id, its name, or a prefix of the id that only one snapshot has.
    pub(crate) fn find(&self, key: &str) -> Result<SnapshotManifest, Failure> {
        let all = self.manifests();
        let exact =
            all.iter().find(|manifest| manifest.id.as_str() == key || manifest.name.as_deref() == Some(key));
        let mut begun =
            all.iter().filter(|manifest| !key.is_empty() && manifest.id.as_str().starts_with(key));
        match (exact, begun.next(), begun.next()) {
            (Some(manifest), ..) | (None, Some(manifest), None) => Ok(manifest.clone()),
            _ => Err(Failure::new(
                Kind::NotFound,
                format!("there is no snapshot {:?}", proto::text::visible(key)),
            )
            .hint("list them: pal snapshot ls")),
        }
    }

    /// Finds the snapshot that a template's name refers to, if it refers to one.
    pub fn find_view(&self, key: &str) -> Option<SnapshotView> {
        self.find(bare(key)).ok().map(view)
    }

    /// A snapshot and the snapshots below it, top first.
    pub(crate) fn stack(&self, top: &SnapshotManifest) -> Result<Vec<SnapshotLower>, Failure> {
        let mut stack = vec![snapshot::below(self.path(&top.id), top)];
        for id in &top.below {
            let dir = self.path(id);
            let manifest = snapshot::read(&dir).map_err(|error| {
                Failure::new(Kind::Host, format!("snapshot {id}, which others use, cannot be read"))
                    .because(error)
            })?;
            stack.push(snapshot::below(dir, &manifest));
        }
        Ok(stack)
    }

    /// A snapshot, the snapshots below it, and the root of the template below them.
    pub(crate) fn under_snapshot(&self, top: &SnapshotManifest) -> Result<RootfsStack, Failure> {
        let layers =
            top.base.as_ref().map(|base| self.fleet.templates().layers_below(&base.layers)).transpose()?;
        Ok(RootfsStack {
            snapshots: self.stack(top)?,
            layers,
            workspaces: self.fleet.workspaces().workspaces_below(&top.workspaces)?,
            home: self.fleet.homes().home_below(top.home.as_ref())?,
        })
    }

    /// The snapshots below an existing Body.
    pub(crate) fn below(&self, spec: &Spec) -> Result<Vec<SnapshotLower>, Failure> {
        match spec.snapshots.first() {
            Some(first) => self.stack(&self.find(first.as_str())?),
            None => Ok(Vec::new()),
        }
    }

    /// Removes a snapshot that no Body and no other snapshot uses.
    pub fn remove(&self, key: &str) -> Result<SnapshotId, Failure> {
        let manifest = self.find(key)?;
        if let Some(user) = self.user_of(&manifest.id)? {
            return Err(Failure::new(
                Kind::Conflict,
                format!("snapshot {} is in use by {user}", manifest.id),
            )
            .hint("remove that first"));
        }
        let data = SnapshotRemoved { snapshot: manifest.id.clone(), name: manifest.name };
        self.fleet.write(&manifest.body, data)?;
        snapshot::remove(&self.fleet.launch_context.programs, &manifest.ids, &self.path(&manifest.id))
            .map_err(failures::removal)?;
        self.drop_unused(&manifest.below)?;
        Ok(manifest.id)
    }

    /// Names a user of a snapshot: a Body, or another snapshot.
    pub(crate) fn user_of(&self, id: &SnapshotId) -> Result<Option<String>, Failure> {
        let specs = self
            .fleet
            .ids()?
            .into_iter()
            .filter_map(|body| body::BodyDir::at(self.fleet.body_path(&body)).spec().ok());
        let body = specs
            .into_iter()
            .find(|spec| spec.snapshots.contains(id))
            .map(|spec| format!("Body {}", spec.id));
        let other = || {
            self.manifests()
                .into_iter()
                .find(|other| other.below.contains(id))
                .map(|other| format!("snapshot {}", other.id))
        };
        Ok(body.or_else(other))
    }

    /// Of the snapshots below a removed Body or snapshot, removes those that were taken for forks and have no user left.
    pub(crate) fn drop_unused(&self, below: &[SnapshotId]) -> Result<(), Failure> {
        for id in below {
            let Ok(manifest) = snapshot::read(&self.path(id)) else { continue };
            if manifest.for_forks && self.user_of(id)?.is_none() {
                snapshot::remove(&self.fleet.launch_context.programs, &manifest.ids, &self.path(id))
                    .map_err(failures::removal)?;
            }
        }
        Ok(())
    }

    /// Creates and starts `count` Bodies that begin with the current state of this one, and belong to its owner.
    pub async fn fork(&self, id: &BodyId, count: u32) -> Result<Vec<BodyView>, Failure> {
        let terms = run_blocking(|| self.fleet.leases().terms_of_fork(id))?;
        self.fork_leased(id, count, None, terms).await
    }

    /// Creates and starts `count` forks of a Body, each with this lease, and with this name and a number.
    pub async fn fork_leased(
        &self,
        id: &BodyId,
        count: u32,
        name: Option<&BodyName>,
        lease: Option<Lease>,
    ) -> Result<Vec<BodyView>, Failure> {
        if !(1..=FORKS_MAX).contains(&count) {
            return Err(Failure::new(Kind::Usage, format!("cannot create {count} forks at once"))
                .hint(format!("ask for 1 to {FORKS_MAX}")));
        }
        let names = run_blocking(|| Names::of(self.fleet).number(name, count))?;
        let shapes = names.into_iter().map(|name| {
            let lease = lease.clone();
            move |request: Create| Create { name, lease, ..request }
        });
        self.fork_shaped(id, shapes).await
    }

    /// Creates and starts a fork of a Body for one act. The fork ends with this process, saves no work, reaches no
    /// network and writes to no directory of the host, so that no effect of the act outlives the fork.
    pub async fn fork_for_act(&self, id: &BodyId) -> Result<BodyView, Failure> {
        let mut views = self.fork_shaped(id, [seal]).await?;
        views.pop().ok_or_else(|| Failure::new(Kind::Internal, "a fork was not created"))
    }

    /// Creates and starts one fork of a Body for each shape of its request.
    async fn fork_shaped<F: FnOnce(Create) -> Create>(
        &self,
        id: &BodyId,
        shapes: impl IntoIterator<Item = F>,
    ) -> Result<Vec<BodyView>, Failure> {
        // The lock is held until the forks use the snapshot: until then `gc` would find it unused.
        let (parent, manifest, _lock) = run_blocking(|| -> Result<_, Failure> {
            let (dir, parent, lock) = self.fleet.lock_body(id)?;
            let manifest = self.take(&dir, &parent, None, SnapshotPurpose::Forks)?;
            Ok((parent, manifest, lock))
        })?;
        let mut views = Vec::new();
        for shape in shapes {
            let request = shape(fork_of(&parent, manifest.id.to_string()));
            let started = match run_blocking(|| self.fleet.creator().create_now(request, Some(id.clone()))) {
                Ok(view) => {
                    views.push(view.clone());
                    self.fleet.creator().await_template_start(view).await.map(drop)
                }
                Err(failure) => Err(failure),
            };
            if let Err(failure) = started {
                self.undo_forks(&views, &manifest).await;
                return Err(failure);
            }
        }
        views.iter().for_each(|view| inherit_landed(self.fleet, &parent, view.id()));
        let bodies = views.iter().map(BodyView::id).cloned().collect();
        run_blocking(|| self.fleet.write(id, BodyForked { snapshot: manifest.id, bodies }))?;
        Ok(views)
    }

    /// Creates and starts a Body that begins with a snapshot of this one, and belongs to the owner of this one.
    pub async fn fork_at(&self, id: &BodyId, snapshot: &SnapshotId) -> Result<BodyView, Failure> {
        self.fork_shaped_at(id, snapshot, |request| request).await
    }

    /// Creates and starts a Body that begins with a snapshot of this one, for acts that leave no trace, as
    /// [`Snapshots::fork_for_act`] does.
    pub async fn fork_for_acts_at(&self, id: &BodyId, snapshot: &SnapshotId) -> Result<BodyView, Failure> {
        self.fork_shaped_at(id, snapshot, seal).await
    }

    async fn fork_shaped_at(
        &self,
        id: &BodyId,
        snapshot: &SnapshotId,
        shape: impl FnOnce(Create) -> Create,
    ) -> Result<BodyView, Failure> {
        let (request, parent, _building) = run_blocking(|| -> Result<_, Failure> {
            let building = self.fleet.garbage().building()?;
            let (_, parent, _lock) = self.fleet.lock_body(id)?;
            let manifest = snapshot::read(&self.path(snapshot)).map_err(|error| {
                Failure::new(Kind::NotFound, format!("there is no snapshot {snapshot}"))
                    .because(error)
                    .hint("list the snapshots: pal snapshots")
            })?;
            let lease = self.fleet.leases().terms_of_fork(id)?;
            let request = Create { lease, ..fork_of(&parent, manifest.id.to_string()) };
            Ok((request, parent, building))
        })?;
        let view = run_blocking(|| self.fleet.creator().create_now(shape(request), Some(id.clone())))?;
        let view = self.fleet.creator().await_template_start(view).await?;
        inherit_landed(self.fleet, &parent, view.id());
        Ok(view)
    }

    /// Removes the forks of a request that failed: a request creates all of its forks or none.
    async fn undo_forks(&self, views: &[BodyView], manifest: &SnapshotManifest) {
        for view in views {
            let _ = self.fleet.remove(view.id(), crate::Force::Yes).await;
        }
        let path = self.path(&manifest.id);
        let _ = run_blocking(|| snapshot::remove(&self.fleet.launch_context.programs, &manifest.ids, &path));
    }
}

/// The request for a Body from which no effect of its commands gets out.
fn seal(request: Create) -> Create {
    let proxy = proxy_env(Some(Path::new("")));
    let mut env = request.env;
    // Without a proxy these variables would only confuse programs.
    env.retain(|name, value| proxy.get(name) != Some(value));
    Create {
        role: BodyRole::Step,
        egress: None,
        lease: None,
        env,
        mounts: request.mounts.into_iter().map(read_only).collect(),
        ..request
    }
}

fn read_only(mount: Mount) -> Mount {
    Mount { access: Access::ReadOnly, ..mount }
}

/// The request for a fork of a Body that begins with a snapshot of it.
fn fork_of(parent: &Spec, snapshot: String) -> Create {
    Create {
        name: None,
        layer: Some(parent.layer),
        template: snapshot,
        limits: LimitRequest::from(&parent.limits),
        env: parent.env.clone(),
        mounts: parent.mounts.clone(),
        share: parent.share,
        workspaces: parent.workspaces.clone(),
        // The snapshot's manifest has these values.
        home: None,
        at_start: Vec::new(),
        ports: Vec::new(),
        // A Body from a snapshot of the parent has no policy; a fork has the one of its parent.
        egress: parent.egress.clone().map(|egress| Egress { generation: 0, ..egress }),
        // The policy has the secrets of the parent, and the environment their placeholders.
        secrets: Vec::new(),
        role: BodyRole::Work,
        workdir: parent.workdir.clone(),
        user: Some(parent.user.clone()),
        life: Life::Kept,
        lease: None,
        engine: None,
        cold: false,
    }
}

/// The key without the default tags, because snapshots have no tags.
pub(crate) fn bare(key: &str) -> &str {
    key.strip_suffix(":default").or_else(|| key.strip_suffix(":latest")).unwrap_or(key)
}

fn view(manifest: SnapshotManifest) -> SnapshotView {
    SnapshotView {
        id: manifest.id,
        name: manifest.name,
        body: manifest.body,
        owner: manifest.owner,
        created_at: manifest.created_at,
        bytes: manifest.bytes,
        for_forks: manifest.for_forks,
        checkpoint_of: manifest.checkpoint_of,
    }
}

#[cfg(test)]
mod tests {
    use proto::egress::EgressRule;
    use serde_json::json;

    use super::*;

    fn parent() -> Spec {
        let spec = json!({
            "v": 1, "id": "k3v9", "created_at": "2026-01-01T00:00:00Z", "layer": "process", "template": "host",
            "limits": { "memory": 536870912, "cpu_milli": 1000, "pids": 256, "disk": 1073741824, "files": 1024,
                "inodes": 65536, "output": 1048576, "wall_ms": null }, "user": "user", "network": "closed", "life": "kept",
            "egress": { "rules": [{ "to": "pypi.org:443" }], "generation": 7 }, "env": proxy_env(None),
            "ids": { "users": [], "groups": [] },
        });
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn a_fork_has_the_network_of_its_parent_and_one_for_an_act_has_none() {
        let request = fork_of(&parent(), "s1".into());
        let rules = vec![EgressRule::allow("pypi.org:443")];
        assert_eq!(request.egress, Some(Egress { rules, ..Egress::default() }));
        let sealed = seal(request);
        assert_eq!((sealed.egress, sealed.env.get("https_proxy")), (None, None));
    }
}
