//! Kept commands: known by their tag, also after their end, with their newest output.
//!
//! Invariant: at most [`KEPT_RUNNING_MAX`] run and [`KEPT_ENDED_MAX`] ended ones are known. The output of all ended ones
//! is at most [`KEPT_ENDED_LEN_MAX`] long; that of the oldest goes first, and how they ended stays known.
//! Invariant: an ended command holds no descriptor.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use hyper::{Request, body::Incoming};
use proto::{
    guest::{
        KEPT_ENDED_LEN_MAX, KEPT_ENDED_MAX, KEPT_RUNNING_MAX, KEPT_TAG_LEN_MAX, KEPT_WAIT_MS_MAX, KeptEnd,
        KeptRead, KeptState,
    },
    wire::process::{StartRequest, process_event::EndEvent},
};
use tokio::{
    sync::{Mutex, Notify},
    time::Instant,
};

use super::{GuestProcess, Processes, hub::Hub, input::StdinHandle, tape::Tape};
use crate::{
    connect::{Code, ConnectError, status_of, whole},
    reply::{self, HttpReply, PlainRefusal},
    server::GuestServer,
};

/// A kept command that has ended.
#[derive(Debug)]
pub struct EndedCommand {
    process: Rc<GuestProcess>,
    tty: bool,
    age: Duration,
}

/// Answers a [`KeptRead`].
pub async fn read(guest: &GuestServer, request: Request<Incoming>) -> HttpReply {
    let asked = match whole(request.into_body()).await {
        Ok(bytes) => {
            serde_json::from_slice::<KeptRead>(&bytes).map_err(|error| PlainRefusal::bad(error.to_string()))
        }
        Err(fault) => Err(PlainRefusal::new(status_of(fault.code), fault.message)),
    };
    match asked {
        Ok(asked) => reply::json(&read_state(&guest.processes, &asked).await),
        Err(refusal) => refusal.reply(),
    }
}

/// Waits for output after `from`, for the end, or for the time that the caller has.
async fn read_state(processes: &Processes, asked: &KeptRead) -> Option<KeptState> {
    let until = Instant::now() + Duration::from_millis(asked.wait_ms.min(KEPT_WAIT_MS_MAX));
    loop {
        let process = processes.find_kept(&asked.tag)?;
        let mut news = Box::pin(process.news.notified());
        // From here on nothing is missed, whatever happens before the wait.
        news.as_mut().enable();
        let state = processes.state_of(&process, asked.from);
        if state.next > state.from || state.end.is_some() {
            return Some(state);
        }
        if tokio::time::timeout_at(until, news).await.is_err() {
            return Some(state);
        }
    }
}

impl Processes {
    /// The kept command with this tag, whether it runs or has ended.
    pub fn find_kept(&self, tag: &str) -> Option<Rc<GuestProcess>> {
        let has_tag = |process: &GuestProcess| process.tag.as_deref() == Some(tag) && process.is_kept();
        let running = self.running.borrow().values().find(|process| has_tag(process)).cloned();
        running.or_else(|| {
            let ended = self.kept.borrow();
            ended.iter().map(|ended| &ended.process).find(|process| has_tag(process)).cloned()
        })
    }

    /// The kept command that a start names; `None` if it is to be started.
    pub fn find_kept_start(&self, asked: &StartRequest) -> Result<Option<Rc<GuestProcess>>, ConnectError> {
        let tag = asked.tag.as_deref().unwrap_or_default();
        if tag.is_empty() || tag.len() > KEPT_TAG_LEN_MAX {
            let message = format!("a kept command needs a tag of 1 to {KEPT_TAG_LEN_MAX} bytes");
            return Err(ConnectError::invalid(message));
        }
        let taken = |message: String| Err(ConnectError::new(Code::AlreadyExists, message));
        let config = asked.process.clone().unwrap_or_default();
        match self.find_kept(tag) {
            Some(known) if known.config.cmd == config.cmd && known.config.args == config.args => {
                Ok(Some(known))
            }
            Some(_) => taken(format!("another command is kept with the tag {tag}")),
            None if self.has_tag(tag) => taken(format!("a command that is not kept has the tag {tag}")),
            None => self.check_kept_room().map(|()| None),
        }
    }

    fn has_tag(&self, tag: &str) -> bool {
        self.running.borrow().values().any(|process| process.tag.as_deref() == Some(tag))
    }

    fn check_kept_room(&self) -> Result<(), ConnectError> {
        if self.running.borrow().values().filter(|process| process.is_kept()).count() < KEPT_RUNNING_MAX {
            return Ok(());
        }
        Err(ConnectError::new(
            Code::ResourceExhausted,
            format!("{KEPT_RUNNING_MAX} kept commands are running already; end one of them"),
        ))
    }

    /// Keeps a command that has ended, if it is a kept one.
    pub(super) fn keep_end(&self, process: &Rc<GuestProcess>) -> bool {
        let (tape, end) = {
            let mut hub = process.hub.borrow_mut();
            let end = hub.end();
            match (hub.tape_mut().map(std::mem::take), end) {
                (Some(tape), Some(end)) => (tape, end),
                _ => return false,
            }
        };
        let ended = EndedCommand {
            process: Rc::new(process.without_descriptors(tape, end)),
            tty: process.input.is_terminal(),
            age: process.began.elapsed(),
        };
        let mut kept = self.kept.borrow_mut();
        kept.push_back(ended);
        while kept.len() > KEPT_ENDED_MAX {
            kept.pop_front();
        }
        let len = |ended: &EndedCommand| ended.process.hub.borrow().tape().map_or(0, Tape::len);
        let mut total: usize = kept.iter().map(len).sum();
        for oldest in kept.iter() {
            if total <= KEPT_ENDED_LEN_MAX {
                break;
            }
            total -= len(oldest);
            oldest.process.hub.borrow_mut().tape_mut().into_iter().for_each(Tape::clear);
        }
        drop(kept);
        process.news.notify_waiters();
        true
    }

    /// The state of a kept command, with its output after `from`.
    fn state_of(&self, process: &Rc<GuestProcess>, from: u64) -> KeptState {
        let hub = process.hub.borrow();
        let (from, bytes) = hub.tape().map_or((0, Vec::new()), |tape| tape.after(from));
        let kept = self.kept.borrow();
        let ended = kept.iter().find(|ended| Rc::ptr_eq(&ended.process, process));
        let age = ended.map_or_else(|| process.began.elapsed(), |ended| ended.age);
        let end = hub.end().filter(|_| ended.is_some()).map(|end| KeptEnd {
            exited: end.exited,
            exit_code: end.exit_code,
            status: end.status,
            timed_out: process.timed_out.get(),
        });
        KeptState {
            pid: process.pid,
            tty: ended.map_or_else(|| process.input.is_terminal(), |ended| ended.tty),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            first: hub.tape().map_or(0, Tape::first),
            next: from + bytes.len() as u64,
            from,
            base64: STANDARD.encode(bytes),
            end,
        }
    }
}

impl GuestProcess {
    fn is_kept(&self) -> bool {
        self.hub.borrow().tape().is_some()
    }

    /// The record of a command that has ended. Listeners of the running one have its output and need only its end.
    fn without_descriptors(&self, mut tape: Tape, end: EndEvent) -> Self {
        tape.shrink();
        Self {
            pid: self.pid,
            config: self.config.clone(),
            tag: self.tag.clone(),
            hub: RefCell::new(Hub::of_ended(tape, end)),
            input: StdinHandle::Pipe(Mutex::new(None)),
            leader_gone: Cell::new(true),
            timed_out: Cell::new(self.timed_out.get()),
            began: self.began,
            news: Notify::new(),
        }
    }
}
