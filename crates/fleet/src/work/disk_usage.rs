//! Where the space went, and how much of it there may be.

use std::{collections::BTreeMap, fs, path::Path};

use body::layers;
use proto::{Failure, Size};
use serde::Serialize;

use crate::GarbageCollector;

/// One kind of things that take space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DiskShare {
    /// What they are.
    pub kind: &'static str,
    /// How many.
    pub count: usize,
    /// What they take.
    pub bytes: u64,
}

impl GarbageCollector<'_> {
    /// What takes how much, and what it may take.
    pub fn disk_usage(&self) -> Result<(Vec<DiskShare>, Size), Failure> {
        let mut shares: BTreeMap<&'static str, DiskShare> = BTreeMap::new();
        let mut add = |kind: &'static str, bytes: u64| {
            let share = shares.entry(kind).or_insert(DiskShare { kind, ..DiskShare::default() });
            share.count += 1;
            share.bytes += bytes;
        };
        for id in self.fleet.ids()? {
            add("bodies", tree_bytes(&self.fleet.body_path(&id)));
        }
        for manifest in self.fleet.snapshots().manifests() {
            add(if manifest.dependency.is_some() { "dependencies" } else { "snapshots" }, manifest.bytes);
        }
        for entry in fs::read_dir(self.fleet.templates().layers_dir()).into_iter().flatten().flatten() {
            let Ok(record) = layers::read(&entry.path()) else { continue };
            add(layer_kind(&record.about), record.bytes);
        }
        for (kind, place) in [("clones", "repos"), ("artifacts", "artifacts"), ("images", "images")] {
            for entry in fs::read_dir(self.fleet.data.join(place)).into_iter().flatten().flatten() {
                add(kind, tree_bytes(&entry.path()));
            }
        }
        for (kind, bytes) in self.fleet.drivers.all().flat_map(|driver| driver.disk_usage()) {
            add(kind, bytes);
        }
        for name in ["events.db", "events.db-wal"] {
            if let Ok(found) = fs::metadata(self.fleet.data.join(name)) {
                add("events", found.len());
            }
        }
        Ok((shares.into_values().collect(), self.fleet.settings().budget()?))
    }
}

fn layer_kind(about: &str) -> &'static str {
    match about.split(' ').next() {
        Some("tree" | "subtree") => "trees",
        Some("head" | "objects") => "histories",
        Some("home") => "homes",
        _ => "template layers",
    }
}

fn tree_bytes(path: &Path) -> u64 {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::File::open(path)
            .and_then(|dir| sys::tree::usage(std::os::fd::AsFd::as_fd(&dir)))
            .map_or(0, |usage| usage.bytes),
        Ok(found) => found.len(),
        Err(_) => 0,
    }
}
