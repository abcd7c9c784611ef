//! The recent resource usage of each Body, in memory.
//!
//! Invariant: at most [`KEPT`] samples of at most [`BODIES_MAX`] Bodies; a removed Body has no entry.
//! Direction of failure: a sample that cannot be taken is missing.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use fleet::{Fleet, ResourceUsage, Status, lease::now_ms};
use proto::BodyId;

use crate::App;

const EVERY: Duration = Duration::from_secs(5);
/// Samples of one hour.
const KEPT: usize = 720;
const BODIES_MAX: usize = 4096;
/// Disk usage is measured less often, because it walks over all files.
const DISK_EVERY: usize = 12;

/// One sample of a Body's usage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UsageSample {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// CPU time since the previous sample, as a fraction of one CPU.
    pub cpus_used: f64,
    /// Memory without the page cache that the kernel can drop.
    pub memory: u64,
    /// Page cache that the kernel can drop.
    pub cache: u64,
    /// Bytes of its files on disk.
    pub disk: u64,
}

/// The histories of all Bodies.
#[derive(Debug, Clone, Default)]
pub struct UsageHistories(Arc<Mutex<HashMap<BodyId, BodyHistory>>>);

#[derive(Debug, Default)]
struct BodyHistory {
    kept: VecDeque<UsageSample>,
    before: Option<(Instant, Duration)>,
    taken: usize,
}

impl UsageHistories {
    /// The samples of a Body, oldest first.
    pub fn of(&self, body: &BodyId) -> Vec<UsageSample> {
        self.histories().get(body).map(|history| history.kept.iter().copied().collect()).unwrap_or_default()
    }

    /// Takes a sample of a Body now.
    pub fn take(&self, fleet: &Fleet, body: &BodyId) {
        let Ok(usage) = fleet.access().usage(body) else { return };
        let (known, counts) = {
            let histories = self.histories();
            let history = histories.get(body);
            (
                history.and_then(|history| history.kept.back().map(|last| last.disk)),
                history.map_or(0, |history| history.taken),
            )
        };
        let disk = if counts.is_multiple_of(DISK_EVERY) {
            fleet.access().disk_usage(body)
        } else {
            known.unwrap_or(0)
        };
        let mut histories = self.histories();
        if histories.len() >= BODIES_MAX && !histories.contains_key(body) {
            return;
        }
        histories.entry(body.clone()).or_default().add(usage, disk);
    }

    fn keep_only(&self, bodies: &[BodyId]) {
        self.histories().retain(|body, _| bodies.contains(body));
    }

    fn histories(&self) -> MutexGuard<'_, HashMap<BodyId, BodyHistory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BodyHistory {
    fn add(&mut self, usage: ResourceUsage, disk: u64) {
        let now = Instant::now();
        let cpus_used = self.before.map_or(0.0, |(at, cpu)| {
            let passed = now.duration_since(at).as_secs_f64();
            if passed > 0.0 { usage.cpu.saturating_sub(cpu).as_secs_f64() / passed } else { 0.0 }
        });
        self.before = Some((now, usage.cpu));
        self.taken += 1;
        if self.kept.len() >= KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(UsageSample {
            at_ms: now_ms(),
            cpus_used,
            memory: usage.memory.saturating_sub(usage.cache),
            cache: usage.cache,
            disk,
        });
    }
}

/// Samples every running Body periodically.
pub async fn run(app: App) {
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let samples = app.samples().clone();
        let _ = app
            .blocking(async move |fleet: &Fleet| {
                let bodies = fleet.ids()?;
                samples.keep_only(&bodies);
                for body in bodies
                    .iter()
                    .filter(|body| fleet.status(body).is_ok_and(|status| status == Status::Running))
                {
                    samples.take(fleet, body);
                }
                Ok(())
            })
            .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_bounded_and_measures_between_samples() {
        let mut history = BodyHistory::default();
        for second in 0..(KEPT as u64 + 10) {
            history.add(
                ResourceUsage { cpu: Duration::from_secs(second), memory: 10, cache: 4, processes: 1 },
                7,
            );
        }
        assert_eq!(history.kept.len(), KEPT);
        let last = history.kept.back().unwrap();
        assert_eq!((last.memory, last.cache, last.disk), (6, 4, 7));
        assert!(last.cpus_used > 0.0);
    }
}
