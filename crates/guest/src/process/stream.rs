//! The events of one process, as one caller receives them: start, output, keepalives, end.

use std::{
    collections::VecDeque,
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use proto::{
    envelope,
    wire::process::{
        ProcessEvent, StartResponse,
        process_event::{Event, KeepAlive, StartEvent},
    },
};
use tokio::time::{Instant, Sleep};

use super::{
    OutputSource,
    hub::{Listener, OutputPiece},
};
use crate::{
    connect::{Code, Codec, ConnectError, end_envelope, nested_bytes},
    reply::BodySource,
};

/// The call through which a caller listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenCall {
    /// Its caller set the deadline, so it receives a deadline error.
    Start,
    Connect,
}

/// The response body of Start or Connect.
pub struct ProcessEvents {
    listener: Listener,
    codec: Codec,
    through: ListenCall,
    ready: VecDeque<Bytes>,
    keepalive: Duration,
    last: Instant,
    timer: Pin<Box<Sleep>>,
    over: bool,
}

impl ProcessEvents {
    pub fn new(listener: Listener, codec: Codec, through: ListenCall, keepalive: Duration) -> Self {
        let mut events = Self {
            codec,
            through,
            ready: VecDeque::with_capacity(2),
            keepalive,
            last: Instant::now(),
            timer: Box::pin(tokio::time::sleep(keepalive)),
            over: false,
            listener,
        };
        events.say(Event::Start(StartEvent { pid: events.listener.process.pid }));
        events
    }

    fn say(&mut self, event: Event) {
        let message = StartResponse { event: Some(ProcessEvent { event: Some(event) }) };
        self.ready.push_back(envelope::seal(0, &self.codec.encode(&message)));
    }

    fn pass_on(&mut self, (stream, bytes): &OutputPiece) {
        let field = match stream {
            OutputSource::Stdout => (1, "stdout"),
            OutputSource::Stderr => (2, "stderr"),
            OutputSource::Pty => (3, "pty"),
        };
        let (head, tail) = nested_bytes(self.codec, &[(1, "event"), (2, "data"), field], bytes);
        self.ready.push_back(head);
        self.ready.extend(tail);
        self.last = Instant::now();
    }

    fn finish(&mut self) {
        self.over = true;
        let process = &self.listener.process;
        let late = self.through == ListenCall::Start && process.timed_out.get();
        let fault = match process.end() {
            Some(end) if !late => {
                self.say(Event::End(end));
                None
            }
            Some(_) => {
                Some(ConnectError::new(Code::DeadlineExceeded, "the process ran longer than its timeout"))
            }
            None => Some(ConnectError::internal("the process was lost")),
        };
        self.ready.push_back(end_envelope(fault.as_ref()));
    }

    /// Whether a keepalive is due now; sets the timer for the next one.
    fn poll_keepalive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            std::task::ready!(self.timer.as_mut().poll(cx));
            let due = self.last + self.keepalive;
            let now = Instant::now();
            if due <= now {
                self.last = now;
                self.timer.as_mut().reset(now + self.keepalive);
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(due);
        }
    }
}

impl BodySource for ProcessEvents {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(bytes)));
            }
            if self.over {
                return Poll::Ready(None);
            }
            if let Some(piece) = self.listener.missed.pop_front() {
                self.pass_on(&piece);
                continue;
            }
            match self.listener.receiver.poll_recv(cx) {
                Poll::Ready(Some(piece)) => self.pass_on(&piece),
                Poll::Ready(None) => self.finish(),
                Poll::Pending => {
                    std::task::ready!(self.poll_keepalive(cx));
                    self.say(Event::Keepalive(KeepAlive {}));
                }
            }
        }
    }
}
