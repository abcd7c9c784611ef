//! Our own small service of the guest, beside envd's: what that protocol lacks.
//!
//! Paths are under `/v1`; bodies are JSON. The generation tells a newer host what an older guest can do.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::BodyId;

/// The protocol of this guest; grows by one with each change that a host must know of.
pub const GENERATION: u32 = 1;
/// What the guest claims to be towards the E2B SDKs; they gate features on it.
pub const ENVD_VERSION: &str = "0.6.13";

/// What the host tells the guest once, before it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// Which Body this is.
    pub body: BodyId,
    /// The template it was made from.
    pub template: String,
    /// What callers must send as `X-Access-Token`.
    pub token: Option<String>,
    /// Environment of every process.
    pub envs: BTreeMap<String, String>,
    /// Who runs a command when nobody is named.
    pub user: String,
    /// Where a command runs when no directory is named; the user's home if none.
    pub workdir: Option<String>,
    /// How much output of each process is kept for those who connect later.
    pub ring_bytes: u64,
    /// A port inside that leads to a socket of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<Forward>,
}

/// A port on the Body's loopback that leads to a socket it can see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// The port.
    pub port: u16,
    /// The socket's path inside.
    pub socket: String,
}

/// Where programs in a Body find the proxy that leads out, if there is one.
pub const EGRESS_PORT: u16 = 3128;
/// Where the Body sees that proxy's socket.
pub const EGRESS_DIR: &str = "/run/palisade";

/// `GET /v1/guest`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestInfo {
    /// See [`GENERATION`].
    pub generation: u32,
    /// Version of the guest.
    pub version: String,
    /// Which Body answers.
    pub body: BodyId,
    /// How long the guest has been up.
    pub uptime_ms: u64,
    /// Processes started through the guest that still run.
    pub processes: u32,
    /// Whether it was told to end, and starts nothing any more. Older guests do not say.
    #[serde(default)]
    pub ending: bool,
}

/// `POST /v1/shutdown`: end every process (TERM, then KILL after the grace), then the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shutdown {
    /// How long processes have to end by themselves.
    pub grace_ms: u64,
}

/// `GET /v1/dial?port=N` with this `Upgrade` becomes a raw stream to that port inside.
pub const DIAL_UPGRADE: &str = "palisade-dial";

/// A header of `Connect`: of a terminal, its newest output comes first, whoever has heard it before.
pub const REPLAY: &str = "palisade-replay";

/// Why a guest refuses to start a command, where its caller tells that from other refusals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartRefusal {
    /// There is no such command.
    CommandNotFound,
    /// There is one, and it cannot be run.
    CommandNotExecutable,
}
