//! Waiting for descriptors.

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::AsyncFd;

/// A descriptor that can be waited on; it must be non-blocking.
#[expect(
    deprecated,
    reason = "unsound only for types whose descriptor may close or change; an OwnedFd's does not"
)]
pub fn ready(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}
