//! Shows progress of long work on standard error.

use std::{future::Future, pin::pin, time::Duration};

use rustix::{stdio, termios::isatty};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use crate::output;

/// Work that is shorter than this shows nothing.
const QUIET: Duration = Duration::from_secs(1);
const TICK_TERMINAL: Duration = Duration::from_millis(100);
const TICK_PLAIN: Duration = Duration::from_secs(10);
const SPINNER: [char; 4] = ['|', '/', '-', '\\'];

/// Waits for `work` and shows `what` meanwhile.
pub async fn watch<T>(what: &str, work: impl Future<Output = T>) -> T {
    let started = Instant::now();
    let mut work = pin!(work);
    if let Ok(done) = timeout(QUIET, work.as_mut()).await {
        return done;
    }
    let terminal = isatty(stdio::stderr());
    let tick = if terminal { TICK_TERMINAL } else { TICK_PLAIN };
    let mut ticks = interval_at(Instant::now(), tick);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut turn = 0;
    loop {
        tokio::select! {
            biased;
            done = work.as_mut() => {
                if terminal {
                    output::draw("\r\x1b[K");
                }
                return done;
            }
            _ = ticks.tick() => {
                let seconds = started.elapsed().as_secs();
                if terminal {
                    output::draw(&format!("\r{} {what} ({seconds} s)\x1b[K", SPINNER[turn % SPINNER.len()]));
                } else {
                    output::talk(&format!("{what} ({seconds} s)"));
                }
                turn += 1;
            }
        }
    }
}
