//! Signals that reach `pal` and are meant for the command.

use std::future::{pending, poll_fn};

use proto::{Failure, Kind};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The interrupt of a terminal.
pub const SIGINT: i32 = 2;
/// The end of a terminal.
pub const SIGHUP: i32 = 1;
const SIGTERM: i32 = 15;

/// Interrupt, terminate, hang up.
pub struct Signals {
    heard: Vec<(i32, Signal)>,
}

impl Signals {
    /// Listens, from now on. What our parent had us ignore (`nohup`) stays ignored.
    pub fn listen() -> Result<Self, Failure> {
        let ignored = ignored();
        let mut heard = Vec::with_capacity(3);
        for number in [SIGINT, SIGTERM, SIGHUP] {
            if ignored & (1 << (number - 1)) == 0 {
                heard.push((number, listen_to(number)?));
            }
        }
        Ok(Self { heard })
    }

    /// The next one.
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

/// Listens to one signal.
pub fn listen_to(number: i32) -> Result<Signal, Failure> {
    signal(SignalKind::from_raw(number))
        .map_err(|error| Failure::new(Kind::Host, format!("cannot listen to signal {number}")).because(error))
}

/// The mask of ignored signals: after the name in parentheses, field 31 of `/proc/self/stat` (the 33rd of all).
fn ignored() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    fields.split_ascii_whitespace().nth(30).and_then(|mask| mask.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_found() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let expected = u64::from_str_radix(line.trim(), 16).unwrap();
        assert_eq!(ignored(), expected & 0x7fff_ffff);
        assert_ne!(expected & (1 << 12), 0, "Rust ignores SIGPIPE, so the mask is not empty");
    }
}
