//! Reports the disk usage of the data directory, and its budget.

use std::{collections::BTreeMap, fs, path::Path};

use body::layers;
use proto::{Failure, Size};
use serde::Serialize;

use crate::GarbageCollector;

/// The disk usage of one kind of data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DiskShare {
    /// The kind.
    pub kind: &'static str,
    /// The number of items.
    pub count: usize,
    /// The size in bytes.
    pub bytes: u64,
}

impl GarbageCollector<'_> {
    /// Returns the disk usage by kind, and the budget of layers and dependency layers.
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
