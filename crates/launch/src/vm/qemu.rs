//! QEMU's `microvm` machine type: its command line, its process, and its monitor.
//!
//! A restored microVM must have exactly the devices of the saved one, so both command lines come from the same code
//! and differ only in how the microVM starts.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::CString,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, process::CommandExt},
    },
    process::{Command, Stdio},
    rc::Rc,
};

use proto::vm::{Accelerator, DiskTraffic, PORT, UPPER, VmPlan, VmStart};
use rustix::{pipe::PipeFlags, process::Pid};
use serde_json::{Value, json};
use sys::{namespace::ForkResult, ptrace_mmap::TraceStop};
use tokio::{
    net::UnixListener,
    signal::unix::{SignalKind, signal},
    task::{JoinHandle, JoinSet},
};

use super::{
    hypervisor::{ChildProcess, DriverFuture, HypervisorDriver, OutputTail},
    memory,
    migration_stream::{REST_LEN_MAX, split},
    open_broker, pair,
    qmp::QmpMonitor,
};

/// Memory for translated code under emulation.
const TRANSLATED_MIB: u32 = 64;
/// The emulated CPU. It lacks features that cost an emulator more than they give: byte-wise string copies (`erms`,
/// `fsrm`) become loops, SMAP splits each copy between kernel and user space in three, and PCID and XSAVES only add
/// code. It also lacks `rdrand` and `rdseed`: QEMU would take those from its own memory, and they would be equal in
/// every restored copy.
const EMULATED_PROCESSOR: &str = "max,la57=off,erms=off,fsrm=off,smap=off,pcid=off,invpcid=off,xsavec=off,xsaves=off,rdrand=off,rdseed=off";
/// Options of its disks: no other process takes their locks, and the host's page cache stays. QEMU assumes that a
/// restored microVM comes from another host, and would drop every cached page of every image first.
const FILE_OPTIONS: &str = "file.locking=off,file.drop-cache=off";
/// The first byte that the child sends before it becomes the hypervisor: whether it is traced.
const TRACED: [u8; 1] = *b"t";
const PLAIN: [u8; 1] = *b"p";
/// Most bytes that are kept of the console, to explain an early end.
const CONSOLE_LEN: u32 = 64 << 10;
/// The socket to which it writes its migration stream: in the Body's own root, which is memory.
const WAY: &str = "/dev/shm/save.sock";
/// Bytes per second of the migration stream: practically unlimited.
const BANDWIDTH: u64 = 1 << 36;

type MemoryCopy = JoinHandle<io::Result<()>>;

/// A running QEMU that accepts commands.
pub struct Qemu {
    process: ChildProcess,
    monitor: QmpMonitor,
    /// Its standard error.
    said: OutputTail,
    /// The connection to the guest, until `begin` returns it.
    line: Option<OwnedFd>,
    /// Whether its memory, which it takes for shared, is a private mapping.
    private: Rc<Cell<bool>>,
    /// The running copy of the memory that the microVM was restored from.
    copying: Option<MemoryCopy>,
}

/// Starts the hypervisor.
pub async fn open(vm: &VmPlan) -> io::Result<Box<dyn HypervisorDriver>> {
    let QemuProcess { process, line, monitor, complaints, state, asks, traced } = start(vm)?;
    let said = OutputTail::read_in_background(complaints);
    if let Some((listener, ram, path)) = asks {
        tokio::task::spawn_local(open_broker::serve_opens(listener, ram, path));
    }
    let private = Rc::new(Cell::new(false));
    if traced {
        tokio::task::spawn_local(keep_private(process.pid(), private.clone()));
    }
    let incoming = state
        .as_ref()
        .map(|state| ("migrate-incoming", json!({ "uri": format!("fd:{}", state.as_raw_fd()) })));
    match QmpMonitor::open(monitor, incoming).await {
        Ok(monitor) => {
            Ok(Box::new(Qemu { process, monitor, said, line: Some(line), private, copying: None }))
        }
        Err(error) => Err(said.or(error).await),
    }
}

impl HypervisorDriver for Qemu {
    fn begin<'a>(&'a mut self, vm: &'a VmPlan) -> DriverFuture<'a, OwnedFd> {
        Box::pin(async move {
            if matches!(vm.begin, VmStart::Thaw { .. }) {
                self.monitor.wait_loaded().await?;
                self.monitor.ask("cont", Value::Null).await?;
            }
            self.line.take().ok_or_else(|| io::ErrorKind::NotConnected.into())
        })
    }

    // The memory that a microVM was restored from never changes, so it is copied while the guest is being frozen.
    fn save_ahead(&mut self, vm: &VmPlan, ram: &File) {
        let VmStart::Thaw { ram: below, .. } = &vm.begin else { return };
        let Some(ram) = self.private.get().then(|| ram.try_clone().ok()).flatten() else { return };
        let below = below.clone();
        self.copying =
            Some(tokio::task::spawn_blocking(move || sys::fd::copy_data(&File::open(below)?, &ram)));
    }

    fn pause(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(async { self.monitor.ask("stop", Value::Null).await.map(drop) })
    }

    fn save<'a>(&'a mut self, vm: &'a VmPlan, ram: File, state: File) -> DriverFuture<'a, ()> {
        Box::pin(self.save_state(vm, ram, state))
    }

    fn resume(&mut self) -> DriverFuture<'_, Option<OwnedFd>> {
        Box::pin(async { self.monitor.ask("cont", Value::Null).await.map(|_| None) })
    }

    fn console(&mut self) -> DriverFuture<'_, Vec<String>> {
        Box::pin(async {
            // The console of a hypervisor that has ended is gone, so its standard error is used.
            self.monitor.console().await.or_else(|_| Ok(self.said.console()))
        })
    }

    fn wait_stopped(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(self.monitor.wait_stopped())
    }

    fn end_with_guest(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(self.monitor.end_with_guest())
    }

    fn traffic(&mut self) -> DriverFuture<'_, (BTreeMap<String, DiskTraffic>, Option<u64>)> {
        Box::pin(async {
            let told = self.monitor.ask("query-blockstats", Value::Null).await?;
            let balloon = self.monitor.ask("query-balloon", Value::Null).await.ok();
            Ok((disks(&told), balloon.and_then(|told| told["actual"].as_u64())))
        })
    }

    fn process(&mut self) -> &mut ChildProcess {
        &mut self.process
    }
}

impl Qemu {
    async fn save_state(&mut self, vm: &VmPlan, ram: File, state: File) -> io::Result<()> {
        let copying = self.copying.take();
        self.monitor.begin_saving();
        let _ = std::fs::remove_file(WAY);
        let listener = UnixListener::bind(WAY)?;
        let memory = vm.memory_bytes;
        let left_out = copying.is_some();
        let to = ram.try_clone()?;
        // The task is aborted on drop: a killed hypervisor never connects, and a thread would wait forever.
        let mut splitting = JoinSet::new();
        splitting.spawn(async move {
            let from = listener.accept().await?.0.into_std()?;
            from.set_nonblocking(false)?;
            let take = move || {
                if left_out {
                    memory::pass(from, &state, REST_LEN_MAX)
                } else {
                    split(from, &to, memory, &state)
                }
            };
            tokio::task::spawn_blocking(take).await.map_err(io::Error::other)?
        });
        let saved = self.send_all().await;
        let split = match &saved {
            Ok(()) => splitting.join_next().await.unwrap_or_else(|| Ok(Ok(()))).map_err(io::Error::other)?,
            Err(_) => {
                // QEMU then closes the stream.
                let _ = self.monitor.ask("migrate_cancel", Value::Null).await;
                Ok(())
            }
        };
        let _ = std::fs::remove_file(WAY);
        saved.and(split)?;
        match copying {
            Some(copying) => {
                copying.await.map_err(io::Error::other)??;
                self.add_private_pages(vm, ram).await
            }
            None => Ok(()),
        }
    }

    /// Makes QEMU send its migration stream to the socket.
    async fn send_all(&mut self) -> io::Result<()> {
        self.monitor.ask("migrate-set-parameters", json!({ "max-bandwidth": BANDWIDTH })).await?;
        self.monitor.ask("migrate", json!({ "uri": format!("unix:{WAY}") })).await?;
        self.monitor.wait_saved().await
    }

    async fn add_private_pages(&self, vm: &VmPlan, ram: File) -> io::Result<()> {
        let VmStart::Thaw { ram: below, .. } = vm.begin.clone() else { return Ok(()) };
        let (process, len) = (self.process.pid(), vm.memory_bytes);
        tokio::task::spawn_blocking(move || memory::add_own_pages(process, &below, len, &ram))
            .await
            .map_err(io::Error::other)?
    }
}

/// Parses the answer of `query-blockstats`.
fn disks(told: &Value) -> BTreeMap<String, DiskTraffic> {
    let disk = |one: &Value| -> Option<(String, DiskTraffic)> {
        let count = |name: &str| one["stats"][name].as_u64().unwrap_or(0);
        let traffic = DiskTraffic {
            reads: count("rd_operations"),
            read_bytes: count("rd_bytes"),
            writes: count("wr_operations"),
            written_bytes: count("wr_bytes"),
        };
        Some((one["device"].as_str()?.to_owned(), traffic))
    };
    told.as_array().into_iter().flatten().filter_map(disk).collect()
}

/// Waits until the hypervisor maps the saved memory, and makes the mapping private.
async fn keep_private(pid: Pid, private: Rc<Cell<bool>>) {
    let Ok(mut stops) = signal(SignalKind::child()) else { return };
    loop {
        match sys::ptrace_mmap::stopped(pid) {
            Ok(Some(TraceStop::Call)) => {
                private.set(sys::ptrace_mmap::make_private(pid).is_ok());
                return;
            }
            // The process has executed the hypervisor, or a signal is being delivered to it.
            Ok(Some(TraceStop::Other(status))) => {
                drop(sys::ptrace_mmap::watch_calls(pid).and_then(|()| sys::ptrace_mmap::go_on(pid, status)))
            }
            Ok(None) => {
                if stops.recv().await.is_none() {
                    return;
                }
            }
            // The process has ended.
            Err(_) => return,
        }
    }
}

/// A QEMU that was started.
struct QemuProcess {
    /// Its process.
    process: ChildProcess,
    /// The connection to the guest.
    line: OwnedFd,
    /// The socket of its monitor.
    monitor: OwnedFd,
    /// Its standard error.
    complaints: OwnedFd,
    /// The state of a microVM to restore, under the descriptor number that it has in the child, too.
    state: Option<OwnedFd>,
    /// The seccomp listener for its opens for writing, and the memory file, which it may only read.
    asks: Option<(OwnedFd, File, CString)>,
    /// Whether it stops where it maps that memory, so that the mapping can be made private.
    traced: bool,
}

fn start(vm: &VmPlan) -> io::Result<QemuProcess> {
    let (line, line_there) = pair()?;
    let (monitor, monitor_there) = pair()?;
    let (complaints, complain) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (asks, asks_there) = pair()?;
    let (state, ram) = match &vm.begin {
        VmStart::Thaw { state, ram, .. } => (
            Some(OwnedFd::from(File::open(state)?)),
            Some((File::open(ram)?, CString::new(ram.as_os_str().as_bytes())?)),
        ),
        VmStart::Boot { .. } => (None, None),
    };
    for fd in [Some(&line_there), Some(&monitor_there), state.as_ref()].into_iter().flatten() {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
    }
    let (told, tell) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    match sys::namespace::fork()? {
        ForkResult::Child => {
            // Where tracing is not permitted, the memory is mapped as it is, and the hypervisor writes it out.
            let traced = ram.is_some() && sys::ptrace_mmap::by_parent().is_ok();
            let _ = rustix::io::write(&tell, if traced { &TRACED } else { &PLAIN });
            let mut command = Command::new(&vm.program);
            command
                .args(arguments(vm, line_there.as_raw_fd(), monitor_there.as_raw_fd(), traced))
                .env_clear();
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(complain));
            let prepared = if ram.is_some() { prepare(vm, &asks_there, traced) } else { Ok(()) };
            let error = prepared.err().unwrap_or_else(|| command.exec());
            let _ = io::Write::write_all(&mut io::stderr(), error.to_string().as_bytes());
            std::process::exit(1)
        }
        ForkResult::Parent(pid) => {
            let process = ChildProcess::of(pid);
            drop(tell);
            let mut word = [0];
            let traced = rustix::io::read(&told, &mut word).is_ok() && word == TRACED;
            // The child has its own copies. Ours are closed, so that the end of its output can be read after its
            // exit.
            drop((asks_there, complain));
            let asks = ram
                .map(|(ram, path)| sys::fd::receive(asks.as_fd()).map(|listener| (listener, ram, path)))
                .transpose()?;
            Ok(QemuProcess { process, line, monitor, complaints, state, asks, traced })
        }
    }
}

/// Runs in the child for a restored microVM: restrictions beyond the sandbox.
fn prepare(vm: &VmPlan, way: &OwnedFd, traced: bool) -> io::Result<()> {
    // A restored microVM writes to few pages of its memory; huge pages would take several MiB more of the host's
    // memory.
    rustix::thread::disable_transparent_huge_pages(true)?;
    if traced {
        sys::ptrace_mmap::stop_at_mapping(vm.memory_bytes)?;
    }
    open_broker::ask(way)
}

fn arguments(vm: &VmPlan, line: i32, monitor: i32, traced: bool) -> Vec<String> {
    let mut words: Vec<String> =
        ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "palisade"]
            .map(str::to_owned)
            .into();
    let mut add = |name: &str, value: String| words.extend([name.to_owned(), value]);
    add("-L", vm.firmware.display().to_string());
    add("-M", "microvm,pit=on,pic=on,rtc=on,acpi=on,isa-serial=on,ioapic2=on,auto-kernel-cmdline=off,memory-backend=ram".to_owned());
    let (accelerator, processor) = match vm.accelerator {
        Accelerator::Kvm => ("kvm".to_owned(), "host"),
        Accelerator::Emulated => (
            format!("tcg,tb-size={TRANSLATED_MIB},thread={}", if vm.cpus > 1 { "multi" } else { "single" }),
            EMULATED_PROCESSOR,
        ),
    };
    add("-accel", accelerator);
    add("-cpu", processor.to_owned());
    add("-smp", vm.cpus.to_string());
    add("-m", format!("{}K", vm.memory_bytes >> 10));
    let size = vm.memory_bytes;
    match &vm.begin {
        VmStart::Boot { kernel, initrd, cmdline } => {
            // virtiofsd maps the microVM's memory.
            let memory =
                if vm.shares.is_empty() { "memory-backend-ram" } else { "memory-backend-memfd,share=on" };
            add("-object", format!("{memory},id=ram,size={size}"));
            add("-kernel", kernel.display().to_string());
            add("-initrd", initrd.display().to_string());
            add("-append", cmdline.clone());
            // A guest that gives up during boot stays paused, so that its console can be read.
            add("-action", "shutdown=pause".to_owned());
        }
        VmStart::Thaw { ram, .. } => {
            add(
                "-object",
                format!(
                    "memory-backend-file,id=ram,size={size},mem-path={},share={}",
                    ram.display(),
                    if traced { "on" } else { "off" }
                ),
            );
            add("-incoming", "defer".to_owned());
        }
    }
    add("-chardev", format!("ringbuf,id=console,size={CONSOLE_LEN}"));
    add("-serial", "chardev:console".to_owned());
    add("-chardev", format!("socket,id=line,fd={line}"));
    add("-device", "virtio-serial-device,max_ports=2".to_owned());
    add("-device", format!("virtserialport,chardev=line,name={PORT}"));
    add("-chardev", format!("socket,id=monitor,fd={monitor}"));
    add("-mon", "chardev=monitor,mode=control".to_owned());
    add(
        "-drive",
        format!(
            "id={UPPER},file={},format=raw,if=none,cache=writeback,discard=unmap,{FILE_OPTIONS}",
            vm.upper.display()
        ),
    );
    add("-device", format!("virtio-blk-device,drive={UPPER},serial={UPPER}"));
    // Memory that the guest does not use goes back to the host.
    add("-device", "virtio-balloon-device,free-page-reporting=on".to_owned());
    for (index, image) in vm.images.iter().enumerate() {
        let name = image_name(index);
        add(
            "-drive",
            format!("id={name},file={},format=raw,if=none,readonly=on,{FILE_OPTIONS}", image.display()),
        );
        add("-device", format!("virtio-blk-device,drive={name},serial={name}"));
    }
    if !vm.shares.is_empty() {
        // vhost-user devices do not support legacy virtio.
        add("-global", "virtio-mmio.force-legacy=false".to_owned());
    }
    for share in &vm.shares {
        let tag = &share.tag;
        add("-chardev", format!("socket,id={tag},path={}", share.socket.display()));
        add("-device", format!("vhost-user-fs-device,chardev={tag},tag={tag}"));
    }
    words
}

/// The name by which the guest finds an image.
pub fn image_name(index: usize) -> String {
    format!("image{index}")
}
