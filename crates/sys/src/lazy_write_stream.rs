//! A Unix stream that wakes its owner only for events that it waits for.
//!
//! The runtime's own streams always poll for reading and writing. Each read on one side of a Unix socket frees buffer
//! space, and the kernel then wakes the other side, which has nothing to write and sleeps again: two more context
//! switches for each message, on the CPU where the reader is about to work.
//!
//! Invariant: no call blocks, whatever mode the descriptor is in.
//! Invariant: a duplicate of the descriptor is polled for writing, made when a write found no room for the first
//! time.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustix::{
    io::Errno,
    net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown},
};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};

const SEND: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// A Unix stream that polls for writing only when needed.
#[derive(Debug)]
pub struct LazyWriteStream {
    reads: AsyncFd<OwnedFd>,
    /// Whether the last read found the socket empty.
    drained: bool,
    writes: Option<AsyncFd<OwnedFd>>,
}

impl LazyWriteStream {
    /// Wraps a connection; must be called within a runtime.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        let reads = watched(stream.into(), Interest::READABLE)?;
        Ok(Self { reads, drained: false, writes: None })
    }

    /// Sends as soon as there is room, which is nearly always at once.
    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        mut send: impl FnMut(&OwnedFd) -> Result<usize, Errno>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match send(self.reads.get_ref()) {
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                sent => return Poll::Ready(sent.map_err(io::Error::from)),
            }
            let writes = match &mut self.writes {
                Some(writes) => writes,
                none => none.insert(watched(self.reads.get_ref().try_clone()?, Interest::WRITABLE)?),
            };
            // Readiness is cleared before the next attempt, so that room freed in between is reported again.
            ready!(writes.poll_write_ready(context))?.clear_ready();
        }
    }
}

#[expect(
    deprecated,
    reason = "unsound only for types whose descriptor may close or change; an OwnedFd's does not"
)]
pub(crate) fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}

impl AsyncRead for LazyWriteStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.drained {
                // Readiness is cleared before the next attempt. The runtime keeps the information that the other side
                // has closed.
                ready!(this.reads.poll_read_ready(context))?.clear_ready();
            }
            let room = into.initialize_unfilled();
            let len = room.len();
            match rustix::net::recv(this.reads.as_fd(), room, RecvFlags::DONTWAIT) {
                Ok((read, _)) => {
                    this.drained = read < len;
                    into.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::AGAIN) => this.drained = true,
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

impl AsyncWrite for LazyWriteStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |fd| rustix::net::send(fd, bytes, SEND))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |fd| {
            rustix::net::sendmsg(fd, bytes, &mut SendAncillaryBuffer::default(), SEND)
        })
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match rustix::net::shutdown(&self.reads, Shutdown::Write) {
            // The other side has closed the connection already.
            Err(Errno::NOTCONN) => Poll::Ready(Ok(())),
            done => Poll::Ready(done.map_err(io::Error::from)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn in_runtime<T>(act: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), act).await.unwrap() })
    }

    #[test]
    fn everything_arrives_also_when_there_is_no_room() {
        in_runtime(async {
            let (near, far) = UnixStream::pair().unwrap();
            let (mut near, mut far) =
                (LazyWriteStream::new(near).unwrap(), LazyWriteStream::new(far).unwrap());
            let sent: Vec<u8> = (0..8 << 20).map(|n: u32| (n ^ n >> 9) as u8).collect();
            let write = async {
                near.write_all(&sent).await.unwrap();
                assert!(near.writes.is_some(), "it never had no room");
                near.shutdown().await.unwrap();
            };
            let read = async {
                // Slowly at first, so that the socket is full.
                tokio::time::sleep(Duration::from_millis(50)).await;
                let mut all = Vec::new();
                far.read_to_end(&mut all).await.unwrap();
                all
            };
            let ((), all) = tokio::join!(write, read);
            assert!(all == sent);
        });
    }

    #[test]
    fn an_end_that_came_with_the_last_bytes_is_seen() {
        in_runtime(async {
            let (near, far) = UnixStream::pair().unwrap();
            let mut far = LazyWriteStream::new(far).unwrap();
            for said in ["one", "two"] {
                std::io::Write::write_all(&mut &near, said.as_bytes()).unwrap();
                let mut room = [0; 16];
                let len = far.read(&mut room).await.unwrap();
                assert_eq!(&room[..len], said.as_bytes());
                assert!(far.writes.is_none());
            }
            std::io::Write::write_all(&mut &near, b"last").unwrap();
            drop(near);
            // Let the runtime see both events at once.
            tokio::time::sleep(Duration::from_millis(20)).await;
            let mut all = String::new();
            far.read_to_string(&mut all).await.unwrap();
            assert_eq!(all, "last");
            assert!(far.write_all(b"x").await.is_err());
        });
    }

    #[test]
    fn pieces_are_sent_as_one() {
        in_runtime(async {
            let (near, far) = UnixStream::pair().unwrap();
            let (mut near, mut far) =
                (LazyWriteStream::new(near).unwrap(), LazyWriteStream::new(far).unwrap());
            let sent =
                near.write_vectored(&[io::IoSlice::new(b"ab"), io::IoSlice::new(b"cd")]).await.unwrap();
            let mut room = [0; 8];
            assert_eq!((sent, far.read(&mut room).await.unwrap()), (4, 4));
            assert_eq!(&room[..4], b"abcd");
        });
    }
}
