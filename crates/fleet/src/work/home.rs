//! Homes that outlive their Bodies: what an agent keeps in `$HOME`, for the next Body that asks for it by name.
//!
//! A home is a record that names a stack of layers. The Body that has it writes to a part of its own upper, as it does everywhere else, so
//! snapshots and forks hold it, too; when that Body is removed, its part becomes one more layer.
//!
//! Invariant: one Body at a time has a home; whoever wants it meanwhile is refused. Two that write would each lose what
//! the other remembered.
//! Invariant: a Body that has a home is removed only after what it wrote there is kept, or with `--discard`.
//! Absent on purpose: caches of package managers. They are part of dependency layers, and would hide newer ones.

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

/// Most layers of one home: each is a mount of its Body.
const LAYERS_MAX: usize = 96;
/// What package managers can have again: paths below the home.
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
    /// Its name.
    pub name: String,
    /// Its files, nearest first.
    pub layers: Vec<LayerId>,
    /// When it was last kept.
    pub kept_at: String,
}

/// A home as callers see it.
#[derive(Debug, Clone, Serialize)]
pub struct HomeView {
    /// Its record.
    #[serde(flatten)]
    pub record: HomeRecord,
    /// What it takes.
    pub bytes: u64,
    /// The Body that has it.
    pub body: Option<BodyId>,
}

/// The homes that Bodies use by name.
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

    /// Removes a home that no Body has.
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

    /// The home of that name for a Body that is about to be made. The lock is to be held until the Body is there.
    pub(crate) fn take(&self, name: &str) -> Result<(Home, fs::File), Failure> {
        check_name(name)?;
        let lock = self.lock_homes()?;
        if let Some(body) = self.holder(name)? {
            return Err(taken(name, &body));
        }
        let layers = self.table().get(&key_of([name])?)?.map(|found| found.value.layers).unwrap_or_default();
        if layers.len() >= LAYERS_MAX {
            let full = Failure::new(
                Kind::Limit,
                format!("home {name} was changed {LAYERS_MAX} times, and cannot be changed again"),
            );
            return Err(full.hint("copy what is worth keeping into a new one: pal cp, pal up --home OTHER"));
        }
        Ok((Home { name: Some(name.to_owned()), layers }, lock))
    }

    /// What is below the home of a Body.
    pub(crate) fn home_below(&self, home: Option<&Home>) -> Result<Option<Vec<LowerLayer>>, Failure> {
        home.map(|home| self.fleet.templates().layers_below(&home.layers)).transpose()
    }

    /// The Body that has a home.
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

    /// Keeps what a Body wrote to its home. Nobody writes there any more, and the caller has the Body's lock.
    pub(crate) fn keep(&self, spec: &Spec) -> Result<(), Failure> {
        let Some(Home { name: Some(name), layers }) = &spec.home else { return Ok(()) };
        let area = proto::launch::area_dir(HOME);
        let upper = self.fleet.body_path(&spec.id).join("disk/upper").join(&area);
        let cannot = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| Failure::new(Kind::Host, what).because(error).hint("make room: pal gc")
        };
        if is_empty(&upper).unwrap_or(false) {
            return Ok(());
        }
        let _building = self.fleet.garbage().building()?;
        let _lock = self.lock_homes()?;
        let drawn = sys::random::bytes().map_err(cannot("cannot draw an id"))?;
        let id = LayerId::from_random(drawn);
        let draft = LayerDraft::begin(
            &self.fleet.launch_context.programs,
            &self.fleet.templates().layers_dir(),
            &format!("{id}.part{}", std::process::id()),
            spec.ids.clone(),
        )
        .map_err(failures::layer)?;
        draft.take_area(&self.fleet.body_path(&spec.id), spec, &area).map_err(failures::layer)?;
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

    /// Takes a path out of a layer; no link on the way is followed.
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

    /// Held by one `pal` of this data directory at a time: the Body that has a home is found by the specs of Bodies, which
    /// no record can hold back.
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
    Failure::new(Kind::Conflict, format!("Body {body} has the home {name}"))
        .hint(format!("work in that Body, or remove it, which keeps the home: pal rm {body}"))
        .hint(format!("begin with a copy of everything it has: pal fork {body}"))
}
