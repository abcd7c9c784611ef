//! The first bytes of a host of ssh, before the connection is encrypted: its signature of the session is among it.

use std::{
    cell::RefCell,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use tokio::io::AsyncWrite;

use crate::target::Target;

/// Well over a greeting, a list of algorithms and the answer to a key exchange.
const OPENING_LEN_MAX: usize = 32 << 10;
/// Shortest signature: no host says a text of this length by chance.
const SIGNATURE_LEN_MIN: usize = 64;

/// The first bytes of a host on a connection that is open.
pub struct HostOpening {
    pub target: Target,
    bytes: RefCell<Vec<u8>>,
}

impl HostOpening {
    /// Of a host that has said nothing.
    pub fn of(target: Target) -> Self {
        Self { target, bytes: RefCell::default() }
    }

    /// Whether the host said this signature.
    pub fn has(&self, signature: &[u8]) -> bool {
        signature.len() >= SIGNATURE_LEN_MIN
            && memchr::memmem::find(&self.bytes.borrow(), signature).is_some()
    }

    /// Keeps what the host said next.
    pub fn push(&self, bytes: &[u8]) {
        let mut kept = self.bytes.borrow_mut();
        let left = OPENING_LEN_MAX - kept.len();
        kept.extend_from_slice(&bytes[..left.min(bytes.len())]);
    }
}

/// The end of a program, to which everything goes that its host says. The opening is kept on the way.
pub struct TappedWriter<W> {
    writer: W,
    opening: Option<Rc<HostOpening>>,
}

impl<W> TappedWriter<W> {
    /// Without an opening it keeps nothing.
    pub fn new(writer: W, opening: Option<Rc<HostOpening>>) -> Self {
        Self { writer, opening }
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for TappedWriter<W> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let tapped = self.get_mut();
        let written = Pin::new(&mut tapped.writer).poll_write(context, bytes);
        // The program can use the bytes only after this: one thread serves it and its agent.
        if let (Poll::Ready(Ok(len)), Some(opening)) = (&written, &tapped.opening) {
            opening.push(&bytes[..*len]);
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().writer).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().writer).poll_shutdown(context)
    }
}
