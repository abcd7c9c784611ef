//! The messages between `body` and `pal-launch`.
//!
//! The plan is one line of JSON on the launcher's standard input. For a Body that ends with the process that
//! created it, that process keeps the pipe open; when the pipe closes, the supervisor ends the Body. The
//! report is one line on standard output.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    BodyId, Mechanism,
    guest::GuestConfig,
    spec::{BodyRole, Ids, Life, Mount},
    vm::{StartReport, VmPlan},
};

/// Everything that the launcher needs to create one Body.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaunchPlan {
    /// The Body.
    pub body: BodyId,
    /// Its directory on the host.
    pub dir: PathBuf,
    /// The configuration of the guest.
    pub config: GuestConfig,
    /// The Body's id ranges.
    pub ids: Ids,
    /// Symlinks that claim these ids; the supervisor removes them with the Body's directory.
    pub claims: Vec<OwnerLink>,
    /// Where the Body's writes go.
    pub upper: Upper,
    /// The overlay mounts of the root file system; the root itself comes first.
    pub areas: Vec<OverlayMount>,
    /// Entries to create in the upper; existing ones stay as they are.
    pub seeds: Vec<SeedEntry>,
    /// Mounts for which the guest answers git's fsmonitor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub followed: Vec<FollowedMount>,
    /// Whether setuid programs of the root file system work, so that the user can become root in the Body.
    #[serde(default)]
    pub setuid: bool,
    /// Size of `/dev/shm`.
    pub shm_bytes: u64,
    /// Directories and files of the host that the Body sees.
    pub mounts: Vec<Mount>,
    /// The cgroups that limit it.
    pub cgroups: Vec<Cgroup>,
    /// Limits of each process.
    pub rlimits: Rlimits,
    /// The CPUs that its processes may use, if no cgroup limits them.
    pub cpus: Option<u32>,
    /// Wall-clock limit of the Body.
    pub wall_ms: Option<u64>,
    /// Size limit of its upper on disk; the supervisor enforces it.
    pub disk_bytes: u64,
    /// Limit of files and directories in its upper on disk.
    pub inodes: u64,
    /// Whether the Body ends with the process that created it.
    pub life: Life,
    /// The purpose of the Body: one of a step is removed if its creator ends early.
    pub role: BodyRole,
    /// Mechanisms that are in force besides those of the launcher; the launcher writes the whole record.
    pub mechanisms: Vec<Mechanism>,
    /// The egress proxy of a Body with a policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressPlan>,
    /// The microVM that runs in the Body instead of a guest; none on layer `process`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmPlan>,
}

/// The egress proxy of a Body, which the supervisor starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressPlan {
    /// The proxy's directory on the host; it holds its orders, the spool and the directory that the Body sees.
    pub dir: PathBuf,
    /// The file with the key of the sealed parts of the orders.
    pub key: PathBuf,
    /// The token of the Body's guest, with which the supervisor opens the ports that other Bodies may reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

/// A symlink whose target names the owner of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerLink {
    /// The path of the symlink.
    pub link: PathBuf,
    /// Its target as long as it belongs to the Body.
    pub target: PathBuf,
}

/// Where a Body's writes go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Upper {
    /// A tmpfs of the Body, which ends with it.
    Memory {
        /// Its size.
        bytes: u64,
        /// Its limit of inodes.
        inodes: u64,
    },
    /// `disk/upper` and `disk/work` in the Body's directory.
    Disk,
}

/// An entry that exists in a Body's upper before its guest runs. Paths begin with the directory of an overlay
/// mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SeedEntry {
    /// A directory.
    Dir {
        /// The path.
        path: String,
        /// Permission bits.
        mode: u32,
        /// The owner, as an id in the Body.
        owner: u32,
    },
    /// A symbolic link.
    Link {
        /// The path.
        path: String,
        /// The target.
        target: String,
    },
    /// A file that every user may read.
    File {
        /// The path.
        path: String,
        /// The text of the file.
        contents: String,
    },
    /// A whiteout, which hides a file of the host.
    Hidden {
        /// The path.
        path: String,
    },
}

/// One overlay mount of a Body's root: read-only lowers and the private upper.
///
/// The root needs several mounts, because in a user namespace an overlay cannot have a lower with mounts
/// below it, and the host's `/` always has some. A host directory without an overlay mount does not exist in
/// the Body, so a secret that appears on the host later stays invisible.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayMount {
    /// The mount point in the Body, without a leading `/`; empty for the root.
    pub at: String,
    /// The access of the Body.
    pub kind: OverlayAccess,
    /// Read-only directories, topmost first.
    pub lowers: Vec<Lower>,
    /// The owner of its top directory, as an id in the Body.
    #[serde(default)]
    pub owner: u32,
}

/// The access of a Body to an overlay mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OverlayAccess {
    /// Write, into its own upper.
    Private,
    /// Read only: a bind mount of the last lower, because reading through an overlay costs a third more.
    ReadOnly,
}

/// One read-only directory of an overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lower {
    /// Its path on the host.
    pub path: PathBuf,
    /// The ids that own its files, if another Body wrote them.
    pub written_as: Option<Ids>,
}

/// A mount for which the guest answers git's fsmonitor: every change is in the mount's upper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowedMount {
    /// The mount point.
    pub at: String,
    /// The fsmonitor token that stands for the unchanged layers of the repository.
    pub token: String,
    /// How many of the lowers, topmost first, are above those layers.
    pub above: usize,
}

impl OverlayMount {
    /// The name of the mount's directory in an upper or a snapshot.
    pub fn dir_name(&self) -> String {
        area_dir(&self.at)
    }
}

/// The name of the directory for a mount point: `root` for the root itself.
pub fn area_dir(at: &str) -> String {
    if at.is_empty() { "root".to_owned() } else { at.replace('/', "-") }
}

/// A cgroup that the Body's first process enters before it does anything else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// Its directory.
    pub path: PathBuf,
    /// The version of its hierarchy.
    pub version: CgroupVersion,
}

/// The two versions of cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CgroupVersion {
    /// One hierarchy for each controller.
    V1,
    /// One unified hierarchy.
    V2,
}

/// Limits of each process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimits {
    /// Open files.
    pub files: u64,
    /// Largest file.
    pub file_bytes: u64,
    /// Processes of the Body's ids, if no cgroup counts them.
    pub processes: Option<u64>,
    /// Private memory of one process, if no cgroup counts it.
    pub data_bytes: Option<u64>,
}

/// The launcher's report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LaunchReport {
    /// The guest runs.
    Ready(LaunchedBody),
    /// The launcher failed and cleaned up.
    Failed(LaunchFailure),
}

/// A running Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchedBody {
    /// The guest's pid on the host.
    pub pid: i32,
    /// Its start time in clock ticks since boot: pid and start time together identify a process.
    pub ticks: u64,
    /// The supervisor's pid.
    #[serde(rename = "keeper")]
    pub supervisor: i32,
    /// The supervisor's start time.
    #[serde(rename = "keeper_ticks")]
    pub supervisor_ticks: u64,
    /// The mechanisms that the launcher set up.
    pub mechanisms: Vec<Mechanism>,
    /// How its microVM started; none on layer `process`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revival: Option<StartReport>,
}

/// Why the launcher could not create a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchFailure {
    /// The step that failed.
    pub step: String,
    /// The kernel's error.
    pub cause: String,
    /// Advice for the user.
    pub hint: Option<String>,
    /// The class of the failure.
    #[serde(default)]
    pub kind: FailedKind,
}

/// The class of a launcher's failure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailedKind {
    /// The host cannot do it.
    #[default]
    Host,
    /// A restored snapshot failed a check.
    RestoreIncomplete,
}

/// The name to which a removed Body's directory is renamed until its supervisor has deleted it.
pub fn set_aside(dir: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(dir.file_name().unwrap_or_default());
    dir.with_file_name(name)
}

/// Whether a directory has such a name.
pub fn is_set_aside(dir: &Path) -> bool {
    let name = dir.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.strip_prefix('.').is_some_and(|id| id.parse::<BodyId>().is_ok())
}

/// `end.json`: why a Body's guest ended, written by the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "lowercase")]
pub enum GuestEnd {
    /// The guest exited; an orderly shutdown has code 0.
    Exit {
        /// Its exit code.
        code: i32,
    },
    /// A signal ended the guest.
    Killed {
        /// The signal.
        signal: i32,
    },
    /// The kernel killed the guest because the Body was out of memory.
    Oom,
    /// The Body reached its wall-clock limit.
    Timeout,
    /// The Body's upper exceeded its size limit.
    Disk,
    /// The Body's upper exceeded its limit of files and directories.
    Inodes,
    /// The process that created the Body ended.
    Owner,
    /// Unknown, because the supervisor was killed, too.
    Unknown,
}

/// `run.json`: the processes of a running Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The boot id of the host.
    pub boot_id: String,
    /// The guest's pid on the host.
    pub pid: i32,
    /// The guest's start time.
    pub ticks: u64,
    /// The supervisor's pid.
    #[serde(rename = "keeper")]
    pub supervisor: i32,
    /// The supervisor's start time; earlier versions did not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "keeper_ticks")]
    pub supervisor_ticks: Option<u64>,
    /// Its cgroups.
    pub cgroups: Vec<Cgroup>,
}
