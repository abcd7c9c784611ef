//! A Body made before anybody asked for it, for a caller that makes one after another.
//!
//! It is like the last two that were asked for: its guest runs and waits, and all that is missing is to write it down.
//! Until then it is no Body: it has no spec, hangs by a pipe from this process, and ends with it.
//!
//! Invariant: at most one waits, and none unless two in a row were alike.
//! Absent on purpose: Bodies with mounts, snapshots or templates below them. What those stand on could change while
//! they wait.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, mpsc},
    thread::JoinHandle,
};

use body::{
    BodyDir, ProcessState,
    dir::BodyLock,
    ids::{self, MapRoot},
    process::{LaunchContext, StartingBody},
    root::RootfsStack,
};
use proto::{BodyId, Spec, spec::Ids};

use crate::{data, lock_mutex};

/// All of a spec but who it is.
#[derive(Debug, Clone, PartialEq)]
pub struct BodyShape(Spec);

impl BodyShape {
    /// The shape of a spec.
    pub fn of(spec: &Spec) -> Self {
        let nobody = Ids { users: Vec::new(), groups: Vec::new() };
        Self(Spec {
            id: BodyId::from_random([0; 12]),
            created_at: String::new(),
            parent: None,
            ids: nobody,
            ..spec.clone()
        })
    }

    fn can_wait(&self) -> bool {
        self.0.layer == proto::Layer::Process
            && self.0.template == "host"
            && self.0.base.is_none()
            && self.0.snapshots.is_empty()
            && self.0.mounts.is_empty()
            && self.0.workspaces.is_empty()
            && self.0.home.is_none()
            && self.0.egress.is_none()
    }
}

/// A Body that waits.
#[derive(Debug)]
pub struct PooledBody {
    shape: BodyShape,
    /// Whether root was wanted inside.
    root: MapRoot,
    /// Who it is.
    pub id: BodyId,
    /// Its directory.
    pub dir: BodyDir,
    /// The lock on it.
    pub lock: BodyLock,
    /// Its ids.
    pub ids: Ids,
    /// Its guest.
    pub begun: StartingBody,
}

/// Where the next one waits.
#[derive(Debug)]
pub struct Pool {
    ground: Arc<PoolContext>,
    place: Arc<Mutex<PoolSlot>>,
    orders: Option<mpsc::SyncSender<(BodyShape, MapRoot)>>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct PoolSlot {
    last: Option<BodyShape>,
    waiting: Option<PooledBody>,
}

/// What Bodies are made with.
#[derive(Debug)]
pub struct PoolContext {
    /// The launcher, and what this host has.
    pub launch_context: Arc<LaunchContext>,
    /// The data directory.
    pub data: PathBuf,
    /// What tokens are made of.
    pub key: String,
    /// The records of the data directory.
    pub records: Arc<dyn store::Records>,
}

/// A Body that was begun and is nobody's yet.
#[derive(Debug)]
pub struct UnclaimedBody {
    /// Who it is.
    pub id: BodyId,
    /// Its directory.
    pub dir: BodyDir,
    /// The lock on it.
    pub lock: BodyLock,
    /// Its ids.
    pub ids: Ids,
    /// Its guest.
    pub begun: StartingBody,
}

impl Pool {
    /// An empty one.
    pub fn open(ground: &Arc<PoolContext>) -> Self {
        let ground = ground.clone();
        let place: Arc<Mutex<PoolSlot>> = Arc::default();
        let (orders, taken) = mpsc::sync_channel::<(BodyShape, MapRoot)>(1);
        let (making, filled) = (ground.clone(), place.clone());
        let work = move || {
            for (shape, root) in taken {
                if lock_mutex(&filled).waiting.is_some() {
                    continue;
                }
                // One that cannot be made is made when it is asked for, and fails there.
                let made = making.park(shape, root);
                lock_mutex(&filled).waiting = made;
            }
        };
        let worker = std::thread::Builder::new().name("pal-park".into()).spawn(work).ok();
        Self { ground, place, orders: Some(orders), worker }
    }

    /// Takes the one that waits, if it is like that and alive.
    pub fn take(&self, shape: &BodyShape, root: MapRoot) -> Option<PooledBody> {
        let parked = lock_mutex(&self.place).waiting.take()?;
        let fits = parked.shape == *shape && parked.root == root;
        if fits && !matches!(parked.dir.condition(), Ok(ProcessState::Dead(_)) | Err(_)) {
            return Some(parked);
        }
        self.ground.discard(parked);
        None
    }

    /// Has another one made, if the last two were alike.
    pub fn refill(&self, shape: BodyShape, root: MapRoot) {
        let last = lock_mutex(&self.place).last.replace(shape.clone());
        if last.as_ref() == Some(&shape)
            && shape.can_wait()
            && let Some(orders) = &self.orders
        {
            // A full queue means that one is being made.
            let _ = orders.try_send((shape, root));
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        if let Some(parked) = lock_mutex(&self.place).waiting.take() {
            self.ground.discard(parked);
        }
    }
}

impl PoolContext {
    /// Ends one that nobody asked for. Its keeper clears it away, unless its guest died before.
    fn discard(&self, parked: PooledBody) {
        let PooledBody { id, dir, lock: _lock, ids, begun, .. } = parked;
        drop(begun);
        self.clear_away(&id, &dir, &ids);
    }

    /// Takes away what is left of one that has ended.
    pub fn clear_away(&self, id: &BodyId, dir: &BodyDir, ids: &Ids) {
        if dir.path().exists() {
            body::groups::remove_cgroups_by_name(id);
            let _ = body::snapshot::remove(&self.launch_context.programs, ids, dir.path());
        }
        ids::release(&self.data, ids, id);
    }

    fn park(&self, shape: BodyShape, root: MapRoot) -> Option<PooledBody> {
        let UnclaimedBody { id, dir, lock, ids, begun } =
            self.begin(&shape.0, root, &RootfsStack::default())?;
        Some(PooledBody { shape, root, id, dir, lock, ids, begun })
    }

    /// Begins one like that, with an id of its own.
    pub fn begin(&self, like: &Spec, root: MapRoot, rootfs: &RootfsStack) -> Option<UnclaimedBody> {
        let launcher = self.launch_context.start_launcher().ok()?;
        let id = BodyId::from_random(sys::random::bytes().ok()?);
        let dir = BodyDir::create(self.data.join("bodies").join(id.as_str())).ok()?;
        let made = dir.try_lock().ok().flatten().and_then(|lock| {
            let ids = ids::claim(&self.data, &id, root).ok()?;
            let spec = Spec { id: id.clone(), ids: ids.clone(), ..like.clone() };
            let begun =
                self.launch_context.begin(launcher, &dir, &spec, &data::token(&self.key, &id), rootfs);
            let begun = begun.inspect_err(|_| ids::release(&self.data, &ids, &id)).ok()?;
            Some((lock, ids, begun))
        });
        let Some((lock, ids, begun)) = made else {
            let _ = std::fs::remove_dir_all(dir.path());
            return None;
        };
        Some(UnclaimedBody { id, dir, lock, ids, begun })
    }
}
