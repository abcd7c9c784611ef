//! What drives a hypervisor: a few verbs, and one engine for each hypervisor behind them.
//!
//! Invariant: an engine that is dropped has no hypervisor any more.
//! Trust: a hypervisor that was taken over may answer anything; each engine bounds what it hears in length and time.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs::File,
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    path::Path,
    pin::Pin,
    process::{Command, Stdio},
    rc::Rc,
    time::Duration,
};

use proto::vm::{Metrics, Traffic, VmPlan};
use rustix::{
    pipe::PipeFlags,
    process::{Pid, Signal, WaitOptions, WaitStatus},
};
use sys::namespace::Side;
use tokio::io::AsyncReadExt;

use crate::report::{Step, StepError};

use super::{beside::Beside, cloud_hypervisor, firecracker, jail, name_of, qemu};

/// What is kept of a hypervisor's complaints, and of its machine's console where that is the same.
const COMPLAINT_LEN_MAX: usize = 4096;
/// What it said last may still be on its way.
const LAST_WORDS: Duration = Duration::from_millis(50);
const CONSOLE_LINES: usize = 6;
const FACTS_LEN_MAX: u64 = 8192;

/// Something that takes a while.
pub type Doing<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + 'a>>;

/// A hypervisor that was started and takes commands.
pub trait Engine {
    /// Has the machine run, from its kernel's beginning or where it was frozen, and gives the line to its guest.
    fn begin<'a>(&'a mut self, vm: &'a VmPlan) -> Doing<'a, OwnedFd>;

    /// Begins with what can be written down of its memory before it stands still.
    fn save_ahead(&mut self, _vm: &VmPlan, _ram: &File) {}

    /// Has its processors stand still.
    fn pause(&mut self) -> Doing<'_, ()>;

    /// Writes the hypervisor itself down while its machine stands still, where that can be.
    fn imprint<'a>(&'a mut self, _vm: &'a VmPlan, _to: File) -> Doing<'a, ()> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }

    /// Whether it goes on as a copy of a hypervisor that was written down.
    fn is_copy(&self) -> bool {
        false
    }

    /// Writes down a machine that stands still: its memory, and everything else but its disks.
    fn save<'a>(&'a mut self, vm: &'a VmPlan, ram: File, state: File) -> Doing<'a, ()>;

    /// Has its processors go on. Where its line does not survive [`Engine::save`], this is the one that takes its place.
    fn resume(&mut self) -> Doing<'_, Option<OwnedFd>>;

    /// The end of what the machine wrote on its console.
    fn console(&mut self) -> Doing<'_, String>;

    /// Its guest said goodbye: the hypervisor goes, too.
    fn stop(&mut self) -> Doing<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    /// What went to and from its disks since it began, and how much memory it has where that is told.
    fn traffic(&mut self) -> Doing<'_, (BTreeMap<String, Traffic>, Option<u64>)>;

    /// What it uses.
    fn metrics(&mut self) -> Doing<'_, Metrics> {
        Box::pin(async {
            let (disks, machine_bytes) = self.traffic().await?;
            let (cpu_ms, memory_bytes) = self.process().used()?;
            Ok(Metrics { cpu_ms, memory_bytes, machine_bytes, disks })
        })
    }

    /// Its process.
    fn process(&mut self) -> &mut Process;
}

/// Starts the hypervisor of a plan.
///
/// One that Firecracker's jailer starts is under way already.
pub async fn start(vm: &VmPlan, jailer: Option<Beside>) -> Result<Box<dyn Engine>, StepError> {
    let step = format!("start the hypervisor {}", name_of(&vm.program));
    let started = match vm.engine {
        proto::vm::Engine::Qemu => qemu::open(vm).await,
        proto::vm::Engine::CloudHypervisor => cloud_hypervisor::open(vm).await,
        proto::vm::Engine::Firecracker => firecracker::open(vm, jailer).await,
    };
    let started = started.step(step);
    if vm.is_jailed() { started.map_err(|error| error.hint(jail::HINT)) } else { started }
}

/// A child of ours; ended when it is dropped, or with this process.
pub struct Process {
    pid: Pid,
    ended: Option<WaitStatus>,
}

impl Process {
    /// A child that was just made.
    pub fn of(pid: Pid) -> Self {
        Self { pid, ended: None }
    }

    /// Its number.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// What it has had of processors.
    pub fn busy(&self) -> Duration {
        sys::proc::stat(self.pid.as_raw_nonzero().get()).map_or(Duration::ZERO, |stat| stat.busy)
    }

    /// Whether it runs, or would if it had a processor.
    pub fn wants_processor(&self) -> bool {
        sys::proc::wants_processor(self.pid.as_raw_nonzero().get())
    }

    /// A handle on it that can be waited on.
    pub fn handle(&self) -> io::Result<OwnedFd> {
        sys::process::open(self.pid)
    }

    /// Its processor time in milliseconds, and the memory it has in use.
    fn used(&self) -> io::Result<(u64, u64)> {
        let path = format!("/proc/{}/status", self.pid.as_raw_nonzero());
        let status = sys::fd::read_small(Path::new(&path), FACTS_LEN_MAX)?;
        let told = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: u64 = told.and_then(|told| told.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        Ok((self.busy().as_millis() as u64, kib << 10))
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<WaitStatus> {
        if self.ended.is_none() {
            // One that is traced may stand still meanwhile.
            self.ended = sys::process::ended(self.pid);
        }
        self.ended
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            // Landlock lets nobody signal who was there before it, beside us; such a one ends with this process instead.
            if rustix::process::kill_process(self.pid, Signal::KILL).is_ok() {
                let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
            }
        }
    }
}

/// Executes a command as a child of ours. `first` is what the child does before.
pub fn spawn(mut command: Command, first: impl FnOnce() -> io::Result<()>) -> io::Result<Process> {
    match sys::namespace::fork()? {
        Side::Child => {
            let error = first().err().unwrap_or_else(|| command.exec());
            let _ = io::Write::write_all(&mut io::stderr(), error.to_string().as_bytes());
            std::process::exit(1)
        }
        Side::Parent(pid) => Ok(Process::of(pid)),
    }
}

/// What a hypervisor says, as it comes: the end of it is kept.
#[derive(Clone)]
pub struct Said(Rc<RefCell<Vec<u8>>>);

impl Said {
    /// A pipe for a hypervisor's words, and the ear on it.
    pub fn pipe() -> io::Result<(Stdio, OwnedFd)> {
        let (hear, say) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Stdio::from(say), hear))
    }

    /// Listens until nobody speaks any more.
    pub fn overhear(words: OwnedFd) -> Self {
        let said = Self(Rc::default());
        if let Ok(mut stream) = tokio::net::unix::pipe::Receiver::from_owned_fd(words) {
            let kept = said.0.clone();
            tokio::task::spawn_local(async move {
                let mut buffer = [0; 1024];
                while let Ok(len @ 1..) = stream.read(&mut buffer).await {
                    let mut kept = kept.borrow_mut();
                    kept.extend_from_slice(&buffer[..len]);
                    let over = kept.len().saturating_sub(COMPLAINT_LEN_MAX);
                    kept.drain(..over);
                }
            });
        }
        said
    }

    /// Its last words instead of the error that was met, where there are any.
    pub async fn or(&self, error: io::Error) -> io::Error {
        tokio::time::sleep(LAST_WORDS).await;
        let said = self.last_lines();
        if said.is_empty() { error } else { io::Error::other(said) }
    }

    /// The last lines of it, fit to be shown.
    pub fn last_lines(&self) -> String {
        tail(&String::from_utf8_lossy(&self.0.borrow()))
    }
}

/// The last lines of a text, fit to be shown.
pub fn tail(text: &str) -> String {
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).rev().take(CONSOLE_LINES).collect();
    lines.into_iter().rev().map(proto::text::visible).collect::<Vec<_>>().join(" | ")
}
