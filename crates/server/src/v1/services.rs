//! What the native API keeps between requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

use crate::{App, limits::LimitTracker, metrics::RequestMetrics, terminal::Terminals};

/// How soon an event that another process wrote is noticed.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What the native API keeps between requests; a clone is the same one.
#[derive(Debug, Clone, Default)]
pub struct Services(Arc<ServicesState>);

#[derive(Debug, Default)]
struct ServicesState {
    terminals: Terminals,
    limits: LimitTracker,
    metrics: RequestMetrics,
    follow: LogFollower,
}

impl Services {
    /// Terminals that are held here.
    pub fn terminals(&self) -> &Terminals {
        &self.0.terminals
    }

    /// Who uses how much.
    pub fn limits(&self) -> &LimitTracker {
        &self.0.limits
    }

    /// What is counted.
    pub fn metrics(&self) -> &RequestMetrics {
        &self.0.metrics
    }

    /// Who follows the log.
    pub fn follow(&self) -> &LogFollower {
        &self.0.follow
    }
}

/// One task looks at the log for everybody who follows it, and nobody looks when nobody follows.
#[derive(Debug, Clone, Default)]
pub struct LogFollower(Arc<LogWatch>);

#[derive(Debug, Default)]
struct LogWatch {
    seen: watch::Sender<u64>,
    begun: AtomicBool,
}

impl LogFollower {
    /// The place of the newest event, from now on.
    pub fn watch(&self, app: &App) -> watch::Receiver<u64> {
        let receiver = self.0.seen.subscribe();
        if !self.0.begun.swap(true, Ordering::SeqCst) {
            tokio::spawn(look(self.0.clone(), app.clone()));
        }
        receiver
    }
}

async fn look(looking: Arc<LogWatch>, app: App) {
    loop {
        let newest = app.blocking(async |fleet: &fleet::Fleet| fleet.log().last_pos()).await;
        if let Ok(newest) = newest {
            looking.seen.send_if_modified(|known| std::mem::replace(known, newest) != newest);
        }
        tokio::time::sleep(LOOK_EVERY).await;
        if looking.seen.receiver_count() == 0 {
            looking.begun.store(false, Ordering::SeqCst);
            // Somebody who came just now saw that one was looking.
            if looking.seen.receiver_count() == 0 || looking.begun.swap(true, Ordering::SeqCst) {
                return;
            }
        }
    }
}
