//! Delivery of watch events: as a stream, or kept until the caller polls.
//!
//! Invariant: there are at most [`WATCHES_MAX`] watches; a polled watch that its caller never polls keeps only its
//! newest events.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    future::Future,
    io,
    ops::ControlFlow,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use proto::{
    envelope,
    wire::filesystem::{
        FilesystemEvent, WatchDirResponse,
        watch_dir_response::{Event, KeepAlive, StartEvent},
    },
};
use tokio::{
    io::unix::AsyncFd,
    sync::mpsc,
    task::AbortHandle,
    time::{Instant, Sleep},
};

use super::{rpc::on_helper, watch::DirWatch};
use crate::{
    connect::{Code, Codec, ConnectError, end_envelope},
    reply::BodySource,
};

const WATCHES_MAX: usize = 1024;
const EVENTS_KEPT_MAX: usize = 4096;
const QUEUE_LEN: usize = 64;

/// All watches of the guest.
#[derive(Debug, Default)]
pub struct Watchers {
    polled: RefCell<HashMap<String, PolledWatch>>,
    count: Rc<Cell<usize>>,
}

/// Counts as one watch until it is dropped.
#[derive(Debug)]
pub struct WatchPermit(Rc<Cell<usize>>);

impl Drop for WatchPermit {
    fn drop(&mut self) {
        self.0.set(self.0.get().saturating_sub(1));
    }
}

#[derive(Debug)]
struct PolledWatch {
    kept: Rc<RefCell<WatchBacklog>>,
    task: AbortHandle,
    _place: WatchPermit,
}

#[derive(Debug, Default)]
struct WatchBacklog {
    events: VecDeque<FilesystemEvent>,
    fault: Option<ConnectError>,
}

impl Drop for PolledWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watchers {
    pub fn place(&self) -> Result<WatchPermit, ConnectError> {
        if self.count.get() >= WATCHES_MAX {
            return Err(ConnectError::new(
                Code::ResourceExhausted,
                format!("{WATCHES_MAX} watches are under way already"),
            ));
        }
        self.count.set(self.count.get() + 1);
        Ok(WatchPermit(self.count.clone()))
    }

    /// Starts a polled watch, which keeps its events until the caller asks for them; returns its id.
    pub fn add(&self, watch: DirWatch) -> Result<String, ConnectError> {
        let place = self.place()?;
        let id = random_id()?;
        let kept = Rc::new(RefCell::new(WatchBacklog::default()));
        let keeping = kept.clone();
        let keep = async move |heard: Result<FilesystemEvent, ConnectError>| {
            keeping.borrow_mut().add(heard);
            ControlFlow::Continue(())
        };
        let ready = ready(&watch)?;
        let task = tokio::task::spawn_local(drive(watch, ready, keep)).abort_handle();
        self.polled.borrow_mut().insert(id.clone(), PolledWatch { kept, task, _place: place });
        Ok(id)
    }

    /// Takes the events since the last poll.
    pub fn events(&self, id: &str) -> Result<Vec<FilesystemEvent>, ConnectError> {
        let polled = self.polled.borrow();
        let mut kept = polled.get(id).ok_or_else(|| not_found(id))?.kept.borrow_mut();
        match &kept.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(std::mem::take(&mut kept.events).into()),
        }
    }

    pub fn remove(&self, id: &str) -> Result<(), ConnectError> {
        self.polled.borrow_mut().remove(id).map(drop).ok_or_else(|| not_found(id))
    }
}

impl WatchBacklog {
    fn add(&mut self, heard: Result<FilesystemEvent, ConnectError>) {
        match heard {
            Ok(event) => {
                if self.events.len() >= EVENTS_KEPT_MAX {
                    self.events.pop_front();
                }
                self.events.push_back(event);
            }
            Err(fault) => self.fault = Some(fault),
        }
    }
}

fn not_found(id: &str) -> ConnectError {
    ConnectError::new(Code::NotFound, format!("watcher with id {id} not found"))
}

fn random_id() -> Result<String, ConnectError> {
    let mut bytes = [0_u8; 10];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|error| ConnectError::internal(error.to_string()))?;
    Ok(bytes.iter().fold("w".to_owned(), |id, byte| format!("{id}{byte:02x}")))
}

fn ready(watch: &DirWatch) -> Result<AsyncFd<std::os::fd::OwnedFd>, ConnectError> {
    let fd = watch.descriptor().and_then(crate::ready::ready);
    fd.map_err(|error| ConnectError::new(Code::ResourceExhausted, format!("error creating watcher: {error}")))
}

/// Passes on every event until the watch fails or the receiver is gone.
async fn drive(
    mut watch: DirWatch,
    ready: AsyncFd<std::os::fd::OwnedFd>,
    mut tell: impl AsyncFnMut(Result<FilesystemEvent, ConnectError>) -> ControlFlow<()>,
) {
    loop {
        let Ok(mut guard) = ready.readable().await else { return };
        let batch = if watch.needs_helper() {
            let helped = on_helper(move || {
                let batch = watch.next();
                Ok((watch, batch))
            });
            match helped.await {
                Ok((back, batch)) => {
                    watch = back;
                    batch
                }
                Err(fault) => {
                    let _ = tell(Err(fault)).await;
                    return;
                }
            }
        } else {
            watch.next()
        };
        match batch {
            Ok(batch) => {
                if batch.drained {
                    guard.clear_ready();
                }
                drop(guard);
                for event in batch.events {
                    if tell(Ok(event)).await.is_break() {
                        return;
                    }
                }
            }
            Err(fault) => {
                let _ = tell(Err(fault)).await;
                return;
            }
        }
    }
}

/// The response body of WatchDir.
pub struct WatchEvents {
    heard: mpsc::Receiver<Result<FilesystemEvent, ConnectError>>,
    task: AbortHandle,
    codec: Codec,
    ready: VecDeque<Bytes>,
    keepalive: Duration,
    timer: Pin<Box<Sleep>>,
    over: bool,
    _place: WatchPermit,
}

impl Drop for WatchEvents {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl WatchEvents {
    pub fn new(
        watch: DirWatch,
        place: WatchPermit,
        codec: Codec,
        keepalive: Duration,
    ) -> Result<Self, ConnectError> {
        let (sender, heard) = mpsc::channel(QUEUE_LEN);
        let tell = async move |event| match sender.send(event).await {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        };
        let when = ready(&watch)?;
        let task = tokio::task::spawn_local(drive(watch, when, tell)).abort_handle();
        let timer = Box::pin(tokio::time::sleep(keepalive));
        let ready = VecDeque::new();
        let mut events = Self { heard, task, codec, ready, keepalive, timer, over: false, _place: place };
        events.say(Event::Start(StartEvent {}));
        Ok(events)
    }

    fn say(&mut self, event: Event) {
        let message = WatchDirResponse { event: Some(event) };
        self.ready.push_back(envelope::seal(0, &self.codec.encode(&message)));
        self.timer.as_mut().reset(Instant::now() + self.keepalive);
    }

    fn finish(&mut self, fault: Option<&ConnectError>) {
        self.over = true;
        self.ready.push_back(end_envelope(fault));
    }
}

impl BodySource for WatchEvents {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(bytes)));
            }
            if self.over {
                return Poll::Ready(None);
            }
            match self.heard.poll_recv(cx) {
                Poll::Ready(Some(Ok(event))) => self.say(Event::Filesystem(event)),
                Poll::Ready(Some(Err(fault))) => self.finish(Some(&fault)),
                Poll::Ready(None) => self.finish(None),
                Poll::Pending => {
                    std::task::ready!(self.timer.as_mut().poll(cx));
                    self.say(Event::Keepalive(KeepAlive {}));
                }
            }
        }
    }
}
