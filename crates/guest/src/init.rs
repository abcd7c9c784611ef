//! The duties of init: prepare the process, reap children, end all processes at the end.
//!
//! Invariant: only this module calls `wait`, on the serving thread. So the kernel cannot have reused a pid as long as
//! the [`Reaper`] has not reported its exit.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd, IntoRawFd},
    path::Path,
    rc::Rc,
    sync::Once,
    time::Duration,
};

use rustix::{
    fs::Mode,
    process::{DumpableBehavior, Signal, WaitOptions, WaitStatus},
};
use sys::signals::{SignalSet, Signals};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use crate::server::GuestServer;

/// The grace period when a signal, not a request, ends the guest.
const SIGNAL_GRACE: Duration = Duration::from_secs(5);
/// Longest grace period that a caller may ask for.
pub const GRACE_MAX: Duration = Duration::from_secs(600);
/// How long the kernel may take to remove killed processes, and streams to report their ends.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// The interval at which the guest looks for processes that are not its own children: no SIGCHLD announces their
/// exit.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Signals that ask the guest to end.
const ENDS: [Signal; 3] = [Signal::TERM, Signal::INT, Signal::HUP];
const TERM: i32 = 15;
const KILL: i32 = 9;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

/// Prepares this process to be init. Every step hardens and none is required, so failures are ignored.
pub fn become_init() {
    hold_standard_descriptors();
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let _ = rustix::thread::set_name(c"pal-guest");
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let _ = rustix::process::umask(Mode::WGRP | Mode::WOTH);
    if is_init() {
        let _ = std::env::set_current_dir(Path::new("/"));
    }
}

/// Fills descriptors 0, 1 and 2, so that none of them ever becomes a pipe or socket of the guest.
fn hold_standard_descriptors() {
    while let Ok(file) = OpenOptions::new().read(true).write(true).open("/dev/null") {
        if file.as_raw_fd() > 2 {
            break;
        }
        let _ = file.into_raw_fd();
    }
}

fn is_init() -> bool {
    rustix::process::getpid().is_init()
}

/// Delivers the exit of each child to the task that waits for it.
#[derive(Debug, Default)]
pub struct Reaper {
    waiting: RefCell<HashMap<u32, oneshot::Sender<Exit>>>,
    /// The number of starts in progress: a child may exit before a task waits for it.
    starting: Cell<usize>,
    early: RefCell<HashMap<u32, Exit>>,
    buried: Notify,
}

/// Held while a process starts, so that the reaper keeps an early exit.
#[derive(Debug)]
pub struct StartGuard<'a>(&'a Reaper);

impl Drop for StartGuard<'_> {
    fn drop(&mut self) {
        let left = self.0.starting.get().saturating_sub(1);
        self.0.starting.set(left);
        if left == 0 {
            self.0.early.borrow_mut().clear();
        }
    }
}

impl Reaper {
    /// Must be called before a process is started.
    pub fn starting(&self) -> StartGuard<'_> {
        self.starting.set(self.starting.get() + 1);
        StartGuard(self)
    }

    /// The future exit of a child that was just started.
    pub fn exit_of(&self, pid: u32, _start: &StartGuard<'_>) -> oneshot::Receiver<Exit> {
        let (sender, receiver) = oneshot::channel();
        match self.early.borrow_mut().remove(&pid) {
            Some(exit) => drop(sender.send(exit)),
            None => drop(self.waiting.borrow_mut().insert(pid, sender)),
        }
        receiver
    }

    fn reap(&self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let Some(exit) = exit_of_status(status) else { continue };
            let pid = pid.as_raw_pid().unsigned_abs();
            match self.waiting.borrow_mut().remove(&pid) {
                Some(sender) => drop(sender.send(exit)),
                None if self.starting.get() > 0 => drop(self.early.borrow_mut().insert(pid, exit)),
                None => {}
            }
        }
        self.buried.notify_waiters();
    }
}

fn exit_of_status(status: WaitStatus) -> Option<Exit> {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(Exit::Code(code)),
        (_, Some(signal)) => Some(Exit::Signal(signal)),
        _ => None,
    }
}

/// Blocks every signal that the guest handles; must run before the first request is answered.
pub fn signals() -> io::Result<Signals> {
    Signals::take(SignalSet::of(&ENDS).and(Signal::CHILD))
}

/// Reads once which signals a child has to reset. It runs after the first start, where it delays no child.
pub fn look_at_signals_once() {
    static LOOKED: Once = Once::new();
    LOOKED.call_once(sys::spawn::look_at_signals);
}

/// Reaps children for as long as the guest runs, and reports the first signal that asks it to end.
async fn handle_signals(guest: Rc<GuestServer>, signals: Signals, end: oneshot::Sender<()>) {
    let mut end = Some(end);
    loop {
        guest.reaper.reap();
        match signals.next().await {
            Ok(came) if came.meets(SignalSet::of(&ENDS)) => {
                if let Some(end) = end.take() {
                    let _ = end.send(());
                }
            }
            Ok(_) => {}
            // Signals cannot be awaited, so poll for exits.
            Err(_) => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

/// Reaps children from now on, and waits for a signal that asks the guest to end.
pub async fn keep_watch(guest: Rc<GuestServer>, signals: Signals) -> Duration {
    let (end, ends) = oneshot::channel();
    tokio::task::spawn_local(handle_signals(guest, signals, end));
    let _ = ends.await;
    SIGNAL_GRACE
}

/// Ends every process: TERM, then KILL after the grace.
pub async fn end_all_processes(guest: &GuestServer, grace: Duration) {
    // No new process is started any more: these groups and their own children are all there will be.
    let groups = guest.processes.groups();
    // Interactive shells ignore TERM, but leave when their terminal does.
    for pid in guest.processes.on_terminals() {
        signal_group(pid, rustix::process::Signal::HUP);
    }
    signal_all(&groups, TERM);
    if !gone_within(guest, &groups, grace.min(GRACE_MAX)).await {
        signal_all(&groups, KILL);
        gone_within(guest, &groups, LAST_WAIT).await;
    }
    guest.reaper.reap();
    let _ = tokio::time::timeout(LAST_WAIT, guest.processes.all_ended()).await;
}

async fn gone_within(guest: &GuestServer, groups: &[u32], limit: Duration) -> bool {
    let end = Instant::now() + limit;
    while any_process(groups) {
        if Instant::now() >= end {
            return false;
        }
        let wake = (Instant::now() + LOOK_EVERY).min(end);
        let _ = tokio::time::timeout_at(wake, guest.reaper.buried.notified()).await;
    }
    true
}

fn signal_all(groups: &[u32], number: i32) {
    if is_init() {
        let _ = sys::spawn::signal_everyone(number);
        return;
    }
    let signal = if number == TERM { rustix::process::Signal::TERM } else { rustix::process::Signal::KILL };
    groups.iter().for_each(|pid| signal_group(*pid, signal));
}

fn any_process(groups: &[u32]) -> bool {
    if crate::vm::is_machine() {
        return !crate::vm::programs().is_empty();
    }
    if is_init() {
        return sys::spawn::signal_everyone(0).is_ok();
    }
    groups
        .iter()
        .filter_map(|pid| pid_of(*pid))
        .any(|pid| rustix::process::test_kill_process_group(pid).is_ok())
}

fn signal_group(pid: u32, signal: rustix::process::Signal) {
    if let Some(pid) = pid_of(pid) {
        let _ = rustix::process::kill_process_group(pid, signal);
    }
}

/// The kernel's form of a pid.
pub fn pid_of(pid: u32) -> Option<rustix::process::Pid> {
    i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw)
}
