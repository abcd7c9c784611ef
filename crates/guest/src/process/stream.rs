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
    connect::{seal_event, seal_output},
    wire::process::process_event::{Event, KeepAlive, StartEvent, data_event::Output},
};
use tokio::time::{Instant, Sleep};

use super::{
    OutputSource,
    hub::{Listener, OutputPiece},
};
use crate::{
    connect::{Code, Codec, ConnectError, end_envelope},
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
    /// Whether the process is hung up if the caller leaves before its end.
    hang_up: bool,
}

impl Drop for ProcessEvents {
    fn drop(&mut self) {
        if self.hang_up && !self.over && self.listener.is_last() {
            self.listener.process.hang_up();
        }
    }
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
            hang_up: false,
            listener,
        };
        events.say(Event::Start(StartEvent { pid: events.listener.process.pid }));
        events
    }

    /// Hangs the process up if the caller leaves before its end.
    pub fn hang_up_without_caller(mut self) -> Self {
        self.hang_up = true;
        self
    }

    fn say(&mut self, event: Event) {
        self.ready.push_back(seal_event(self.codec, event));
    }

    fn pass_on(&mut self, (stream, bytes): &OutputPiece) {
        let output = match stream {
            OutputSource::Stdout => Output::Stdout(bytes.clone()),
            OutputSource::Stderr => Output::Stderr(bytes.clone()),
            OutputSource::Pty => Output::Pty(bytes.clone()),
        };
        let (head, tail) = seal_output(self.codec, &output);
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
