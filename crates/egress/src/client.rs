//! The Body's end of a connection.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
    time::timeout,
};

use crate::refusal::Denial;

/// How long a program may take for a head or a hello.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Longest head of a request.
pub const HEAD_LEN_MAX: usize = 64 << 10;
const PIECE_LEN: usize = 4096;

/// A stream of a program.
pub trait ClientStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Makes the next close a reset.
    fn reset(&self);
}

impl ClientStream for TcpStream {
    fn reset(&self) {
        let _ = self.set_zero_linger();
    }
}

impl ClientStream for UnixStream {
    // A closed Unix socket has no other way to end.
    fn reset(&self) {}
}

/// A stream, and the bytes of it that were read and not yet used.
pub struct ProxyClient<S> {
    pub stream: S,
    pub ahead: Vec<u8>,
}

impl<S: ClientStream> ProxyClient<S> {
    /// A client of which nothing was read.
    pub fn new(stream: S) -> Self {
        Self { stream, ahead: Vec::new() }
    }

    /// Reads more bytes, and returns how many; 0 at the end.
    pub async fn read_more(&mut self) -> io::Result<usize> {
        let mut piece = [0; PIECE_LEN];
        let len = self.stream.read(&mut piece).await?;
        self.ahead.extend_from_slice(&piece[..len]);
        Ok(len)
    }

    /// Reads a head of HTTP, and returns it without the empty line at its end.
    pub async fn read_head(&mut self) -> io::Result<Result<Vec<u8>, Denial>> {
        timeout(PATIENCE, self.read_head_slowly()).await.map_err(|_| io::ErrorKind::TimedOut)?
    }

    async fn read_head_slowly(&mut self) -> io::Result<Result<Vec<u8>, Denial>> {
        let mut seen: usize = 0;
        loop {
            if let Some(at) = find_head_end(&self.ahead, seen) {
                let rest = self.ahead.split_off(at + 4);
                let mut head = std::mem::replace(&mut self.ahead, rest);
                head.truncate(at);
                return Ok(Ok(head));
            }
            if self.ahead.len() > HEAD_LEN_MAX {
                return Ok(Err(Denial::bad("its head is too long")));
            }
            seen = self.ahead.len();
            if self.read_more().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Reads and discards everything.
    pub async fn drain(&mut self) {
        self.ahead.clear();
        let _ = tokio::io::copy(&mut self.stream, &mut tokio::io::sink()).await;
    }
}

/// Reads the bytes that were read and not yet used first.
impl<S: ClientStream> AsyncRead for ProxyClient<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let client = self.get_mut();
        if client.ahead.is_empty() {
            return Pin::new(&mut client.stream).poll_read(context, buffer);
        }
        let rest = client.ahead.split_off(client.ahead.len().min(buffer.remaining()));
        buffer.put_slice(&client.ahead);
        client.ahead = rest;
        Poll::Ready(Ok(()))
    }
}

impl<S: ClientStream> AsyncWrite for ProxyClient<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// Finds the empty line at the end of a head, of which the first `seen` bytes have none.
pub fn find_head_end(bytes: &[u8], seen: usize) -> Option<usize> {
    let from = seen.saturating_sub(3);
    bytes.get(from..)?.windows(4).position(|four| four == b"\r\n\r\n").map(|at| from + at)
}
