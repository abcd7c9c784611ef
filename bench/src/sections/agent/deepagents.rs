//! Python's deepagents with the model script of an agent, each run in a process of its own.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use crate::{context::BenchContext, peers::AbsentPeer};

/// deepagents, as `tests/differential/run` installs it.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/differential/venv/bin/python");
const PEER: &str = include_str!("peer.py");
const REFERENCE: &str = include_str!("../../../../tests/differential/reference.py");

/// The place where the tools of deepagents act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerBackend {
    /// BaseSandbox over subprocesses of this host, without a sandbox: no BaseSandbox can be faster.
    Subprocesses,
    /// LocalShellBackend: file tools in the Python process itself, commands as subprocesses, without a sandbox.
    LocalShell,
    /// BaseSandbox over `pal exec` into a Body.
    Body,
}

impl PeerBackend {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Subprocesses => "deepagents, BaseSandbox over subprocesses",
            Self::LocalShell => "deepagents, LocalShellBackend",
            Self::Body => "deepagents, BaseSandbox over `pal exec`",
        }
    }
}

/// The installed deepagents.
pub struct DeepAgents {
    dir: PathBuf,
    data: PathBuf,
    /// Its version.
    pub version: String,
}

impl DeepAgents {
    /// Finds deepagents, or says why it cannot be measured.
    pub fn find(context: &BenchContext) -> io::Result<Result<Self, AbsentPeer>> {
        let dir = context.dir("deepagents")?;
        fs::write(dir.join("peer.py"), PEER)?;
        fs::write(dir.join("reference.py"), REFERENCE)?;
        let program = "from importlib.metadata import version; print(version('deepagents'))";
        let asked = Command::new(PYTHON).args(["-c", program]).stdin(Stdio::null()).output();
        Ok(match asked {
            Ok(told) if told.status.success() => Ok(Self {
                dir,
                data: context.data.clone(),
                version: String::from_utf8_lossy(&told.stdout).trim().to_owned(),
            }),
            _ => Err(("deepagents".into(), format!("{PYTHON} has none; tests/differential/run installs it"))),
        })
    }

    /// Runs a script, and returns the times between two requests to the model.
    pub fn run(
        &self,
        script: &Path,
        root: &str,
        place: PeerBackend,
        body: [&str; 2],
    ) -> io::Result<Vec<Duration>> {
        let mut command = Command::new(PYTHON);
        command.arg("-B").arg(self.dir.join("peer.py")).arg(script).arg(root);
        match place {
            PeerBackend::Subprocesses => command.arg("subprocess"),
            PeerBackend::LocalShell => command.arg("local"),
            PeerBackend::Body => command.arg("pal").args(body),
        };
        let done =
            command.env("PAL_DATA", &self.data).stdin(Stdio::null()).current_dir(&self.dir).output()?;
        if !done.status.success() {
            let errors = String::from_utf8_lossy(&done.stderr);
            let newest = errors.trim().lines().last().unwrap_or_default();
            return Err(io::Error::other(format!("deepagents failed: {newest}")));
        }
        let times: Vec<u64> = serde_json::from_slice(&done.stdout)?;
        Ok(times.windows(2).map(|pair| Duration::from_nanos(pair[1].saturating_sub(pair[0]))).collect())
    }
}
