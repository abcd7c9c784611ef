//! A Body's directory: everything that a later process needs to find, use and end the Body.
//!
//! ```text
//! spec.json  the Body's spec; named spec.draft while the Body is being created or removed
//! enforcement.json  guest.sock  guest.log
//! disk/      upper/ and work/ of a kept Body, owned by its ids
//! run.json   the guest that was started last, until its end was handled
//! end.json   why the last guest ended, written by the supervisor
//! step.lock  of a Body of a build step: locked by the `pal` that runs the step
//! missing-steps.json  the prepare steps that `pal prepare` left missing; without it, those of the snapshot below
//! held       exists while the Body's processes are briefly frozen for a snapshot
//! ```
//! Invariant: a directory without `spec.json` is not a Body, so a Body that a killed `pal` half created or
//! half removed is never mistaken for one. Of the file's contents only the limits ever change.
//! Trust: the files are ours; a Body cannot reach them. A full disk may still have cut them short.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use proto::{
    BodyName, Enforcement, Mechanism, Spec,
    egress::Flush,
    event_data::MissingStep,
    launch::{GuestEnd, RunRecord},
    vm::StartReport,
};
use rustix::{
    fs::FlockOperation,
    process::{Pid, Signal},
};
use serde::{Deserialize, de::DeserializeOwned};
use sys::cgroup::{FreezerState, OomCounter};

const SPEC: &str = "spec.json";
const DRAFT: &str = "spec.draft";
const HELD: &str = "held";
const STEP_LOCK: &str = "step.lock";
const RUN: &str = "run.json";
const MISSING_STEPS: &str = "missing-steps.json";
const RECEIPT: &str = "receipt.json";
const FILE_LEN_MAX: u64 = 1 << 20;
/// How long a supervisor may take to record how its guest ended.
const KEEPER_PATIENCE: Duration = Duration::from_secs(5);
/// How long the kernel may take to remove a killed process.
const ENDING_PATIENCE: Duration = Duration::from_secs(5);

/// Why a Body's directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// A record cannot be read.
    #[error("cannot read {name} of the Body")]
    Read {
        /// Which file.
        name: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A record cannot be written.
    #[error("cannot write {name} of the Body")]
    Write {
        /// Which file.
        name: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A record cannot be parsed.
    #[error("{name} of the Body is damaged")]
    Damaged {
        /// Which file.
        name: &'static str,
        /// How.
        #[source]
        source: serde_json::Error,
    },
}

/// The state of a Body's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessState {
    /// Its guest runs.
    Running(RunRecord),
    /// Its guest is frozen.
    Paused(RunRecord),
    /// The guest was shut down, or never started.
    Stopped,
    /// The guest died.
    Dead(GuestEnd),
    /// The guest ran in an earlier boot of the host.
    Interrupted,
}

/// The part of a spec that [`BodyDir::name`] reads.
#[derive(Deserialize)]
struct SpecName {
    #[serde(default)]
    name: Option<BodyName>,
}

/// A Body's directory.
#[derive(Debug, Clone)]
pub struct BodyDir {
    path: PathBuf,
}

/// The lock that a process holds while it changes a Body's state; the kernel releases it with its descriptor,
/// also after `kill -9`.
#[derive(Debug)]
pub struct BodyLock(#[expect(dead_code, reason = "held for its descriptor")] OwnedFd);

impl BodyDir {
    /// The directory at `path`, whether it exists or not.
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Creates the directory, accessible only by its owner.
    pub fn create(path: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the lock if it is free. The lock is on the directory itself, so there is no lock file to create
    /// and remove.
    pub fn try_lock(&self) -> io::Result<Option<BodyLock>> {
        let dir = File::open(&self.path)?;
        match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            // The previous holder may have removed the Body.
            Ok(()) if !self.is_still(&dir)? => Err(io::ErrorKind::NotFound.into()),
            Ok(()) => Ok(Some(BodyLock(dir.into()))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    fn is_still(&self, dir: &File) -> io::Result<bool> {
        let (held, found) = (dir.metadata()?, fs::metadata(&self.path)?);
        Ok((held.dev(), held.ino()) == (found.dev(), found.ino()))
    }

    /// Marks the Body as in use by a build step, as long as the caller holds the descriptor.
    pub fn lock_step(&self) -> io::Result<OwnedFd> {
        let file = File::create(self.path.join(STEP_LOCK))?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file.into())
    }

    /// Whether no process runs the Body's build step any more.
    pub fn is_step_left(&self) -> bool {
        let file = match File::open(self.path.join(STEP_LOCK)) {
            Ok(file) => file,
            Err(error) => return error.kind() == io::ErrorKind::NotFound,
        };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }

    /// The Body's spec.
    pub fn spec(&self) -> Result<Spec, DirError> {
        self.read(SPEC)
    }

    /// The name in the Body's spec. This costs less than the whole spec.
    pub fn name(&self) -> Result<Option<BodyName>, DirError> {
        self.read::<SpecName>(SPEC).map(|spec| spec.name)
    }

    /// The name in the draft of a spec.
    pub fn draft_name(&self) -> Result<Option<BodyName>, DirError> {
        self.read::<SpecName>(DRAFT).map(|spec| spec.name)
    }

    /// Writes the draft of the spec. The directory becomes a Body when the spec is
    /// [published](Self::publish).
    pub fn draft_spec(&self, spec: &Spec) -> Result<(), DirError> {
        let text = serde_json::to_vec(spec).map_err(|source| DirError::Damaged { name: DRAFT, source })?;
        fs::write(self.path.join(DRAFT), text).map_err(|source| DirError::Write { name: DRAFT, source })
    }

    /// The spec of a Body that is half created or half removed.
    pub fn draft(&self) -> Result<Spec, DirError> {
        self.read(DRAFT)
    }

    /// Publishes the spec: the directory becomes a Body.
    pub fn publish(&self) -> Result<(), DirError> {
        self.rename(DRAFT, SPEC).map_err(|source| DirError::Write { name: SPEC, source })
    }

    /// Withdraws the spec: the directory is no Body any more, and its files are about to be removed. With
    /// [`Flush::Disk`], also a power failure does not bring the spec back.
    pub fn unpublish(&self, flush: Flush) -> io::Result<()> {
        match self.rename(SPEC, DRAFT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) if flush == Flush::Disk => File::open(&self.path)?.sync_all(),
            Ok(()) => Ok(()),
        }
    }

    /// Replaces the spec of a Body whose limits changed. The caller holds the lock.
    pub fn rewrite_spec(&self, spec: &Spec) -> Result<(), DirError> {
        let text = serde_json::to_vec(spec).map_err(|source| DirError::Damaged { name: SPEC, source })?;
        sys::fd::write_whole(&self.path.join(SPEC), &text)
            .map_err(|source| DirError::Write { name: SPEC, source })
    }

    /// The prepare steps that the Body lacks; none if they are those of the snapshot below it.
    pub fn missing_steps(&self) -> Option<Vec<MissingStep>> {
        self.read(MISSING_STEPS).ok()
    }

    /// Records the prepare steps that the Body lacks.
    pub fn write_missing_steps(&self, missing: &[MissingStep]) -> io::Result<()> {
        sys::fd::write_whole(&self.path.join(MISSING_STEPS), &serde_json::to_vec(missing)?)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    /// Notes that the Body's processes are frozen for a snapshot. The caller holds the lock.
    pub fn freeze_lock(&self) -> io::Result<()> {
        File::create(self.path.join(HELD)).map(drop)
    }

    /// Notes that the processes continue.
    pub fn release_freeze(&self) -> io::Result<()> {
        fs::remove_file(self.path.join(HELD))
    }

    /// Whether the processes are frozen for a snapshot, or a `pal` was killed during one.
    pub fn is_held(&self) -> bool {
        self.path.join(HELD).exists()
    }

    /// The file that is written last when a microVM is suspended to disk.
    pub const SWAP_RECORD: &str = "machine.json";

    /// The directory with the memory of a suspended microVM.
    pub fn swap(&self) -> PathBuf {
        self.path.join("swap")
    }

    /// The directory with the memory of a microVM while it is being saved.
    pub fn swap_draft(&self) -> PathBuf {
        self.path.join("swap.part")
    }

    /// Files that an interrupted suspend or resume left. The caller holds the lock.
    pub fn interrupted_suspends(&self) -> Vec<PathBuf> {
        let stale = (!self.is_swapped()).then(|| self.swap());
        [Some(self.swap_draft()), stale].into_iter().flatten().filter(|path| path.exists()).collect()
    }

    /// Removes the memory that was saved when the Body was suspended; its files stay.
    pub fn drop_suspended_memory(&self) -> io::Result<()> {
        match fs::remove_dir_all(self.swap()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether the Body is suspended to disk. If a guest was started after the suspend, the Body was resumed,
    /// and the `pal` that resumed it was killed before it removed the saved memory.
    pub fn is_swapped(&self) -> bool {
        let written = |path: PathBuf| fs::metadata(path).and_then(|found| found.modified()).ok();
        let waits = written(self.swap().join(Self::SWAP_RECORD));
        waits.is_some_and(|waits| written(self.path.join(RUN)).is_none_or(|started| started < waits))
    }

    /// The enforcement record; empty if the Body never ran.
    pub fn enforcement(&self) -> Result<Enforcement, DirError> {
        match self.read("enforcement.json") {
            Err(DirError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(Enforcement::default())
            }
            read => read,
        }
    }

    /// Replaces entries of the enforcement record. The caller holds the lock.
    pub fn restate_mechanisms(&self, changed: Vec<Mechanism>) -> Result<(), DirError> {
        const NAME: &str = "enforcement.json";
        let mut record = self.enforcement()?;
        for new in changed {
            match record.mechanisms.iter_mut().find(|known| known.name == new.name) {
                Some(known) => *known = new,
                None => record.mechanisms.push(new),
            }
        }
        let text = serde_json::to_vec(&record).map_err(|source| DirError::Damaged { name: NAME, source })?;
        sys::fd::write_whole(&self.path.join(NAME), &text)
            .map_err(|source| DirError::Write { name: NAME, source })
    }

    /// The start report of the microVM, if it is one.
    pub fn revival(&self) -> Option<StartReport> {
        self.read(RECEIPT).ok()
    }

    /// Records the start report.
    pub fn write_receipt(&self, revival: &StartReport) -> io::Result<()> {
        sys::fd::write_whole(&self.path.join(RECEIPT), &serde_json::to_vec(revival)?)
    }

    /// Whether an unclaimed guest of the pool runs here: the directory has no spec, not even a draft.
    pub fn is_parked(&self) -> bool {
        let has = |name: &str| self.path.join(name).exists();
        has(RUN) && !has(SPEC) && !has(DRAFT)
    }

    /// Determines the state of its guest.
    pub fn condition(&self) -> Result<ProcessState, DirError> {
        let Some(running) = self.running()? else {
            return Ok(self.ended()?.map_or(ProcessState::Stopped, condition_of));
        };
        if boot_id().is_some_and(|boot| boot != running.boot_id) {
            return Ok(ProcessState::Interrupted);
        }
        let frozen = running.cgroups.iter().find_map(|group| sys::cgroup::frozen(&group.path)) == Some(true);
        // A frozen process that was killed gets the signal only when it is thawed, so it is not waited for.
        let look = if frozen { seen } else { alive };
        if let Some(state) = look(running.pid, running.ticks) {
            let paused = frozen || state == 'T';
            return Ok(if paused { ProcessState::Paused(running) } else { ProcessState::Running(running) });
        }
        self.wait_for_keeper(&running);
        let end = self.ended()?.unwrap_or_else(|| process_state_by_pid(&running));
        Ok(condition_of(end))
    }

    /// Identifies the last start of a guest.
    pub fn run_stamp(&self) -> Option<RunStamp> {
        let found = fs::metadata(self.path.join(RUN)).ok()?;
        Some(RunStamp { inode: found.ino(), changed: (found.ctime(), found.ctime_nsec()) })
    }

    /// The guest that was started last, dead or alive.
    pub fn running(&self) -> Result<Option<RunRecord>, DirError> {
        self.read_if_there(RUN)
    }

    fn ended(&self) -> Result<Option<GuestEnd>, DirError> {
        self.read_if_there("end.json")
    }

    /// Removes the records of the last guest, so that another can be started.
    pub fn clear_run_files(&self) -> io::Result<()> {
        for name in ["end.json", RUN, "guest.sock", proto::vm::CONTROL, RECEIPT] {
            match fs::remove_file(self.path.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits for a supervisor whose guest is gone and that is about to record why.
    pub fn wait_for_keeper(&self, running: &RunRecord) {
        let deadline = Instant::now() + KEEPER_PATIENCE;
        while supervisor_lives(running) && !self.path.join("end.json").exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn read_if_there<T: DeserializeOwned>(&self, name: &'static str) -> Result<Option<T>, DirError> {
        match self.read(name) {
            Ok(value) => Ok(Some(value)),
            Err(DirError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read<T: DeserializeOwned>(&self, name: &'static str) -> Result<T, DirError> {
        let text = sys::fd::read_small(&self.path.join(name), FILE_LEN_MAX)
            .map_err(|source| DirError::Read { name, source })?;
        serde_json::from_str(&text).map_err(|source| DirError::Damaged { name, source })
    }
}

/// Distinguishes one start of a guest from the next: each start creates a new record file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunStamp {
    inode: u64,
    changed: (i64, i64),
}

/// A guest that was found running, with cached facts about it.
#[derive(Debug, Clone)]
pub struct ObservedGuest(Arc<GuestObservation>);

#[derive(Debug)]
struct GuestObservation {
    stamp: Option<RunStamp>,
    freezer: Option<FreezerState>,
    /// Opened at its first use.
    oom: OnceLock<Option<OomCounter>>,
    running: RunRecord,
}

impl ObservedGuest {
    /// The guest with that stamp; without a stamp the observation cannot be reused.
    pub fn new(stamp: Option<RunStamp>, running: RunRecord) -> Self {
        let freezer = || running.cgroups.iter().find_map(|group| FreezerState::of(&group.path));
        let freezer = stamp.and_then(|_| freezer());
        Self(Arc::new(GuestObservation { stamp, freezer, oom: OnceLock::new(), running }))
    }

    /// The record of the guest's start.
    pub fn running(&self) -> &RunRecord {
        &self.0.running
    }

    /// The number of its processes that the kernel killed for lack of memory so far.
    pub fn oom_kills(&self) -> u64 {
        let groups = &self.0.running.cgroups;
        let oom = self.0.oom.get_or_init(|| groups.iter().find_map(|group| OomCounter::of(&group.path)));
        oom.as_ref().and_then(OomCounter::count).unwrap_or(0)
    }

    /// Whether it is still the last start, and not paused. This does not check whether the guest is alive.
    pub fn still_runs(&self, dir: &BodyDir) -> bool {
        let goes_on = self.0.freezer.as_ref().and_then(FreezerState::is_frozen) == Some(false);
        goes_on && self.0.stamp.is_some() && dir.run_stamp() == self.0.stamp
    }
}

/// The id of this boot, read once.
fn boot_id() -> Option<&'static str> {
    static BOOT: OnceLock<Option<String>> = OnceLock::new();
    BOOT.get_or_init(|| sys::proc::boot_id().ok()).as_deref()
}

fn condition_of(end: GuestEnd) -> ProcessState {
    match end {
        GuestEnd::Exit { code: 0 } => ProcessState::Stopped,
        end => ProcessState::Dead(end),
    }
}

/// Whether the supervisor of that guest is alive. A killed supervisor that its parent has not reaped yet is
/// not alive, and neither is another process that got its pid, even if that is a supervisor too.
pub fn supervisor_lives(running: &RunRecord) -> bool {
    let pid = running.supervisor;
    match running.supervisor_ticks {
        Some(ticks) => seen(pid, ticks).is_some(),
        // An earlier version did not record the start time of its supervisor; the process name is the only
        // evidence.
        None => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name.trim() == "pal-keeper")
                && sys::proc::stat(pid).is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X'))
        }
    }
}

/// The state letter of exactly that process; none if it is gone or a zombie. Waits for a process that was
/// killed, until the kernel has removed it: it will not answer, but still holds its resources.
pub fn alive(pid: i32, ticks: u64) -> Option<char> {
    let deadline = Instant::now() + ENDING_PATIENCE;
    loop {
        let found = stat_of(pid, ticks)?;
        if !found.ending || Instant::now() > deadline {
            return Some(found.state);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The state letter of exactly that process at this moment, without waiting.
fn seen(pid: i32, ticks: u64) -> Option<char> {
    stat_of(pid, ticks).map(|stat| stat.state)
}

fn stat_of(pid: i32, ticks: u64) -> Option<sys::proc::ProcessStat> {
    let found = sys::proc::stat(pid).ok()?;
    (found.ticks == ticks && !matches!(found.state, 'Z' | 'X')).then_some(found)
}

/// Without a supervisor, only the cgroup shows how the guest ended.
fn process_state_by_pid(running: &RunRecord) -> GuestEnd {
    let oom = running
        .cgroups
        .iter()
        .any(|group| sys::cgroup::oom_kills(&group.path).is_some_and(|kills| kills > 0));
    if oom { GuestEnd::Oom } else { GuestEnd::Unknown }
}

/// Sends a signal to the guest, and never to another process that got its pid.
pub fn signal_guest(running: &RunRecord, signal: Signal) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = Pid::from_raw(running.pid) else { return Ok(None) };
    let handle = match sys::process::open(pid) {
        Ok(handle) => handle,
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    if seen(running.pid, running.ticks).is_none() {
        return Ok(None);
    }
    sys::process::signal(std::os::fd::AsFd::as_fd(&handle), signal)?;
    Ok(Some(handle))
}
