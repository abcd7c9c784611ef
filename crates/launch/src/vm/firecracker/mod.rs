//! Firecracker: its process and its API, in the order of requests that the API's description asks for.
//!
//! It resets its vsock device when it saves a microVM, so the channel moves to a new connection then. It maps memory
//! from the saved file, copy on write and opened read-only.

mod measured;
pub mod messages;

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::Path,
    process::{Command, Stdio},
    rc::{Rc, Weak},
    time::Duration,
};

use proto::vm::{DiskTraffic, VmPlan, VmStart};

pub use self::measured::add_up;
use self::{
    measured::MetricsReader,
    messages::{
        Action, BootSource, Drive, Entropy, MachineConfig, MemoryBackend, MetricsConfig, SnapshotCreate,
        SnapshotLoad, VmPatch, VmRunState, Vsock, VsockOverride,
    },
};
use super::{
    firecracker_jail,
    http::{ApiRequest, HypervisorApi},
    hypervisor::{ChildProcess, DriverFuture, HypervisorDriver, OutputTail, spawn},
    scratch,
    sidecar::Sidecar,
    vsock,
};

const API: &str = "/dev/shm/api.sock";
const STATE: &str = "/dev/shm/state";
/// It may have to write all of a microVM's memory.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a resumed guest may take to accept a connection again.
const CALL_PATIENCE: Duration = Duration::from_secs(20);

/// The file to which it writes its metrics.
const METRICS: &str = "/dev/shm/metrics";
/// How often the metrics are read without a request: Firecracker writes a line per minute, to a tmpfs.
const CATCH_UP_EVERY: Duration = Duration::from_secs(600);

/// A running Firecracker that accepts requests.
pub struct Firecracker {
    process: ChildProcess,
    api: HypervisorApi,
    said: OutputTail,
    measured: Rc<RefCell<MetricsReader>>,
}

/// Starts the hypervisor, or takes it over from its jailer.
pub async fn open(vm: &VmPlan, jailer: Option<Sidecar>) -> io::Result<Box<dyn HypervisorDriver>> {
    let metrics = File::options().read(true).write(true).create(true).truncate(true).open(METRICS)?;
    let (mut process, said, complained) = match jailer {
        Some(jailer) => {
            std::os::unix::fs::fchown(&metrics, Some(firecracker_jail::ID), Some(firecracker_jail::ID))?;
            let (process, said) = firecracker_jail::released(jailer).await?;
            (process, said.clone(), said)
        }
        None => start_unjailed(vm)?,
    };
    let api = HypervisorApi::new(API, PATIENCE);
    if let Err(error) = api.wait(|| process.ended().is_some()).await {
        return Err(complained.or(said.or(error).await).await);
    }
    api.send(&self::metrics()?).await?;
    let measured = Rc::new(RefCell::new(MetricsReader::of(metrics)));
    tokio::task::spawn_local(catch_up(Rc::downgrade(&measured)));
    Ok(Box::new(Firecracker { process, api, said, measured }))
}

/// Reads metrics for as long as the reader exists.
async fn catch_up(measured: Weak<RefCell<MetricsReader>>) {
    loop {
        tokio::time::sleep(CATCH_UP_EVERY).await;
        let Some(measured) = measured.upgrade() else { return };
        // An error shows again at the next request for metrics.
        let _ = measured.borrow_mut().catch_up();
    }
}

/// The command line arguments.
pub fn arguments() -> [&'static str; 4] {
    ["--api-sock", API, "--level", "Error"]
}

/// Starts the hypervisor without a jailer.
fn start_unjailed(vm: &VmPlan) -> io::Result<(ChildProcess, OutputTail, OutputTail)> {
    vsock::clear(API);
    let (say, hear) = OutputTail::pipe()?;
    let (complain, complaints) = OutputTail::pipe()?;
    let mut command = Command::new(&vm.program);
    command.args(arguments()).args(["--id", firecracker_jail::NAME]).env_clear();
    command.stdin(Stdio::null()).stdout(say).stderr(complain);
    let process = spawn(command, || Ok(()))?;
    Ok((process, OutputTail::read_in_background(hear), OutputTail::read_in_background(complaints)))
}

/// The requests that boot a microVM of this plan, in order.
pub fn boot(vm: &VmPlan, kernel: &Path, initrd: &Path, cmdline: &str) -> io::Result<Vec<ApiRequest>> {
    let machine = MachineConfig {
        vcpu_count: vm.cpus,
        mem_size_mib: vm.memory_bytes >> 20,
        smt: false,
        track_dirty_pages: false,
    };
    let boot = BootSource {
        kernel_image_path: kernel.to_owned(),
        initrd_path: initrd.to_owned(),
        boot_args: cmdline.to_owned(),
    };
    let line = Vsock { guest_cid: vsock::GUEST, uds_path: vsock::SOCKET.to_owned() };
    let mut asked =
        vec![ApiRequest::put("/machine-config", &machine)?, ApiRequest::put("/boot-source", &boot)?];
    for drive in drives(vm) {
        asked.push(ApiRequest::put(format!("/drives/{}", drive.drive_id), &drive)?);
    }
    asked.push(ApiRequest::put("/vsock", &line)?);
    asked.push(ApiRequest::put("/entropy", &Entropy {})?);
    asked.push(ApiRequest::put("/actions", &Action { action_type: "InstanceStart" })?);
    Ok(asked)
}

/// The private upper comes first: the guest's kernel names its disks in this order.
fn drives(vm: &VmPlan) -> Vec<Drive> {
    let upper = Drive::of(proto::vm::UPPER.to_owned(), vm.upper.clone(), false);
    let images = vm
        .images
        .iter()
        .enumerate()
        .map(|(index, image)| Drive::of(super::qemu::image_name(index), image.clone(), true));
    std::iter::once(upper).chain(images).collect()
}

/// The request that restores a microVM.
pub fn thaw(ram: &Path, state: &Path) -> io::Result<ApiRequest> {
    let load = SnapshotLoad {
        snapshot_path: state.to_owned(),
        mem_backend: MemoryBackend { backend_type: "File", backend_path: ram.to_owned() },
        track_dirty_pages: false,
        resume_vm: true,
        vsock_override: VsockOverride { uds_path: vsock::SOCKET.to_owned() },
    };
    ApiRequest::put("/snapshot/load", &load)
}

/// The first request: the file for metrics.
pub fn metrics() -> io::Result<ApiRequest> {
    ApiRequest::put("/metrics", &MetricsConfig { metrics_path: METRICS.into() })
}

/// The request that flushes the metrics.
pub fn flush() -> io::Result<ApiRequest> {
    ApiRequest::put("/actions", &Action { action_type: "FlushMetrics" })
}

/// The request that pauses or resumes the CPUs.
pub fn state(state: VmRunState) -> io::Result<ApiRequest> {
    ApiRequest::patch("/vm", &VmPatch { state })
}

/// The request that saves a microVM.
pub fn save() -> io::Result<ApiRequest> {
    ApiRequest::put(
        "/snapshot/create",
        &SnapshotCreate {
            snapshot_type: "Full",
            snapshot_path: STATE.into(),
            mem_file_path: scratch::PLACE.into(),
        },
    )
}

impl HypervisorDriver for Firecracker {
    fn begin<'a>(&'a mut self, vm: &'a VmPlan) -> DriverFuture<'a, OwnedFd> {
        Box::pin(async move {
            let patience = match &vm.begin {
                VmStart::Boot { kernel, initrd, cmdline } => {
                    for request in boot(vm, kernel, initrd, cmdline)? {
                        self.api.send(&request).await?;
                    }
                    Duration::from_millis(vm.boot_ms_max)
                }
                VmStart::Thaw { ram, state, .. } => {
                    self.api.send(&thaw(ram, state)?).await?;
                    CALL_PATIENCE
                }
            };
            vsock::call(Path::new(vsock::SOCKET), patience).await
        })
    }

    fn pause(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(async { self.api.send(&state(VmRunState::Paused)?).await })
    }

    fn save<'a>(&'a mut self, vm: &'a VmPlan, ram: File, state: File) -> DriverFuture<'a, ()> {
        Box::pin(async move {
            self.api.send(&self::save()?).await?;
            let kept = scratch::keep_file(ram, vm.memory_bytes)
                .await
                .and_then(|()| scratch::copy_small(Path::new(STATE), state));
            let _ = std::fs::remove_file(STATE);
            kept
        })
    }

    fn resume(&mut self) -> DriverFuture<'_, Option<OwnedFd>> {
        Box::pin(async {
            self.api.send(&state(VmRunState::Resumed)?).await?;
            vsock::call(Path::new(vsock::SOCKET), CALL_PATIENCE).await.map(Some)
        })
    }

    fn console(&mut self) -> DriverFuture<'_, Vec<String>> {
        Box::pin(async { Ok(self.said.console()) })
    }

    fn traffic(&mut self) -> DriverFuture<'_, (BTreeMap<String, DiskTraffic>, Option<u64>)> {
        Box::pin(async {
            self.api.send(&flush()?).await?;
            let mut measured = self.measured.borrow_mut();
            measured.catch_up()?;
            Ok((measured.counted.clone(), None))
        })
    }

    fn process(&mut self) -> &mut ChildProcess {
        &mut self.process
    }
}
