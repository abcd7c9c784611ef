//! QEMU's `microvm` machine: its command line, and its process.
//!
//! A machine that is thawed must be put together exactly as the one that was frozen: everything but its beginning comes
//! from the same lines here.

use std::{
    ffi::CString,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, process::CommandExt},
    },
    process::{Command, Stdio},
};

use proto::vm::{Accelerator, Begin, PORT, UPPER, VmPlan};
use rustix::{
    pipe::PipeFlags,
    process::{Pid, Signal, WaitOptions, WaitStatus},
};
use sys::namespace::Side;

use super::pair;

/// Memory for translated code, where the machine is emulated.
const TRANSLATED_MIB: u32 = 64;
/// What a child tells before it becomes the hypervisor.
const TRACED: [u8; 1] = *b"t";
const PLAIN: [u8; 1] = *b"p";
/// What is kept of the console, for the reason of an early end.
const CONSOLE_LEN: u32 = 64 << 10;

/// A hypervisor that was started.
pub struct Hypervisor {
    /// Its process.
    pub process: Process,
    /// The line to the guest.
    pub line: OwnedFd,
    /// Where it takes commands.
    pub monitor: OwnedFd,
    /// What it complains.
    pub complaints: OwnedFd,
    /// The number under which it has the state of a machine that is to be thawed.
    pub state: Option<i32>,
    /// Where it asks before it opens files for writing, and the memory it may only read.
    pub asks: Option<(OwnedFd, File, CString)>,
    /// Whether it stops where it maps that memory, to be told to keep it to itself.
    pub traced: bool,
}

/// A child of ours; ended when it is dropped.
pub struct Process {
    pid: Pid,
    ended: Option<WaitStatus>,
}

impl Process {
    /// Its number.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// A handle on it that can be waited on.
    pub fn handle(&self) -> io::Result<OwnedFd> {
        sys::process::open(self.pid)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<WaitStatus> {
        if self.ended.is_none() {
            self.ended = rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG).ok().flatten().map(|(_, status)| status);
        }
        self.ended
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            let _ = rustix::process::kill_process(self.pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
        }
    }
}

/// Starts it.
pub fn start(vm: &VmPlan) -> io::Result<Hypervisor> {
    let (line, line_there) = pair()?;
    let (monitor, monitor_there) = pair()?;
    let (complaints, complain) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (asks, asks_there) = pair()?;
    let (state, ram) = match &vm.begin {
        Begin::Thaw { state, ram, .. } => (Some(OwnedFd::from(File::open(state)?)), Some((File::open(ram)?, CString::new(ram.as_os_str().as_bytes())?))),
        Begin::Boot { .. } => (None, None),
    };
    for fd in [Some(&line_there), Some(&monitor_there), state.as_ref()].into_iter().flatten() {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
    }
    let (told, tell) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    match sys::namespace::fork()? {
        Side::Child => {
            // Where nobody may trace, the memory is mapped plainly, and written out by the hypervisor.
            let traced = ram.is_some() && sys::trace::by_parent().is_ok();
            let _ = rustix::io::write(&tell, if traced { &TRACED } else { &PLAIN });
            let mut command = Command::new(&vm.program);
            command.args(arguments(vm, line_there.as_raw_fd(), monitor_there.as_raw_fd(), traced)).env_clear();
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(complain));
            let prepared = if ram.is_some() { prepare(vm, &asks_there, traced) } else { Ok(()) };
            let error = prepared.err().unwrap_or_else(|| command.exec());
            let _ = io::Write::write_all(&mut io::stderr(), error.to_string().as_bytes());
            std::process::exit(1)
        }
        Side::Parent(pid) => {
            let process = Process { pid, ended: None };
            drop(tell);
            let mut word = [0];
            let traced = rustix::io::read(&told, &mut word).is_ok() && word == TRACED;
            // Its ends are its own now; its last words are heard when it is gone.
            drop((asks_there, complain));
            let asks = ram.map(|(ram, path)| sys::fd::receive(asks.as_fd()).map(|listener| (listener, ram, path))).transpose()?;
            Ok(Hypervisor { process, line, monitor, complaints, state: state.as_ref().map(AsRawFd::as_raw_fd), asks, traced })
        }
    }
}

/// In the child, where a machine is thawed: what holds it beyond its walls.
fn prepare(vm: &VmPlan, way: &OwnedFd, traced: bool) -> io::Result<()> {
    rest_small()?;
    if traced {
        sys::trace::stop_at_mapping(vm.memory_bytes)?;
    }
    ask(way)
}

/// In the child: its memory is taken page by page. Of the large pages a hypervisor would take instead, one that was
/// thawed uses little, and there may be many of them.
fn rest_small() -> io::Result<()> {
    Ok(rustix::thread::disable_transparent_huge_pages(true)?)
}

/// In the child: from here on it asks before it opens files for writing.
fn ask(way: &OwnedFd) -> io::Result<()> {
    let listener = sys::intercept::ask_before_opening()?;
    sys::fd::send(way.as_fd(), listener.as_fd())
}

fn arguments(vm: &VmPlan, line: i32, monitor: i32, traced: bool) -> Vec<String> {
    let mut words: Vec<String> = ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "palisade"].map(str::to_owned).into();
    let mut add = |name: &str, value: String| words.extend([name.to_owned(), value]);
    add("-L", vm.firmware.display().to_string());
    add("-M", "microvm,pit=on,pic=on,rtc=on,acpi=on,isa-serial=on,ioapic2=on,auto-kernel-cmdline=off,memory-backend=ram".to_owned());
    let (accelerator, processor) = match vm.accelerator {
        Accelerator::Kvm => ("kvm".to_owned(), "host"),
        Accelerator::Emulated => (format!("tcg,tb-size={TRANSLATED_MIB},thread={}", if vm.cpus > 1 { "multi" } else { "single" }), "max,la57=off"),
    };
    add("-accel", accelerator);
    add("-cpu", processor.to_owned());
    add("-smp", vm.cpus.to_string());
    add("-m", format!("{}K", vm.memory_bytes >> 10));
    let size = vm.memory_bytes;
    match &vm.begin {
        Begin::Boot { kernel, initrd, cmdline } => {
            add("-object", format!("memory-backend-ram,id=ram,size={size}"));
            add("-kernel", kernel.display().to_string());
            add("-initrd", initrd.display().to_string());
            add("-append", cmdline.clone());
        }
        Begin::Thaw { ram, .. } => {
            add("-object", format!("memory-backend-file,id=ram,size={size},mem-path={},share={}", ram.display(), if traced { "on" } else { "off" }));
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
    add("-drive", format!("id={UPPER},file={},format=raw,if=none,cache=writeback,discard=unmap,file.locking=off", vm.upper.display()));
    add("-device", format!("virtio-blk-device,drive={UPPER},serial={UPPER}"));
    for (index, image) in vm.images.iter().enumerate() {
        let name = image_name(index);
        add("-drive", format!("id={name},file={},format=raw,if=none,readonly=on,file.locking=off", image.display()));
        add("-device", format!("virtio-blk-device,drive={name},serial={name}"));
    }
    words
}

/// What the guest finds an image by.
pub fn image_name(index: usize) -> String {
    format!("image{index}")
}
