//! The way into a Body for callers who speak with its guest, or with a port of it, themselves.

use std::time::Duration;

use body::{BodyDir, ProcessState, guest::PortStream};
use proto::{BodyId, Failure, launch::RunRecord, vm::VmMetrics};
use tokio::net::UnixStream;

use crate::{Fleet, Status, failures};

/// What a Body uses now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResourceUsage {
    /// Processor time since it was started.
    pub cpu: Duration,
    /// Memory, files kept by the kernel included.
    pub memory: u64,
    /// The part of it that the kernel can drop.
    pub cache: u64,
    /// Its processes, the guest included.
    pub processes: u64,
}

impl Fleet {
    /// How a Body is now; less work than a whole view.
    pub fn status(&self, id: &BodyId) -> Result<Status, Failure> {
        let dir = BodyDir::at(self.body_path(id));
        if !dir.path().join("spec.json").exists() {
            return Err(crate::lifecycle::no_such_body(id));
        }
        Ok(match dir.condition().map_err(|error| failures::dir(id, error))? {
            ProcessState::Running(_) => Status::Running,
            ProcessState::Paused(_) if dir.is_held() => Status::Running,
            ProcessState::Paused(_) => Status::Paused,
            ProcessState::Stopped | ProcessState::Dead(_) | ProcessState::Interrupted if dir.is_swapped() => {
                Status::Paused
            }
            ProcessState::Stopped => Status::Stopped,
            ProcessState::Dead(_) => Status::Dead,
            ProcessState::Interrupted => Status::Interrupted,
        })
    }
}

/// Connections to the guest of a Body, and what the Body uses.
#[derive(Debug, Clone, Copy)]
pub struct GuestAccess<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl GuestAccess<'_> {
    /// A stream to a Body's guest, which wants [`Fleet::token`].
    pub async fn connect(&self, id: &BodyId) -> Result<UnixStream, Failure> {
        self.fleet.guest(id).connect_raw().await.map_err(failures::guest)
    }

    /// A stream to a port inside a Body.
    pub async fn dial(&self, id: &BodyId, port: u16) -> Result<PortStream, Failure> {
        self.fleet.guest(id).dial(port).await.map_err(failures::guest)
    }

    /// How many processes that callers started still run in a Body.
    pub async fn busy(&self, id: &BodyId) -> Result<u32, Failure> {
        self.fleet.guest(id).info().await.map(|info| info.processes).map_err(failures::guest)
    }

    /// What a Body that runs uses now.
    pub fn usage(&self, id: &BodyId) -> Result<ResourceUsage, Failure> {
        let running: RunRecord = self.fleet.running(id)?;
        let used = body::usage::measure(&running);
        Ok(ResourceUsage {
            cpu: Duration::from_millis(used.cpu_ms),
            memory: used.memory,
            cache: used.cache,
            processes: used.processes,
        })
    }

    /// What a Body uses, as its engine knows it; none where it does not run, or its engine is busy or does not tell.
    pub fn metrics(&self, id: &BodyId) -> Option<VmMetrics> {
        let dir = BodyDir::at(self.fleet.body_path(id));
        let spec = dir.spec().ok().filter(|_| matches!(dir.condition(), Ok(ProcessState::Running(_))))?;
        self.fleet.driver(&spec).ok()?.metrics(&dir)
    }

    /// What a Body's files take on disk beyond what it started from. Walks them all.
    pub fn disk_usage(&self, id: &BodyId) -> u64 {
        let measured = std::fs::File::open(self.fleet.body_path(id).join("disk/upper"))
            .and_then(|upper| sys::tree::usage(std::os::fd::AsFd::as_fd(&upper)));
        measured.map_or(0, |usage| usage.bytes)
    }
}
