//! Async waiting for descriptors.

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the runtime; it must be non-blocking.
#[expect(
    deprecated,
    reason = "unsound only for types whose descriptor may close or change; an OwnedFd's does not"
)]
pub fn ready(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}
