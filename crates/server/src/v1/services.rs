//! What the native API keeps between requests.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::{OwnedMutexGuard, watch};

use crate::{App, limits::Limits, metrics::Metrics, terminal::Terminals};

/// How soon an event that another process wrote is noticed.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const TURNS_MAX: usize = 4096;

/// What the native API keeps between requests; a clone is the same one.
#[derive(Debug, Clone, Default)]
pub struct Services(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    terminals: Terminals,
    limits: Limits,
    metrics: Metrics,
    follow: Follow,
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

impl Services {
    /// Terminals that are held here.
    pub fn terminals(&self) -> &Terminals {
        &self.0.terminals
    }

    /// Who uses how much.
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Who follows the log.
    pub fn follow(&self) -> &Follow {
        &self.0.follow
    }

    /// The turn of a request that names itself: a repetition waits until the first is done.
    pub async fn turn(&self, request: &str) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.0.turns.lock().unwrap_or_else(PoisonError::into_inner);
            if turns.len() >= TURNS_MAX {
                turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            }
            turns.entry(request.to_owned()).or_default().clone()
        };
        turn.lock_owned().await
    }
}

/// One task looks at the log for everybody who follows it, and nobody looks when nobody follows.
#[derive(Debug, Clone, Default)]
pub struct Follow(Arc<Looking>);

#[derive(Debug, Default)]
struct Looking {
    seen: watch::Sender<u64>,
    begun: AtomicBool,
}

impl Follow {
    /// The place of the newest event, from now on.
    pub fn watch(&self, app: &App) -> watch::Receiver<u64> {
        let receiver = self.0.seen.subscribe();
        if !self.0.begun.swap(true, Ordering::SeqCst) {
            tokio::spawn(look(self.0.clone(), app.clone()));
        }
        receiver
    }
}

async fn look(looking: Arc<Looking>, app: App) {
    loop {
        let newest = app.blocking(async |fleet: &fleet::Fleet| fleet.last_event()).await;
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
