//! Named homes: an agent's `$HOME` that outlives its Body, for the next Body that asks for it by name.
//!
//! A home is a record that names a stack of layers. The Body that uses it writes to a part of its own upper, so
//! snapshots and forks include the home too. When that Body is removed, this part becomes one more layer of the home.
//!
//! Invariant: only one Body at a time uses a home; a second request is refused. With two writers, each would lose the
//! changes of the other.
//! Invariant: a Body with a home is removed only after its writes to the home are stored, or with `--discard`.
//! Absent on purpose: caches of package managers. They belong to dependency layers, and an older cache in the home
//! would hide a newer one there.

use std::{fs, io, os::unix::ffi::OsStrExt};

use body::{
    layers::{self, LayerDraft},
    root::LowerLayer,
};
use proto::{
    BodyId, Failure, Kind, LayerId, Spec,
    event_data::{HomeKept, HomeRemoved},
    spec::{HOME, Home},
};
use serde::{Deserialize, Serialize};
use store::RecordTable;

use crate::{
    Fleet, failures,
    records::{HOMES, key_of},
};

/// Most layers of one home: each is a mount in its Body.
const LAYERS_MAX: usize = 96;
/// Caches that package managers can fill again: paths below the home.
const CACHES: &[&str] = &[
    ".bun",
    ".bundle",
    ".cache",
    ".cargo/git",
    ".cargo/registry",
    ".composer/cache",
    ".config/pnpm",
    ".gradle/caches",
    ".hex",
    ".local/share/pnpm",
    ".local/share/poetry",
    ".local/share/uv",
    ".m2/repository",
    ".mix",
    ".npm",
    ".venv",
    ".yarn",
    "go/pkg",
];

/// The record of a home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeRecord {
    /// The name.
    pub name: String,
    /// The layers, top first.
    pub layers: Vec<LayerId>,
    /// The time at which it was last stored.
    pub kept_at: String,
}

/// A home as callers see it.
#[derive(Debug, Clone, Serialize)]
pub struct HomeView {
    /// The record.
    #[serde(flatten)]
    pub record: HomeRecord,
    /// The size in bytes.
    pub bytes: u64,
    /// The Body that uses it now.
    pub body: Option<BodyId>,
}

/// The named homes of a fleet.
#[derive(Debug, Clone, Copy)]
pub struct Homes<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl Homes<'_> {
    /// All homes, by name.
    pub fn list(&self) -> Result<Vec<HomeView>, Failure> {
        let mut views = Vec::new();
        for record in self.records()? {
            let size = |id: &LayerId| {
                layers::read(&self.fleet.templates().layers_dir().join(id.as_str()))
                    .map_or(0, |layer| layer.bytes)
            };
            let bytes = record.layers.iter().map(size).sum();
            let body = self.holder(&record.name)?;
            views.push(HomeView { record, bytes, body });
        }
        views.sort_by(|a, b| a.record.name.cmp(&b.record.name));
        Ok(views)
    }

    pub(crate) fn records(&self) -> Result<Vec<HomeRecord>, Failure> {
        Ok(self.table().values(None)?)
    }

    fn table(&self) -> RecordTable<'_, HomeRecord> {
        self.fleet.table(HOMES)
    }

    /// Removes a home that no Body uses.
    pub fn remove(&self, name: &str) -> Result<(), Failure> {
        check_name(name)?;
        let _lock = self.lock_homes()?;
        let key = key_of([name])?;
        if self.table().get(&key)?.is_none() {
            return Err(Failure::new(Kind::NotFound, format!("there is no home {name}"))
                .hint("list them: pal home ls"));
        }
        if let Some(body) = self.holder(name)? {
            return Err(taken(name, &body));
        }
        self.fleet.log().note(HomeRemoved { home: name.to_owned() })?;
        self.table().remove(&key)?;
        self.fleet.garbage().drop_unused_layers()
    }

    /// Reserves a home for a Body that is about to be created. The caller holds the returned lock until the Body
    /// exists.
    pub(crate) fn take(&self, name: &str) -> Result<(Home, fs::File), Failure> {
        check_name(name)?;
        let lock = self.lock_homes()?;
        if let Some(body) = self.holder(name)? {
            return Err(taken(name, &body));
        }
        let layers = self.table().get(&key_of([name])?)?.map(|found| found.value.layers).unwrap_or_default();
        if layers.len() >= LAYERS_MAX {
            let full =
                Failure::new(Kind::Limit, format!("home {name} has {LAYERS_MAX} layers, which is the limit"));
            return Err(full.hint("copy what is worth keeping into a new one: pal cp, pal up --home OTHER"));
        }
        Ok((Home { name: Some(name.to_owned()), layers }, lock))
    }

    /// The layers below the home of a Body.
    pub(crate) fn home_below(&self, home: Option<&Home>) -> Result<Option<Vec<LowerLayer>>, Failure> {
        home.map(|home| self.fleet.templates().layers_below(&home.layers)).transpose()
    }

    /// The Body that uses a home.
    fn holder(&self, name: &str) -> Result<Option<BodyId>, Failure> {
        let has = |spec: &Spec| spec.home.as_ref().and_then(|home| home.name.as_deref()) == Some(name);
        for id in self.fleet.ids()? {
            let dir = body::BodyDir::at(self.fleet.body_path(&id));
            if dir.spec().or_else(|_| dir.draft()).is_ok_and(|spec| has(&spec)) {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// Stores a Body's writes to its home as a layer. No process of the Body runs any more, and the caller holds the
    /// Body's lock.
    pub(crate) fn keep(&self, spec: &Spec) -> Result<(), Failure> {
        let Some(Home { name: Some(name), layers }) = &spec.home else { return Ok(()) };
        let area = proto::launch::area_dir(HOME);
        let copy = self.fleet.copy_upper(spec)?;
        let upper =
            copy.as_ref().map_or_else(|| self.fleet.upper_path(&spec.id), |copy| copy.path().to_owned());
        let cannot = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| Failure::new(Kind::Host, what).because(error).hint("make room: pal gc")
        };
        if is_empty(&upper.join(&area)).unwrap_or(false) {
            return Ok(());
        }
        let _building = self.fleet.garbage().building()?;
        let _lock = self.lock_homes()?;
        let drawn = sys::random::bytes().map_err(cannot("cannot read random bytes from the kernel"))?;
        let id = LayerId::from_random(drawn);
        let draft = LayerDraft::begin(
            &self.fleet.launch_context.programs,
            &self.fleet.templates().layers_dir(),
            &format!("{id}.part{}", std::process::id()),
            spec.ids.clone(),
        )
        .map_err(failures::layer)?;
        draft.take_area(&upper, spec, &area).map_err(failures::layer)?;
        for cache in CACHES {
            self.leave_out(spec, &draft.root(), cache)?;
        }
        self.fleet.log().note(HomeKept { home: name.clone(), body: spec.id.clone(), layer: id.clone() })?;
        draft.finish(id.clone(), &format!("home {name}"), store::clock::now()).map_err(failures::layer)?;
        let record = HomeRecord {
            name: name.clone(),
            layers: [id].into_iter().chain(layers.iter().cloned()).collect(),
            kept_at: store::clock::now(),
        };
        Ok(self.table().put(&key_of([name])?, &record)?)
    }

    /// Removes a path from a layer without following symbolic links.
    fn leave_out(&self, spec: &Spec, root: &std::path::Path, path: &str) -> Result<(), Failure> {
        let mut place = root.to_owned();
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        for part in above.split('/').filter(|part| !part.is_empty()) {
            place.push(part);
            if !fs::symlink_metadata(&place).is_ok_and(|found| found.is_dir()) {
                return Ok(());
            }
        }
        place.push(name);
        match fs::symlink_metadata(&place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            _ => body::snapshot::remove(&self.fleet.launch_context.programs, &spec.ids, &place)
                .map_err(failures::removal),
        }
    }

    /// Takes the lock of all homes, which one `pal` of this data directory holds at a time. A lock is needed because
    /// the user of a home is found in the specs of Bodies, which no record revision guards.
    fn lock_homes(&self) -> Result<fs::File, Failure> {
        let dir = self.fleet.data.join("homes");
        let locked =
            fs::create_dir_all(&dir).and_then(|()| fs::File::create(dir.join("lock"))).and_then(|file| {
                rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
                Ok(file)
            });
        locked.map_err(|error| Failure::new(Kind::Host, "cannot lock the homes").because(error))
    }
}

fn is_empty(dir: &std::path::Path) -> io::Result<bool> {
    Ok(fs::read_dir(dir)?.next().is_none())
}

fn check_name(name: &str) -> Result<(), Failure> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    if name.is_empty()
        || name.len() > 64
        || name.starts_with('.')
        || !std::ffi::OsStr::new(name).as_bytes().iter().all(plain)
    {
        let wrong = Failure::new(Kind::Usage, format!("{:?} cannot name a home", proto::text::visible(name)));
        return Err(wrong.hint("use 1 to 64 letters, digits, `-`, `_` or `.`, and no `.` first"));
    }
    Ok(())
}

fn taken(name: &str, body: &BodyId) -> Failure {
    Failure::new(Kind::Conflict, format!("Body {body} uses the home {name}"))
        .hint(format!("work in that Body, or remove it, which keeps the home: pal rm {body}"))
        .hint(format!("begin with a copy of everything it has: pal fork {body}"))
}
