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
    dir::BodyLock,
    guest::GuestClient,
    ids::MapRoot,
    process::{StartedBody, guest_config},
    root::RootfsStack,
    vm::{self, VmParts, jail::JailSetup},
};
use proto::{
    BodyId, Spec,
    spec::{Ids, Life},
    wire::process::{ProcessConfig, StartRequest},
};

use super::boot_snapshot;
use crate::{
    BodyView, Fleet, data, lock_mutex,
    parked::{BodyShape, PoolContext},
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
pub(crate) struct PoolKey {
    shape: BodyShape,
    root: MapRoot,
    key: String,
    /// What jails its hypervisor, where that is to be jailed.
    jail: Option<PathBuf>,
}

/// A machine that waits.
#[derive(Debug)]
pub(crate) struct SpareVm {
    like: PoolKey,
    since: Instant,
    spec: Spec,
    rootfs: RootfsStack,
    pub(crate) dir: BodyDir,
    pub(crate) lock: BodyLock,
    pub(crate) made: StartedBody,
}

impl SpareVm {
    /// Who it is.
    pub(crate) fn who(&self) -> (BodyId, Ids) {
        (self.spec.id.clone(), self.spec.ids.clone())
    }

    /// What it was made from.
    pub(crate) fn rootfs(&self) -> RootfsStack {
        self.rootfs.clone()
    }
}

/// One that is to be made.
#[derive(Debug)]
struct SpareRequest {
    like: PoolKey,
    spec: Spec,
    rootfs: RootfsStack,
    /// Who comes first.
    after: BodyId,
    since: Instant,
}

/// Where they wait.
#[derive(Debug)]
pub(crate) struct VmPool {
    pool: Arc<PoolShared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct PoolShared {
    install: Arc<PoolContext>,
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    ready: Vec<SpareVm>,
    orders: VecDeque<SpareRequest>,
    /// Machines that have yet to run a command.
    fresh: Vec<BodyId>,
    /// Whether a busy host is no reason to wait.
    hurry: bool,
    closing: bool,
}

impl Fleet {
    /// What a machine of that spec has in common with its spares; none where it can have none.
    pub(crate) fn pool_key(&self, spec: &Spec, root: MapRoot, parts: &VmParts) -> Option<PoolKey> {
        let plain = spec.life == Life::Kept
            && spec.share.is_none()
            && spec.mounts.is_empty()
            && spec.workspaces.is_empty()
            && spec.home.is_none()
            && spec.egress.is_none()
            && spec.limits.wall_ms.is_none();
        (plain && self.spares.is_some()).then(|| PoolKey {
            shape: BodyShape::of(&without_identity(spec)),
            root,
            key: boot_snapshot::key(spec, parts),
            jail: parts.jail.as_ref().and_then(JailSetup::root).map(Path::to_owned),
        })
    }

    /// Takes a spare and tells it whose it is. One that cannot prove that is ended, as if it had never been.
    pub(crate) fn take_spare(&self, like: &PoolKey, spec: &Spec) -> Option<SpareVm> {
        let pool = &self.spares.as_ref()?.pool;
        let mut spare = pool.take(like)?;
        let (id, ids) = spare.who();
        let spec = Spec { id, ids, ..spec.clone() };
        match vm::assign::assign(spare.dir.path(), &guest_config(&spec, &self.token(&spec.id))) {
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
    pub(crate) fn request_spare(&self, like: PoolKey, view: &BodyView, rootfs: RootfsStack) {
        if let Some(spares) = &self.spares {
            spares.pool.order(SpareRequest {
                like,
                spec: without_identity(&view.spec),
                rootfs,
                after: view.id().clone(),
                since: Instant::now(),
            });
        }
    }

    /// A machine has had a command.
    pub(crate) fn note_first_exec(&self, id: &BodyId) {
        if let Some(spares) = &self.spares {
            spares.pool.has_run(id);
        }
    }

    /// What was decided may have changed.
    pub(crate) fn check_pool(&self) {
        if let Some(spares) = &self.spares {
            spares.pool.changed.notify_all();
        }
    }

    /// Has spares made at once that were asked for, also while the host is busy: for who measures or tests them.
    pub fn force_refill(&self) {
        if let Some(spares) = &self.spares {
            lock_mutex(&spares.pool.state).hurry = true;
            spares.pool.changed.notify_all();
        }
    }

    /// How many machines wait for somebody to ask for one.
    pub fn spares(&self) -> usize {
        self.spares.as_ref().map_or(0, |spares| lock_mutex(&spares.pool.state).ready.len())
    }
}

/// Without what a spare is only told when it is taken.
fn without_identity(spec: &Spec) -> Spec {
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

impl VmPool {
    /// None yet.
    pub(crate) fn open(install: &Arc<PoolContext>) -> Self {
        let pool = Arc::new(PoolShared {
            install: install.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let working = pool.clone();
        let worker = std::thread::Builder::new().name("pal-spares".into()).spawn(move || working.work()).ok();
        Self { pool, worker }
    }
}

impl Drop for VmPool {
    fn drop(&mut self) {
        lock_mutex(&self.pool.state).closing = true;
        self.pool.changed.notify_all();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        for spare in std::mem::take(&mut lock_mutex(&self.pool.state).ready) {
            self.pool.discard(spare);
        }
    }
}

impl PoolShared {
    /// How many there may be of one kind.
    fn count(&self) -> usize {
        settings::read(&*self.install.records).map_or(0, |settings| settings.pool_size() as usize)
    }

    fn take(&self, like: &PoolKey) -> Option<SpareVm> {
        let mut state = lock_mutex(&self.state);
        let at =
            state.ready.iter().position(|spare| spare.like == *like && spare.since.elapsed() < AGE_MAX)?;
        (self.count() > 0).then(|| state.ready.swap_remove(at))
    }

    fn order(&self, order: SpareRequest) {
        let count = self.count();
        let mut state = lock_mutex(&self.state);
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
        let mut state = lock_mutex(&self.state);
        if state.fresh.contains(id) {
            state.fresh.retain(|other| other != id);
            self.changed.notify_all();
        }
    }

    fn discard(&self, spare: SpareVm) {
        let SpareVm { spec, dir, lock, mut made, .. } = spare;
        made.supervisor.reap();
        self.install.clear_away(&spec.id, &dir, &spec.ids);
        drop(lock);
    }

    fn work(&self) {
        while let Some(order) = self.next() {
            let made = if self.may_begin(&order) { self.make(&order) } else { None };
            let mut state = lock_mutex(&self.state);
            state.fresh.retain(|id| *id != order.after);
            state.ready.extend(made);
        }
    }

    /// Waits for an order; meanwhile those that are too many or too old go.
    fn next(&self) -> Option<SpareRequest> {
        loop {
            self.sweep();
            let mut state = lock_mutex(&self.state);
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
        let mut kept: Vec<SpareVm> = Vec::new();
        let mut gone = Vec::new();
        let mut state = lock_mutex(&self.state);
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
    fn may_begin(&self, order: &SpareRequest) -> bool {
        let mut state = lock_mutex(&self.state);
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
        while !lock_mutex(&self.state).hurry && !sys::proc::has_idle_processor() {
            if lock_mutex(&self.state).closing || order.since.elapsed() > AGE_MAX {
                return false;
            }
            self.sweep();
            std::thread::sleep(LOOK_EVERY);
        }
        self.has_room(order)
    }

    fn has_room(&self, order: &SpareRequest) -> bool {
        let count = self.count();
        let state = lock_mutex(&self.state);
        let same = state.ready.iter().filter(|spare| spare.like == order.like).count();
        let memory: u64 = state.ready.iter().map(|spare| spare.spec.limits.memory.0).sum();
        !state.closing
            && same < count
            && state.ready.len() < SPARES_MAX as usize
            && memory + order.spec.limits.memory.0
                <= self.install.launch_context.capacity.memory.0 / MEMORY_PART
    }

    fn make(&self, order: &SpareRequest) -> Option<SpareVm> {
        let begun = self.install.begin(&order.spec, order.like.root, &order.rootfs)?;
        let (id, dir, lock, ids) = (begun.id, begun.dir, begun.lock, begun.ids);
        let Ok(made) = begun.begun.finish() else {
            self.install.clear_away(&id, &dir, &ids);
            return None;
        };
        let spec = Spec { id, ids, ..order.spec.clone() };
        let guest = GuestClient::new(dir.path(), data::token(&self.install.key, &spec.id));
        let (like, rootfs) = (order.like.clone(), order.rootfs.clone());
        let spare = SpareVm { like, since: Instant::now(), spec, rootfs, dir, lock, made };
        if rehearse_all(&guest).is_none() || lock_mutex(&self.state).closing {
            self.discard(spare);
            return None;
        }
        Some(spare)
    }
}

/// Has a machine do what its first commands would have to do first.
fn rehearse_all(guest: &GuestClient) -> Option<()> {
    (0..REHEARSALS).try_for_each(|_| run_true(guest))
}

/// Runs the template's `true` as whoever asks will have commands run.
fn run_true(guest: &GuestClient) -> Option<()> {
    let process = ProcessConfig { cmd: "true".into(), ..ProcessConfig::default() };
    let start = StartRequest { process: Some(process), stdin: Some(false), ..StartRequest::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let ran = async {
        let mut stream = guest.connect_http().await?.start(&start, None, None).await?;
        while stream.next().await?.is_some() {}
        Ok::<(), body::guest::GuestError>(())
    };
    runtime.block_on(async { tokio::time::timeout(REHEARSAL_PATIENCE, ran).await }).ok()?.ok()
}
