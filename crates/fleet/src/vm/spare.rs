//! Spare machines of a fleet that stays: thawed, proven and rehearsed before anybody asks for one.
//!
//! A template that was asked for is likely to be asked for again. Its next machine then only has to be told whose it is,
//! and proves that anew: its clock, fresh randomness, and that its files are still the template's.
//!
//! Invariant: a spare is no Body: it has no spec, hangs by a pipe from this process, and ends with it.
//! Invariant: a spare has run nothing but the template's own `true`, and one that was given away never comes back.
//! Invariant: of each kind there are as many as the setting says, together [`SPARES_MAX`], with no more memory than one
//! [`MEMORY_PART`]th of the host's, and none is older than [`AGE_MAX`].
//! Invariant: none is made before the machine that was asked for has had its first command, or while the host is busy.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use body::{
    BodyDir,
    dir::Lock,
    guest::Guest,
    ids::Root,
    process::{Made, guest_config},
    root::Under,
    vm::{self, Parts, jail::Jail},
};
use proto::{
    BodyId, Spec,
    spec::{Ids, Life},
    wire::process::{ProcessConfig, StartRequest},
};

use super::warm;
use crate::{
    Fleet, View, data, held,
    parked::{Ground, Shape},
    settings,
};

/// Spares of one template where nobody decided, in a fleet that serves.
pub(crate) const SPARES_DEFAULT: u32 = 1;
/// Most spares of all templates together.
pub(crate) const SPARES_MAX: u32 = 4;
/// They may have this part of the host's memory together.
const MEMORY_PART: u64 = 8;
/// How long one waits.
const AGE_MAX: Duration = Duration::from_secs(600);
/// A machine that has run nothing by then is not waited for.
const FIRST_EXEC_PATIENCE: Duration = Duration::from_secs(3);
/// Who has just had an answer may ask again.
const REST: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_millis(100);
const SWEEP_EVERY: Duration = Duration::from_secs(10);
const REHEARSAL_PATIENCE: Duration = Duration::from_secs(20);
/// The second time finds what the first has left to be learned.
const REHEARSALS: usize = 2;

/// What two machines have in common that can be each other's spare.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Likeness {
    shape: Shape,
    root: Root,
    key: String,
    /// What jails its hypervisor, where that is to be jailed.
    jail: Option<PathBuf>,
}

/// A machine that waits.
#[derive(Debug)]
pub(crate) struct Spare {
    like: Likeness,
    since: Instant,
    spec: Spec,
    under: Under,
    pub(crate) dir: BodyDir,
    pub(crate) lock: Lock,
    pub(crate) made: Made,
}

impl Spare {
    /// Who it is.
    pub(crate) fn who(&self) -> (BodyId, Ids) {
        (self.spec.id.clone(), self.spec.ids.clone())
    }

    /// What it was made from.
    pub(crate) fn under(&self) -> Under {
        self.under.clone()
    }
}

/// One that is to be made.
#[derive(Debug)]
struct Order {
    like: Likeness,
    spec: Spec,
    under: Under,
    /// Who comes first.
    after: BodyId,
    since: Instant,
}

/// Where they wait.
#[derive(Debug)]
pub(crate) struct Spares {
    pool: Arc<Pool>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Pool {
    ground: Arc<Ground>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: Vec<Spare>,
    orders: VecDeque<Order>,
    /// Machines that have yet to run a command.
    fresh: Vec<BodyId>,
    /// Whether a busy host is no reason to wait.
    hurry: bool,
    closing: bool,
}

impl Fleet {
    /// What a machine of that spec has in common with its spares; none where it can have none.
    pub(crate) fn likeness(&self, spec: &Spec, root: Root, parts: &Parts) -> Option<Likeness> {
        let plain = spec.life == Life::Kept
            && spec.share.is_none()
            && spec.mounts.is_empty()
            && spec.workspaces.is_empty()
            && spec.home.is_none()
            && spec.egress.is_none()
            && spec.limits.wall_ms.is_none();
        (plain && self.spares.is_some()).then(|| Likeness {
            shape: Shape::of(&faceless(spec)),
            root,
            key: warm::key(spec, parts),
            jail: parts.jail.as_ref().and_then(Jail::root).map(Path::to_owned),
        })
    }

    /// Takes a spare and tells it whose it is. One that cannot prove that is ended, as if it had never been.
    pub(crate) fn take_spare(&self, like: &Likeness, spec: &Spec) -> Option<Spare> {
        let pool = &self.spares.as_ref()?.pool;
        let mut spare = pool.take(like)?;
        let (id, ids) = spare.who();
        let spec = Spec { id, ids, ..spec.clone() };
        match vm::take::take(spare.dir.path(), &guest_config(&spec, &self.token(&spec.id))) {
            Ok(revival) => {
                spare.made.ready.revival = Some(revival);
                Some(spare)
            }
            Err(_) => {
                pool.discard(spare);
                None
            }
        }
    }

    /// Has another one made, like a machine that was just made of those parts.
    pub(crate) fn want_spare(&self, like: Likeness, view: &View, under: Under) {
        if let Some(spares) = &self.spares {
            spares.pool.order(Order {
                like,
                spec: faceless(&view.spec),
                under,
                after: view.id().clone(),
                since: Instant::now(),
            });
        }
    }

    /// A machine has had a command.
    pub(crate) fn has_run(&self, id: &BodyId) {
        if let Some(spares) = &self.spares {
            spares.pool.has_run(id);
        }
    }

    /// What was decided may have changed.
    pub(crate) fn look_at_spares(&self) {
        if let Some(spares) = &self.spares {
            spares.pool.changed.notify_all();
        }
    }

    /// Has spares made at once that were asked for, also while the host is busy: for who measures or tests them.
    pub fn hurry_spares(&self) {
        if let Some(spares) = &self.spares {
            held(&spares.pool.state).hurry = true;
            spares.pool.changed.notify_all();
        }
    }

    /// How many machines wait for somebody to ask for one.
    pub fn spares(&self) -> usize {
        self.spares.as_ref().map_or(0, |spares| held(&spares.pool.state).ready.len())
    }
}

/// Without what a spare is only told when it is taken.
fn faceless(spec: &Spec) -> Spec {
    Spec {
        env: Default::default(),
        user: "user".into(),
        workdir: None,
        at_start: Vec::new(),
        ports: Vec::new(),
        parent: None,
        ..spec.clone()
    }
}

impl Spares {
    /// None yet.
    pub(crate) fn open(ground: &Arc<Ground>) -> Self {
        let pool =
            Arc::new(Pool { ground: ground.clone(), state: Mutex::default(), changed: Condvar::new() });
        let working = pool.clone();
        let worker = std::thread::Builder::new().name("pal-spares".into()).spawn(move || working.work()).ok();
        Self { pool, worker }
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        held(&self.pool.state).closing = true;
        self.pool.changed.notify_all();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        for spare in std::mem::take(&mut held(&self.pool.state).ready) {
            self.pool.discard(spare);
        }
    }
}

impl Pool {
    /// How many there may be of one kind.
    fn count(&self) -> usize {
        settings::read(&self.ground.data).map_or(0, |settings| settings.spares() as usize)
    }

    fn take(&self, like: &Likeness) -> Option<Spare> {
        let mut state = held(&self.state);
        let at =
            state.ready.iter().position(|spare| spare.like == *like && spare.since.elapsed() < AGE_MAX)?;
        (self.count() > 0).then(|| state.ready.swap_remove(at))
    }

    fn order(&self, order: Order) {
        let count = self.count();
        let mut state = held(&self.state);
        let same = state.ready.iter().filter(|spare| spare.like == order.like).count()
            + state.orders.iter().filter(|other| other.like == order.like).count();
        if same < count {
            if state.orders.len() >= SPARES_MAX as usize {
                let dropped = state.orders.pop_front();
                state.fresh.retain(|id| dropped.as_ref().is_none_or(|dropped| dropped.after != *id));
            }
            state.fresh.push(order.after.clone());
            state.orders.push_back(order);
            self.changed.notify_all();
        }
    }

    fn has_run(&self, id: &BodyId) {
        let mut state = held(&self.state);
        if state.fresh.contains(id) {
            state.fresh.retain(|other| other != id);
            self.changed.notify_all();
        }
    }

    fn discard(&self, spare: Spare) {
        let Spare { spec, dir, lock, mut made, .. } = spare;
        made.tether.bury();
        self.ground.clear_away(&spec.id, &dir, &spec.ids);
        drop(lock);
    }

    fn work(&self) {
        while let Some(order) = self.next() {
            let made = if self.may_begin(&order) { self.make(&order) } else { None };
            let mut state = held(&self.state);
            state.fresh.retain(|id| *id != order.after);
            state.ready.extend(made);
        }
    }

    /// Waits for an order; meanwhile those that are too many or too old go.
    fn next(&self) -> Option<Order> {
        loop {
            self.sweep();
            let mut state = held(&self.state);
            if state.closing {
                return None;
            }
            if let Some(order) = state.orders.pop_front() {
                return Some(order);
            }
            drop(self.changed.wait_timeout(state, SWEEP_EVERY));
        }
    }

    fn sweep(&self) {
        let count = self.count();
        let mut kept: Vec<Spare> = Vec::new();
        let mut gone = Vec::new();
        let mut state = held(&self.state);
        for spare in state.ready.drain(..) {
            let same = kept.iter().filter(|other| other.like == spare.like).count();
            let stays = same < count && spare.since.elapsed() < AGE_MAX;
            if stays { kept.push(spare) } else { gone.push(spare) }
        }
        state.ready = kept;
        drop(state);
        gone.into_iter().for_each(|spare| self.discard(spare));
    }

    /// Waits until nobody is kept waiting by it; false where it is not to be made.
    fn may_begin(&self, order: &Order) -> bool {
        let mut state = held(&self.state);
        while !state.closing
            && state.fresh.contains(&order.after)
            && order.since.elapsed() < FIRST_EXEC_PATIENCE
        {
            let waited = self.changed.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        drop(state);
        std::thread::sleep(REST);
        // On a host that stays busy nobody asked for it in a while.
        while !held(&self.state).hurry && !sys::proc::has_idle_processor() {
            if held(&self.state).closing || order.since.elapsed() > AGE_MAX {
                return false;
            }
            self.sweep();
            std::thread::sleep(LOOK_EVERY);
        }
        self.has_room(order)
    }

    fn has_room(&self, order: &Order) -> bool {
        let count = self.count();
        let state = held(&self.state);
        let same = state.ready.iter().filter(|spare| spare.like == order.like).count();
        let memory: u64 = state.ready.iter().map(|spare| spare.spec.limits.memory.0).sum();
        !state.closing
            && same < count
            && state.ready.len() < SPARES_MAX as usize
            && memory + order.spec.limits.memory.0 <= self.ground.maker.capacity.memory.0 / MEMORY_PART
    }

    fn make(&self, order: &Order) -> Option<Spare> {
        let begun = self.ground.begin(&order.spec, order.like.root, &order.under)?;
        let (id, dir, lock, ids) = (begun.id, begun.dir, begun.lock, begun.ids);
        let Ok(made) = begun.begun.finish() else {
            self.ground.clear_away(&id, &dir, &ids);
            return None;
        };
        let spec = Spec { id, ids, ..order.spec.clone() };
        let guest = Guest::new(dir.path(), data::token(&self.ground.key, &spec.id));
        let (like, under) = (order.like.clone(), order.under.clone());
        let spare = Spare { like, since: Instant::now(), spec, under, dir, lock, made };
        if rehearse_all(&guest).is_none() || held(&self.state).closing {
            self.discard(spare);
            return None;
        }
        Some(spare)
    }
}

/// Has a machine do what its first commands would have to do first.
pub(super) fn rehearse_all(guest: &Guest) -> Option<()> {
    (0..REHEARSALS).try_for_each(|_| rehearse(guest))
}

/// Runs the template's `true` as whoever asks will have commands run.
fn rehearse(guest: &Guest) -> Option<()> {
    let process = ProcessConfig { cmd: "true".into(), ..ProcessConfig::default() };
    let start = StartRequest { process: Some(process), stdin: Some(false), ..StartRequest::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let ran = async {
        let mut stream = guest.line().await?.start(&start, None, None).await?;
        while stream.next().await?.is_some() {}
        Ok::<(), body::guest::GuestError>(())
    };
    runtime.block_on(async { tokio::time::timeout(REHEARSAL_PATIENCE, ran).await }).ok()?.ok()
}
