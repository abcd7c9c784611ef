//! Signals that `pal` receives and forwards to the command.

use std::future::{pending, poll_fn};

use proto::{Failure, Kind};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The interrupt key of a terminal.
pub const SIGINT: i32 = 2;
/// The hangup of a terminal.
pub const SIGHUP: i32 = 1;
const SIGTERM: i32 = 15;

/// SIGINT, SIGTERM and SIGHUP.
pub struct StopSignals {
    heard: Vec<(i32, Signal)>,
}

impl StopSignals {
    /// Installs the handlers. A signal that the parent process ignores (`nohup`) stays ignored.
    pub fn listen() -> Result<Self, Failure> {
        let mut heard = Vec::with_capacity(3);
        for number in [SIGINT, SIGTERM, SIGHUP] {
            if !sys::process::ignores(number) {
                heard.push((number, listen_to(number)?));
            }
        }
        Ok(Self { heard })
    }

    /// The next signal.
    pub async fn next(&mut self) -> i32 {
        if self.heard.is_empty() {
            return pending().await;
        }
        poll_fn(|context| {
            for (number, signal) in &mut self.heard {
                if let std::task::Poll::Ready(Some(())) = signal.poll_recv(context) {
                    return std::task::Poll::Ready(*number);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}

/// Installs the handler of one signal.
pub fn listen_to(number: i32) -> Result<Signal, Failure> {
    signal(SignalKind::from_raw(number))
        .map_err(|error| Failure::new(Kind::Host, format!("cannot handle signal {number}")).because(error))
}
