//! What the native API says of Bodies and what they are made of.
//!
//! Invariant: no shape holds a path of the host, a host id or a pid of the host.

use std::{collections::BTreeMap, time::Duration};

use fleet::{BodyView, Lease, LimitRequest, Status};
use proto::{Layer, MechanismStatus, Size, launch::GuestEnd, spec::Access};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a Body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BodyStatus {
    /// Its guest answers.
    Running,
    /// Frozen.
    Paused,
    /// Ended in order; can be started.
    Stopped,
    /// Its guest died; can be started.
    Dead,
    /// It ran before the host's last boot; can be started.
    #[serde(alias = "lost")]
    Interrupted,
}

impl From<Status> for BodyStatus {
    fn from(status: Status) -> Self {
        match status {
            Status::Running => Self::Running,
            Status::Paused => Self::Paused,
            Status::Stopped => Self::Stopped,
            Status::Dead => Self::Dead,
            Status::Interrupted => Self::Interrupted,
        }
    }
}

/// Who may reach the ports of a Body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Ports {
    /// Who sends the Body's `traffic_token`.
    #[default]
    Private,
    /// Everybody who reaches the server.
    Public,
}

/// What becomes of a Body at its deadline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = OnTimeout)]
pub enum TimeoutAction {
    /// It is removed.
    #[default]
    Remove,
    /// It is paused.
    Pause,
}

/// One mechanism that holds a Body, or does not.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Mechanism)]
pub struct BodyMechanism {
    /// What it is for.
    pub name: String,
    /// How far it holds.
    pub state: MechanismState,
    /// By what it is held, or why it is not.
    pub reason: String,
}

/// How far a mechanism holds.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MechanismState {
    /// Not there at all.
    Absent,
    /// There, but weaker than it should be.
    Degraded,
    /// The kernel holds it.
    Enforced,
}

impl From<MechanismStatus> for MechanismState {
    fn from(state: MechanismStatus) -> Self {
        match state {
            MechanismStatus::Absent => Self::Absent,
            MechanismStatus::Degraded => Self::Degraded,
            MechanismStatus::Enforced => Self::Enforced,
        }
    }
}

/// How much a Body may use.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Limits)]
pub struct BodyLimits {
    /// Memory of all processes together.
    pub memory_bytes: u64,
    /// Processor time in thousandths of one processor.
    pub cpu_milli: u32,
    /// Processes and threads.
    pub pids: u32,
    /// What it may write.
    pub disk_bytes: u64,
    /// Files and directories it may make.
    pub inodes: u64,
    /// Open files of one process.
    pub files: u32,
    /// How long it may live from its start.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub wall_ms: Option<u64>,
    /// Output of one exec that is kept in the log.
    pub output_bytes: u64,
}

/// Limits as they are asked for; what is left out gets the host's default.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsRequest {
    /// Memory of all processes together.
    #[schema(minimum = 8388608)]
    pub memory_bytes: Option<u64>,
    /// Processor time in thousandths of one processor.
    #[schema(minimum = 10)]
    pub cpu_milli: Option<u32>,
    /// Processes and threads.
    #[schema(minimum = 4, maximum = 4194304)]
    pub pids: Option<u32>,
    /// What it may write.
    #[schema(minimum = 1048576)]
    pub disk_bytes: Option<u64>,
    /// Files and directories it may make; without, one for each 16 KiB of its disk, and at least 4096.
    #[schema(minimum = 64)]
    pub inodes: Option<u64>,
    /// Open files of one process.
    #[schema(minimum = 64, maximum = 1048576)]
    pub files: Option<u32>,
    /// How long it may live from its start.
    #[schema(minimum = 1)]
    pub wall_ms: Option<u64>,
    /// Output of one exec that is kept in the log.
    #[schema(minimum = 0)]
    pub output_bytes: Option<u64>,
}

impl From<LimitsRequest> for LimitRequest {
    fn from(wanted: LimitsRequest) -> Self {
        Self {
            memory: wanted.memory_bytes.map(Size),
            cpu_milli: wanted.cpu_milli,
            pids: wanted.pids,
            disk: wanted.disk_bytes.map(Size),
            inodes: wanted.inodes,
            files: wanted.files,
            wall: wanted.wall_ms.map(Duration::from_millis),
            output: wanted.output_bytes.map(Size),
        }
    }
}

/// Something of the host that a Body sees because somebody named it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct MountInfo {
    /// Where the Body sees it.
    pub target: String,
    /// Whether the Body may change it.
    pub writable: bool,
    /// Whether it may change git directories there, too.
    pub unprotected: bool,
}

/// A Body: a file system, processes, a network view, limits.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Body {
    /// Which.
    #[schema(pattern = "^[a-z0-9]{1,32}$")]
    pub id: String,
    /// How it is.
    pub status: BodyStatus,
    /// When it was made, RFC 3339.
    pub created_at: String,
    /// How it is held.
    pub layer: String,
    /// What it started from.
    pub template: String,
    /// The Body it was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub parent: Option<String>,
    /// How much it may use.
    pub limits: BodyLimits,
    /// Names of the variables that every process in it has; values stay inside.
    pub env: Vec<String>,
    /// What it sees of the host by name.
    pub mounts: Vec<MountInfo>,
    /// Where commands run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub workdir: Option<String>,
    /// Who runs commands.
    pub user: String,
    /// What its owner wrote on it.
    pub metadata: BTreeMap<String, String>,
    /// The key that asked for it; none for one that was made without a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub owner: Option<String>,
    /// When it is removed or paused, in milliseconds since 1970; none if nobody set that.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub deadline_ms: Option<u64>,
    /// What becomes of it then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub on_timeout: Option<TimeoutAction>,
    /// Who may reach its ports.
    pub ports: Ports,
    /// What callers of its ports send as `e2b-traffic-access-token`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub traffic_token: Option<String>,
    /// Why its guest is gone, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub end: Option<String>,
    /// What holds it, mechanism by mechanism.
    pub enforcement: Vec<BodyMechanism>,
}

impl Body {
    /// As its owner may see it.
    pub fn new(view: BodyView, lease: Option<Lease>) -> Self {
        let spec = view.spec;
        let limits = spec.limits;
        let lease = lease.as_ref();
        Self {
            id: spec.id.to_string(),
            status: view.status.into(),
            created_at: spec.created_at,
            layer: spec.layer.to_string(),
            template: lease.and_then(|lease| lease.alias.clone()).unwrap_or(spec.template),
            parent: spec.parent.map(|parent| parent.to_string()),
            limits: BodyLimits {
                memory_bytes: limits.memory.0,
                cpu_milli: limits.cpu_milli,
                pids: limits.pids,
                disk_bytes: limits.disk.0,
                inodes: limits.inodes,
                files: limits.files,
                wall_ms: limits.wall_ms,
                output_bytes: limits.output.0,
            },
            env: spec.env.into_keys().collect(),
            mounts: spec
                .mounts
                .into_iter()
                .map(|mount| MountInfo {
                    target: mount.target.display().to_string(),
                    writable: mount.access.is_writable(),
                    unprotected: mount.access == Access::Unprotected,
                })
                .collect(),
            workdir: spec.workdir,
            user: spec.user,
            metadata: lease.map(|lease| lease.metadata.clone()).unwrap_or_default(),
            owner: lease.and_then(|lease| lease.owner.clone()),
            deadline_ms: lease.and_then(|lease| lease.deadline_ms),
            on_timeout: lease.filter(|lease| lease.deadline_ms.is_some()).map(|lease| match lease.then {
                fleet::Then::Kill => TimeoutAction::Remove,
                fleet::Then::Pause(_) => TimeoutAction::Pause,
            }),
            ports: match lease {
                Some(lease) if lease.traffic_token.is_none() => Ports::Public,
                _ => Ports::Private,
            },
            traffic_token: lease.and_then(|lease| lease.traffic_token.clone()),
            end: view.end.map(|end| end_word(&end)),
            enforcement: view.enforcement.mechanisms.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<proto::Mechanism> for BodyMechanism {
    fn from(held: proto::Mechanism) -> Self {
        Self { name: held.name, state: held.state.into(), reason: held.reason }
    }
}

/// An end in one word, as the log has it.
pub fn end_word(end: &GuestEnd) -> String {
    match serde_json::to_value(end) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(value) => value
            .get("end")
            .or(value.get("why"))
            .and_then(serde_json::Value::as_str)
            .map_or_else(|| value.to_string(), str::to_owned),
        Err(_) => "unknown".into(),
    }
}

/// A layer that can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LayerRequest {
    /// Namespaces, Landlock, seccomp and limits.
    Process,
    /// A kernel of its own, where microVMs are set up.
    Microvm,
}

impl From<LayerRequest> for Layer {
    fn from(layer: LayerRequest) -> Self {
        match layer {
            LayerRequest::Process => Layer::Process,
            LayerRequest::Microvm => Layer::Microvm,
        }
    }
}
