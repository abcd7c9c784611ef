//! All Bodies of this machine: create, find, use, fork, end. The one writer of Body events.
//!
//! Invariant: an action that changes a Body is written to the log before it takes effect; one that cannot be
//! written does not happen. The end of a Body of a run is decided when it is made: it ends with its last command or
//! with its maker, whichever is first, and that it has is written when it has.
//! Invariant: whoever changes a Body's life holds the lock in its directory.
//! Absent on purpose: environment variables, printing, the user's home. The caller brings all of it.

mod copy;
mod create;
mod data;
mod doctor;
mod door;
mod ending;
mod events;
mod exec;
mod failures;
mod gc;
mod heard;
mod images;
pub mod lease;
mod life;
mod parked;
mod record;
mod request;
mod settings;
mod snapshots;
mod templates;
mod view;
mod vm;
mod way_out;
mod work;

use std::{
    collections::HashMap,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use body::process::{Maker, Tether};
use data::Ahead;
use parked::Yard;
use proto::{BodyId, Draft, Event, Failure, Kind, Spec, launch::Running};
use store::Store;

pub use body::guest::Dialled;
pub use body::process::Launcher;
pub use data::Config;
pub use doctor::{Doctor, Finding, LayerReport};
pub use door::Usage;
pub use events::{LogEntry, Verdict};
pub use exec::{Control, Exec, Output};
pub use gc::Sweep;
pub use heard::Heard;
pub use images::{Credentials, Dress, Image, Inside, Platform, Pulled, Reach};
pub use lease::{Lease, Rest, Then};
pub use life::{Force, describe};
pub use request::{AskedLimits, Create, ExecRequest, Stdin, TtySize};
pub use settings::{Setting, Settings};
pub use store::{Durability, clock};
pub use templates::{
    Act, BASE, BuildRequest, BuildState, From, INTERPRETER, Job, STEPS_MAX, Said, Say, Step, TemplateView,
    check_tags,
    recipe::{Recipe, read as read_recipe},
};
pub use view::{Copied, Ended, Garbage, SnapshotView, Status, View};
pub use vm::{Boots, OwnKernel};
pub use way_out::{check_rules, registries};
pub use work::{
    Compared, Comparison, Discard, Hear, HomeRecord, HomeView, Images, Look, Lost, Overlap, Prepare, Queued,
    Repo, Share, Up, WorkDiff,
};
pub use workspace::{Commit, Dirty, How, Landed, LeftOut, Person, Saved, SavedModule, Shape, Touched, What};

/// All Bodies of one data directory.
#[derive(Debug)]
pub struct Fleet {
    data: PathBuf,
    /// What tokens are made of.
    key: String,
    durability: Durability,
    /// Opened when it is first needed.
    store: OnceLock<Store>,
    maker: Arc<Maker>,
    /// Keepers that are this process's children: to be waited for, and for some Bodies the thread they hang by.
    tethers: Mutex<HashMap<BodyId, Held>>,
    /// Where Bodies ran when this process last looked.
    seen: Mutex<HashMap<BodyId, body::dir::Seen>>,
    /// Lines to their guests that the last command left, for the next.
    lines: Mutex<HashMap<BodyId, body::guest::Line>>,
    /// What is started ahead.
    ahead: Ahead,
    /// Templates that are being built.
    jobs: templates::Jobs,
    /// Started ahead.
    launcher: Mutex<Option<Launcher>>,
    /// Where the next Body waits, for a caller that makes one after another.
    yard: Option<Yard>,
    /// Where machines wait, for a caller that stays.
    spares: Option<vm::spare::Spares>,
    /// Events that stand in the log before the next one.
    pending: Mutex<Vec<Draft>>,
    /// Keepers that cleared their Body away and are about to exit.
    leaving: Mutex<Vec<Tether>>,
    /// Held while a lease changes.
    leases: Mutex<()>,
}

/// A Body that this process made.
#[derive(Debug)]
struct Held {
    tether: Tether,
    /// Where it runs and what it is: asked for by each exec.
    running: Running,
    spec: Spec,
    /// What was said to its guest while it came up, for the first command.
    opened: Option<Opened>,
    /// Whether its end is in the log.
    told: bool,
}

/// What was said to a guest while it came up.
#[derive(Debug)]
enum Opened {
    /// Nothing; it was connected to.
    Line(UnixStream),
    /// Its first command.
    First(exec::First),
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.settle();
        for mut tether in std::mem::take(&mut *held(&self.leaving)) {
            tether.bury();
        }
    }
}

impl Fleet {
    /// Opens the data directory, and makes it if need be.
    pub fn open(config: Config) -> Result<Fleet, Failure> {
        data::open(config, Ahead::Nothing, None)
    }

    /// The same for a caller that will make a Body at once: its launcher starts while the rest is opened, unless the
    /// caller brings one.
    pub fn open_to_create(config: Config, launcher: Option<Launcher>) -> Result<Fleet, Failure> {
        data::open(config, Ahead::One, launcher)
    }

    /// The same for a caller that will make one Body after another: there is always a launcher ahead, and after two
    /// Bodies alike a third.
    pub fn open_to_serve(config: Config) -> Result<Fleet, Failure> {
        data::open(config, Ahead::Always, None)
    }

    /// Writes what still waits to be written. Done when the fleet is dropped; for a caller that exits instead.
    pub fn settle(&self) {
        let pending = std::mem::take(&mut *held(&self.pending));
        if let (Some(store), false) = (self.store.get(), pending.is_empty()) {
            let _ = store.append_all(pending);
        }
    }

    /// The data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Where a Body is.
    fn body_path(&self, id: &BodyId) -> PathBuf {
        self.data.join("bodies").join(id.as_str())
    }

    /// What callers of that Body's guest must send.
    pub fn token(&self, id: &BodyId) -> String {
        data::token(&self.key, id)
    }

    fn launcher(&self) -> Result<Launcher, Failure> {
        let ahead = held(&self.launcher).take();
        let started = ahead.map_or_else(|| self.maker.start_launcher(), Ok);
        started.map_err(|error| failures::process("cannot start a Body", error))
    }

    /// Starts the launcher of the next Body, while this one is being made. One that cannot be started is started when
    /// it is needed, and fails there.
    fn look_ahead(&self) {
        if self.ahead == Ahead::Always {
            *held(&self.launcher) = self.maker.start_launcher().ok();
        }
    }

    fn tethers(&self) -> MutexGuard<'_, HashMap<BodyId, Held>> {
        held(&self.tethers)
    }

    fn take_tether(&self, id: &BodyId) -> Option<Tether> {
        self.tethers().remove(id).map(|held| held.tether)
    }

    fn store(&self) -> Result<&Store, Failure> {
        if let Some(store) = self.store.get() {
            return Ok(store);
        }
        let opened = Store::open(&self.data, self.durability).map_err(failures::open)?;
        Ok(self.store.get_or_init(|| opened))
    }

    /// Appends an event, after those that wait for it.
    fn append(&self, draft: Draft) -> Result<Event, Failure> {
        self.append_all([draft])
    }

    /// Appends events together; gives the last one.
    fn append_all(&self, drafts: impl IntoIterator<Item = Draft>) -> Result<Event, Failure> {
        let mut pending = held(&self.pending);
        let drafts = pending.iter().cloned().chain(drafts).collect();
        let written = self.store()?.append_all(drafts).map_err(failures::append)?;
        pending.clear();
        written
            .into_iter()
            .next_back()
            .ok_or_else(|| Failure::new(Kind::Internal, "an event was not written"))
    }

    /// Leaves an event to be written with the next one.
    fn later(&self, draft: Draft) {
        held(&self.pending).push(draft);
    }

    /// Lets a keeper exit in its own time; those that have are waited for.
    fn let_leave(&self, tether: Tether) {
        let mut leaving = held(&self.leaving);
        leaving.retain_mut(|tether| !tether.is_buried());
        leaving.push(tether);
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
