//! Copies the output of a process from its pipe or terminal to its hub.
//!
//! Invariant: no buffer is held while there is nothing to read.
//! After the leader has exited, its children may still hold the pipe. Everything the leader wrote is in the pipe by
//! then, so reading continues until the end of file, until 200 ms of silence, or, if a child keeps writing, until
//! more was read than a pipe can hold. From then on output is read and discarded, so that SIGPIPE does not kill a
//! daemon.

use std::{io, os::fd::OwnedFd, rc::Rc, time::Duration};

use bytes::Bytes;
use rustix::buffer::spare_capacity;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, watch},
    time::Instant,
};

use super::{GuestProcess, OutputSource};

const PIPE_PIECE_LEN: usize = 32 * 1024;
const PTY_PIECE_LEN: usize = 16 * 1024;
/// A pipe is enlarged to this size once its process has shown that it writes much.
const PIPE_LARGE: usize = 256 * 1024;
const FULL_PIECES_BEFORE_LARGE: u32 = 4;
const SILENCE: Duration = Duration::from_millis(200);
const DRAIN_MIN: Duration = Duration::from_secs(2);
/// More bytes than any pipe here holds.
const DRAIN_LEN: usize = 1 << 20;
const THROWN_LEN: usize = 4096;

/// A descriptor to read output from.
pub struct Outlet {
    pub fd: Rc<AsyncFd<OwnedFd>>,
    pub stream: OutputSource,
}

/// The time at which the leader exited, once it has.
pub type LeaderExit = watch::Receiver<Option<Instant>>;

/// Copies all output; drops `done` when the listeners have all that they will get.
pub async fn run(process: Rc<GuestProcess>, outlet: Outlet, mut gone: LeaderExit, done: mpsc::Sender<()>) {
    let end = carry(&process, &outlet, &mut gone).await;
    drop((done, process));
    match end {
        DrainEnd::StillOpen => discard_rest(&outlet.fd).await,
        // Let the end be delivered before the descriptor is closed.
        DrainEnd::EndOfFile => tokio::task::yield_now().await,
    }
}

#[derive(Debug, PartialEq, Eq)]
enum DrainEnd {
    EndOfFile,
    StillOpen,
}

async fn carry(process: &GuestProcess, outlet: &Outlet, gone: &mut LeaderExit) -> DrainEnd {
    let mut reader = OutletReader::new(outlet);
    let at = loop {
        tokio::select! {
            biased;
            read = reader.read() => match read {
                Some(bytes) => process.publish((outlet.stream, bytes)).await,
                None => return DrainEnd::EndOfFile,
            },
            at = exit(gone) => break at,
        }
    };
    let mut after_exit = 0;
    loop {
        // Try to read before waiting: most often the end of file is there already.
        let read = match reader.read_now() {
            Some(read) => read,
            None => tokio::select! {
                biased;
                read = reader.read() => read,
                () = tokio::time::sleep(SILENCE) => return DrainEnd::StillOpen,
            },
        };
        let Some(bytes) = read else { return DrainEnd::EndOfFile };
        after_exit += bytes.len();
        if after_exit > DRAIN_LEN && at.elapsed() > DRAIN_MIN {
            return DrainEnd::StillOpen;
        }
        process.publish((outlet.stream, bytes)).await;
    }
}

/// Waits until the leader exits.
async fn exit(gone: &mut LeaderExit) -> Instant {
    // The sender exists as long as the leader; its loss is an exit too.
    let at = gone.wait_for(Option::is_some).await.ok().and_then(|at| *at);
    at.unwrap_or_else(Instant::now)
}

async fn discard_rest(fd: &AsyncFd<OwnedFd>) {
    loop {
        let read = fd.async_io(Interest::READABLE, |fd| {
            let mut buffer = [0_u8; THROWN_LEN];
            Ok(rustix::io::read(fd, &mut buffer[..])?)
        });
        if matches!(read.await, Ok(0) | Err(_)) {
            return;
        }
    }
}

struct OutletReader<'a> {
    outlet: &'a Outlet,
    piece_len: usize,
    full_pieces: u32,
}

impl<'a> OutletReader<'a> {
    fn new(outlet: &'a Outlet) -> Self {
        let piece_len = if outlet.stream == OutputSource::Pty { PTY_PIECE_LEN } else { PIPE_PIECE_LEN };
        Self { outlet, piece_len, full_pieces: 0 }
    }

    /// Reads the next piece; `None` at the end of file. A pty master without a slave returns EIO, which is its end of
    /// file.
    async fn read(&mut self) -> Option<Bytes> {
        let piece_len = self.piece_len;
        let read = self.outlet.fd.async_io(Interest::READABLE, |fd| read_piece(fd, piece_len));
        let bytes = read.await.ok().filter(|bytes| !bytes.is_empty())?;
        self.widen(bytes.len());
        Some(bytes)
    }

    /// Reads the next piece without waiting; the outer `None` means that there is nothing to read yet.
    fn read_now(&mut self) -> Option<Option<Bytes>> {
        match read_piece(self.outlet.fd.get_ref(), self.piece_len) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            read => Some(read.ok().filter(|bytes| !bytes.is_empty())),
        }
    }

    fn widen(&mut self, len: usize) {
        if len < self.piece_len || self.full_pieces >= FULL_PIECES_BEFORE_LARGE {
            return;
        }
        self.full_pieces += 1;
        if self.full_pieces == FULL_PIECES_BEFORE_LARGE && self.outlet.stream != OutputSource::Pty {
            let _ = rustix::pipe::fcntl_setpipe_size(self.outlet.fd.get_ref(), PIPE_LARGE);
        }
    }
}

fn read_piece(fd: &OwnedFd, len: usize) -> io::Result<Bytes> {
    let mut buffer = Vec::with_capacity(len);
    rustix::io::read(fd, spare_capacity(&mut buffer))?;
    // A short text must not keep a large buffer alive while its listener is slow.
    if buffer.len() < len / 2 { Ok(Bytes::copy_from_slice(&buffer)) } else { Ok(buffer.into()) }
}
