//! All Bodies of this host: create, find, use, fork, end. The only writer of Body events.
//!
//! Invariant: the event of an action that changes a Body is appended before the action takes effect; if that fails,
//! the action does not happen. One exception: a `pal run` Body ends with its command or with the `pal` that created
//! it, whichever comes first, and `body.removed` is appended at that time.
//! Invariant: a process that changes the state of a Body holds the lock in its directory.
//! Invariant: an async function here blocks on the disk or the kernel only in `blocking::run_blocking`, so that it
//! delays no other task of a server; every other function may block its thread.
//! Absent on purpose: environment variables, printing, the user's home. The caller passes everything in.

mod access;
mod blocking;
mod child_output;
mod copy;
mod create;
mod data;
mod doctor;
mod drivers;
mod egress;
mod exec;
mod failures;
mod gc;
mod images;
pub mod lease;
mod lifecycle;
mod log;
mod migrate;
mod mounts;
mod place;
mod pool;
mod receipt;
pub mod records;
mod request;
mod settings;
mod shutdown_wait;
mod snapshots;
mod step_locks;
mod templates;
mod view;
mod vm;
mod work;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use body::process::{LaunchContext, Launcher, SupervisorHandle};
use data::Prestart;
use drivers::Drivers;
use pool::Pool;
use proto::{BodyId, Draft, Event, Failure, Spec, launch::RunRecord};
use store::Records;

pub use access::{GuestAccess, ResourceUsage};
pub use body::{
    driver::{DoctorFinding, LimitRequest},
    guest::PortStream,
};
pub use copy::BodyFiles;
pub use data::FleetConfig;
pub use doctor::{DoctorReport, LayerCheck};
pub use drivers::DriverMaker;
pub use egress::{EgressProxies, check_rules, registries};
pub use exec::{Exec, ExecControl, ExecLogEntry, Execs, LogRange, OutputChunk, StartError};
pub use gc::{GarbageCollector, GcMode};
pub use images::{
    Image, ImageProfile, ImagePuller, Platform, PrivateAddresses, PulledImage, RegistryAccess,
    RegistryCredentials,
};
pub use lease::{Lease, Leases, Rest, Then};
pub use lifecycle::{Force, describe_end};
pub use log::Log;
pub use request::{Create, ExecRequest, Stdin, TtySize};
pub use settings::{Setting, Settings, SettingsRecord};
pub use store::{Durability, EventOrder, EventQuery, ExecFilter, LogVerdict, clock};
pub use templates::{
    BASE, BaseImage, BuildJob, BuildRequest, BuildState, BuildStep, Builds, INTERPRETER, Instruction,
    LogLine, ProgressFn, STEPS_MAX, TemplateView, Templates, check_tags,
    dockerfile::{Dockerfile, read as read_recipe},
};
pub use view::{BodyView, CopyTotals, ExecEnd, GarbageItem, SnapshotView, Status};
pub use vm::{BootFiles, CustomKernel, Microvms, SetupReport};
pub use work::{
    BodyComparison, Comparison, Discard, DiskShare, HomeRecord, HomeView, Homes, ImageResolver, Overlap,
    PrepareChoice, Progress, QueueResult, RepoSource, UnsavedWork, UpRequest, WorkDiff, WorkReview,
    Workspaces,
};
pub use workspace::{
    ChangedFile, Commit, DiffFormat, GitIdentity, LandResult, LandSelection, LandTarget, SaveResult,
    SavedModule, SkippedPath, UncommittedFiles,
};

/// All Bodies of one data directory.
#[derive(Debug)]
pub struct Fleet {
    data: PathBuf,
    /// The secret from which tokens are derived.
    key: String,
    log: Log,
    /// The records; their database is opened at first use.
    records: Arc<dyn Records>,
    launch_context: Arc<LaunchContext>,
    /// The Bodies whose supervisors are children of this process. The process reaps the supervisors; `pal run` Bodies
    /// end when their handle is dropped.
    owned: Mutex<HashMap<BodyId, OwnedBody>>,
    /// Guests that this process has observed, and idle connections to them.
    connections: exec::GuestConnections,
    /// Which launchers to start in advance.
    ahead: Prestart,
    /// The builds of this process.
    jobs: templates::BuildJobs,
    /// A launcher that was started in advance.
    launcher: Mutex<Option<Launcher>>,
    /// The driver of each layer.
    drivers: Drivers,
    /// Running Bodies without an owner, for a long-lived process that creates many.
    pool: Option<Pool>,
    /// Supervisors that have removed their Body and are about to exit.
    leaving: Mutex<Vec<SupervisorHandle>>,
    /// The locks of the Bodies of build steps, held while this process uses them.
    steps: step_locks::StepLocks,
}

/// A Body that this process created.
#[derive(Debug)]
struct OwnedBody {
    supervisor: SupervisorHandle,
    /// Its processes; cached because every exec needs them.
    running: RunRecord,
    spec: Spec,
    /// Whether its end is in the log.
    told: bool,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for mut supervisor in std::mem::take(&mut *lock_mutex(&self.leaving)) {
            supervisor.reap();
        }
    }
}

impl Fleet {
    /// Opens the data directory, and creates it if necessary.
    pub fn open(config: FleetConfig) -> Result<Fleet, Failure> {
        data::open(config, Prestart::None, &[])
    }

    /// Opens the data directory for a caller that creates one Body at once. Starts the launcher before it opens the
    /// rest.
    pub fn open_to_create(config: FleetConfig) -> Result<Fleet, Failure> {
        data::open(config, Prestart::Once, &[])
    }

    /// Opens the data directory for a server. Always keeps a launcher ready, and a pool of Bodies for templates that
    /// are used repeatedly.
    pub fn open_to_serve(config: FleetConfig) -> Result<Fleet, Failure> {
        data::open(config, Prestart::Always, &[])
    }

    /// Opens the data directory with additional drivers.
    pub fn open_with(config: FleetConfig, drivers: &[DriverMaker<'_>]) -> Result<Fleet, Failure> {
        data::open(config, Prestart::None, drivers)
    }

    /// The driver of the microVM layer, to set it up.
    pub fn microvms(&self) -> &Microvms {
        &self.drivers.microvms
    }

    /// The data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// The directory of a Body.
    fn body_path(&self, id: &BodyId) -> PathBuf {
        self.data.join("bodies").join(id.as_str())
    }

    /// The token that requests to this Body's guest must carry.
    pub fn token(&self, id: &BodyId) -> String {
        self.drivers.context.token(id)
    }

    fn launcher(&self) -> Result<Launcher, Failure> {
        let ahead = lock_mutex(&self.launcher).take();
        let started = ahead.map_or_else(|| self.launch_context.start_launcher(), Ok);
        started.map_err(|error| failures::process("cannot start a Body", error))
    }

    /// Starts the launcher for the next Body while this one is being created. A failure is ignored here: the next
    /// creation tries again and reports it.
    fn prestart_launcher(&self) {
        if self.ahead == Prestart::Always {
            *lock_mutex(&self.launcher) = self.launch_context.start_launcher().ok();
        }
    }

    fn owned_bodies(&self) -> MutexGuard<'_, HashMap<BodyId, OwnedBody>> {
        lock_mutex(&self.owned)
    }

    fn take_supervisor(&self, id: &BodyId) -> Option<SupervisorHandle> {
        self.owned_bodies().remove(id).map(|held| held.supervisor)
    }

    /// The event log.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Appends an event.
    pub(crate) fn append(&self, draft: Draft) -> Result<Event, Failure> {
        self.log.append(draft)
    }

    /// Reaps a supervisor later, when it has exited. Also reaps those that have exited by now.
    fn reap_later(&self, supervisor: SupervisorHandle) {
        let mut leaving = lock_mutex(&self.leaving);
        leaving.retain_mut(|supervisor| !supervisor.try_reap());
        leaving.push(supervisor);
    }
}

/// The parts of a fleet. Each borrows the fleet and owns one group of operations.
impl Fleet {
    /// The commands of Bodies.
    pub fn execs(&self) -> Execs<'_> {
        Execs { fleet: self, connections: &self.connections }
    }

    /// The templates and their records.
    pub fn templates(&self) -> Templates<'_> {
        Templates { fleet: self }
    }

    /// The builds of templates.
    pub fn builds(&self) -> Builds<'_> {
        Builds { fleet: self, jobs: &self.jobs }
    }

    /// The puller of images from registries.
    pub fn image_puller(&self) -> ImagePuller<'_> {
        ImagePuller { fleet: self }
    }

    /// The workspaces of Bodies.
    pub fn workspaces(&self) -> Workspaces<'_> {
        Workspaces { fleet: self }
    }

    /// The homes that Bodies use by name.
    pub fn homes(&self) -> Homes<'_> {
        Homes { fleet: self }
    }

    /// The egress proxies of Bodies.
    pub fn egress(&self) -> EgressProxies<'_> {
        EgressProxies { fleet: self }
    }

    /// The files of Bodies.
    pub fn files(&self) -> BodyFiles<'_> {
        BodyFiles { fleet: self }
    }

    /// The access to guests for callers that connect to them directly.
    pub fn access(&self) -> GuestAccess<'_> {
        GuestAccess { fleet: self }
    }

    /// The collector of files that no Body, snapshot or template uses any more.
    pub fn garbage(&self) -> GarbageCollector<'_> {
        GarbageCollector { fleet: self }
    }
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
