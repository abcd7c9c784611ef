//! What callers ask of the fleet.

use std::{collections::BTreeMap, time::Duration};

use body::driver::{LimitRequest, StartMode};
use proto::{
    Layer,
    spec::{BodyRole, Egress, Home, Life, Mount},
    vm::{Engine, Sharing},
    workspace::Workspace,
};

use crate::Lease;

/// A Body to be made.
#[derive(Debug, Clone)]
pub struct Create {
    /// How it is held; none asks for the strongest that this host runs at interactive speed.
    pub layer: Option<Layer>,
    /// What drives its machine, where it is one; none asks for the one of the snapshot it starts from, or QEMU.
    pub engine: Option<Engine>,
    /// What it starts from: `host`, or the id or name of a snapshot.
    pub template: String,
    /// Limits that differ from the host's defaults.
    pub limits: LimitRequest,
    /// Environment of every process in it.
    pub env: BTreeMap<String, String>,
    /// What it sees of the host by name.
    pub mounts: Vec<Mount>,
    /// How a machine sees them; without it, one is given nothing of the host.
    pub share: Option<Sharing>,
    /// Repositories in it, whose layers are there.
    pub workspaces: Vec<Workspace>,
    /// A home that is an area of its own.
    pub home: Option<Home>,
    /// Lines of shell that run at each of its starts.
    pub at_start: Vec<String>,
    /// Ports in it that somebody will want to reach.
    pub ports: Vec<u16>,
    /// The names that it may reach.
    pub egress: Option<Egress>,
    /// Why it is made.
    pub role: BodyRole,
    /// Where commands run.
    pub workdir: Option<String>,
    /// Who runs commands; `user` if none.
    pub user: Option<String>,
    /// What becomes of it.
    pub life: Life,
    /// On which terms it is kept; none until it is removed.
    pub lease: Option<Lease>,
    /// A microVM boots, also where one like it could be thawed.
    pub cold: bool,
}

impl Create {
    /// A Body of the host's own root that ends with its maker.
    pub fn run() -> Self {
        Self {
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
            role: BodyRole::Work,
            workdir: None,
            user: None,
            life: Life::Run,
            lease: None,
            cold: false,
        }
    }

    /// Whether its start may continue from saved memory.
    pub(crate) fn start_mode(&self) -> StartMode {
        if self.cold { StartMode::Boot } else { StartMode::Restore }
    }

    /// A Body of the host's own root that is kept until it is removed.
    pub fn kept() -> Self {
        Self { life: Life::Kept, ..Self::run() }
    }
}

/// A command to be run in a Body.
#[derive(Debug, Clone)]
pub struct ExecRequest {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Environment beyond the Body's.
    pub env: BTreeMap<String, String>,
    /// Who runs it; the Body's user if none.
    pub user: Option<String>,
    /// Where it runs; the Body's working directory if none.
    pub workdir: Option<String>,
    /// A terminal of this size, or pipes.
    pub tty: Option<TtySize>,
    /// What it reads.
    pub stdin: Stdin,
    /// When it is killed.
    pub timeout: Option<Duration>,
    /// A name by which it is found again: [`crate::Fleet::attach`].
    pub tag: Option<String>,
}

impl ExecRequest {
    /// A command with nothing to read, and pipes.
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
        }
    }
}

/// What a command reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stdin {
    /// What the caller sends.
    Open,
    /// Nothing.
    Null,
}

/// A terminal's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TtySize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}
