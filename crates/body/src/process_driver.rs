//! The driver of the process layer: namespaces, Landlock, seccomp and cgroups around the guest.

use std::{path::Path, sync::Arc};

use proto::{
    Failure, Kind, Layer, Limits, Size, Spec,
    launch::RunRecord,
    limits::HostCapacity,
    spec::{Ids, Life},
};

use crate::{
    BodyDir, ProcessState,
    driver::{
        Capabilities, Capability, ChangedLimits, Driver, DriverContext, LimitRequest, Origin, PoolShape,
        Recipe, Refill,
    },
    failure,
    process::{self, LaunchContext, Launcher, StartingBody},
    root::RootfsStack,
    snapshot::{self, SnapshotManifest},
};

/// Memory of a Body in which no command runs.
const IDLE_MEMORY: Size = Size::mib(2);

const CAPABILITIES: Capabilities = Capabilities {
    has: &[Capability::Workspaces, Capability::Homes, Capability::Egress, Capability::LiveMounts],
    engines: &[],
};

/// The driver of the process layer.
#[derive(Debug)]
pub struct ProcessDriver {
    context: Arc<DriverContext>,
}

impl ProcessDriver {
    /// The driver of a data directory.
    pub fn new(context: Arc<DriverContext>) -> Self {
        Self { context }
    }
}

impl Driver for ProcessDriver {
    fn layer(&self) -> Layer {
        Layer::Process
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn limits(&self, asked: &LimitRequest, life: Life, _origin: &Origin) -> Result<Limits, Failure> {
        let host = self.context.launch.capacity;
        match life {
            Life::Kept => asked.resolve(life, host),
            // An upper in memory takes no space on the disk.
            Life::Run => asked.resolve(life, HostCapacity { disk: host.memory, ..host }),
        }
    }

    fn check(&self, _spec: &Spec, _origin: &Origin) -> Result<(), Failure> {
        Ok(())
    }

    fn prepare(
        &self,
        _spec: &Spec,
        rootfs: RootfsStack,
        _origin: &Origin,
    ) -> Result<Arc<dyn Recipe>, Failure> {
        Ok(Arc::new(ProcessRecipe { launch: self.context.launch.clone(), rootfs }))
    }

    fn change_limits(
        &self,
        running: &RunRecord,
        spec: &Spec,
        new: &Limits,
    ) -> Result<ChangedLimits, Failure> {
        let used = crate::usage::measure(running);
        let needed = Size(used.memory.saturating_sub(used.cache));
        if new.memory < spec.limits.memory && new.memory < needed {
            return Err(Failure::new(
                Kind::Conflict,
                format!("Body {} uses {needed} of memory now, more than {}", spec.id, new.memory),
            )
            .hint("end some of its processes first: pal ps BODY"));
        }
        self.context.launch.change_limits(running, spec, new).map_err(|error| {
            Failure::new(Kind::Host, "cannot change the limits of the Body's cgroups").because(error)
        })
    }

    fn check_new_limits(&self, spec: &Spec, new: &Limits) -> Result<(), Failure> {
        let old = &spec.limits;
        let fixed = (new.disk, new.inodes, new.wall_ms) != (old.disk, old.inodes, old.wall_ms);
        if spec.life == Life::Run && fixed {
            return Err(Failure::new(
                Kind::Usage,
                "the disk, inodes and time of a Body of `pal run` are set when it starts",
            )
            .hint("start it with other limits: pal run --disk SIZE --timeout DURATION"));
        }
        Ok(())
    }

    fn snapshot(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        to: &Path,
        manifest: SnapshotManifest,
    ) -> Result<SnapshotManifest, Failure> {
        let condition = dir.condition().map_err(|error| failure::dir(&spec.id, error))?;
        if let ProcessState::Running(running) = condition {
            dir.freeze_lock().map_err(|error| {
                Failure::new(Kind::Host, "cannot freeze the Body").because(error).hint("make room: pal gc")
            })?;
            let frozen =
                process::pause(&running).map_err(|error| failure::process("cannot freeze the Body", error));
            frozen.inspect_err(|_| drop(thaw_interrupted_save(dir)))?;
        }
        let taken = snapshot::take(&self.context.launch.programs, dir.path(), spec, to, manifest);
        thaw_interrupted_save(dir)?;
        taken.map_err(failure::snapshot)
    }

    /// The shape is the whole spec without its identity. A Body that depends on files which may change
    /// meanwhile, or whose time limit counts from its start, cannot wait.
    fn pool_shape(&self, spec: &Spec) -> Option<PoolShape> {
        let plain = spec.template == "host"
            && spec.base.is_none()
            && spec.snapshots.is_empty()
            && spec.mounts.is_empty()
            && spec.workspaces.is_empty()
            && spec.home.is_none()
            && spec.egress.is_none()
            && spec.limits.wall_ms.is_none();
        let shape =
            || PoolShape { spec: without_identity(spec), memory: IDLE_MEMORY, refill: Refill::AtOnce };
        plain.then(shape)
    }

    fn pool_size(&self) -> usize {
        1
    }
}

/// A spec without its identity: id, name, host ids, time and parent.
pub fn without_identity(spec: &Spec) -> Spec {
    Spec {
        id: proto::BodyId::from_random([0; 12]),
        name: None,
        created_at: String::new(),
        parent: None,
        ids: Ids { users: Vec::new(), groups: Vec::new() },
        ..spec.clone()
    }
}

#[derive(Debug)]
struct ProcessRecipe {
    launch: Arc<LaunchContext>,
    rootfs: RootfsStack,
}

impl Recipe for ProcessRecipe {
    fn begin(
        &self,
        launcher: Launcher,
        dir: &BodyDir,
        spec: &Spec,
        token: &str,
    ) -> Result<StartingBody, Failure> {
        self.launch
            .begin(launcher, dir, spec, token, &self.rootfs)
            .map_err(|error| failure::process("cannot start the Body", error))
    }
}

/// Resumes a Body that a killed `pal` had frozen for a snapshot. The caller holds the Body's lock.
pub fn thaw_interrupted_save(dir: &BodyDir) -> Result<(), Failure> {
    if !dir.is_held() {
        return Ok(());
    }
    // The guest may have been killed just before: then only its cgroup is frozen, and would freeze the next
    // guest.
    let frozen =
        |running: &RunRecord| running.cgroups.iter().any(|group| sys::cgroup::is_frozen(&group.path));
    let stopped = |running: &RunRecord| crate::dir::alive(running.pid, running.ticks) == Some('T');
    if let Some(running) = dir.running().ok().flatten().filter(|running| frozen(running) || stopped(running))
    {
        process::resume(&running).map_err(|error| failure::process("cannot resume the Body", error))?;
    }
    dir.release_freeze().map_err(|error| Failure::new(Kind::Host, "cannot resume the Body").because(error))
}
