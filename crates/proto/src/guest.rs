//! Palisade's own small guest service, for what envd's protocol lacks.
//!
//! Paths begin with `/v1`; bodies are JSON. The generation tells a newer host what an older guest can do.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::BodyId;

/// The generation of the guest protocol; it grows by one with each change that a host must know.
pub const GENERATION: u32 = 1;
/// The envd version that the guest reports; the E2B SDKs enable features by it.
pub const ENVD_VERSION: &str = "0.6.13";

/// The configuration that the host gives the guest before it serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// The Body.
    pub body: BodyId,
    /// The template of the Body.
    pub template: String,
    /// The value that callers must send as `X-Access-Token`.
    pub token: Option<String>,
    /// Environment of every process.
    pub envs: BTreeMap<String, String>,
    /// The user of a command for which the caller names none.
    pub user: String,
    /// The working directory of a command for which the caller names none; without it, the user's home.
    pub workdir: Option<String>,
    /// How much output of each process the guest keeps for clients that connect later.
    pub ring_bytes: u64,
    /// A port in the Body that the guest forwards to a socket of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<Forward>,
}

/// A port on the Body's loopback that the guest forwards to a Unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// The port.
    pub port: u16,
    /// The socket's path in the Body.
    pub socket: String,
}

/// The port on the Body's loopback at which programs find the egress proxy.
pub const EGRESS_PORT: u16 = 3128;
/// The directory in the Body that holds the proxy's socket.
pub const EGRESS_DIR: &str = "/run/palisade";

/// The answer to `GET /v1/guest`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestInfo {
    /// See [`GENERATION`].
    pub generation: u32,
    /// Version of the guest.
    pub version: String,
    /// The Body of this guest.
    pub body: BodyId,
    /// How long the guest has been up.
    pub uptime_ms: u64,
    /// Processes started through the guest that still run.
    pub processes: u32,
    /// Whether the guest is shutting down and refuses new commands. Older guests do not send it.
    #[serde(default)]
    pub ending: bool,
}

/// The request `POST /v1/shutdown`: the guest ends every process (TERM, then KILL after the grace), then
/// itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shutdown {
    /// How long processes have to end by themselves.
    pub grace_ms: u64,
}

/// The `Upgrade` of `GET /v1/dial?port=N`, which turns the connection into a raw stream to that port in the
/// Body.
pub const DIAL_UPGRADE: &str = "palisade-dial";

/// A header of `Connect`: for a terminal, the guest first sends the newest output again, even if another
/// client has read it.
pub const REPLAY: &str = "palisade-replay";

/// Why a guest refuses to start a command, as far as callers distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartRefusal {
    /// The command does not exist.
    CommandNotFound,
    /// The command exists but cannot be executed.
    CommandNotExecutable,
}
