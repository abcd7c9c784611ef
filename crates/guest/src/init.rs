//! What being init means: settle into the process, bury the dead, end everybody at the end.
//!
//! Invariant: `wait` is called only here, on the one serving thread, so a pid that a [`Reaper`] has not reported dead
//! cannot have been given to anybody else.

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

/// How long processes have when a signal, not a caller, ends the guest.
const SIGNAL_GRACE: Duration = Duration::from_secs(5);
/// Longest grace a caller may ask for.
pub const GRACE_MAX: Duration = Duration::from_secs(600);
/// How long the kernel has to remove what was killed, and streams have to say so.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Not every death is told: other parents' children are looked for this often.
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

/// Makes this process fit to be an init. Best effort: each step is a hardening, none is needed to serve.
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

/// 0, 1 and 2 must never become a pipe or a socket of ours.
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

/// Who waits for whom.
#[derive(Debug, Default)]
pub struct Reaper {
    waiting: RefCell<HashMap<u32, oneshot::Sender<Exit>>>,
    /// Starts under way: their children may die before anybody waits for them.
    starting: Cell<usize>,
    early: RefCell<HashMap<u32, Exit>>,
    buried: Notify,
}

/// Held while a process is being started, so that its early death is not forgotten.
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
    /// To be called before a process is started.
    pub fn starting(&self) -> StartGuard<'_> {
        self.starting.set(self.starting.get() + 1);
        StartGuard(self)
    }

    /// The exit of a child that was just started.
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

/// Takes every signal that the guest heeds, before anybody is answered.
pub fn signals() -> io::Result<Signals> {
    Signals::take(SignalSet::of(&ENDS).and(Signal::CHILD))
}

/// Looks once what children must be rid of. After a start, which then costs the next one less: no child waits for it.
pub fn look_at_signals_once() {
    static LOOKED: Once = Once::new();
    LOOKED.call_once(sys::spawn::look_at_signals);
}

/// Buries the dead for as long as the guest lives, and passes on when somebody asks it to end.
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
            // Whoever is not told looks by himself.
            Err(_) => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

/// Buries the dead from now on, and waits for a signal that asks the guest to end.
pub async fn keep_watch(guest: Rc<GuestServer>, signals: Signals) -> Duration {
    let (end, ends) = oneshot::channel();
    tokio::task::spawn_local(handle_signals(guest, signals, end));
    let _ = ends.await;
    SIGNAL_GRACE
}

/// Ends every process: TERM, then KILL after the grace.
pub async fn end_all_processes(guest: &GuestServer, grace: Duration) {
    // Started by nobody any more; what runs now is all there will be, but for what it starts itself.
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
