//! Palisade's own small guest service, for what envd's protocol lacks.
//!
//! Paths begin with `/v1`; bodies are JSON. The generation tells a newer host what an older guest can do.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::BodyId;

/// The generation of the guest protocol; it grows by one with each change that a host must know.
///
/// 2: trees of the second form ([`crate::tree::TreeForm`]), [`HANG_UP`].
/// 3: operations on files ([`crate::file_call`]), kept commands ([`KEPT_START`]).
pub const GENERATION: u32 = 3;
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
    /// Whether the guest redirects all connections of programs there, and answers their name lookups through it: the
    /// guest of a microVM does. Elsewhere the egress process holds these sockets itself.
    #[serde(default)]
    pub transparent: bool,
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

/// The answer to `GET /v1/processes`. Older guests do not have it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessList {
    /// The processes, by pid.
    pub processes: Vec<BodyProcess>,
    /// How many more there are.
    pub left_out: u64,
}

/// A process in a Body, as its guest sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BodyProcess {
    /// Its pid in the Body.
    pub pid: i32,
    /// The pid of its parent.
    pub parent: i32,
    /// The name of its user, or the number of one without a name.
    pub user: String,
    /// Its CPU time over all threads.
    pub cpu_ms: u64,
    /// Its resident memory.
    pub memory_bytes: u64,
    /// How long ago it started.
    pub age_ms: u64,
    /// Its arguments, beginning with the program; only the name in brackets if it has none.
    pub command: Vec<String>,
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

/// A header of `Start`: if the caller's connection breaks, the guest hangs up the command's terminal.
pub const HANG_UP: &str = "palisade-hang-up";

/// The path of `Start` for a command that the guest keeps: its tag names it, also after its end. If the guest knows
/// the tag, the answer follows that command from its first kept byte and starts nothing. A path of its own and no
/// header, because an older guest would ignore a header and start the command a second time.
pub const KEPT_START: &str = "/v1/kept/start";
/// The path of `Connect` for a kept command, which may have ended.
pub const KEPT_FOLLOW: &str = "/v1/kept/follow";
/// The path of a [`KeptRead`]; the answer is a [`KeptState`], or `null` if the guest does not know the tag.
pub const KEPT_READ: &str = "/v1/kept/read";
/// The longest tag of a kept command in bytes.
pub const KEPT_TAG_LEN_MAX: usize = 256;
/// How much of its newest output the guest keeps for a command.
pub const KEPT_LEN_MAX: usize = 1 << 20;
/// How many kept commands may run at once.
pub const KEPT_RUNNING_MAX: usize = 64;
/// How many ended commands the guest keeps; the oldest go first.
pub const KEPT_ENDED_MAX: usize = 256;
/// How many bytes of output of all ended commands the guest keeps; those of the oldest go first, and their ends stay.
pub const KEPT_ENDED_LEN_MAX: usize = 32 << 20;

/// A request for output of a kept command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptRead {
    /// The tag of the command.
    pub tag: String,
    /// The number of bytes to skip, counted from the first byte that the command wrote.
    pub from: u64,
    /// How long the guest waits for a byte after `from` or for the end of the command; at most [`KEPT_WAIT_MS_MAX`].
    pub wait_ms: u64,
}

/// The longest wait of a [`KeptRead`].
pub const KEPT_WAIT_MS_MAX: u64 = 20_000;

/// The answer to a [`KeptRead`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptState {
    /// The pid of the command in the Body.
    pub pid: u32,
    /// Whether it has a terminal.
    pub tty: bool,
    /// How long it has run, or ran.
    pub age_ms: u64,
    /// The number of bytes that the command wrote before the first one that is kept.
    pub first: u64,
    /// Its output in base64, standard output and standard error in the order of their arrival.
    pub base64: String,
    /// The number of bytes that the command wrote before these.
    pub from: u64,
    /// The number of bytes that the command has written up to the last one here.
    pub next: u64,
    /// How the command ended, if it has and no byte follows.
    pub end: Option<KeptEnd>,
}

/// How a kept command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptEnd {
    /// Whether it exited by itself.
    pub exited: bool,
    /// Its exit code, if it did.
    pub exit_code: i32,
    /// How envd words the end.
    pub status: String,
    /// Whether the guest killed it at its timeout.
    pub timed_out: bool,
}

/// Why a guest refuses to start a command, as far as callers distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartRefusal {
    /// The command does not exist.
    CommandNotFound,
    /// The command exists but cannot be executed.
    CommandNotExecutable,
}
