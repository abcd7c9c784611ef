//! The interface of a layer: how it creates, freezes and ends a Body. Everything done *in* a Body goes over
//! its guest stream, independent of the layer.
//!
//! A driver describes its layer by data: [`Capabilities`]. `fleet` checks for a capability before it uses it;
//! [`missing`] makes the one error for a missing capability.
//!
//! ```text
//! limits, engine, check        before anything exists: the limits and engine of the Body, or an error
//! prepare                      spec + root + origin → a recipe: the disks, images and programs of a start
//! Recipe::begin                recipe + directory → a supervisor that starts the guest
//! pause, resume, kill          on the Body's processes
//! snapshot, suspend            save a frozen Body's files or memory
//! pool_shape, assign           Bodies that are started before a caller asks for one
//! readiness, examine, garbage  the state of the layer on this host
//! ```
//!
//! Invariant: `check` finds every error that can be found before a directory, an id or an event of the Body exists.
//! Invariant: a recipe may be used for many Bodies, by several threads.
//! Absent on purpose: events and leases. A driver returns what happened, and `fleet` records it.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use proto::{
    BodyId, Failure, Kind, Layer, Limits, Mechanism, MechanismStatus, Size, Spec,
    guest::GuestConfig,
    launch::RunRecord,
    limits::HostCapacity,
    secret::{self, Purpose},
    spec::Life,
    vm::{Engine, StartReport, VmMetrics},
};
use serde::Serialize;

use crate::{
    BodyDir, failure,
    process::{self, LaunchContext, Launcher, StartingBody},
    root::RootfsStack,
    snapshot::SnapshotManifest,
    vm::upper_copy::UpperCopy,
};

/// The context that the drivers of one data directory share.
#[derive(Debug)]
pub struct DriverContext {
    /// Starts launchers, and knows the host's capacity.
    pub launch: Arc<LaunchContext>,
    /// The data directory.
    pub data: PathBuf,
    /// The secret from which tokens are derived.
    pub key: String,
    /// The caller's ear for work that takes long.
    pub notices: Notices,
}

/// A function that takes lines about work that takes long.
type NoticeListener = Box<dyn Fn(&str) + Send + Sync>;

/// Where lines about work that takes long go. They are lost until a caller listens.
#[derive(Default)]
pub struct Notices {
    listener: OnceLock<NoticeListener>,
}

impl Notices {
    /// Sets the listener; only the first one counts.
    pub fn listen(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.listener.set(Box::new(listener));
    }

    /// Tells a line.
    pub fn tell(&self, line: &str) {
        if let Some(listener) = self.listener.get() {
            listener(line);
        }
    }
}

impl std::fmt::Debug for Notices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notices")
    }
}

impl DriverContext {
    /// The token that callers of a Body's guest must send. It is derived from the key of the data directory, and is
    /// stored nowhere.
    pub fn token(&self, body: &BodyId) -> String {
        secret::derive(&self.key, Purpose::GuestToken, &[body.as_str()])
    }

    /// The directory of a Body.
    pub fn body_path(&self, body: &BodyId) -> PathBuf {
        self.data.join("bodies").join(body.as_str())
    }
}

/// One capability that a layer may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Capability {
    /// A snapshot holds memory, and a Body can be suspended to disk.
    MemorySnapshots,
    /// Repositories whose work can be saved and landed.
    Workspaces,
    /// Homes that outlive a Body.
    Homes,
    /// An egress proxy.
    Egress,
    /// Files and directories of the host, mounted as they are.
    LiveMounts,
    /// Directories of the host, shared by a virtiofsd process.
    SharedMounts,
    /// A resumed guest proves its identity, clock and files.
    Receipts,
    /// User ids inside that do not depend on the host ids of the Body.
    OwnIds,
}

impl Capability {
    /// The name of the capability for users, and hints for a layer that lacks it.
    fn describe(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::MemorySnapshots => (
                "memory snapshots",
                &["keep its memory in RAM: pal pause BODY", "or choose `--layer microvm` when you create it"],
            ),
            Self::Workspaces => {
                ("workspaces", &["choose `--layer process`, or copy files: pal cp DIR BODY:PATH"])
            }
            Self::Homes => ("homes", &["leave --home out, or choose `--layer process`"]),
            Self::Egress => ("egress proxy", &["leave --allow out, or choose `--layer process`"]),
            Self::LiveMounts => (
                "live mounts",
                &[
                    "copy it in: pal cp FILE BODY:PATH",
                    "or share it: --mount SRC:DST,type=virtiofs (such a microVM has no memory snapshots)",
                ],
            ),
            Self::SharedMounts => (
                "shared mounts",
                &["leave `,type=virtiofs` out: its mounts are always live; or choose `--layer microvm`"],
            ),
            Self::Receipts => ("receipts", &[]),
            Self::OwnIds => ("ids of its own", &[]),
        }
    }
}

/// The capabilities of a layer, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// The capabilities that it has.
    pub has: &'static [Capability],
    /// The engines that a caller can choose; none where the layer is our own code alone.
    pub engines: &'static [Engine],
}

impl Capabilities {
    /// Whether the layer has a capability.
    pub fn contains(&self, capability: Capability) -> bool {
        self.has.contains(&capability)
    }
}

/// The one error about a capability that a layer does not have.
pub fn missing(layer: Layer, capability: Capability) -> Failure {
    let (name, hints) = capability.describe();
    let failure = Failure::new(Kind::Usage, format!("layer {layer} has no {name}"));
    hints.iter().fold(failure, |failure, hint| failure.hint(*hint))
}

/// Limits as a caller asks for them; the driver fills in the rest.
#[derive(Debug, Clone, Default)]
pub struct LimitRequest {
    /// Memory.
    pub memory: Option<Size>,
    /// CPU time in thousandths of one CPU.
    pub cpu_milli: Option<u32>,
    /// Processes and threads.
    pub pids: Option<u32>,
    /// Private upper.
    pub disk: Option<Size>,
    /// Files and directories in the private upper; none derives it from the disk size.
    pub inodes: Option<u64>,
    /// Open files of one process.
    pub files: Option<u32>,
    /// The longest run of the Body.
    pub wall: Option<Duration>,
    /// Output kept for the log, for each exec.
    pub output: Option<Size>,
}

impl LimitRequest {
    /// The limits of a Body, with defaults for the rest, checked against the capacity of the host.
    pub fn resolve(&self, life: Life, host: HostCapacity) -> Result<Limits, Failure> {
        let mut limits = Limits::default_on(host);
        limits.memory = self.memory.unwrap_or(limits.memory);
        limits.cpu_milli = self.cpu_milli.unwrap_or(limits.cpu_milli);
        limits.pids = self.pids.unwrap_or(limits.pids);
        limits.files = self.files.unwrap_or(limits.files);
        limits.output = self.output.unwrap_or(limits.output);
        limits.wall_ms = self.wall.map(|wall| wall.as_millis() as u64);
        limits.disk = match (self.disk, life) {
            (Some(disk), _) => disk,
            // Files in memory count as memory, so they get at most half of it.
            (None, Life::Run) => Size((limits.memory.0 / 2).max(proto::limits::DISK_MIN.0)),
            (None, Life::Kept) => Size((host.disk.0 / 4).max(proto::limits::DISK_MIN.0)),
        };
        limits.inodes = self.inodes.unwrap_or_else(|| Limits::inodes_of(limits.disk));
        limits.check(host).map_err(|error| {
            Failure::new(Kind::Usage, error.to_string()).hint("see this host's capacity: pal doctor")
        })?;
        Ok(limits)
    }
}

impl From<&Limits> for LimitRequest {
    /// The request for exactly these limits.
    fn from(limits: &Limits) -> Self {
        Self {
            memory: Some(limits.memory),
            cpu_milli: Some(limits.cpu_milli),
            pids: Some(limits.pids),
            disk: Some(limits.disk),
            inodes: Some(limits.inodes),
            files: Some(limits.files),
            wall: limits.wall_ms.map(Duration::from_millis),
            output: Some(limits.output),
        }
    }
}

/// The result of changing limits of a running Body.
#[derive(Debug, Default)]
pub struct ChangedLimits {
    /// The entries of the enforcement record for the limits that are in force now.
    pub mechanisms: Vec<Mechanism>,
    /// The limits that count from the next start on.
    pub deferred: Vec<DeferredLimit>,
}

/// A limit that counts from the next start of its Body on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeferredLimit {
    /// The name of the limit.
    pub limit: &'static str,
    /// Why it does not count at once.
    pub why: String,
}

/// Whether a start may restore saved memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartMode {
    /// Restores saved memory, if there is some.
    Restore,
    /// Starts from files alone: `--boot`.
    Boot,
}

/// A snapshot that a Body starts from.
#[derive(Debug, Clone)]
pub struct SnapshotSource {
    /// Its directory.
    pub dir: PathBuf,
    /// Its manifest.
    pub manifest: SnapshotManifest,
}

/// The origin of a Body's files and memory.
#[derive(Debug, Clone)]
pub enum Origin {
    /// A template, with an empty upper.
    Template(StartMode),
    /// A snapshot.
    Snapshot(Box<SnapshotSource>, StartMode),
    /// The Body's own files, from an earlier start.
    Files,
    /// The Body's own memory, which [`Driver::suspend`] saved.
    Suspended,
}

impl Origin {
    /// The snapshot, if the origin is one.
    pub fn snapshot(&self) -> Option<&SnapshotSource> {
        match self {
            Self::Snapshot(source, _) => Some(source),
            _ => None,
        }
    }
}

/// When the pool starts a Body of a requested shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refill {
    /// At once, if the last two requests of its layer were alike: a start is cheap, and the shape is the
    /// whole request.
    AtOnce,
    /// After the requested Body has run its first command, when a CPU is idle: a start occupies a CPU for
    /// long.
    WhenIdle,
}

/// The shape of a Body that waits in the pool.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolShape {
    /// Its spec, without the parts that [`Driver::assign`] sets later.
    pub spec: Spec,
    /// Memory that it takes while it waits.
    pub memory: Size,
    /// When it is started.
    pub refill: Refill,
}

/// The result of one check of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// The name of the check.
    pub name: String,
    /// How well it works.
    pub state: MechanismStatus,
    /// Details of the result.
    pub detail: String,
    /// A command that fixes the problem.
    pub fix: Option<String>,
}

/// The results of `pal doctor` for a layer.
#[derive(Debug, Default)]
pub struct Examination {
    /// The result of each check.
    pub findings: Vec<DoctorFinding>,
    /// Why no Body should be started on this layer here, if there is a reason.
    pub lacks: Option<String>,
}

/// A file or directory that a driver no longer needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverGarbage {
    /// The kind of item.
    pub kind: &'static str,
    /// Its path.
    pub path: PathBuf,
    /// Bytes on disk.
    pub bytes: u64,
    /// Why it can be removed.
    pub why: &'static str,
}

/// Whether a Body of a driver's layer runs or is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerInUse {
    /// At least one Body does.
    Yes,
    /// No Body does.
    No,
}

/// How one layer creates, freezes and ends a Body.
pub trait Driver: fmt::Debug + Send + Sync {
    /// The layer.
    fn layer(&self) -> Layer;

    /// The capabilities of the layer.
    fn capabilities(&self) -> Capabilities;

    /// Checks that the layer is set up on this host; the error says how to set it up.
    fn readiness(&self) -> Result<(), Failure> {
        Ok(())
    }

    /// The limits of a Body, or why it cannot have them here.
    fn limits(&self, asked: &LimitRequest, life: Life, origin: &Origin) -> Result<Limits, Failure>;

    /// Chooses the engine of a Body, which may request one.
    fn engine(&self, asked: Option<Engine>, _origin: &Origin) -> Result<Option<Engine>, Failure> {
        Ok(asked)
    }

    /// Refuses a spec that this layer cannot start, beyond the check of its capabilities. The spec has no id
    /// and no host ids yet.
    fn check(&self, spec: &Spec, origin: &Origin) -> Result<(), Failure>;

    /// Prepares everything that the start of such a Body needs.
    fn prepare(&self, spec: &Spec, rootfs: RootfsStack, origin: &Origin) -> Result<Arc<dyn Recipe>, Failure>;

    /// Notifies the driver that a Body of its layer has started.
    fn note_started(&self, _spec: &Spec, _report: &StartReport) {}

    /// Changes limits of a running Body as far as that is possible; those that remain count from its next start on.
    fn change_limits(&self, running: &RunRecord, spec: &Spec, new: &Limits)
    -> Result<ChangedLimits, Failure>;

    /// Refuses new limits that a Body, once created, can never get.
    fn check_new_limits(&self, _spec: &Spec, _new: &Limits) -> Result<(), Failure> {
        Ok(())
    }

    /// Freezes every process of a Body.
    fn pause(&self, running: &RunRecord) -> Result<(), Failure> {
        process::pause(running).map_err(|error| failure::process("cannot pause the Body", error))
    }

    /// Resumes every process of a Body.
    fn resume(&self, running: &RunRecord) -> Result<(), Failure> {
        process::resume(running).map_err(|error| failure::process("cannot resume the Body", error))
    }

    /// Ends every process of a Body, and waits until its supervisor has recorded that.
    fn kill(&self, dir: &BodyDir, running: &RunRecord) -> Result<(), Failure> {
        process::kill(dir, running).map_err(|error| failure::process("cannot end the Body", error))
    }

    /// Ends every process of a Body after its writes can be read, as far as its guest still answers.
    fn kill_synced(&self, dir: &BodyDir, _spec: &Spec, running: &RunRecord) -> Result<(), Failure> {
        self.kill(dir, running)
    }

    /// Copies the repositories and the home of a Body whose upper is not plain files; none where it is. A
    /// running Body is frozen meanwhile.
    fn copy_upper(&self, _dir: &BodyDir, _spec: &Spec) -> Result<Option<UpperCopy>, Failure> {
        Ok(None)
    }

    /// Takes a snapshot into the directory `to`, which does not exist yet. The caller holds the Body's lock, and
    /// removes `to` if this fails.
    fn snapshot(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        to: &Path,
        manifest: SnapshotManifest,
    ) -> Result<SnapshotManifest, Failure>;

    /// Refuses to suspend a Body whose memory cannot be saved.
    fn check_suspend(&self, _spec: &Spec) -> Result<(), Failure> {
        Err(missing(self.layer(), Capability::MemorySnapshots))
    }

    /// Saves a running Body's memory in its directory and ends its processes; [`Origin::Suspended`] continues it. The
    /// caller holds the Body's lock.
    fn suspend(&self, _dir: &BodyDir, _spec: &Spec, _running: &RunRecord) -> Result<(), Failure> {
        Err(missing(self.layer(), Capability::MemorySnapshots))
    }

    /// The shape of a pooled Body for such a spec; none if it cannot wait in a pool.
    fn pool_shape(&self, _spec: &Spec) -> Option<PoolShape> {
        None
    }

    /// How many Bodies of one shape may wait.
    fn pool_size(&self) -> usize {
        0
    }

    /// Gives a pooled Body its identity; returns its start report, if the layer has receipts.
    fn assign(&self, _dir: &BodyDir, _config: &GuestConfig) -> Result<Option<StartReport>, Failure> {
        Ok(None)
    }

    /// The usage of the Body as its engine measures it; none if the engine does not measure.
    fn metrics(&self, _dir: &BodyDir) -> Option<VmMetrics> {
        None
    }

    /// Checks what this host has for the layer.
    fn examine(&self) -> Examination {
        Examination::default()
    }

    /// Items on disk that the layer no longer needs.
    fn garbage(&self, _in_use: LayerInUse) -> Vec<DriverGarbage> {
        Vec::new()
    }

    /// Kind and size of the items that the layer keeps on disk.
    fn disk_usage(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// Everything that the start of a Body needs; it can be used any number of times.
pub trait Recipe: fmt::Debug + Send + Sync {
    /// Distinguishes recipes that were prepared for the same [`PoolShape`].
    fn key(&self) -> String {
        String::new()
    }

    /// Sends the plan of the Body in `dir` to a launcher.
    fn begin(
        &self,
        launcher: Launcher,
        dir: &BodyDir,
        spec: &Spec,
        token: &str,
    ) -> Result<StartingBody, Failure>;
}

/// Refuses a spec that the driver's capabilities rule out, then one that the driver itself refuses.
pub fn check(driver: &dyn Driver, spec: &Spec, origin: &Origin) -> Result<(), Failure> {
    let (layer, capabilities) = (driver.layer(), driver.capabilities());
    if let Some(source) = origin.snapshot()
        && source.manifest.layer != layer
    {
        let taken_on = source.manifest.layer;
        return Err(Failure::new(
            Kind::Usage,
            format!("the snapshot was taken on layer {taken_on} and cannot start on layer {layer}"),
        )
        .hint(format!("choose it: --layer {taken_on}")));
    }
    if let Some(engine) = spec.engine
        && !capabilities.engines.contains(&engine)
    {
        return Err(Failure::new(Kind::Usage, format!("layer {layer} has no engine {engine}"))
            .hint("leave --engine out, or choose the layer that has it: `--layer microvm`"));
    }
    let needs = [
        (!spec.workspaces.is_empty(), Capability::Workspaces),
        (spec.home.is_some(), Capability::Homes),
        (spec.egress.is_some(), Capability::Egress),
        (spec.share.is_some(), Capability::SharedMounts),
        (spec.share.is_none() && !spec.mounts.is_empty(), Capability::LiveMounts),
    ];
    match needs.into_iter().find(|(needed, capability)| *needed && !capabilities.contains(*capability)) {
        Some((_, capability)) => Err(missing(layer, capability)),
        None => driver.check(spec, origin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_tokens_are_keyed_hashes() {
        let token = |key: &str| {
            let launch = Arc::new(LaunchContext {
                programs: crate::programs::Programs { launch: PathBuf::new() },
                capacity: HostCapacity { memory: Size(0), cpus: 1, disk: Size(0) },
                cgroups: Default::default(),
                flush: proto::egress::Flush::Kernel,
            });
            let context = DriverContext {
                launch,
                data: PathBuf::new(),
                key: key.to_owned(),
                notices: Notices::default(),
            };
            context.token(&"abc".parse().unwrap())
        };
        // The value was computed with Python's hmac module.
        let expected = "488dfb23c644746830ec3d47bd7001c2759500764e2b1e07206776dab9d1fa06";
        assert_eq!(token("a key"), expected);
        assert_ne!(token("another key"), expected);
    }

    #[test]
    fn a_missing_capability_is_one_error_with_a_hint() {
        let failure = missing(Layer::Process, Capability::MemorySnapshots);
        assert_eq!(failure.to_string(), "layer process has no memory snapshots");
        assert_eq!(failure.kind, Kind::Usage);
        assert!(failure.hints[0].contains("pal pause"), "{:?}", failure.hints);
    }
}
