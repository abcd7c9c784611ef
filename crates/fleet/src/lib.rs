//! All Bodies of this machine: create, find, use, fork, end. The one writer of Body events.
//!
//! Invariant: an action that changes a Body is written to the log before it takes effect; one that cannot be
//! written does not happen. The end of a Body of a run is decided when it is made: it ends with its last command or
//! with its maker, whichever is first, and that it has is written when it has.
//! Invariant: whoever changes a Body's life holds the lock in its directory.
//! Invariant: an async function here waits for the disk or the kernel only in `blocking::run_blocking`, so that it holds
//! up no other task of a server; every other function may block its thread.
//! Absent on purpose: environment variables, printing, the user's home. The caller brings all of it.

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
mod supervisors;
mod templates;
mod view;
mod vm;
mod work;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use body::process::LaunchContext;
use data::Prestart;
use drivers::Drivers;
use proto::{BodyId, Draft, Event, Failure};
use store::Records;
use supervisors::{OwnedBody, Supervisors};

pub use access::{GuestAccess, ResourceUsage};
pub use body::{
    driver::{DoctorFinding, LimitRequest},
    guest::PortStream,
};
pub use copy::BodyFiles;
pub use create::Creator;
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
pub use pool::Pool;
pub use request::{Create, ExecRequest, Stdin, TtySize};
pub use settings::{Setting, Settings, SettingsRecord};
pub use snapshots::Snapshots;
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
    /// What tokens are made of.
    key: String,
    log: Log,
    /// Opened when they are first used.
    records: Arc<dyn Records>,
    launch_context: Arc<LaunchContext>,
    supervisors: Supervisors,
    /// Guests that commands were run by, and connections to them.
    connections: exec::GuestConnections,
    /// Templates that are being built.
    jobs: templates::BuildJobs,
    /// How each layer makes Bodies.
    drivers: Drivers,
    /// Bodies that wait, for a caller that stays.
    pool: Option<Pool>,
    /// Locks of Bodies of steps, held for as long as this process works at them.
    steps: step_locks::StepLocks,
}

impl Fleet {
    /// Opens the data directory, and makes it if need be.
    pub fn open(config: FleetConfig) -> Result<Fleet, Failure> {
        data::open(config, Prestart::None, &[])
    }

    /// Opens the data directory for a caller that makes a Body at once: the fleet starts its launcher before it opens the
    /// rest.
    pub fn open_to_create(config: FleetConfig) -> Result<Fleet, Failure> {
        data::open(config, Prestart::Once, &[])
    }

    /// The same for a caller that will make one Body after another: there is always a launcher ahead, and after two
    /// Bodies alike a third.
    pub fn open_to_serve(config: FleetConfig) -> Result<Fleet, Failure> {
        data::open(config, Prestart::Always, &[])
    }

    /// Opens the data directory with drivers of further layers.
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

    /// Where a Body is.
    fn body_path(&self, id: &BodyId) -> PathBuf {
        self.data.join("bodies").join(id.as_str())
    }

    /// What callers of that Body's guest must send.
    pub fn token(&self, id: &BodyId) -> String {
        self.drivers.context.token(id)
    }

    /// The event log.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Appends an event.
    pub(crate) fn append(&self, draft: Draft) -> Result<Event, Failure> {
        self.log.append(draft)
    }
}

/// The parts of a fleet. Each borrows the fleet and owns one group of operations.
impl Fleet {
    /// The commands of Bodies.
    pub fn execs(&self) -> Execs<'_> {
        Execs { fleet: self, connections: &self.connections }
    }

    /// Bodies that wait for a request; only a fleet that serves has them.
    pub fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    /// The steps that create a Body.
    pub fn creator(&self) -> Creator<'_> {
        Creator { fleet: self }
    }

    /// Snapshots of Bodies, and forks.
    pub fn snapshots(&self) -> Snapshots<'_> {
        Snapshots { fleet: self }
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

    /// The guests of Bodies, for callers that speak with them directly.
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
