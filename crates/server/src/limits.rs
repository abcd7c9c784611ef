//! Limits and quotas: Bodies, streams, memory of the host, quotas of keys.
//!
//! Invariant: the server refuses a request before the host runs short of a resource, and says when to retry.
//! Invariant: one key cannot take another key's share: streams are counted for each key, and Bodies are
//! created in the order of their requests.

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

use crate::{App, Caller, agents::RequestOrigin, keys::Quota};

/// The longest JSON request body.
pub const BODY_LEN_MAX: usize = 1 << 20;
/// How long a request to create a Body waits for its turn.
const TURN_WAIT: Duration = Duration::from_secs(10);

/// Limits for all callers together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerBounds {
    /// The largest number of Bodies.
    pub bodies_max: usize,
    /// Bodies that are created at the same time.
    pub making_max: usize,
    /// Open streams of one key.
    pub streams_max: usize,
    /// Connections of one peer.
    pub peer_connections_max: usize,
    /// Memory of the host that stays free: the server creates no Body that would leave less.
    pub memory_reserve: Size,
    /// The largest number of agents.
    pub agents_max: usize,
    /// The largest number of agents that one key created.
    pub agents_of_key_max: usize,
    /// Agents that the server drives at the same time; more wait for their turn.
    pub agents_driven_max: usize,
    /// Agents of one key that the server drives at the same time.
    pub agents_driven_of_key_max: usize,
}

impl Default for ServerBounds {
    fn default() -> Self {
        Self {
            bodies_max: 2000,
            making_max: 16,
            streams_max: 1024,
            peer_connections_max: 2048,
            memory_reserve: Size::mib(256),
            agents_max: 10_000,
            agents_of_key_max: 2000,
            agents_driven_max: 256,
            agents_driven_of_key_max: 128,
        }
    }
}

/// Tracks the use of limits and quotas.
#[derive(Debug, Default)]
pub struct LimitTracker {
    streams: Arc<Mutex<HashMap<String, usize>>>,
    streams_max: std::sync::OnceLock<usize>,
    making: std::sync::OnceLock<Arc<Semaphore>>,
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    refused: Mutex<HashMap<&'static str, u64>>,
    /// Bodies that were admitted but may not exist yet.
    coming: Arc<AtomicU64>,
    /// Held while Bodies are counted: two requests that count at the same time would both take the last
    /// place.
    counting: Arc<tokio::sync::Mutex<()>>,
}

/// The permit for a stream of a key, until it is dropped.
#[derive(Debug)]
pub struct StreamPermit {
    streams: Arc<Mutex<HashMap<String, usize>>>,
    key: String,
}

/// The permit to create Bodies, until it is dropped.
#[derive(Debug)]
pub struct CreatePermit {
    _making: OwnedSemaphorePermit,
    _coming: PendingBodies,
    /// A key with a quota holds it until the new Body can be counted.
    _turn: Option<OwnedMutexGuard<()>>,
}

/// Places for Bodies that may not exist yet, until it is dropped.
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
    /// Sets the limits; called once, at the start.
    pub fn bound(&self, bounds: &ServerBounds) {
        let _ = self.streams_max.set(bounds.streams_max);
        let _ = self.making.set(Arc::new(Semaphore::new(bounds.making_max)));
    }

    /// Counts a stream of a key, or refuses it.
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

    /// Open streams of all keys.
    pub fn streams(&self) -> usize {
        held(&self.streams).values().sum()
    }

    /// The number of refusals by reason.
    pub fn refusals(&self) -> Vec<(&'static str, u64)> {
        let mut all: Vec<_> = held(&self.refused).iter().map(|(why, count)| (*why, *count)).collect();
        all.sort_unstable();
        all
    }

    /// Counts a refusal.
    pub fn note_refusal(&self, why: &'static str) {
        *held(&self.refused).entry(why).or_default() += 1;
    }

    fn refuse(&self, why: &'static str, failure: Failure) -> Failure {
        self.note_refusal(why);
        failure
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit, Failure> {
        let making =
            self.making.get_or_init(|| Arc::new(Semaphore::new(ServerBounds::default().making_max))).clone();
        let busy = || {
            self.refuse(
                "busy",
                Failure::new(Kind::Host, "too many Bodies are being created right now")
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

/// The resources that a requested Body may use.
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

    /// The first limit of a quota that it would exceed.
    fn overruns(self, quota: &Quota) -> Option<&'static str> {
        let over = |used: u64, max: Option<u64>| max.is_some_and(|max| used > max);
        let checks = [
            ("Bodies", over(self.bodies, quota.bodies)),
            ("CPUs", over(self.cpu_milli, quota.cpu_milli)),
            ("memory", over(self.memory_bytes, quota.memory_bytes)),
            ("disk", over(self.disk_bytes, quota.disk_bytes)),
        ];
        checks.into_iter().find(|(_, over)| *over).map(|(what, _)| what)
    }
}

/// Admits the creation of a Body, or refuses it with the reason and the time to retry.
pub async fn admit(app: &App, caller: &Caller, create: &Create) -> Result<CreatePermit, Failure> {
    admit_many(app, caller, create, 1).await
}

/// Admits several Bodies of one request, or refuses them with the reason and the time to retry.
pub async fn admit_many(
    app: &App,
    caller: &Caller,
    create: &Create,
    count: u32,
) -> Result<CreatePermit, Failure> {
    let limits = app.fleet().creator().limits(create)?;
    let share = QuotaShare {
        bodies: 1,
        cpu_milli: limits.cpu_milli.into(),
        memory_bytes: limits.memory.0,
        disk_bytes: limits.disk.0,
    };
    admit_share(app, caller, share.times(count)).await
}

/// Admits forks of a Body, or refuses them with the reason and the time to retry.
pub async fn admit_forks(
    app: &App,
    caller: &Caller,
    parent: &Spec,
    count: u32,
) -> Result<CreatePermit, Failure> {
    admit_share(app, caller, QuotaShare::of(parent).times(count)).await
}

/// Admits new agents of a caller, or refuses them. Their Bodies are admitted on their own.
pub async fn admit_agents(app: &App, caller: &Caller, count: usize) -> Result<(), Failure> {
    let (agents, key) = (app.agents().agents().clone(), caller.key.clone());
    let (all, own) = app
        .blocking(async move |_: &Fleet| {
            let records = agents.list()?;
            let is_own = |origin: RequestOrigin| origin.owner == key;
            let own = records.iter().filter(|record| RequestOrigin::of(record).is_some_and(is_own)).count();
            Ok((records.len(), own))
        })
        .await?;
    let bounds = &app.config().bounds;
    let text = if all + count > bounds.agents_max {
        format!("this server has {all} agents and allows at most {}", bounds.agents_max)
    } else if own + count > bounds.agents_of_key_max {
        format!("this key has {own} agents and may have at most {}", bounds.agents_of_key_max)
    } else {
        return Ok(());
    };
    let failure = Failure::new(Kind::Limit, text).hint("remove one that you no longer need");
    Err(app.services().limits().refuse("agents", failure))
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
    // Reads this before the count of existing Bodies: a Body that appears in between counts twice, and for a
    // moment there is one place less. In the other order there could be one Body too many.
    let coming = limits.coming.load(Ordering::Relaxed);
    let (bodies, used) = app
        .blocking(async move |fleet: &Fleet| {
            Ok((fleet.count()?, if measured { used_by(fleet, &key)? } else { QuotaShare::default() }))
        })
        .await?;
    if bodies as u64 + coming + share.bodies > bounds.bodies_max as u64 {
        let failure = Failure::new(
            Kind::Limit,
            format!("this server has {bodies} Bodies and allows at most {}", bounds.bodies_max),
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

/// The memory that the kernel could still allocate, in bytes.
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
