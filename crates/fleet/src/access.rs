//! Direct access to running Bodies: status, connections to the guest and to ports inside, and resource usage.

use std::time::Duration;

use body::{
    BodyDir, ProcessState,
    guest::{GuestError, PortStream},
};
use proto::{BodyId, Failure, guest::ProcessList, launch::RunRecord, vm::VmMetrics};
use tokio::net::UnixStream;

use crate::{Fleet, Status, blocking::run_blocking, failures};

/// The resources that a Body uses at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResourceUsage {
    /// CPU time since the Body started.
    pub cpu: Duration,
    /// Memory in bytes, including the page cache.
    pub memory: u64,
    /// The part of `memory` that is page cache, which the kernel can drop.
    pub cache: u64,
    /// The number of processes, including the guest.
    pub processes: u64,
}

impl Fleet {
    /// Returns the status of a Body. This costs less than a whole [`crate::BodyView`].
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

/// Opens connections to the guests of Bodies and measures the resources that Bodies use.
#[derive(Debug, Clone, Copy)]
pub struct GuestAccess<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl GuestAccess<'_> {
    /// Opens a stream to a Body's guest. The guest expects requests with [`Fleet::token`].
    pub async fn connect(&self, id: &BodyId) -> Result<UnixStream, Failure> {
        self.fleet.guest(id).connect_raw().await.map_err(failures::guest)
    }

    /// Opens a stream to a port inside a Body.
    pub async fn dial(&self, id: &BodyId, port: u16) -> Result<PortStream, Failure> {
        self.fleet.guest(id).dial(port).await.map_err(failures::guest)
    }

    /// Counts the processes in a Body that callers started and that still run.
    pub async fn busy(&self, id: &BodyId) -> Result<u32, Failure> {
        self.fleet.guest(id).info().await.map(|info| info.processes).map_err(failures::guest)
    }

    /// Lists the processes in a running Body.
    pub async fn processes(&self, id: &BodyId) -> Result<ProcessList, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        self.fleet.guest(id).processes().await.map_err(|error| match error {
            GuestError::Refused { code, .. } if code == "404" => {
                failures::old_guest(id, "list its processes")
            }
            error => failures::guest(error),
        })
    }

    /// Measures the resources that a running Body uses.
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

    /// Returns the metrics that the Body's hypervisor reports; `None` if the Body does not run, or if its hypervisor
    /// is busy or reports none.
    pub fn metrics(&self, id: &BodyId) -> Option<VmMetrics> {
        let dir = BodyDir::at(self.fleet.body_path(id));
        let spec = dir.spec().ok().filter(|_| matches!(dir.condition(), Ok(ProcessState::Running(_))))?;
        self.fleet.driver(&spec).ok()?.metrics(&dir)
    }

    /// Measures the disk space of the files that a Body wrote, without the layers below. Walks all of these files.
    pub fn disk_usage(&self, id: &BodyId) -> u64 {
        let measured = std::fs::File::open(self.fleet.body_path(id).join("disk/upper"))
            .and_then(|upper| sys::tree::usage(std::os::fd::AsFd::as_fd(&upper)));
        measured.map_or(0, |usage| usage.bytes)
    }
}
