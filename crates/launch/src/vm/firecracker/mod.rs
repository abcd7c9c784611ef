//! Firecracker: its process, and the order of requests that its API's description asks for.
//!
//! Its vsock is reset whenever it is written down, so the line moves then. Memory is mapped from the frozen file, copy on
//! write and opened for reading only.

pub mod bodies;
mod measured;

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

use proto::vm::{Begin, Traffic, VmPlan};

pub use self::measured::add_up;
use self::{
    bodies::{
        Action, BootSource, Drive, Entropy, MachineConfig, MemoryBackend, Metrics, SnapshotCreate,
        SnapshotLoad, State, Vm, Vsock, VsockOverride,
    },
    measured::Measured,
};
use super::{
    beside::Beside,
    engine::{Doing, Engine, Process, Said, spawn},
    http::{Api, Request},
    jail, scratch, vsock,
};

const API: &str = "/dev/shm/api.sock";
const STATE: &str = "/dev/shm/state";
/// It may have to write down all of a machine's memory.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a machine that goes on may take to be called again.
const CALL_PATIENCE: Duration = Duration::from_secs(20);

/// Where it writes down what it did.
const METRICS: &str = "/dev/shm/metrics";
/// How often that is read where nobody asks: it writes a line a minute, into memory.
const CATCH_UP_EVERY: Duration = Duration::from_secs(600);

/// A Firecracker that takes commands.
pub struct Firecracker {
    process: Process,
    api: Api,
    said: Said,
    measured: Rc<RefCell<Measured>>,
}

/// Starts it, or takes it over from its jailer.
pub async fn open(vm: &VmPlan, jailer: Option<Beside>) -> io::Result<Box<dyn Engine>> {
    let metrics = File::options().read(true).write(true).create(true).truncate(true).open(METRICS)?;
    let (mut process, said, complained) = match jailer {
        Some(jailer) => {
            std::os::unix::fs::fchown(&metrics, Some(jail::ID), Some(jail::ID))?;
            let (process, said) = jail::released(jailer).await?;
            (process, said.clone(), said)
        }
        None => alone(vm)?,
    };
    let api = Api::new(API, PATIENCE);
    if let Err(error) = api.wait(|| process.ended().is_some()).await {
        return Err(complained.or(said.or(error).await).await);
    }
    api.send(&self::metrics()?).await?;
    let measured = Rc::new(RefCell::new(Measured::of(metrics)));
    tokio::task::spawn_local(catch_up(Rc::downgrade(&measured)));
    Ok(Box::new(Firecracker { process, api, said, measured }))
}

/// For as long as it is there.
async fn catch_up(measured: Weak<RefCell<Measured>>) {
    loop {
        tokio::time::sleep(CATCH_UP_EVERY).await;
        let Some(measured) = measured.upgrade() else { return };
        // Whoever asks hears of it.
        let _ = measured.borrow_mut().catch_up();
    }
}

/// What it is told when it is started.
pub fn arguments() -> [&'static str; 4] {
    ["--api-sock", API, "--level", "Error"]
}

/// Starts it without a jailer.
fn alone(vm: &VmPlan) -> io::Result<(Process, Said, Said)> {
    vsock::clear(API);
    let (say, hear) = Said::pipe()?;
    let (complain, complaints) = Said::pipe()?;
    let mut command = Command::new(&vm.program);
    command.args(arguments()).args(["--id", jail::NAME]).env_clear();
    command.stdin(Stdio::null()).stdout(say).stderr(complain);
    let process = spawn(command, || Ok(()))?;
    Ok((process, Said::overhear(hear), Said::overhear(complaints)))
}

/// What it is asked for a machine of that plan to boot, in this order.
pub fn boot(vm: &VmPlan, kernel: &Path, initrd: &Path, cmdline: &str) -> io::Result<Vec<Request>> {
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
    let mut asked = vec![Request::put("/machine-config", &machine)?, Request::put("/boot-source", &boot)?];
    for drive in drives(vm) {
        asked.push(Request::put(format!("/drives/{}", drive.drive_id), &drive)?);
    }
    asked.push(Request::put("/vsock", &line)?);
    asked.push(Request::put("/entropy", &Entropy {})?);
    asked.push(Request::put("/actions", &Action { action_type: "InstanceStart" })?);
    Ok(asked)
}

/// The private upper first: the machine's kernel names its disks in this order.
fn drives(vm: &VmPlan) -> Vec<Drive> {
    let upper = Drive::of(proto::vm::UPPER.to_owned(), vm.upper.clone(), false);
    let images = vm
        .images
        .iter()
        .enumerate()
        .map(|(index, image)| Drive::of(super::qemu::image_name(index), image.clone(), true));
    std::iter::once(upper).chain(images).collect()
}

/// What it is asked to thaw a machine.
pub fn thaw(ram: &Path, state: &Path) -> io::Result<Request> {
    let load = SnapshotLoad {
        snapshot_path: state.to_owned(),
        mem_backend: MemoryBackend { backend_type: "File", backend_path: ram.to_owned() },
        track_dirty_pages: false,
        resume_vm: true,
        vsock_override: VsockOverride { uds_path: vsock::SOCKET.to_owned() },
    };
    Request::put("/snapshot/load", &load)
}

/// What it is asked before all else: where to write down what it does.
pub fn metrics() -> io::Result<Request> {
    Request::put("/metrics", &Metrics { metrics_path: METRICS.into() })
}

/// What it is asked to write that down now.
pub fn flush() -> io::Result<Request> {
    Request::put("/actions", &Action { action_type: "FlushMetrics" })
}

/// What it is asked to have processors stand still, or go on.
pub fn state(state: State) -> io::Result<Request> {
    Request::patch("/vm", &Vm { state })
}

/// What it is asked to write a machine down.
pub fn save() -> io::Result<Request> {
    Request::put(
        "/snapshot/create",
        &SnapshotCreate {
            snapshot_type: "Full",
            snapshot_path: STATE.into(),
            mem_file_path: scratch::PLACE.into(),
        },
    )
}

impl Engine for Firecracker {
    fn begin<'a>(&'a mut self, vm: &'a VmPlan) -> Doing<'a, OwnedFd> {
        Box::pin(async move {
            let patience = match &vm.begin {
                Begin::Boot { kernel, initrd, cmdline } => {
                    for request in boot(vm, kernel, initrd, cmdline)? {
                        self.api.send(&request).await?;
                    }
                    Duration::from_millis(vm.boot_ms_max)
                }
                Begin::Thaw { ram, state, .. } => {
                    self.api.send(&thaw(ram, state)?).await?;
                    CALL_PATIENCE
                }
            };
            vsock::call(Path::new(vsock::SOCKET), patience).await
        })
    }

    fn pause(&mut self) -> Doing<'_, ()> {
        Box::pin(async { self.api.send(&state(State::Paused)?).await })
    }

    fn save<'a>(&'a mut self, vm: &'a VmPlan, ram: File, state: File) -> Doing<'a, ()> {
        Box::pin(async move {
            self.api.send(&self::save()?).await?;
            let kept = scratch::keep(ram, vm.memory_bytes)
                .await
                .and_then(|()| scratch::copy_small(Path::new(STATE), state));
            let _ = std::fs::remove_file(STATE);
            kept
        })
    }

    fn resume(&mut self) -> Doing<'_, Option<OwnedFd>> {
        Box::pin(async {
            self.api.send(&state(State::Resumed)?).await?;
            vsock::call(Path::new(vsock::SOCKET), CALL_PATIENCE).await.map(Some)
        })
    }

    fn console(&mut self) -> Doing<'_, String> {
        Box::pin(async { Ok(self.said.last_lines()) })
    }

    fn traffic(&mut self) -> Doing<'_, (BTreeMap<String, Traffic>, Option<u64>)> {
        Box::pin(async {
            self.api.send(&flush()?).await?;
            let mut measured = self.measured.borrow_mut();
            measured.catch_up()?;
            Ok((measured.counted.clone(), None))
        })
    }

    fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}
