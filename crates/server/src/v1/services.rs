//! State that the native API keeps between requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

use crate::{App, limits::LimitTracker, metrics::RequestMetrics, terminal::Terminals};

/// How often the server looks for events that another process stored.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// State that the native API keeps between requests. Clones share it.
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
    /// Terminals that this server follows.
    pub fn terminals(&self) -> &Terminals {
        &self.0.terminals
    }

    /// The limits and quotas, and how much of them is in use.
    pub fn limits(&self) -> &LimitTracker {
        &self.0.limits
    }

    /// Request counters.
    pub fn metrics(&self) -> &RequestMetrics {
        &self.0.metrics
    }

    /// The watcher of the event log.
    pub fn follow(&self) -> &LogFollower {
        &self.0.follow
    }
}

/// Watches the log: one task serves all followers, and no task runs while there are no followers.
#[derive(Debug, Clone, Default)]
pub struct LogFollower(Arc<LogWatch>);

#[derive(Debug, Default)]
struct LogWatch {
    seen: watch::Sender<u64>,
    begun: AtomicBool,
}

impl LogFollower {
    /// Follows the position of the newest event from now on.
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
            // A follower that subscribed at this moment saw that a task was running, and relies on it.
            if looking.seen.receiver_count() == 0 || looking.begun.swap(true, Ordering::SeqCst) {
                return;
            }
        }
    }
}
