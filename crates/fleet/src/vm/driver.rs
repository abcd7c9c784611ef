//! The driver of the microVM layer.

use std::{path::Path, sync::Arc};

use body::{
    BodyDir,
    driver::{
        Capabilities, Capability, ChangedLimits, DeferredLimit, Driver, DriverGarbage, Examination,
        LayerInUse, LimitRequest, Origin, PoolShape, Recipe, Refill, StartMode,
    },
    failure,
    process::{Launcher, StartingBody},
    process_driver::without_identity,
    root::RootfsStack,
    snapshot::SnapshotManifest,
    vm::{self, VmParts, jailer::JailSetup, upper_copy::UpperCopy},
};
use proto::{
    Failure, Kind, Layer, Limits, Size, Spec,
    guest::GuestConfig,
    launch::RunRecord,
    spec::Life,
    vm::{Engine, StartReport, VmMetrics},
};

use super::{Microvms, boot_snapshot, memory_snapshot, shared_mounts, vm_failure};

const CAPABILITIES: Capabilities = Capabilities {
    has: &[
        Capability::MemorySnapshots,
        Capability::Workspaces,
        Capability::Homes,
        Capability::Egress,
        Capability::SharedMounts,
        Capability::Receipts,
        Capability::OwnIds,
    ],
    engines: &Engine::ALL,
};

impl Driver for Microvms {
    fn layer(&self) -> Layer {
        Layer::Microvm
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn readiness(&self) -> Result<(), Failure> {
        self.install().setup().map(drop).map_err(vm_failure)
    }

    fn limits(&self, asked: &LimitRequest, life: Life, origin: &Origin) -> Result<Limits, Failure> {
        let host = self.context.launch.capacity;
        let mut asked = match origin {
            Origin::Snapshot(source, mode) => match &source.manifest.machine {
                Some(machine) => memory_snapshot::inherit(asked, *mode, machine)?,
                None => asked.clone(),
            },
            _ => asked.clone(),
        };
        asked.memory = asked.memory.or(Some(vm::plan::MEMORY_DEFAULT));
        asked.cpu_milli = asked.cpu_milli.or(Some(1000 * vm::plan::CPUS_DEFAULT.min(sys::proc::cpu_count())));
        let room = Size((host.disk.0 / 4) & !0xfff);
        asked.disk = asked.disk.or(Some(vm::plan::DISK_DEFAULT.min(room)));
        check_sizes(&asked)?;
        asked.resolve(life, host)
    }

    /// The engine: of the request, else of the snapshot, else of the settings.
    fn engine(&self, asked: Option<Engine>, origin: &Origin) -> Result<Option<Engine>, Failure> {
        let taken_by = origin.snapshot().and_then(|source| source.manifest.machine.as_ref());
        match asked.or(taken_by.map(|machine| machine.hypervisor)) {
            Some(engine) => Ok(Some(engine)),
            None => Ok(Some(self.settings()?.engine.unwrap_or_default())),
        }
    }

    fn check(&self, spec: &Spec, _origin: &Origin) -> Result<(), Failure> {
        shared_mounts::check(spec)?;
        shared_mounts::check_engine(spec, spec.engine.unwrap_or_default())?;
        self.readiness()
    }

    fn prepare(&self, spec: &Spec, rootfs: RootfsStack, origin: &Origin) -> Result<Arc<dyn Recipe>, Failure> {
        let (parts, boot_snapshot) = match origin {
            Origin::Template(StartMode::Restore) if may_use_boot_snapshot(spec) => {
                (self.parts(spec, &rootfs)?, UseBootSnapshot::Yes)
            }
            Origin::Template(_) | Origin::Files => (self.parts(spec, &rootfs)?, UseBootSnapshot::No),
            Origin::Snapshot(source, mode) => {
                let parts = match &source.manifest.machine {
                    Some(machine) => self.snapshot_parts(spec, &rootfs, &source.dir, machine, *mode)?,
                    // The snapshot is a dependency layer: plain files below an empty disk.
                    None => self.parts(spec, &rootfs)?,
                };
                (parts, UseBootSnapshot::No)
            }
            Origin::Suspended => (self.suspended_parts(spec, &rootfs)?, UseBootSnapshot::No),
        };
        Ok(Arc::new(VmRecipe { microvms: self.clone(), rootfs, parts, boot_snapshot }))
    }

    fn change_limits(
        &self,
        _running: &RunRecord,
        spec: &Spec,
        new: &Limits,
    ) -> Result<ChangedLimits, Failure> {
        let old = &spec.limits;
        let changed = [
            ("memory", new.memory != old.memory),
            ("cpus", new.cpu_milli != old.cpu_milli),
            ("pids", new.pids != old.pids),
            ("timeout", new.wall_ms != old.wall_ms),
        ];
        let why = "a microVM keeps what it booted with".to_owned();
        let deferred = changed.into_iter().filter(|(_, changed)| *changed);
        let deferred = deferred.map(|(limit, _)| DeferredLimit { limit, why: why.clone() }).collect();
        Ok(ChangedLimits { deferred, mechanisms: Vec::new() })
    }

    fn check_new_limits(&self, spec: &Spec, new: &Limits) -> Result<(), Failure> {
        if (new.disk, new.inodes) == (spec.limits.disk, spec.limits.inodes) {
            return Ok(());
        }
        Err(Failure::new(Kind::Usage, "the disk of a microVM keeps the size that it was created with")
            .hint("create one with a larger disk: pal create --layer microvm --disk SIZE"))
    }

    fn note_started(&self, spec: &Spec, report: &StartReport) {
        self.record_boot(spec, report);
    }

    fn kill_synced(&self, dir: &BodyDir, spec: &Spec, running: &RunRecord) -> Result<(), Failure> {
        // If the guest does not answer, its disk is left as after a power failure.
        let _still = self.hold_still(dir, spec);
        self.kill(dir, running)
    }

    fn copy_upper(&self, dir: &BodyDir, spec: &Spec) -> Result<Option<UpperCopy>, Failure> {
        Microvms::copy_upper(self, dir, spec).map(Some)
    }

    fn snapshot(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        to: &Path,
        manifest: SnapshotManifest,
    ) -> Result<SnapshotManifest, Failure> {
        self.take_snapshot(dir, spec, to, manifest)
    }

    fn check_suspend(&self, spec: &Spec) -> Result<(), Failure> {
        shared_mounts::check_freeze(spec)
    }

    fn suspend(&self, dir: &BodyDir, spec: &Spec, running: &RunRecord) -> Result<(), Failure> {
        self.save_suspended(dir, spec, running)
    }

    /// A microVM gets its environment, user, working directory and start commands only when it is assigned.
    fn pool_shape(&self, spec: &Spec) -> Option<PoolShape> {
        let plain = spec.life == Life::Kept
            && spec.snapshots.is_empty()
            && spec.share.is_none()
            && spec.mounts.is_empty()
            && spec.workspaces.is_empty()
            && spec.home.is_none()
            && spec.egress.is_none()
            && spec.limits.wall_ms.is_none();
        let shape = || PoolShape {
            spec: Spec {
                env: Default::default(),
                user: "user".into(),
                workdir: None,
                at_start: Vec::new(),
                ports: Vec::new(),
                ..without_identity(spec)
            },
            memory: spec.limits.memory,
            refill: Refill::WhenIdle,
        };
        plain.then(shape)
    }

    fn pool_size(&self) -> usize {
        self.settings().map_or(0, |settings| settings.pool_size() as usize)
    }

    fn assign(&self, dir: &BodyDir, config: &GuestConfig) -> Result<Option<StartReport>, Failure> {
        vm::assign::assign(dir.path(), config).map(Some).map_err(vm_failure)
    }

    fn metrics(&self, dir: &BodyDir) -> Option<VmMetrics> {
        vm::measure::measure(dir.path()).ok()
    }

    fn examine(&self) -> Examination {
        super::findings::examine(&self.install(), &self.settings().unwrap_or_default())
    }

    fn garbage(&self, in_use: LayerInUse) -> Vec<DriverGarbage> {
        self.find_garbage(in_use)
    }

    fn disk_usage(&self) -> Vec<(&'static str, u64)> {
        self.measure_parts()
    }
}

/// Whether a boot snapshot is worthwhile: one with images of a single commit, or with an egress proxy, would hardly be
/// used twice.
fn may_use_boot_snapshot(spec: &Spec) -> bool {
    spec.share.is_none() && spec.workspaces.is_empty() && spec.home.is_none() && spec.egress.is_none()
}

/// Whether a microVM that would boot is restored from its template's boot snapshot instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UseBootSnapshot {
    Yes,
    No,
}

#[derive(Debug)]
struct VmRecipe {
    microvms: Microvms,
    rootfs: RootfsStack,
    parts: VmParts,
    boot_snapshot: UseBootSnapshot,
}

impl Recipe for VmRecipe {
    fn key(&self) -> String {
        let jailer = self.parts.jail.as_ref().and_then(JailSetup::root);
        format!("{:?} {:?} {jailer:?}", self.boot_snapshot, boot_snapshot::parts_key(&self.parts))
    }

    /// Starts the microVM. The first start of a template boots one and takes its boot snapshot.
    fn begin(
        &self,
        launcher: Launcher,
        dir: &BodyDir,
        spec: &Spec,
        token: &str,
    ) -> Result<StartingBody, Failure> {
        let parts = match self.boot_snapshot {
            UseBootSnapshot::Yes => {
                self.microvms.use_boot_snapshot(spec, &self.rootfs, self.parts.clone())?
            }
            UseBootSnapshot::No => self.parts.clone(),
        };
        vm::plan::begin(&self.microvms.context.launch, launcher, dir, spec, token, &self.rootfs, &parts)
            .map_err(|error| failure::process("cannot start the Body", error))
    }
}

fn check_sizes(asked: &LimitRequest) -> Result<(), Failure> {
    let too_small = |what: &str, asked: Size, min: Size| {
        Err(Failure::new(
            Kind::Usage,
            format!("{what} of {asked} is too small for a microVM: at least {min} is needed"),
        )
        .hint("ask for more, or for `--layer process`"))
    };
    match (asked.memory, asked.disk) {
        (Some(memory), _) if memory < vm::plan::MEMORY_MIN => {
            too_small("memory", memory, vm::plan::MEMORY_MIN)
        }
        (_, Some(disk)) if !vm::plan::disk_fits(disk) => too_small("disk", disk, Size(vm::disks::DISK_MIN)),
        _ => Ok(()),
    }
}
