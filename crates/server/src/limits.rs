//! Who may use how much: Bodies, streams, memory of the host, quotas of keys.
//!
//! Invariant: whoever is refused is told when to come again, before the host is short of anything.
//! Invariant: what one key holds never keeps another from its share: streams are counted for each key, and Bodies are
//! made in the order in which they were asked for.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use fleet::{Create, Fleet};
use proto::{Failure, Kind, Size, Spec};
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use crate::{App, Caller, keys::Quota};

/// Longest JSON body.
pub const BODY_LEN_MAX: usize = 1 << 20;
/// How long somebody who asks for a Body waits for its turn.
const TURN_WAIT: Duration = Duration::from_secs(10);

/// How much there is for everybody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerBounds {
    /// Bodies at once.
    pub bodies_max: usize,
    /// Bodies that are made at the same time.
    pub making_max: usize,
    /// Streams of one key.
    pub streams_max: usize,
    /// Memory of the host that stays free: no Body is made below it.
    pub memory_reserve: Size,
}

impl Default for ServerBounds {
    fn default() -> Self {
        Self { bodies_max: 2000, making_max: 16, streams_max: 1024, memory_reserve: Size::mib(256) }
    }
}

/// Who uses how much.
#[derive(Debug, Default)]
pub struct LimitTracker {
    streams: Arc<Mutex<HashMap<String, usize>>>,
    streams_max: std::sync::OnceLock<usize>,
    making: std::sync::OnceLock<Arc<Semaphore>>,
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    refused: Mutex<HashMap<&'static str, u64>>,
    /// Bodies that were admitted and may not be there yet.
    coming: Arc<AtomicU64>,
    /// Held while Bodies are counted: two who count at once would both find the last place.
    counting: Arc<tokio::sync::Mutex<()>>,
}

/// A stream of a key, until it is dropped.
#[derive(Debug)]
pub struct StreamPermit {
    streams: Arc<Mutex<HashMap<String, usize>>>,
    key: String,
}

/// The right to make Bodies, until it is dropped.
#[derive(Debug)]
pub struct CreatePermit {
    _making: OwnedSemaphorePermit,
    _coming: PendingBodies,
    /// Held by a key with a quota until what it asked for can be counted.
    _turn: Option<OwnedMutexGuard<()>>,
}

/// Places of Bodies that may not be there yet, until it is dropped.
#[derive(Debug)]
struct PendingBodies {
    all: Arc<AtomicU64>,
    bodies: u64,
}

impl Drop for PendingBodies {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bodies, Ordering::Relaxed);
    }
}

impl LimitTracker {
    /// Takes the bounds; said once, at the start.
    pub fn bound(&self, bounds: &ServerBounds) {
        let _ = self.streams_max.set(bounds.streams_max);
        let _ = self.making.set(Arc::new(Semaphore::new(bounds.making_max)));
    }

    /// Counts a stream of a key.
    pub fn stream(&self, key: &str) -> Result<StreamPermit, Failure> {
        let max = self.streams_max.get().copied().unwrap_or(ServerBounds::default().streams_max);
        let mut streams = held(&self.streams);
        let open = streams.entry(key.to_owned()).or_default();
        if *open >= max {
            drop(streams);
            return Err(self.refuse(
                "streams",
                Failure::new(Kind::Limit, format!("this key has {max} streams open already"))
                    .hint("close one that you no longer need"),
            ));
        }
        *open += 1;
        Ok(StreamPermit { streams: self.streams.clone(), key: key.to_owned() })
    }

    /// Streams that are open, of all keys.
    pub fn streams(&self) -> usize {
        held(&self.streams).values().sum()
    }

    /// How many were refused, and why.
    pub fn refusals(&self) -> Vec<(&'static str, u64)> {
        let mut all: Vec<_> = held(&self.refused).iter().map(|(why, count)| (*why, *count)).collect();
        all.sort_unstable();
        all
    }

    fn refuse(&self, why: &'static str, failure: Failure) -> Failure {
        *held(&self.refused).entry(why).or_default() += 1;
        failure
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit, Failure> {
        let making =
            self.making.get_or_init(|| Arc::new(Semaphore::new(ServerBounds::default().making_max))).clone();
        let busy = || {
            self.refuse(
                "busy",
                Failure::new(Kind::Host, "too many Bodies are being made right now")
                    .hint("try again in a moment"),
            )
        };
        match tokio::time::timeout(TURN_WAIT, making.acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(busy()),
        }
    }

    async fn quota_turn(&self, key: &str) -> OwnedMutexGuard<()> {
        let turn = held(&self.turns).entry(key.to_owned()).or_default().clone();
        turn.lock_owned().await
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut streams = held(&self.streams);
        if let Some(open) = streams.get_mut(&self.key) {
            *open -= 1;
            if *open == 0 {
                streams.remove(&self.key);
            }
        }
    }
}

/// What a Body that is asked for may come to use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct QuotaShare {
    bodies: u64,
    cpu_milli: u64,
    memory_bytes: u64,
    disk_bytes: u64,
}

impl QuotaShare {
    fn of(spec: &Spec) -> Self {
        Self {
            bodies: 1,
            cpu_milli: spec.limits.cpu_milli.into(),
            memory_bytes: spec.limits.memory.0,
            disk_bytes: spec.limits.disk.0,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            bodies: self.bodies.saturating_add(other.bodies),
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            disk_bytes: self.disk_bytes.saturating_add(other.disk_bytes),
        }
    }

    fn times(self, count: u32) -> Self {
        (0..count).fold(Self::default(), |sum, _| sum.plus(self))
    }

    /// What of a quota it would overrun.
    fn overruns(self, quota: &Quota) -> Option<&'static str> {
        let over = |used: u64, max: Option<u64>| max.is_some_and(|max| used > max);
        let checks = [
            ("Bodies", over(self.bodies, quota.bodies)),
            ("processors", over(self.cpu_milli, quota.cpu_milli)),
            ("memory", over(self.memory_bytes, quota.memory_bytes)),
            ("disk", over(self.disk_bytes, quota.disk_bytes)),
        ];
        checks.into_iter().find(|(_, over)| *over).map(|(what, _)| what)
    }
}

/// Lets a caller make a Body, or says why not and when to come again.
pub async fn admit(app: &App, caller: &Caller, create: &Create) -> Result<CreatePermit, Failure> {
    let limits = app.fleet().creator().limits(create)?;
    let share = QuotaShare {
        bodies: 1,
        cpu_milli: limits.cpu_milli.into(),
        memory_bytes: limits.memory.0,
        disk_bytes: limits.disk.0,
    };
    admit_share(app, caller, share).await
}

/// Lets a caller fork a Body, or says why not and when to come again.
pub async fn admit_forks(
    app: &App,
    caller: &Caller,
    parent: &Spec,
    count: u32,
) -> Result<CreatePermit, Failure> {
    admit_share(app, caller, QuotaShare::of(parent).times(count)).await
}

async fn admit_share(app: &App, caller: &Caller, share: QuotaShare) -> Result<CreatePermit, Failure> {
    let services = app.services();
    let limits = services.limits();
    let bounds = &app.config().bounds;
    if available_memory().is_some_and(|free| free < bounds.memory_reserve.0) {
        let failure = Failure::new(Kind::Host, "this host is short of memory")
            .hint("remove Bodies that are no longer needed, or try again later");
        return Err(limits.refuse("memory", failure));
    }
    let making = limits.turn().await?;
    let quota = app.keys().quota(&caller.key).filter(|quota| *quota != Quota::default());
    let turn = match quota {
        Some(_) => Some(limits.quota_turn(&caller.key).await),
        None => None,
    };
    let (key, measured) = (caller.key.clone(), quota.is_some());
    let counting = limits.counting.lock().await;
    // Before those that are there: one that arrives in between counts twice, and for a moment there is a place less; the
    // other way round there would be one more.
    let coming = limits.coming.load(Ordering::Relaxed);
    let (bodies, used) = app
        .blocking(async move |fleet: &Fleet| {
            Ok((fleet.count()?, if measured { used_by(fleet, &key)? } else { QuotaShare::default() }))
        })
        .await?;
    if bodies as u64 + coming + share.bodies > bounds.bodies_max as u64 {
        let failure = Failure::new(
            Kind::Limit,
            format!("this server has {bodies} Bodies, and {} is the most", bounds.bodies_max),
        )
        .hint("remove one that you no longer need");
        return Err(limits.refuse("bodies", failure));
    }
    if let Some(what) = quota.and_then(|quota| used.plus(share).overruns(&quota)) {
        let failure = Failure::new(Kind::Limit, format!("this key's quota of {what} is used up"))
            .hint("remove a Body of this key, or ask for less");
        return Err(limits.refuse("quota", failure));
    }
    limits.coming.fetch_add(share.bodies, Ordering::Relaxed);
    let coming = PendingBodies { all: limits.coming.clone(), bodies: share.bodies };
    drop(counting);
    Ok(CreatePermit { _making: making, _coming: coming, _turn: turn })
}

fn used_by(fleet: &Fleet, key: &str) -> Result<QuotaShare, Failure> {
    let mine = fleet.leases().all()?.into_iter().filter(|(_, lease)| lease.owner.as_deref() == Some(key));
    Ok(mine
        .filter_map(|(id, _)| fleet.view(&id).ok())
        .map(|view| QuotaShare::of(&view.spec))
        .fold(QuotaShare::default(), QuotaShare::plus))
}

/// What the kernel could still give, in bytes.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_counted_for_each_key() {
        let limits = LimitTracker::default();
        limits.bound(&ServerBounds { streams_max: 2, ..ServerBounds::default() });
        let first = limits.stream("a").unwrap();
        let _second = limits.stream("a").unwrap();
        assert_eq!(limits.stream("a").unwrap_err().kind, Kind::Limit);
        assert!(limits.stream("b").is_ok(), "another key has its own");
        drop(first);
        assert!(limits.stream("a").is_ok());
        assert_eq!(limits.refusals(), [("streams", 1)]);
        assert_eq!(limits.streams(), 1);
    }

    #[test]
    fn a_quota_is_overrun_by_the_first_thing_beyond_it() {
        let one = QuotaShare { bodies: 1, cpu_milli: 500, memory_bytes: 100, disk_bytes: 10 };
        let quota = Quota { bodies: Some(3), memory_bytes: Some(200), ..Quota::default() };
        assert_eq!(one.times(2).overruns(&quota), None);
        assert_eq!(one.times(3).overruns(&quota), Some("memory"));
        assert_eq!(one.times(4).overruns(&quota), Some("Bodies"));
        assert_eq!(one.times(100).overruns(&Quota::default()), None);
    }
}
