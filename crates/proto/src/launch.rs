//! What `body` asks of `pal-launch`, and what that answers.
//!
//! The plan is one line of JSON on the launcher's standard input. For a Body that lives as long as its maker, the
//! maker keeps that pipe open: its end is the order to end the Body. The report is one line on standard output.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    BodyId, Mechanism,
    egress::EgressOrders,
    guest::GuestConfig,
    spec::{Ids, Life, Mount},
    vm::{StartReport, VmPlan},
};

/// Everything needed to make one Body on the process layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaunchPlan {
    /// Which Body.
    pub body: BodyId,
    /// Its directory on the host.
    pub dir: PathBuf,
    /// What the guest is told.
    pub config: GuestConfig,
    /// Its ids.
    pub ids: Ids,
    /// The links by which it has them: they go with the Body's directory.
    pub claims: Vec<OwnerLink>,
    /// Where its writes go.
    pub upper: Upper,
    /// Its root, area by area; the root itself first.
    pub areas: Vec<OverlayMount>,
    /// What its upper holds from the start; what is there already stays as it is.
    pub seeds: Vec<SeedEntry>,
    /// Areas of which git asks the guest what was changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub followed: Vec<FollowedMount>,
    /// Whether setuid programs of its root work, so that its user can become its root.
    #[serde(default)]
    pub setuid: bool,
    /// Memory of `/dev/shm`.
    pub shm_bytes: u64,
    /// What it sees of the host by name.
    pub mounts: Vec<Mount>,
    /// Where it is put to be limited.
    pub cgroups: Vec<Cgroup>,
    /// Limits of each process.
    pub rlimits: Rlimits,
    /// The processors its processes start on, where no cgroup bounds them.
    pub cpus: Option<u32>,
    /// How long it may live.
    pub wall_ms: Option<u64>,
    /// How much its upper on disk may hold; watched by the keeper.
    pub disk_bytes: u64,
    /// Files and directories of all of the upper on disk together.
    pub inodes: u64,
    /// What becomes of it when its maker ends.
    pub life: Life,
    /// What holds it besides what the launcher puts in place; the launcher writes the whole record.
    pub mechanisms: Vec<Mechanism>,
    /// Its egress proxy, where it has a policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressPlan>,
    /// The machine that runs in it instead of a guest of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmPlan>,
}

/// The egress proxy of a Body, which its supervisor starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressPlan {
    /// The proxy's own directory on the host: the spool is in it, and so is the directory that the Body sees.
    pub dir: PathBuf,
    /// Its orders.
    pub orders: EgressOrders,
}

/// A link that says whose something is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerLink {
    /// Where it is.
    pub link: PathBuf,
    /// What it says as long as it is the Body's.
    pub target: PathBuf,
}

/// Where a Body's writes go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Upper {
    /// A tmpfs of the Body's own, gone with it.
    Memory {
        /// Its size.
        bytes: u64,
        /// Its files.
        inodes: u64,
    },
    /// `disk/upper` and `disk/work` in the Body's directory.
    Disk,
}

/// Something that stands in a Body's upper before its guest runs. Paths begin with an area's directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SeedEntry {
    /// A directory.
    Dir {
        /// Where.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Whose, as an id inside.
        owner: u32,
    },
    /// A symbolic link.
    Link {
        /// Where.
        path: String,
        /// To where.
        target: String,
    },
    /// A file that everybody may read.
    File {
        /// Where.
        path: String,
        /// What it says.
        contents: String,
    },
    /// Nothing, where the host has something.
    Hidden {
        /// Where.
        path: String,
    },
}

/// One part of a Body's root: an overlay of read-only lowers and the private upper.
///
/// Why parts: in a user namespace an overlay cannot have a lower with mounts below it, and the host's `/` always has.
/// What is not an area is not there at all, so a secret that appears on the host later is not seen either.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayMount {
    /// Where in the Body, without a leading `/`; empty for the root.
    pub at: String,
    /// What the Body may do there.
    pub kind: OverlayAccess,
    /// Read-only directories, nearest first.
    pub lowers: Vec<Lower>,
    /// Whose its top directory is, as an id inside.
    #[serde(default)]
    pub owner: u32,
}

/// What a Body may do in an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OverlayAccess {
    /// Change it, in its own upper.
    Private,
    /// Look: the last of its lowers, as it is. Reading through an overlay costs a third more.
    ReadOnly,
}

/// One read-only directory below an upper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lower {
    /// Where it is on the host.
    pub path: PathBuf,
    /// The ids its files were written under, when they were some other Body's.
    pub written_as: Option<Ids>,
}

/// An area of which the guest tells what was changed in it, because whatever was is in its upper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowedMount {
    /// Which area.
    pub at: String,
    /// What git calls the state that the layers of a repository are in.
    pub token: String,
    /// How many of the area's lowers, nearest first, lie above those layers.
    pub above: usize,
}

impl OverlayMount {
    /// The name of this area's directory in an upper or a snapshot.
    pub fn dir_name(&self) -> String {
        area_dir(&self.at)
    }
}

/// The name of an area's directory: `root` for the root itself.
pub fn area_dir(at: &str) -> String {
    if at.is_empty() { "root".to_owned() } else { at.replace('/', "-") }
}

/// A cgroup that the Body's first process enters before it is anything else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// Its directory.
    pub path: PathBuf,
    /// How one enters it.
    pub version: CgroupVersion,
}

/// The two kinds of cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CgroupVersion {
    /// One hierarchy for each controller.
    V1,
    /// One hierarchy.
    V2,
}

/// Limits of each process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimits {
    /// Open files.
    pub files: u64,
    /// Largest file.
    pub file_bytes: u64,
    /// Processes of the Body's ids, where no cgroup counts them.
    pub processes: Option<u64>,
    /// Private memory of one process, where no cgroup counts it.
    pub data_bytes: Option<u64>,
}

/// What the launcher answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LaunchReport {
    /// The guest was started.
    Ready(LaunchedBody),
    /// It could not be, and nothing is left.
    Failed(LaunchFailure),
}

/// A Body that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchedBody {
    /// The guest's pid on the host.
    pub pid: i32,
    /// When it started, in the kernel's ticks: pid and ticks together name a process for good.
    pub ticks: u64,
    /// The keeper's pid.
    #[serde(rename = "keeper")]
    pub supervisor: i32,
    /// When the keeper started.
    #[serde(rename = "keeper_ticks")]
    pub supervisor_ticks: u64,
    /// What the launcher put in place.
    pub mechanisms: Vec<Mechanism>,
    /// How its machine came to life, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revival: Option<StartReport>,
}

/// Why there is no Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchFailure {
    /// What was being done.
    pub step: String,
    /// What the kernel said.
    pub cause: String,
    /// What may help.
    pub hint: Option<String>,
    /// Whose fault it is.
    #[serde(default)]
    pub kind: FailedKind,
}

/// What a launcher's failure means to its caller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailedKind {
    /// The host cannot do it.
    #[default]
    Host,
    /// What was frozen could not be thawed whole.
    RestoreIncomplete,
}

/// Where the directory of a Body goes that is one no more, until its keeper has removed it.
pub fn set_aside(dir: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(dir.file_name().unwrap_or_default());
    dir.with_file_name(name)
}

/// Whether that is such a directory.
pub fn is_set_aside(dir: &Path) -> bool {
    let name = dir.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.strip_prefix('.').is_some_and(|id| id.parse::<BodyId>().is_ok())
}

/// `end.json`: why a Body's guest is gone, written by the keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "lowercase")]
pub enum GuestEnd {
    /// The guest ended by itself: an orderly shutdown has code 0.
    Exit {
        /// Its exit code.
        code: i32,
    },
    /// A signal ended it.
    Killed {
        /// Which.
        signal: i32,
    },
    /// The kernel ended it because the Body was out of memory.
    Oom,
    /// Its time was over.
    Timeout,
    /// Its upper grew over its limit.
    Disk,
    /// Its upper had more files and directories than its limit.
    Inodes,
    /// Its maker ended.
    Owner,
    /// Gone without a trace: the keeper was killed too.
    Unknown,
}

/// `run.json`: where a running Body is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The boot it runs in.
    pub boot_id: String,
    /// The guest's pid on the host.
    pub pid: i32,
    /// The guest's start.
    pub ticks: u64,
    /// The keeper's pid.
    #[serde(rename = "keeper")]
    pub supervisor: i32,
    /// The keeper's start; missing in a record of a version that did not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "keeper_ticks")]
    pub supervisor_ticks: Option<u64>,
    /// Its cgroups.
    pub cgroups: Vec<Cgroup>,
}
