//! The pool: Bodies that a long-lived process starts before a caller asks for one.
//!
//! A caller that asked for a Body is likely to ask for another like it. So the pool starts another Body of the same
//! shape; the next caller that asks for this shape gets a running Body, which only has to be assigned and recorded.
//!
//! Invariant: a pooled Body does not exist for other processes: it has no spec, and it ends when this process closes
//! its pipe.
//! Invariant: no command has run in a pooled Body, and an assigned Body never returns to the pool.
//! Invariant: the pool holds at most [`Driver::pool_size`] Bodies of each shape, at most [`POOL_MAX`] in total, with
//! at most one [`MEMORY_PART`]th of the host's memory, none older than [`AGE_MAX`]. A full pool ends its oldest Body
//! for a new one.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use body::{
    ProcessState,
    driver::{Driver, DriverContext, PoolShape, Recipe, Refill},
    ids::MapRoot,
    process::StartedBody,
};
use proto::{BodyId, Spec};

use crate::{lock_mutex, place::BodyPlace};

/// Pooled microVMs of one shape, by default.
pub(crate) const POOL_SIZE_DEFAULT: u32 = 1;
/// Most pooled Bodies of all shapes together.
pub(crate) const POOL_MAX: u32 = 4;
/// The pooled Bodies together may use the host's memory divided by this number.
const MEMORY_PART: u64 = 8;
/// How long a Body stays in the pool.
const AGE_MAX: Duration = Duration::from_secs(600);
/// How long the pool waits for the first command in the requested Body before it starts another.
const FIRST_EXEC_PATIENCE: Duration = Duration::from_secs(3);
/// How long the pool leaves the CPUs to a caller whose first command has just started.
const REST: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_millis(100);
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// The properties that make two Bodies interchangeable.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PoolKey {
    pub shape: PoolShape,
    pub root: MapRoot,
    /// The value of [`Recipe::key`].
    pub recipe: String,
}

/// A running Body in the pool.
#[derive(Debug)]
pub(crate) struct PooledBody {
    key: PoolKey,
    since: Instant,
    driver: Arc<dyn Driver>,
    pub place: BodyPlace,
    pub started: StartedBody,
}

/// An order to start a Body for the pool.
#[derive(Debug)]
pub(crate) struct PoolOrder {
    pub key: PoolKey,
    pub driver: Arc<dyn Driver>,
    pub recipe: Arc<dyn Recipe>,
    /// The requested Body that caused this order.
    pub after: BodyId,
}

#[derive(Debug)]
struct QueuedOrder {
    order: PoolOrder,
    since: Instant,
    /// The earliest time at which the pool may start it.
    due: Instant,
}

/// The pooled Bodies, and the thread that starts them.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<PoolShared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct PoolShared {
    context: Arc<DriverContext>,
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    ready: Vec<PooledBody>,
    orders: VecDeque<QueuedOrder>,
    /// The shape of the last request among the shapes that are refilled at once.
    last: Option<PoolKey>,
    /// Whether the pool starts Bodies even if no CPU is idle.
    hurry: bool,
    closing: bool,
}

impl Pool {
    /// Creates an empty pool.
    pub(crate) fn open(context: Arc<DriverContext>) -> Self {
        let shared = Arc::new(PoolShared { context, state: Mutex::default(), changed: Condvar::new() });
        let working = shared.clone();
        let worker = std::thread::Builder::new().name("pal-pool".into()).spawn(move || working.work()).ok();
        Self { shared, worker }
    }

    /// Takes a running Body of that shape.
    pub(crate) fn take(&self, key: &PoolKey) -> Option<PooledBody> {
        loop {
            let found = {
                let mut state = lock_mutex(&self.shared.state);
                let fits = |pooled: &PooledBody| pooled.key == *key && pooled.since.elapsed() < AGE_MAX;
                let at = state.ready.iter().position(fits)?;
                state.ready.swap_remove(at)
            };
            let lives = matches!(found.place.dir.condition(), Ok(ProcessState::Running(_)));
            if lives && found.driver.pool_size() > 0 {
                return Some(found);
            }
            self.discard(found);
        }
    }

    /// Ends a pooled Body.
    pub(crate) fn discard(&self, pooled: PooledBody) {
        self.shared.discard(pooled);
    }

    /// Orders another Body of a shape that a caller has just asked for.
    pub(crate) fn order(&self, order: PoolOrder) {
        let mut state = lock_mutex(&self.shared.state);
        if order.key.shape.refill == Refill::AtOnce && state.last.as_ref() != Some(&order.key) {
            state.last = Some(order.key);
            return;
        }
        let same = state.ready.iter().filter(|pooled| pooled.key == order.key).count()
            + state.orders.iter().filter(|queued| queued.order.key == order.key).count();
        if same < order.driver.pool_size() {
            if state.orders.len() >= POOL_MAX as usize {
                state.orders.pop_front();
            }
            let now = Instant::now();
            let due = match order.key.shape.refill {
                Refill::AtOnce => now,
                Refill::WhenIdle => now + FIRST_EXEC_PATIENCE,
            };
            state.orders.push_back(QueuedOrder { order, since: now, due });
            self.shared.changed.notify_all();
        }
    }

    /// Notes that a command has started in a Body.
    pub(crate) fn note_exec(&self, id: &BodyId) {
        let mut state = lock_mutex(&self.shared.state);
        let due = Instant::now() + REST;
        for queued in state.orders.iter_mut().filter(|queued| queued.order.after == *id) {
            queued.due = queued.due.min(due);
        }
    }

    /// Wakes the pool's thread, which compares the pool with its limits again.
    pub(crate) fn check(&self) {
        self.shared.changed.notify_all();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock_mutex(&self.shared.state).closing = true;
        self.shared.changed.notify_all();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        for pooled in std::mem::take(&mut lock_mutex(&self.shared.state).ready) {
            self.shared.discard(pooled);
        }
    }
}

impl PoolShared {
    fn work(&self) {
        while let Some(order) = self.next() {
            if self.make_room(&order.key) {
                // A failure is ignored here: when a caller asks for this Body, its creation fails again and reports
                // it.
                let started = self.start(order);
                lock_mutex(&self.state).ready.extend(started);
            }
        }
    }

    /// Waits for an order that is due. Meanwhile ends Bodies that are too old or exceed the limits.
    fn next(&self) -> Option<PoolOrder> {
        loop {
            self.sweep();
            let idle = sys::proc::has_idle_processor();
            let mut state = lock_mutex(&self.state);
            if state.closing {
                return None;
            }
            let now = Instant::now();
            let may_begin = idle || state.hurry;
            let is_due = |queued: &QueuedOrder| {
                queued.due <= now && (may_begin || queued.order.key.shape.refill == Refill::AtOnce)
            };
            if let Some(at) = state.orders.iter().position(is_due) {
                return state.orders.remove(at).map(|queued| queued.order);
            }
            let wait = if state.orders.is_empty() { SWEEP_EVERY } else { LOOK_EVERY };
            drop(self.changed.wait_timeout(state, wait));
        }
    }

    fn sweep(&self) {
        let mut gone = Vec::new();
        let mut state = lock_mutex(&self.state);
        // An order that found no idle CPU for this long is obsolete.
        state.orders.retain(|queued| queued.since.elapsed() < AGE_MAX);
        let mut kept: Vec<PooledBody> = Vec::new();
        for pooled in state.ready.drain(..) {
            let same = kept.iter().filter(|other| other.key == pooled.key).count();
            let stays = same < pooled.driver.pool_size() && pooled.since.elapsed() < AGE_MAX;
            if stays { kept.push(pooled) } else { gone.push(pooled) }
        }
        state.ready = kept;
        drop(state);
        gone.into_iter().for_each(|pooled| self.discard(pooled));
    }

    /// Ends the oldest Bodies until one more fits; returns false if none can fit.
    fn make_room(&self, key: &PoolKey) -> bool {
        let memory_max = self.context.launch.capacity.memory.0 / MEMORY_PART;
        if key.shape.memory.0 > memory_max {
            return false;
        }
        loop {
            let oldest = {
                let mut state = lock_mutex(&self.state);
                let memory: u64 = state.ready.iter().map(|pooled| pooled.key.shape.memory.0).sum();
                let fits = state.ready.len() < POOL_MAX as usize && memory + key.shape.memory.0 <= memory_max;
                if fits || state.closing {
                    return !state.closing;
                }
                let oldest = (0..state.ready.len()).min_by_key(|at| state.ready[*at].since);
                oldest.map(|at| state.ready.swap_remove(at))
            };
            match oldest {
                Some(oldest) => self.discard(oldest),
                None => return false,
            }
        }
    }

    fn start(&self, order: PoolOrder) -> Option<PooledBody> {
        let PoolOrder { key, driver, recipe, .. } = order;
        let place = BodyPlace::claim(&self.context, key.root).ok()?;
        let spec = Spec { id: place.id.clone(), ids: place.ids.clone(), ..key.shape.spec.clone() };
        let started = self.context.launch.start_launcher().ok().and_then(|launcher| {
            let starting = recipe.begin(launcher, &place.dir, &spec, &self.context.token(&place.id)).ok()?;
            starting.finish().ok()
        });
        match started {
            Some(started) => Some(PooledBody { key, since: Instant::now(), driver, place, started }),
            None => {
                place.clear(&self.context);
                None
            }
        }
    }

    fn discard(&self, pooled: PooledBody) {
        let PooledBody { place, mut started, .. } = pooled;
        started.supervisor.reap();
        place.clear(&self.context);
    }
}

impl Pool {
    /// Starts requested Bodies at once, also while the host is busy: for benchmarks and tests.
    pub fn force_refill(&self) {
        lock_mutex(&self.shared.state).hurry = true;
        self.check();
    }

    /// How many Bodies wait in the pool.
    pub fn ready(&self) -> usize {
        lock_mutex(&self.shared.state).ready.len()
    }
}
