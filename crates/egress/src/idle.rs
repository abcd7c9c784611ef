//! The end of connections on which nothing happens any more.

use std::{
    cell::Cell,
    io,
    time::{Duration, Instant},
};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::budgets::Meter;

/// How long a connection may be quiet: long polls and event streams are, and keepalive finds ends that are gone.
const QUIET_MAX: Duration = Duration::from_secs(2 * 60 * 60);
/// How long it may be quiet after one end has sent its last byte: most often that end is gone.
const HALF_CLOSED_MAX: Duration = Duration::from_secs(300);
/// The longest pause between two checks.
const CHECK_PAUSE: Duration = Duration::from_secs(60);
const BUFFER_LEN: usize = 32 << 10;

/// The last activity of a connection.
pub struct IdleClock {
    last: Cell<Instant>,
    limit: Cell<Duration>,
}

impl IdleClock {
    /// Starts now.
    pub fn new() -> Self {
        Self { last: Cell::new(Instant::now()), limit: Cell::new(QUIET_MAX) }
    }

    /// Notes that bytes went through.
    pub fn touch(&self) {
        self.last.set(Instant::now());
    }

    /// Notes that one end has sent its last byte.
    pub fn half_closed(&self) {
        self.touch();
        self.limit.set(HALF_CLOSED_MAX);
    }

    /// Waits until the connection was quiet for too long.
    pub async fn expired(&self) -> io::Error {
        loop {
            let left = self.limit.get().saturating_sub(self.last.get().elapsed());
            if left.is_zero() {
                return io::ErrorKind::TimedOut.into();
            }
            tokio::time::sleep(left.min(CHECK_PAUSE)).await;
        }
    }

    /// Copies until the end of `from`, and then ends `to`.
    pub async fn copy(
        &self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        meter: &Meter,
    ) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_LEN];
        loop {
            match from.read(&mut buffer).await? {
                0 => {
                    self.half_closed();
                    return to.shutdown().await;
                }
                len => {
                    meter.spend(len)?;
                    to.write_all(&buffer[..len]).await?;
                }
            }
            self.touch();
        }
    }
}
