//! The interface to a hypervisor: one trait, and one driver for each hypervisor behind it.
//!
//! Invariant: a driver that is dropped has ended its hypervisor.
//! Trust: a hypervisor that was taken over may answer anything; each driver limits answers in length and time.

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

use proto::vm::{DiskTraffic, VmMetrics, VmPlan};
use rustix::{
    pipe::PipeFlags,
    process::{Pid, Signal, WaitOptions, WaitStatus},
};
use sys::namespace::ForkResult;
use tokio::io::AsyncReadExt;

use crate::report::{StepError, StepExt};

use super::{cloud_hypervisor, firecracker, firecracker_jail, name_of, qemu, sidecar::Sidecar};

/// Most bytes that are kept of a hypervisor's standard error, and of the guest's console where both are one stream.
const COMPLAINT_LEN_MAX: usize = 16 << 10;
/// How long to wait for the hypervisor's last output, which may still be on its way.
const LAST_WORDS: Duration = Duration::from_millis(50);
/// Lines of a hypervisor's standard error that are shown.
const COMPLAINT_LINES: usize = 6;
/// Lines of a guest's console that are shown.
const CONSOLE_LINES: usize = 20;
/// Characters of one line that are shown.
const LINE_LEN_MAX: usize = 240;
const FACTS_LEN_MAX: u64 = 8192;

/// The result of an operation of a driver.
pub type DriverFuture<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + 'a>>;

/// A running hypervisor that accepts requests.
pub trait HypervisorDriver {
    /// Starts the microVM, by booting its kernel or from saved state, and returns the connection to its guest.
    fn begin<'a>(&'a mut self, vm: &'a VmPlan) -> DriverFuture<'a, OwnedFd>;

    /// Starts copying the part of its memory that cannot change any more, before the CPUs are paused.
    fn save_ahead(&mut self, _vm: &VmPlan, _ram: &File) {}

    /// Pauses its CPUs.
    fn pause(&mut self) -> DriverFuture<'_, ()>;

    /// Saves a paused microVM: its memory, and everything else but its disks.
    fn save<'a>(&'a mut self, vm: &'a VmPlan, ram: File, state: File) -> DriverFuture<'a, ()>;

    /// Resumes its CPUs. If the connection to the guest did not survive [`HypervisorDriver::save`], returns a new
    /// one.
    fn resume(&mut self) -> DriverFuture<'_, Option<OwnedFd>>;

    /// The last lines that the guest wrote on its console, escaped.
    fn console(&mut self) -> DriverFuture<'_, Vec<String>>;

    /// Returns once a booting guest has stopped its microVM. Most hypervisors end with their guest, which breaks the
    /// channel instead.
    fn wait_stopped(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(std::future::pending())
    }

    /// Called after the guest has booted: from now on the hypervisor ends with it.
    fn end_with_guest(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    /// Called after the guest has announced its end: shuts the hypervisor down.
    fn stop(&mut self) -> DriverFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    /// Bytes read from and written to each disk since the start, and the size of the memory where the hypervisor
    /// reports it.
    fn traffic(&mut self) -> DriverFuture<'_, (BTreeMap<String, DiskTraffic>, Option<u64>)>;

    /// The resource usage of the microVM.
    fn metrics(&mut self) -> DriverFuture<'_, VmMetrics> {
        Box::pin(async {
            let (disks, machine_bytes) = self.traffic().await?;
            let (cpu_ms, memory_bytes) = self.process().used()?;
            Ok(VmMetrics { cpu_ms, memory_bytes, machine_bytes, disks })
        })
    }

    /// The hypervisor's process.
    fn process(&mut self) -> &mut ChildProcess;
}

/// Starts the hypervisor of a plan.
///
/// With a jailer, Firecracker is already being started.
pub async fn start(vm: &VmPlan, jailer: Option<Sidecar>) -> Result<Box<dyn HypervisorDriver>, StepError> {
    let step = format!("start the hypervisor {}", name_of(&vm.program));
    let started = match vm.engine {
        proto::vm::Engine::Qemu => qemu::open(vm).await,
        proto::vm::Engine::CloudHypervisor => cloud_hypervisor::open(vm).await,
        proto::vm::Engine::Firecracker => firecracker::open(vm, jailer).await,
    };
    let started = started.step(step);
    if vm.is_jailed() { started.map_err(|error| error.hint(firecracker_jail::HINT)) } else { started }
}

/// A child process. It is killed on drop, or dies with this process.
pub struct ChildProcess {
    pid: Pid,
    ended: Option<WaitStatus>,
}

impl ChildProcess {
    /// Wraps a child that was just forked.
    pub fn of(pid: Pid) -> Self {
        Self { pid, ended: None }
    }

    /// Its pid.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The CPU time that it has used.
    pub fn busy(&self) -> Duration {
        sys::proc::stat(self.pid.as_raw_nonzero().get()).map_or(Duration::ZERO, |stat| stat.busy)
    }

    /// Whether it runs, or is ready to run.
    pub fn wants_processor(&self) -> bool {
        sys::proc::wants_processor(self.pid.as_raw_nonzero().get())
    }

    /// A pidfd of it.
    pub fn handle(&self) -> io::Result<OwnedFd> {
        sys::process::open(self.pid)
    }

    /// Its CPU time in milliseconds, and its resident memory.
    fn used(&self) -> io::Result<(u64, u64)> {
        let path = format!("/proc/{}/status", self.pid.as_raw_nonzero());
        let status = sys::fd::read_small(Path::new(&path), FACTS_LEN_MAX)?;
        let told = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: u64 = told.and_then(|told| told.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        Ok((self.busy().as_millis() as u64, kib << 10))
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<WaitStatus> {
        if self.ended.is_none() {
            // A traced child may report a stop meanwhile, which is no exit.
            self.ended = sys::process::ended(self.pid);
        }
        self.ended
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if self.ended().is_none() {
            // Landlock forbids signals to a process that existed before the domain, such as a sidecar; that one ends
            // with this process instead.
            if rustix::process::kill_process(self.pid, Signal::KILL).is_ok() {
                let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
            }
        }
    }
}

/// Executes a command as a child process, which calls `first` before.
pub fn spawn(mut command: Command, first: impl FnOnce() -> io::Result<()>) -> io::Result<ChildProcess> {
    match sys::namespace::fork()? {
        ForkResult::Child => {
            let error = first().err().unwrap_or_else(|| command.exec());
            let _ = io::Write::write_all(&mut io::stderr(), error.to_string().as_bytes());
            std::process::exit(1)
        }
        ForkResult::Parent(pid) => Ok(ChildProcess::of(pid)),
    }
}

/// The output of a hypervisor; only its end is kept.
#[derive(Clone)]
pub struct OutputTail(Rc<RefCell<Vec<u8>>>);

impl OutputTail {
    /// A pipe: the write end for the hypervisor's output, and the read end.
    pub fn pipe() -> io::Result<(Stdio, OwnedFd)> {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Stdio::from(writer), reader))
    }

    /// Reads in the background until the pipe is closed.
    pub fn read_in_background(words: OwnedFd) -> Self {
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

    /// Replaces an error by the hypervisor's last output, if there is any.
    pub async fn or(&self, error: io::Error) -> io::Error {
        tokio::time::sleep(LAST_WORDS).await;
        let said = self.last_lines();
        if said.is_empty() { error } else { io::Error::other(said) }
    }

    /// The last lines of the output, escaped and joined into one.
    pub fn last_lines(&self) -> String {
        tail(&self.text(), COMPLAINT_LINES).join(" | ")
    }

    /// The last lines of the output as console lines, where the guest's console is part of it.
    pub fn console(&self) -> Vec<String> {
        console_tail(&self.text())
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.borrow()).into_owned()
    }
}

/// The last lines of a console, escaped.
pub fn console_tail(text: &str) -> Vec<String> {
    tail(text, CONSOLE_LINES)
}

fn tail(text: &str, lines_max: usize) -> Vec<String> {
    let lines = text.lines().map(str::trim_end).filter(|line| !line.trim().is_empty());
    let last: Vec<&str> = lines.rev().take(lines_max).collect();
    let show = |line: &str| proto::text::visible(&line.chars().take(LINE_LEN_MAX).collect::<String>());
    last.into_iter().rev().map(show).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_a_console_are_shown_and_not_obeyed() {
        let text: String = (0..30).map(|line| format!("line {line}\r\n\n")).collect();
        let shown = console_tail(&(text + "\x1b[2J" + &"x".repeat(1000)));
        assert_eq!((shown.len(), shown[0].as_str()), (CONSOLE_LINES, "line 11"));
        assert!(shown[19].starts_with("\\u{1b}[2Jx") && shown[19].len() < 300, "{shown:?}");
        assert_eq!(console_tail("\n \n"), Vec::<String>::new());
    }
}
