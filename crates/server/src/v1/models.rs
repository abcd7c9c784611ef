//! The schema types of the native API: Bodies, their limits, mounts and enforcement records.
//!
//! Invariant: no schema type holds a path, a user id or a pid of the host.

use std::{collections::BTreeMap, time::Duration};

use fleet::{BodyView, Lease, LimitRequest, Status};
use proto::{Layer, MechanismStatus, Size, launch::GuestEnd, spec::Access};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Caller, Scope};

/// The status of a Body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BodyStatus {
    /// Its guest answers.
    Running,
    /// Its processes are frozen.
    Paused,
    /// It was stopped; it can be started.
    Stopped,
    /// Its guest died; it can be started.
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

/// Access to the ports of a Body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Ports {
    /// Callers must send the Body's `traffic_token`.
    #[default]
    Private,
    /// Every caller that reaches the server.
    Public,
}

/// The action at a Body's deadline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = OnTimeout)]
pub enum TimeoutAction {
    /// The server removes the Body.
    #[default]
    Remove,
    /// The server pauses the Body.
    Pause,
}

/// One mechanism of a Body's isolation, and whether it is in force.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Mechanism)]
pub struct BodyMechanism {
    /// The resource or boundary that the mechanism protects.
    pub name: String,
    /// How far the mechanism is in force.
    pub state: MechanismState,
    /// The kernel feature that enforces it, or the reason why it is not enforced.
    pub reason: String,
}

/// How far a mechanism is in force.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MechanismState {
    /// Not in force at all.
    Absent,
    /// In force, but weaker than intended.
    Degraded,
    /// The kernel enforces it.
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

/// The limits of a Body.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Limits)]
pub struct BodyLimits {
    /// Memory of all processes together.
    pub memory_bytes: u64,
    /// CPU time, in thousandths of one CPU.
    pub cpu_milli: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Bytes that the Body may write to its file system.
    pub disk_bytes: u64,
    /// Number of files and directories that the Body may create.
    pub inodes: u64,
    /// Open files of one process.
    pub files: u32,
    /// Milliseconds that the Body may run after its start.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub wall_ms: Option<u64>,
    /// Bytes of output of one exec that the log keeps.
    pub output_bytes: u64,
}

/// Limits of a new Body; a limit that is left out gets the host's default.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsRequest {
    /// Memory of all processes together.
    #[schema(minimum = 8388608)]
    pub memory_bytes: Option<u64>,
    /// CPU time, in thousandths of one CPU.
    #[schema(minimum = 10)]
    pub cpu_milli: Option<u32>,
    /// Processes and threads.
    #[schema(minimum = 4, maximum = 4194304)]
    pub pids: Option<u32>,
    /// Bytes that the Body may write to its file system.
    #[schema(minimum = 1048576)]
    pub disk_bytes: Option<u64>,
    /// Number of files and directories that the Body may create; if left out, one for each 16 KiB of its
    /// disk, and at least 4096.
    #[schema(minimum = 64)]
    pub inodes: Option<u64>,
    /// Open files of one process.
    #[schema(minimum = 64, maximum = 1048576)]
    pub files: Option<u32>,
    /// Milliseconds that the Body may run after its start.
    #[schema(minimum = 1)]
    pub wall_ms: Option<u64>,
    /// Bytes of output of one exec that the log keeps.
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

/// A file or directory of the host that was mounted in a Body on request.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct MountInfo {
    /// Its path inside the Body.
    pub target: String,
    /// Whether the Body may change it.
    pub writable: bool,
    /// Whether the Body may change git directories there, too.
    pub unprotected: bool,
}

/// A Body: a sandbox with a file system, processes, a network and limits of its own.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Body {
    /// The id of the Body.
    #[schema(pattern = "^[a-z0-9]{1,32}$")]
    pub id: String,
    /// The name of the Body.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub name: Option<String>,
    /// The status of the Body.
    pub status: BodyStatus,
    /// When the Body was created, RFC 3339.
    pub created_at: String,
    /// The isolation layer of the Body.
    pub layer: String,
    /// The template or snapshot that the Body was created from.
    pub template: String,
    /// The Body that it was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub parent: Option<String>,
    /// The limits of the Body.
    pub limits: BodyLimits,
    /// Names of the environment variables of every process in the Body. The API does not return their values.
    pub env: Vec<String>,
    /// Files and directories of the host that the Body sees.
    pub mounts: Vec<MountInfo>,
    /// The working directory of commands.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub workdir: Option<String>,
    /// The user that runs commands.
    pub user: String,
    /// Labels that the owner gave the Body.
    pub metadata: BTreeMap<String, String>,
    /// The id of the key that created the Body; none if it was created without a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub owner: Option<String>,
    /// The Body's deadline in milliseconds since 1970; none if it has no deadline.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub deadline_ms: Option<u64>,
    /// The action at the deadline.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub on_timeout: Option<TimeoutAction>,
    /// Access to the Body's ports.
    pub ports: Ports,
    /// The token that callers of the Body's ports send as `e2b-traffic-access-token`; not shown to a key of scope `read`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub traffic_token: Option<String>,
    /// Why the guest ended, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub end: Option<String>,
    /// The enforcement record: each mechanism of the Body's isolation.
    pub enforcement: Vec<BodyMechanism>,
}

impl Body {
    /// The Body as this caller may see it: the token for the Body's ports is not for a key that only reads.
    pub fn shown_to(self, caller: &Caller) -> Self {
        let traffic_token = self.traffic_token.filter(|_| caller.scope >= Scope::Run);
        Self { traffic_token, ..self }
    }

    /// The Body as its owner may see it.
    pub fn new(view: BodyView, lease: Option<Lease>) -> Self {
        let spec = view.spec;
        let limits = spec.limits;
        let lease = lease.as_ref();
        Self {
            id: spec.id.to_string(),
            name: spec.name.map(String::from),
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

/// The end of a guest in one word, as in the log.
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

/// An isolation layer that a client can choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LayerRequest {
    /// Namespaces, Landlock, seccomp and cgroup limits.
    Process,
    /// A microVM with its own kernel; available where microVMs are set up.
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
