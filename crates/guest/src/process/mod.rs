//! Processes of the Body: callers start them, and any number of callers listens to each.
//!
//! Output goes to all listeners. Output produced while there is no listener is kept, up to a limit, for the first one
//! that connects; output that a listener has received is never replayed.
//!
//! Invariant: a process stays listed until its end was delivered; after that its end is kept for callers that connect
//! within 30 s.

mod hub;
mod input;
mod kept;
mod program;
mod pump;
mod rpc;
mod start;
mod stream;
mod tape;

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    rc::Rc,
    time::Duration,
};

use proto::wire::process::{
    ProcessConfig, ProcessInfo, ProcessSelector, process_event::EndEvent, process_selector::Selector,
};
use tokio::{sync::Notify, time::Instant};

use crate::{
    connect::{Code, ConnectError},
    init::Exit,
};

pub use rpc::{body_environment, call, call_kept};
pub use start::credentials;

/// Most processes at once.
const RUNNING_MAX: usize = 4096;
/// Most ends that are remembered.
const ENDED_MAX: usize = 256;
/// How long to wait for a killed process.
const KILL_WAIT: Duration = Duration::from_millis(500);
const ENDED_KEPT: Duration = Duration::from_secs(30);

/// The stream that output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputSource {
    Stdout,
    Stderr,
    Pty,
}

/// One process of the Body.
#[derive(Debug)]
pub struct GuestProcess {
    pub pid: u32,
    pub config: ProcessConfig,
    pub tag: Option<String>,
    hub: RefCell<hub::Hub>,
    input: input::StdinHandle,
    leader_gone: Cell<bool>,
    timed_out: Cell<bool>,
    began: Instant,
    /// Notified when a kept command writes or ends.
    news: Notify,
}

/// Whether a command is kept by its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeping {
    No,
    Kept,
}

impl GuestProcess {
    fn info(&self) -> ProcessInfo {
        ProcessInfo { config: Some(self.config.clone()), pid: self.pid, tag: self.tag.clone() }
    }
}

/// All processes that the guest started.
#[derive(Debug, Default)]
pub struct Processes {
    running: RefCell<HashMap<u32, Rc<GuestProcess>>>,
    ended: RefCell<VecDeque<(Instant, Rc<GuestProcess>)>>,
    /// Kept commands that have ended, oldest first.
    kept: RefCell<VecDeque<kept::EndedCommand>>,
    changed: Notify,
}

impl Processes {
    /// How many processes run.
    pub fn count(&self) -> usize {
        self.running.borrow().len()
    }

    /// The groups that the running processes lead.
    pub fn groups(&self) -> Vec<u32> {
        self.running.borrow().keys().copied().collect()
    }

    /// The groups among [`Processes::groups`] that have a terminal.
    pub fn on_terminals(&self) -> Vec<u32> {
        let running = self.running.borrow();
        running.values().filter(|process| process.input.is_terminal()).map(|process| process.pid).collect()
    }

    /// Waits a moment until a killed process is gone, so that its caller does not find it still listed.
    async fn note_exit(&self, process: &GuestProcess) {
        let gone = async {
            loop {
                let changed = self.changed.notified();
                if process.leader_gone.get() {
                    return;
                }
                changed.await;
            }
        };
        // A process in uninterruptible sleep dies later.
        let _ = tokio::time::timeout(KILL_WAIT, gone).await;
    }

    /// Waits until the end of every process was delivered.
    pub async fn all_ended(&self) {
        while self.count() > 0 {
            self.changed.notified().await;
        }
    }

    fn check_room(&self) -> Result<(), ConnectError> {
        if self.count() < RUNNING_MAX {
            return Ok(());
        }
        Err(ConnectError::new(
            Code::ResourceExhausted,
            format!("{RUNNING_MAX} processes are running already"),
        ))
    }

    fn list(&self) -> Vec<ProcessInfo> {
        let mut list: Vec<_> = self.running.borrow().values().map(|process| process.info()).collect();
        list.sort_unstable_by_key(|info| info.pid);
        list
    }

    fn add(&self, process: &Rc<GuestProcess>) {
        // A reused pid or tag must not select the process that had it before.
        let replaced =
            |old: &GuestProcess| old.pid == process.pid || old.tag.is_some() && old.tag == process.tag;
        self.ended.borrow_mut().retain(|(_, old)| !replaced(old));
        self.running.borrow_mut().insert(process.pid, process.clone());
    }

    fn end(&self, process: &Rc<GuestProcess>, end: EndEvent) {
        process.hub.borrow_mut().close(end);
        let mut running = self.running.borrow_mut();
        if running.get(&process.pid).is_some_and(|known| Rc::ptr_eq(known, process)) {
            running.remove(&process.pid);
        }
        drop(running);
        if !self.keep_end(process) {
            let mut ended = self.ended.borrow_mut();
            ended.push_back((Instant::now(), process.clone()));
            if ended.len() > ENDED_MAX {
                ended.pop_front();
            }
        }
        self.changed.notify_waiters();
    }

    /// Forgets old ends.
    fn forget_old(&self) {
        let now = Instant::now();
        let mut ended = self.ended.borrow_mut();
        while ended.front().is_some_and(|(at, _)| now.duration_since(*at) >= ENDED_KEPT) {
            ended.pop_front();
        }
    }

    fn find_running(&self, selector: Option<&ProcessSelector>) -> Result<Rc<GuestProcess>, ConnectError> {
        let selector = selector_of(selector)?;
        let running = self.running.borrow();
        let found = running.values().find(|process| selects(selector, process)).cloned();
        found.ok_or_else(|| not_found(selector))
    }

    fn find_any(&self, selector: Option<&ProcessSelector>) -> Result<Rc<GuestProcess>, ConnectError> {
        if let Ok(process) = self.find_running(selector) {
            return Ok(process);
        }
        self.forget_old();
        let selector = selector_of(selector)?;
        if let Selector::Tag(tag) = selector
            && let Some(process) = self.find_kept(tag)
        {
            return Ok(process);
        }
        let ended = self.ended.borrow();
        let found = ended.iter().rev().find(|(_, process)| selects(selector, process));
        found.map(|(_, process)| process.clone()).ok_or_else(|| not_found(selector))
    }
}

fn selector_of(selector: Option<&ProcessSelector>) -> Result<&Selector, ConnectError> {
    selector
        .and_then(|selector| selector.selector.as_ref())
        .ok_or_else(|| ConnectError::invalid("no process is named"))
}

fn selects(selector: &Selector, process: &GuestProcess) -> bool {
    match selector {
        Selector::Pid(pid) => process.pid == *pid,
        Selector::Tag(tag) => process.tag.as_ref() == Some(tag),
    }
}

fn not_found(selector: &Selector) -> ConnectError {
    let which = match selector {
        Selector::Pid(pid) => format!("process with pid {pid} not found"),
        Selector::Tag(tag) => format!("process with tag {tag} not found"),
    };
    ConnectError::new(Code::NotFound, which)
}

/// Formats an end as Go's `os/exec` does.
fn end_event(exit: Exit) -> EndEvent {
    match exit {
        Exit::Code(code) => {
            let status = format!("exit status {code}");
            let error = (code != 0).then(|| status.clone());
            EndEvent { exit_code: code, exited: true, status, error }
        }
        Exit::Signal(signal) => {
            let status = format!("signal: {}", signal_words(signal));
            EndEvent { exit_code: -1, exited: false, error: Some(status.clone()), status }
        }
    }
}

fn signal_words(signal: i32) -> String {
    const WORDS: [&str; 15] = [
        "hangup",
        "interrupt",
        "quit",
        "illegal instruction",
        "trace/breakpoint trap",
        "aborted",
        "bus error",
        "floating point exception",
        "killed",
        "user defined signal 1",
        "segmentation fault",
        "user defined signal 2",
        "broken pipe",
        "alarm clock",
        "terminated",
    ];
    let words = usize::try_from(signal - 1).ok().and_then(|index| WORDS.get(index));
    words.map_or_else(|| format!("signal {signal}"), |words| (*words).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_worded_as_go_does() {
        let words = |exit| {
            let end = end_event(exit);
            (end.exit_code, end.exited, end.status, end.error)
        };
        assert_eq!(words(Exit::Code(0)), (0, true, "exit status 0".into(), None));
        assert_eq!(words(Exit::Code(7)), (7, true, "exit status 7".into(), Some("exit status 7".into())));
        assert_eq!(
            words(Exit::Signal(9)),
            (-1, false, "signal: killed".into(), Some("signal: killed".into()))
        );
        assert_eq!(words(Exit::Signal(34)).2, "signal: signal 34");
    }
}
