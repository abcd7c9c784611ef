//! The requests that callers make to the fleet.

use std::{collections::BTreeMap, time::Duration};

use body::driver::{LimitRequest, StartMode};
use proto::{
    BodyName, Layer,
    event_data::StartedBy,
    spec::{BodyRole, Egress, Home, Life, Mount},
    vm::{Engine, Sharing},
    workspace::Workspace,
};

use crate::Lease;

/// A request to create a Body.
#[derive(Debug, Clone)]
pub struct Create {
    /// The name of the Body; no other Body may have it.
    pub name: Option<BodyName>,
    /// The isolation layer; `None` means the strongest layer that this host runs at interactive speed.
    pub layer: Option<Layer>,
    /// The hypervisor of a microVM; `None` means the one of the snapshot that it starts from, or the one of the
    /// settings.
    pub engine: Option<Engine>,
    /// The template: `host`, a template's name, or the id or name of a snapshot.
    pub template: String,
    /// Limits that differ from the host's defaults.
    pub limits: LimitRequest,
    /// Environment variables of every process in the Body.
    pub env: BTreeMap<String, String>,
    /// Host directories and files that the Body sees.
    pub mounts: Vec<Mount>,
    /// How a microVM shares the mounts; a microVM gets no mounts without it.
    pub share: Option<Sharing>,
    /// The repositories in the Body; their layers exist already.
    pub workspaces: Vec<Workspace>,
    /// The home directory, if it is a mount of its own.
    pub home: Option<Home>,
    /// Shell commands that run at each start of the Body.
    pub at_start: Vec<String>,
    /// Ports inside that the user will want to reach.
    pub ports: Vec<u16>,
    /// The egress policy: the names that the Body may reach.
    pub egress: Option<Egress>,
    /// Names of the secrets that the Body may use, in addition to those of the policy.
    pub secrets: Vec<String>,
    /// The purpose of the Body.
    pub role: BodyRole,
    /// The working directory of commands.
    pub workdir: Option<String>,
    /// The user of commands; `user` if `None`.
    pub user: Option<String>,
    /// Whether the Body ends with its creator or is kept.
    pub life: Life,
    /// The lease; without one, a kept Body stays until it is removed.
    pub lease: Option<Lease>,
    /// Whether a microVM boots even if it could be restored from a snapshot of its memory.
    pub cold: bool,
}

impl Create {
    /// A Body on the host's root that ends with the process that created it.
    pub fn run() -> Self {
        Self {
            name: None,
            layer: None,
            engine: None,
            template: "host".into(),
            limits: LimitRequest::default(),
            env: BTreeMap::new(),
            mounts: Vec::new(),
            share: None,
            workspaces: Vec::new(),
            home: None,
            at_start: Vec::new(),
            ports: Vec::new(),
            egress: None,
            secrets: Vec::new(),
            role: BodyRole::Work,
            workdir: None,
            user: None,
            life: Life::Run,
            lease: None,
            cold: false,
        }
    }

    /// Whether the start may restore saved memory.
    pub(crate) fn start_mode(&self) -> StartMode {
        if self.cold { StartMode::Boot } else { StartMode::Restore }
    }

    /// A Body on the host's root that is kept until it is removed.
    pub fn kept() -> Self {
        Self { life: Life::Kept, ..Self::run() }
    }
}

/// A request to run a command in a Body.
#[derive(Debug, Clone)]
pub struct ExecRequest {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Environment variables in addition to the Body's.
    pub env: BTreeMap<String, String>,
    /// The user; the Body's user if `None`.
    pub user: Option<String>,
    /// The working directory; the Body's if `None`.
    pub workdir: Option<String>,
    /// The size of the command's terminal; `None` means pipes.
    pub tty: Option<TtySize>,
    /// The standard input.
    pub stdin: Stdin,
    /// The time after which the command is killed.
    pub timeout: Option<Duration>,
    /// A name by which [`crate::Execs::attach`] finds the command.
    pub tag: Option<String>,
    /// Whether the guest keeps the command by its tag, with its newest output and its end. A kept command with a tag
    /// that the guest knows already is followed from its first kept byte and not started again.
    pub keep: bool,
    /// The kind of client that started the command; `None` for Palisade's own.
    pub by: Option<StartedBy>,
    /// The fate of the command if this process vanishes.
    pub on_disconnect: Disconnect,
}

/// The fate of a command whose caller vanishes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Disconnect {
    /// The command goes on, and another caller can attach to it.
    #[default]
    Continue,
    /// The command is hung up, as by a terminal that closes.
    HangUp,
}

impl ExecRequest {
    /// A command with empty input, and with pipes instead of a terminal.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            user: None,
            workdir: None,
            tty: None,
            stdin: Stdin::Null,
            timeout: None,
            tag: None,
            keep: false,
            by: None,
            on_disconnect: Disconnect::Continue,
        }
    }
}

/// The standard input of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stdin {
    /// Bytes that the caller sends.
    Open,
    /// Empty input.
    Null,
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TtySize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}
