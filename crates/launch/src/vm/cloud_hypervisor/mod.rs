//! Cloud Hypervisor: its process and its API.
//!
//! It chooses the names of the files of a saved microVM itself, in a directory. When it opens the memory file, the
//! VMM process hands it a file of its Body; the other files are small and travel as one. A restored microVM keeps its
//! vsock address but not the connection, so the host connects again.

pub mod messages;

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::symlink,
    },
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use proto::vm::{DiskTraffic, VmPlan, VmStart};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::messages::{
    ConsoleConfig, CpusConfig, DiskConfig, FsConfig, MemoryConfig, PayloadConfig, RestoreConfig, RngConfig,
    SnapshotConfig, VmConfig, VsockConfig,
};
use super::{
    http::{ApiRequest, HypervisorApi},
    hypervisor::{ChildProcess, DriverFuture, HypervisorDriver, OutputTail, spawn},
    pair, scratch, vsock,
};

const API: &str = "/dev/shm/api.sock";
/// Directories for a microVM that is saved, and for one that is restored.
const SAVED: &str = "/dev/shm/saved";
const THAWED: &str = "/dev/shm/thawed";
/// The names that it gives to the files of configuration, CPU and device state, and memory.
const CONFIG_FILE: &str = "config.json";
const STATE_FILE: &str = "state.json";
const MEMORY_FILE: &str = "memory-ranges";
const PATIENCE: Duration = Duration::from_secs(120);
const CALL_PATIENCE: Duration = Duration::from_secs(20);

/// A running Cloud Hypervisor that accepts requests.
pub struct CloudHypervisor {
    process: ChildProcess,
    api: HypervisorApi,
    said: OutputTail,
}

/// The state of a saved microVM besides memory and disk, as one file.
#[derive(Debug, Serialize, Deserialize)]
struct SavedState {
    config: String,
    state: String,
}

/// Starts the hypervisor.
pub async fn open(vm: &VmPlan) -> io::Result<Box<dyn HypervisorDriver>> {
    vsock::clear(API);
    let (writer, reader) = OutputTail::pipe()?;
    let (complain, complaints) = OutputTail::pipe()?;
    let (asks, asks_there) = pair()?;
    let mut command = Command::new(&vm.program);
    command.args(["--api-socket", API]).env_clear();
    command.stdin(Stdio::null()).stdout(writer).stderr(complain);
    let mut process = spawn(command, || super::open_broker::ask(&asks_there))?;
    let (said, complained) =
        (OutputTail::read_in_background(reader), OutputTail::read_in_background(complaints));
    drop(asks_there);
    match sys::fd::receive(asks.as_fd()) {
        Ok(listener) => {
            let path = CString::new(format!("{SAVED}/{MEMORY_FILE}"))?;
            tokio::task::spawn_local(super::open_broker::serve_opens(listener, scratch::open()?, path));
        }
        Err(error) => return Err(complained.or(error).await),
    }
    let api = HypervisorApi::new(API, PATIENCE);
    if let Err(error) = api.wait(|| process.ended().is_some()).await {
        return Err(complained.or(error).await);
    }
    Ok(Box::new(CloudHypervisor { process, api, said }))
}

/// The requests that boot a microVM of this plan, in order.
pub fn boot(vm: &VmPlan, kernel: &Path, initrd: &Path, cmdline: &str) -> io::Result<Vec<ApiRequest>> {
    let upper = DiskConfig::of(proto::vm::UPPER.to_owned(), vm.upper.clone(), false);
    let images = vm
        .images
        .iter()
        .enumerate()
        .map(|(index, image)| DiskConfig::of(super::qemu::image_name(index), image.clone(), true));
    let config = VmConfig {
        cpus: CpusConfig { boot_vcpus: vm.cpus, max_vcpus: vm.cpus },
        memory: MemoryConfig { size: vm.memory_bytes, shared: !vm.shares.is_empty() },
        payload: PayloadConfig {
            kernel: kernel.to_owned(),
            initramfs: initrd.to_owned(),
            cmdline: cmdline.to_owned(),
        },
        disks: std::iter::once(upper).chain(images).collect(),
        rng: RngConfig { src: "/dev/urandom".into() },
        serial: ConsoleConfig { mode: "Tty" },
        console: ConsoleConfig { mode: "Off" },
        vsock: VsockConfig { cid: vsock::GUEST, socket: vsock::SOCKET.to_owned() },
        fs: vm.shares.iter().map(|share| FsConfig::of(share.tag.clone(), share.socket.clone())).collect(),
    };
    Ok(vec![ApiRequest::put("/api/v1/vm.create", &config)?, ApiRequest::act("/api/v1/vm.boot")])
}

/// The requests that restore a microVM, in order.
pub fn thaw() -> io::Result<Vec<ApiRequest>> {
    let restore = RestoreConfig { source_url: format!("file://{THAWED}"), prefault: false };
    Ok(vec![ApiRequest::put("/api/v1/vm.restore", &restore)?, resume()])
}

/// The request that pauses the CPUs.
pub fn pause() -> ApiRequest {
    ApiRequest::act("/api/v1/vm.pause")
}

/// The request that saves a microVM.
pub fn save() -> io::Result<ApiRequest> {
    ApiRequest::put("/api/v1/vm.snapshot", &SnapshotConfig { destination_url: format!("file://{SAVED}") })
}

/// The request that resumes the CPUs.
pub fn resume() -> ApiRequest {
    ApiRequest::act("/api/v1/vm.resume")
}

/// The request for the counters.
pub fn counters() -> ApiRequest {
    ApiRequest::get("/api/v1/vm.counters")
}

/// The request that shuts the hypervisor down.
pub fn stop() -> ApiRequest {
    ApiRequest::act("/api/v1/vmm.shutdown")
}

impl CloudHypervisor {
    async fn send_all(&self, requests: &[ApiRequest]) -> io::Result<()> {
        for request in requests {
            self.api.send(request).await?;
        }
        Ok(())
    }
}

impl HypervisorDriver for CloudHypervisor {
    fn begin<'a>(&'a mut self, vm: &'a VmPlan) -> DriverFuture<'a, OwnedFd> {
        Box::pin(async move {
            let patience = match &vm.begin {
                VmStart::Boot { kernel, initrd, cmdline } => {
                    self.send_all(&boot(vm, kernel, initrd, cmdline)?).await?;
                    Duration::from_millis(vm.boot_ms_max)
                }
                VmStart::Thaw { ram, state, .. } => {
                    unpack(ram, state)?;
                    let thawed = self.send_all(&thaw()?).await;
                    let _ = fs::remove_dir_all(THAWED);
                    thawed?;
                    CALL_PATIENCE
                }
            };
            vsock::call(Path::new(vsock::SOCKET), patience).await
        })
    }

    fn pause(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(async { self.api.send(&pause()).await })
    }

    fn save<'a>(&'a mut self, vm: &'a VmPlan, ram: File, state: File) -> DriverFuture<'a, ()> {
        Box::pin(async move {
            fs::create_dir(SAVED)?;
            let kept = match self.api.send(&self::save()?).await {
                Ok(()) => scratch::keep_file(ram, vm.memory_bytes).await.and_then(|()| pack(state)),
                refused => refused,
            };
            let _ = fs::remove_dir_all(SAVED);
            kept
        })
    }

    fn resume(&mut self) -> DriverFuture<'_, Option<OwnedFd>> {
        Box::pin(async {
            self.api.send(&resume()).await?;
            Ok(None)
        })
    }

    fn console(&mut self) -> DriverFuture<'_, Vec<String>> {
        Box::pin(async { Ok(self.said.console()) })
    }

    // Without a shutdown, the hypervisor would boot a guest that ended again.
    fn stop(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(async { self.api.send(&stop()).await })
    }

    fn traffic(&mut self) -> DriverFuture<'_, (BTreeMap<String, DiskTraffic>, Option<u64>)> {
        Box::pin(async {
            let counters_json = self.api.ask(&counters()).await?;
            Ok((disks(&serde_json::from_slice(&counters_json)?), None))
        })
    }

    fn process(&mut self) -> &mut ChildProcess {
        &mut self.process
    }
}

/// Parses the answer of `vm.counters`. The hypervisor names devices itself, its disks in the order in which they were
/// given.
pub fn disks(counters_json: &Value) -> BTreeMap<String, DiskTraffic> {
    let mut found: Vec<(usize, DiskTraffic)> = counters_json
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(name, counted)| {
            let count = |name: &str| counted[name].as_u64().unwrap_or(0);
            let traffic = DiskTraffic {
                reads: count("read_ops"),
                read_bytes: count("read_bytes"),
                writes: count("write_ops"),
                written_bytes: count("write_bytes"),
            };
            Some((name.trim_start_matches('_').strip_prefix("disk")?.parse().ok()?, traffic))
        })
        .collect();
    found.sort_by_key(|(number, _)| *number);
    let names = std::iter::once(proto::vm::UPPER.to_owned()).chain((0..).map(super::qemu::image_name));
    names.zip(found).map(|(name, (_, traffic))| (name, traffic)).collect()
}

fn pack(mut state: File) -> io::Result<()> {
    let read = |name: &str| sys::fd::read_small(&Path::new(SAVED).join(name), scratch::SMALL_LEN_MAX);
    let both = SavedState { config: read(CONFIG_FILE)?, state: read(STATE_FILE)? };
    io::Write::write_all(&mut state, &serde_json::to_vec(&both)?)
}

fn unpack(ram: &Path, state: &Path) -> io::Result<()> {
    let both: SavedState = serde_json::from_str(&sys::fd::read_small(state, scratch::SMALL_LEN_MAX)?)?;
    let dir = Path::new(THAWED);
    fs::create_dir(dir)?;
    fs::write(dir.join(CONFIG_FILE), both.config)?;
    fs::write(dir.join(STATE_FILE), both.state)?;
    symlink(ram, dir.join(MEMORY_FILE))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn disks_are_counted_under_the_names_they_were_given() {
        let counted = |bytes: u64| json!({ "read_bytes": bytes, "read_ops": 1, "write_bytes": 0, "write_ops": 0, "read_latency_avg": 5 });
        let counters_json = json!({ "_disk2": counted(30), "_disk0": counted(10), "_disk10": counted(40), "_net1": { "rx_bytes": 1 } });
        let seen: Vec<_> =
            disks(&counters_json).into_iter().map(|(name, traffic)| (name, traffic.read_bytes)).collect();
        assert_eq!(seen, [("image0".into(), 30), ("image1".into(), 40), ("upper".into(), 10)]);
        assert!(disks(&json!("no object")).is_empty());
    }
}
