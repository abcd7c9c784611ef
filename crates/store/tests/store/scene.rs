//! A temporary data directory, drafts for it, and reproducible random numbers.

use std::{
    collections::hash_map::RandomState,
    fs,
    hash::BuildHasher,
    ops::Deref,
    path::{Path, PathBuf},
};

use proto::{BodyId, ChainId, Draft, Event, event_data::BodyStopped};
use serde_json::{Value, json};
use store::{Durability, EventLog, LogVerdict, Store};

pub struct SceneDir(PathBuf);

impl SceneDir {
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir()).unwrap()
    }

    /// A directory in memory, if there is one, for tests that do not depend on syncs.
    pub fn in_memory() -> Self {
        Self::below(Path::new("/dev/shm")).unwrap_or_else(|_| Self::new())
    }

    fn below(dir: &Path) -> std::io::Result<Self> {
        let random = RandomState::new().hash_one(0);
        let path = dir.join(format!("palisade-store-{random:016x}"));
        fs::create_dir(&path).map(|()| Self(path))
    }

    pub fn open(&self) -> Store {
        Store::open(self, Durability::Process).unwrap()
    }

    /// A closed log of `count` events in one chain.
    pub fn with_events(count: u64) -> Self {
        let dir = Self::new();
        let store = dir.open();
        (1..=count).for_each(|at| drop(append(&store, draft(at))));
        dir
    }

    pub fn log(&self) -> PathBuf {
        self.join(store::FILE)
    }

    /// A separate connection to the database, to tamper with it.
    pub fn meddler(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(self.log()).unwrap()
    }
}

impl Deref for SceneDir {
    type Target = Path;
    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for SceneDir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// The chain that most tests write to, and the name of its Body.
pub const CHAIN: &str = "body/odd";

pub fn chain() -> ChainId {
    CHAIN.parse().unwrap()
}

/// Appends one event to that chain.
pub fn append(store: &Store, draft: Draft) -> Event {
    store.append_at_end(&chain(), vec![draft]).unwrap().remove(0)
}

pub fn draft_of(body: &str, at: u64) -> Draft {
    odd_draft("body.counted".into(), Some(body.parse().unwrap()), json!({ "at": at }))
}

pub fn draft(at: u64) -> Draft {
    let id: BodyId = if at.is_multiple_of(2) { "even" } else { "odd" }.parse().unwrap();
    let data = json!({"at": at, "half": at as f64 / 3.0, "text": "ä\u{0}\"\\"});
    odd_draft("body.counted".into(), Some(id), data)
}

/// A draft that no typed data makes: a store accepts everything that a newer version may write.
pub fn odd_draft(kind: String, body: Option<BodyId>, data: Value) -> Draft {
    let mut draft = Draft::new(BodyStopped { grace_ms: 0 });
    (draft.kind, draft.body, draft.data) = (kind, body, data);
    draft
}

pub fn events_of(verdict: LogVerdict) -> u64 {
    match verdict {
        LogVerdict::Whole { events, .. } => events,
        broken => panic!("{broken:?}"),
    }
}

/// Random numbers from a seed: `PALISADE_SEED`, or a new one, which is printed.
pub struct Random(u64);

impl Random {
    pub fn new() -> Self {
        let given = std::env::var("PALISADE_SEED").ok().map(|seed| seed.parse().unwrap());
        let seed = given.unwrap_or_else(|| RandomState::new().hash_one(1) | 1);
        println!("PALISADE_SEED={seed}");
        Self::from_seed(seed)
    }

    /// Random numbers from a seed that is not 0.
    pub fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}
