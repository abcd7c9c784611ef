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
mod file_calls;
mod gc;
mod images;
pub mod lease;
mod lifecycle;
mod limits;
mod log;
mod migrate;
mod mounts;
mod names;
mod network;
mod place;
mod pool;
mod receipt;
pub mod records;
mod request;
mod secrets;
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
    collections::BTreeMap,
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
    driver::{DeferredLimit, DoctorFinding, LimitRequest},
    guest::PortStream,
};
pub use copy::{BodyFiles, GitDirs};
pub use create::Creator;
pub use data::FleetConfig;
pub use doctor::{DoctorReport, LayerCheck};
pub use drivers::DriverMaker;
pub use egress::{EgressProxies, check_rules};
pub use exec::{Exec, ExecControl, ExecLogEntry, Execs, KeptOutput, LogRange, OutputChunk, StartError};
pub use gc::{GarbageCollector, GcMode};
pub use images::{
    Image, ImageProfile, ImagePuller, Platform, PrivateAddresses, PulledImage, RegistryAccess,
    RegistryCredentials,
};
pub use lease::{Lease, Leases, Rest, Then};
pub use lifecycle::{Force, describe_end};
pub use limits::{LimitChange, LimitChanger};
pub use log::Log;
pub use mounts::mount_warnings;
pub use names::Names;
pub use network::{
    GrantedSecret, NetworkProposal, NetworkRequest, NetworkState, PolicyChange, PolicyChanger, PolicyForce,
    PolicyPart, PolicyVerdict, Preset, RuleReach, WantedTarget, allowing_command, allowing_target,
    judge_target, network_warnings, registries, rule_reach,
};
pub use pool::Pool;
pub use request::{Create, Disconnect, ExecRequest, Stdin, TtySize};
pub use secrets::{
    HostVariables, SERVICES, SecretOrigin, SecretRecord, SecretService, SecretSource, SecretTerms,
    SecretView, Secrets,
};
pub use settings::{Setting, Settings, SettingsRecord};
pub use snapshots::Snapshots;
pub use store::{ArtifactRef, Durability, EventOrder, EventQuery, ExecFilter, LogVerdict, clock};
pub use templates::{
    BASE, BaseImage, BuildJob, BuildRequest, BuildState, BuildStep, Builds, INTERPRETER, Instruction,
    LogLine, ProgressFn, STEPS_MAX, TemplateView, Templates, check_tags,
    dockerfile::{Dockerfile, read as read_recipe},
    pack_context,
};
pub use vault::Zeroizing;
pub use view::{
    BodyView, CopyTotals, ExecEnd, GarbageItem, OmittedEntries, OmittedEntry, SnapshotView, Status,
};
pub use vm::{BootFiles, CustomKernel, Microvms, SetupReport};
pub use work::{
    BodyComparison, Comparison, DevcontainerChoice, Discard, DiskShare, ForkedWork, HandOver,
    HandOverOutcome, HomeRecord, HomeView, Homes, ImageResolver, Overlap, PrepareChoice, PrepareRequest,
    Progress, ProgressLine, QueueResult, RepoSource, RepositoryNetwork, SyncMode, SyncResult, UnsavedWork,
    UpRequest, WorkDiff, WorkMark, WorkReview, WorkState, Workspaces, way_out,
};
pub use workspace::{
    ChangedFile, Commit, DiffFormat, GitIdentity, LandResult, LandSelection, LandTarget, LeftOut, SaveResult,
    SavedModule, SkippedPath, UncommittedFiles, remote_addresses,
};

/// All Bodies of one data directory.
#[derive(Debug)]
pub struct Fleet {
    data: PathBuf,
    /// Environment variables of every new Body, unless its template or its request sets them.
    pub env: BTreeMap<String, String>,
    /// Reads environment variables of this process, for the sources of secrets and for `SSL_CERT_FILE`; none are read
    /// unless the caller sets it.
    pub host_variables: HostVariables,
    /// The secret from which tokens are derived.
    key: String,
    log: Log,
    /// The records; their database is opened at first use.
    records: Arc<dyn Records>,
    launch_context: Arc<LaunchContext>,
    supervisors: Supervisors,
    /// Guests that this process has observed, and idle connections to them.
    connections: exec::GuestConnections,
    /// The builds of this process.
    jobs: templates::BuildJobs,
    /// The driver of each layer.
    drivers: Drivers,
    /// Running Bodies without an owner, for a long-lived process that creates many.
    pool: Option<Pool>,
    /// The locks of the Bodies of build steps, held while this process uses them.
    steps: step_locks::StepLocks,
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

    /// The secrets that Bodies may use.
    pub fn secrets(&self) -> Secrets<'_> {
        Secrets { fleet: self }
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
