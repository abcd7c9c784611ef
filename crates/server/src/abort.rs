//! Connections that the server can reset instead of closing them, which shows the caller that its response is
//! incomplete.
//!
//! An ordinary close would suffice for a careful client. E2B's clients check whether the Body still runs only
//! after the connection was reset, so the server resets it.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// Requests that a connection be reset.
#[derive(Debug, Clone, Default)]
pub struct AbortHandle(Arc<AtomicBool>);

impl AbortHandle {
    /// Requests the reset.
    pub fn say(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_said(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A connection that can be reset.
#[derive(Debug)]
pub struct AbortableConnection {
    stream: TcpStream,
    abort: AbortHandle,
}

impl AbortableConnection {
    /// Wraps a stream, and returns the handle that resets it.
    pub fn new(stream: TcpStream) -> (Self, AbortHandle) {
        let abort = AbortHandle::default();
        (Self { stream, abort: abort.clone() }, abort)
    }
}

impl Drop for AbortableConnection {
    fn drop(&mut self) {
        if self.abort.is_said() {
            // With a linger time of zero, the kernel resets the connection when it is closed.
            let _ = rustix::net::sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
        }
    }
}

impl AsyncRead for AbortableConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for AbortableConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.abort.is_said() {
            // An ordinary shutdown would reach the client before the reset.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
