//! The channel between a microVM's guest and its host. It carries many streams over one port; both ends run this
//! code.
//!
//! Each stream is joined to a Unix socket, or to an in-memory pipe when both of its ends are in this process. Bytes
//! from the far end are buffered only up to the stream's window, so a stream without a reader stalls alone.
//!
//! Invariant: the reading task never waits to write to the channel, so the two ends cannot deadlock.
//! Invariant: after a stopping control message nothing is written until [`Channel::resume_sending`], not even frames
//! that are queued already.
//! Invariant: streams survive the move of an idle channel to another port: some hypervisors lose their port whenever
//! they save a microVM.
//! Trust: [`proto::mux`] checks every frame; the first one that breaks a rule ends the channel.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    rc::Rc,
};

use proto::mux::{
    DATA_LEN_MAX, FlowLedger, FrameKind, FrameReader, GUEST_STREAMS, MuxEvent, MuxSide, WINDOW, seal,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, unix::AsyncFd},
    net::{UnixStream, unix::OwnedReadHalf},
    sync::{Notify, mpsc},
    task::AbortHandle,
};

/// Most frames that wait to be written, over all streams.
const OUT_MAX: usize = 64;
/// Most bytes per write: as many as the virtio port takes at once.
const WRITE_LEN_MAX: usize = 32 << 10;
/// Bytes per read: as many as the virtio port delivers at once.
const READ_LEN: usize = 32 << 10;
/// Bytes that the reader consumes before it grants the sender new credit; a smaller step would only cost frames.
const CREDIT_STEP: u32 = WINDOW / 4;

/// The file descriptor below a channel: a socket to the hypervisor on the host, the virtio port in the guest.
pub struct ChannelPort(AsyncFd<OwnedFd>);

impl ChannelPort {
    /// Wraps a descriptor that can be read and written.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(crate::ready::ready(fd)?))
    }

    async fn read(&self, buffer: &RefCell<Vec<u8>>) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut buffer.borrow_mut()[..])?)) {
                Ok(read) => return read,
                Err(_) => continue,
            }
        }
    }

    async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), bytes)?)) {
                Ok(written) => bytes = &bytes[written?..],
                Err(_) => continue,
            }
        }
        Ok(())
    }
}

/// The side of a stream from which bytes are read and sent to the far end.
trait StreamSource: AsyncRead + Unpin {
    /// Waits until bytes can be read, where the source can tell that without a buffer to read into.
    async fn waiting(&self) -> io::Result<()>;
}

impl StreamSource for OwnedReadHalf {
    async fn waiting(&self) -> io::Result<()> {
        self.readable().await
    }
}

impl StreamSource for ReadHalf<DuplexStream> {
    async fn waiting(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Wraps a descriptor that can be awaited; a pidfd becomes readable when its process ends.
pub fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    crate::ready::ready(fd)
}

/// The reason why a channel ended.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The port was closed or failed.
    #[error("the channel to the guest broke")]
    Broken(#[source] io::Error),
    /// The other end broke a rule.
    #[error(transparent)]
    Violation(#[from] proto::mux::MuxViolation),
}

/// An event that [`Channel::read`] returns to its caller; the bytes of streams never appear here.
#[derive(Debug, PartialEq, Eq)]
pub enum ChannelEvent {
    /// The other end opened this stream; the caller has to attach it to a socket or pipe at once, or to refuse it.
    Opened(u32),
    /// A control message about the channel itself.
    Word(FrameKind, Vec<u8>),
}

/// One end of the channel.
pub struct Channel {
    port: RefCell<Rc<ChannelPort>>,
    /// While set, the end of the port does not end the channel: [`Channel::move_to`] brings another port.
    moving: Cell<bool>,
    moved: Notify,
    ledger: RefCell<FlowLedger>,
    streams: RefCell<HashMap<u32, JoinedStream>>,
    out: mpsc::Sender<OutgoingFrame>,
    queue: RefCell<Option<mpsc::Receiver<OutgoingFrame>>>,
    /// Grows with each reset; frames queued in an older epoch are dropped.
    epoch: Cell<u64>,
    next: Cell<u32>,
    go_on: Notify,
    intake: RefCell<FrameReader>,
    /// The read buffer, allocated once: an emulated microVM is slow at filling new pages.
    buffer: RefCell<Vec<u8>>,
}

struct JoinedStream {
    inbox: Option<mpsc::UnboundedSender<Vec<u8>>>,
    credit: Rc<Notify>,
    pumps: [AbortHandle; 2],
}

struct OutgoingFrame {
    epoch: u64,
    bytes: Vec<u8>,
    stop: bool,
}

impl Channel {
    /// Creates this end of a channel.
    pub fn new(side: MuxSide, port: ChannelPort) -> Rc<Self> {
        let (out, queue) = mpsc::channel(OUT_MAX);
        Rc::new(Self {
            port: RefCell::new(Rc::new(port)),
            moving: Cell::new(false),
            moved: Notify::new(),
            ledger: RefCell::new(FlowLedger::new(side)),
            streams: RefCell::default(),
            out,
            queue: RefCell::new(Some(queue)),
            epoch: Cell::new(0),
            next: Cell::new(if side == MuxSide::Guest { GUEST_STREAMS } else { 1 }),
            go_on: Notify::new(),
            intake: RefCell::default(),
            buffer: RefCell::new(vec![0; READ_LEN]),
        })
    }

    /// Writes queued frames for as long as the channel exists.
    pub async fn write(&self) -> io::Result<()> {
        let Some(mut queue) = self.queue.borrow_mut().take() else { return Ok(()) };
        let mut batch = Vec::new();
        while let Some(first) = queue.recv().await {
            let mut stop = self.gather(first, &mut batch);
            while !stop && batch.len() < WRITE_LEN_MAX {
                let Ok(more) = queue.try_recv() else { break };
                stop = self.gather(more, &mut batch);
            }
            let port = self.port.borrow().clone();
            port.write_all(&batch).await?;
            batch.clear();
            if stop {
                self.go_on.notified().await;
            }
        }
        Ok(())
    }

    fn gather(&self, out: OutgoingFrame, batch: &mut Vec<u8>) -> bool {
        let current = out.epoch == self.epoch.get();
        if current {
            batch.extend_from_slice(&out.bytes);
        }
        current && out.stop
    }

    /// Reads until there is an event for the caller.
    pub async fn read(self: &Rc<Self>) -> Result<ChannelEvent, ChannelError> {
        loop {
            while let Some(frame) = { self.intake.borrow_mut().next()? } {
                let incoming = self.ledger.borrow_mut().receive(frame)?;
                if let Some(event) = self.pass_on(incoming) {
                    return Ok(event);
                }
            }
            let port = self.port.borrow().clone();
            let read = tokio::select! {
                read = port.read(&self.buffer) => read,
                () = self.moved.notified() => continue,
            };
            match read {
                Ok(len @ 1..) => self.intake.borrow_mut().push(&self.buffer.borrow()[..len]),
                _ if self.moving.get() => self.moved.notified().await,
                Ok(_) => return Err(ChannelError::Broken(io::ErrorKind::UnexpectedEof.into())),
                Err(error) => return Err(ChannelError::Broken(error)),
            }
        }
    }

    /// Announces that the port of this idle channel may end. [`Channel::move_to`] or [`Channel::keep_alive`] must
    /// follow.
    pub fn expect_move(&self) {
        self.moving.set(true);
    }

    /// Whether the port may end without ending the channel.
    pub fn may_move(&self) -> bool {
        self.moving.get()
    }

    /// Continues over another port and keeps every stream.
    pub fn move_to(&self, port: ChannelPort) {
        *self.intake.borrow_mut() = FrameReader::default();
        *self.port.borrow_mut() = Rc::new(port);
        self.keep_alive();
    }

    /// Ends the time in which the port may end: from now on its end is the end of the channel again.
    pub fn keep_alive(&self) {
        self.moving.set(false);
        self.moved.notify_one();
    }

    fn pass_on(&self, incoming: MuxEvent) -> Option<ChannelEvent> {
        let mut streams = self.streams.borrow_mut();
        match incoming {
            MuxEvent::Opened(stream) => return Some(ChannelEvent::Opened(stream)),
            MuxEvent::Word(kind, contents) => return Some(ChannelEvent::Word(kind, contents)),
            MuxEvent::Data(stream, bytes) => {
                if let Some(inbox) = streams.get(&stream).and_then(|joined| joined.inbox.as_ref()) {
                    // The queue is unbounded, but the ledger limits a stream's bytes to its window.
                    let _ = inbox.send(bytes);
                }
            }
            MuxEvent::Credit(stream) => {
                if let Some(joined) = streams.get(&stream) {
                    joined.credit.notify_one();
                }
            }
            MuxEvent::Ended(stream) => {
                if let Some(joined) = streams.get_mut(&stream) {
                    joined.inbox = None;
                }
            }
            MuxEvent::Reset(stream) => {
                if let Some(joined) = streams.remove(&stream) {
                    joined.pumps.iter().for_each(AbortHandle::abort);
                }
            }
            MuxEvent::Late => {}
        }
        None
    }

    /// Sends a control message about the channel itself.
    pub async fn send_word(&self, kind: FrameKind, contents: &[u8]) {
        self.push(seal(kind, 0, contents), false).await;
    }

    /// Sends a control message after which nothing is written until [`Channel::resume_sending`].
    pub async fn send_word_and_stop(&self, kind: FrameKind, contents: &[u8]) {
        self.push(seal(kind, 0, contents), true).await;
    }

    /// Lets the writer continue after a stopping control message.
    pub fn resume_sending(&self) {
        self.go_on.notify_one();
    }

    async fn push(&self, bytes: Vec<u8>, stop: bool) {
        let _ = self.out.send(OutgoingFrame { epoch: self.epoch.get(), bytes, stop }).await;
    }

    /// Drops every stream and every frame that still waits to be written.
    pub fn reset_epoch(&self) {
        self.epoch.set(self.epoch.get() + 1);
        self.ledger.borrow_mut().clear();
        for (_, joined) in self.streams.borrow_mut().drain() {
            joined.pumps.iter().for_each(AbortHandle::abort);
        }
    }

    /// Opens a stream and joins it to the socket; false when too many streams are open.
    pub async fn open(self: &Rc<Self>, socket: UnixStream) -> bool {
        let stream = self.next.get();
        let (kind, first) =
            if stream >= GUEST_STREAMS { (FrameKind::Ask, GUEST_STREAMS) } else { (FrameKind::Open, 0) };
        self.next.set(first | (stream.wrapping_add(1) & (GUEST_STREAMS - 1)).max(1));
        if !self.ledger.borrow_mut().open(stream) {
            return false;
        }
        self.push(seal(kind, stream, &[]), false).await;
        self.attach(stream, socket);
        true
    }

    /// Joins a stream to the socket.
    pub fn attach(self: &Rc<Self>, stream: u32, socket: UnixStream) {
        let (from, to) = socket.into_split();
        self.join(stream, from, to);
    }

    /// Joins a stream to an in-memory pipe and returns the far end. This path makes no system call: right after a
    /// restore an emulated microVM has to translate the code of each one anew.
    pub fn attach_here(self: &Rc<Self>, stream: u32) -> DuplexStream {
        let (near, far) = tokio::io::duplex(DATA_LEN_MAX);
        let (from, to) = tokio::io::split(near);
        self.join(stream, from, to);
        far
    }

    fn join(
        self: &Rc<Self>,
        stream: u32,
        from: impl StreamSource + 'static,
        to: impl AsyncWrite + Unpin + 'static,
    ) {
        let (inbox, arriving) = mpsc::unbounded_channel();
        let credit = Rc::new(Notify::new());
        let up = tokio::task::spawn_local(self.clone().send_from(stream, from, credit.clone()));
        let down = tokio::task::spawn_local(self.clone().receive_to(stream, to, arriving));
        let joined =
            JoinedStream { inbox: Some(inbox), credit, pumps: [up.abort_handle(), down.abort_handle()] };
        self.streams.borrow_mut().insert(stream, joined);
    }

    async fn send_from(self: Rc<Self>, stream: u32, mut from: impl StreamSource, credit: Rc<Notify>) {
        loop {
            // Wait before allocating, so that an idle stream holds no buffer.
            if from.waiting().await.is_err() {
                return self.reset(stream).await;
            }
            let allowed = loop {
                let allowed = self.ledger.borrow().credit(stream);
                match allowed {
                    None => return self.detach_streams(stream),
                    Some(0) => credit.notified().await,
                    Some(allowed) => break (allowed as usize).min(DATA_LEN_MAX),
                }
            };
            let mut buffer = Vec::with_capacity(allowed);
            match (&mut from).take(allowed as u64).read_buf(&mut buffer).await {
                Ok(0) => {
                    self.ledger.borrow_mut().end(stream);
                    self.push(seal(FrameKind::End, stream, &[]), false).await;
                    return self.detach_streams(stream);
                }
                Ok(len) => {
                    self.ledger.borrow_mut().spend(stream, len as u32);
                    self.push(seal(FrameKind::Data, stream, &buffer), false).await;
                }
                Err(_) => return self.reset(stream).await,
            }
        }
    }

    async fn receive_to(
        self: Rc<Self>,
        stream: u32,
        mut to: impl AsyncWrite + Unpin,
        mut arriving: mpsc::UnboundedReceiver<Vec<u8>>,
    ) {
        let mut owed = 0;
        while let Some(bytes) = arriving.recv().await {
            if to.write_all(&bytes).await.is_err() {
                return self.reset(stream).await;
            }
            owed += bytes.len() as u32;
            if owed >= CREDIT_STEP {
                if self.ledger.borrow_mut().give(stream, owed) {
                    self.push(seal(FrameKind::Credit, stream, &owed.to_le_bytes()), false).await;
                }
                owed = 0;
            }
        }
        let _ = to.shutdown().await;
        self.detach_streams(stream);
    }

    /// Forgets a stream once both of its directions have ended.
    fn detach_streams(&self, stream: u32) {
        if self.ledger.borrow().credit(stream).is_none() {
            let joined = self.streams.borrow_mut().remove(&stream);
            // Dropping does not abort the pumps: they still deliver bytes that arrived before the end.
            drop(joined);
        }
    }

    /// Closes a stream in both directions.
    pub async fn reset(&self, stream: u32) {
        if self.ledger.borrow_mut().drop_stream(stream) {
            self.push(seal(FrameKind::Reset, stream, &[]), false).await;
        }
        let joined = self.streams.borrow_mut().remove(&stream);
        if let Some(joined) = joined {
            joined.pumps.iter().for_each(AbortHandle::abort);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use tokio::task::LocalSet;

    use super::*;

    /// Connects a host end with a guest end that passes each stream to `serve`.
    fn joined<F: Future<Output = ()> + 'static>(
        serve: impl Fn(UnixStream) -> F + 'static,
    ) -> (Rc<Channel>, Rc<Channel>) {
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let host = Channel::new(MuxSide::Host, ChannelPort::new(one).unwrap());
        let guest = Channel::new(MuxSide::Guest, ChannelPort::new(other).unwrap());
        for end in [host.clone(), guest.clone()] {
            tokio::task::spawn_local(async move { drop(end.write().await) });
        }
        let far = guest.clone();
        tokio::task::spawn_local(async move {
            while let Ok(event) = far.read().await {
                match event {
                    ChannelEvent::Opened(stream) => {
                        let (near, served) = UnixStream::pair().unwrap();
                        far.attach(stream, near);
                        tokio::task::spawn_local(serve(served));
                    }
                    ChannelEvent::Word(FrameKind::Hold, _) => {
                        far.send_word_and_stop(FrameKind::Held, b"{}").await
                    }
                    ChannelEvent::Word(FrameKind::GoOn, _) => far.resume_sending(),
                    ChannelEvent::Word(..) => {}
                }
            }
        });
        (host, guest)
    }

    fn listen(host: &Rc<Channel>) -> mpsc::UnboundedReceiver<FrameKind> {
        let (words, incoming) = mpsc::unbounded_channel();
        let host = host.clone();
        tokio::task::spawn_local(async move {
            while let Ok(event) = host.read().await {
                if let ChannelEvent::Word(kind, _) = event {
                    let _ = words.send(kind);
                }
            }
        });
        incoming
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let limited = async { tokio::time::timeout(Duration::from_secs(20), test).await.expect("it hangs") };
        LocalSet::new().block_on(&runtime, limited);
    }

    async fn echo(socket: UnixStream) {
        let (mut from, mut to) = socket.into_split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
    }

    #[test]
    fn streams_carry_what_they_are_given_in_order_and_to_the_end() {
        run(async {
            let (host, _guest) = joined(echo);
            let _words = listen(&host);
            let tasks: Vec<_> = (0..50u8)
                .map(|number| {
                    let host = host.clone();
                    tokio::task::spawn_local(async move {
                        let (mut near, far) = UnixStream::pair().unwrap();
                        assert!(host.open(far).await);
                        let sent: Vec<u8> =
                            (0..700_000u32).map(|at| (at as u8).wrapping_mul(number)).collect();
                        let (mut from, mut to) = near.split();
                        let mut got = Vec::new();
                        let send = async {
                            to.write_all(&sent).await.unwrap();
                            to.shutdown().await.unwrap();
                        };
                        let ((), read) = tokio::join!(send, from.read_to_end(&mut got));
                        read.unwrap();
                        assert!(got == sent, "stream {number}");
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            tokio::task::yield_now().await;
            assert_eq!(host.streams.borrow().len(), 0, "nothing is kept of streams that are over");
        });
    }

    #[test]
    fn a_stream_that_nobody_reads_stops_alone() {
        run(async {
            // Every stream gets endless output.
            let (host, guest) =
                joined(|mut socket| async move { while socket.write_all(&[7; 4096]).await.is_ok() {} });
            let _words = listen(&host);
            let (stuck, far) = UnixStream::pair().unwrap();
            assert!(host.open(far).await);
            tokio::time::sleep(Duration::from_millis(100)).await;
            for _ in 0..3 {
                let (mut near, far) = UnixStream::pair().unwrap();
                assert!(host.open(far).await);
                let mut read = vec![0; 4 << 20];
                near.read_exact(&mut read).await.unwrap();
            }
            assert_eq!(guest.ledger.borrow().credit(1), Some(0), "the first one has used its window");
            drop(stuck);
        });
    }

    #[test]
    fn streams_outlive_a_line_that_ends_at_rest_and_is_moved() {
        run(async {
            let (host, guest) = joined(echo);
            let mut words = listen(&host);
            let (mut near, far) = UnixStream::pair().unwrap();
            assert!(host.open(far).await);
            near.write_all(b"one").await.unwrap();
            near.read_exact(&mut [0; 3]).await.unwrap();
            host.send_word_and_stop(FrameKind::Hold, &[]).await;
            assert_eq!(words.recv().await, Some(FrameKind::Held));
            for end in [&host, &guest] {
                end.expect_move();
            }
            // Both ends of the old port are closed; meanwhile the host's client sends something.
            near.write_all(b"two").await.unwrap();
            let (one, other) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                    .unwrap();
            guest.move_to(ChannelPort::new(other).unwrap());
            tokio::time::sleep(Duration::from_millis(20)).await;
            host.move_to(ChannelPort::new(one).unwrap());
            host.resume_sending();
            host.send_word(FrameKind::GoOn, &[]).await;
            let mut got = [0; 3];
            near.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, b"two");
        });
    }

    #[test]
    fn a_line_that_was_to_move_and_stays_ends_as_any_other() {
        run(async {
            let (one, other) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                    .unwrap();
            let host = Channel::new(MuxSide::Host, ChannelPort::new(one).unwrap());
            host.expect_move();
            drop(other);
            let waits = tokio::time::timeout(Duration::from_millis(20), host.read()).await;
            assert!(waits.is_err(), "its end is waited out");
            host.keep_alive();
            assert!(matches!(host.read().await, Err(ChannelError::Broken(_))));
        });
    }

    #[test]
    fn a_held_line_is_silent_until_it_goes_on() {
        run(async {
            let (host, guest) = joined(echo);
            let mut words = listen(&host);
            let (mut near, far) = UnixStream::pair().unwrap();
            assert!(host.open(far).await);
            near.write_all(b"one").await.unwrap();
            near.read_exact(&mut [0; 3]).await.unwrap();
            host.send_word_and_stop(FrameKind::Hold, &[]).await;
            assert_eq!(words.recv().await, Some(FrameKind::Held));
            near.write_all(b"two").await.unwrap();
            let silent = tokio::time::timeout(Duration::from_millis(50), near.read_exact(&mut [0; 3])).await;
            assert!(silent.is_err(), "nothing passes a held line");
            host.resume_sending();
            // Frames that waited are written first; the message to the guest comes after them.
            host.send_word(FrameKind::GoOn, &[]).await;
            near.read_exact(&mut [0; 3]).await.unwrap();
            // A restored guest resets its channel: every stream is gone.
            guest.reset_epoch();
            assert_eq!(guest.streams.borrow().len(), 0);
        });
    }
}
