//! Keeps unused layers of repositories for the next Body, up to a budget.

use std::{collections::BTreeSet, fs, path::Path, time::SystemTime};

use body::{layers, snapshot};
use proto::{Failure, LayerId, Size, template::LayerRecord};

use crate::{GarbageCollector, GarbageItem, GcMode, failures};

/// Prefixes of `LayerRecord::about` that mark the layers of repositories.
const KINDS: [&str; 5] = ["tree ", "subtree ", "head ", "objects ", "program "];

/// A layer that is unused now, but that a later Body may use again.
#[derive(Debug)]
pub(crate) struct UnusedLayer {
    record: LayerRecord,
    used: SystemTime,
}

impl GarbageCollector<'_> {
    /// Marks layers as used now.
    pub(crate) fn touch_layers(&self, ids: &[LayerId]) {
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
        for id in ids {
            let _ = rustix::fs::utimensat(
                rustix::fs::CWD,
                self.fleet.templates().layers_dir().join(id.as_str()).join("layer.json"),
                &times,
                rustix::fs::AtFlags::empty(),
            );
        }
    }

    /// Marks a dependency layer as used now.
    pub(crate) fn touch_snapshot(&self, id: &proto::SnapshotId) {
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
        let _ = rustix::fs::utimensat(
            rustix::fs::CWD,
            self.fleet.data.join("snapshots").join(id.as_str()).join("manifest.json"),
            &times,
            rustix::fs::AtFlags::empty(),
        );
    }

    /// Whether an unused layer is worth keeping for a later Body.
    pub(crate) fn is_spare(record: &LayerRecord) -> bool {
        KINDS.iter().any(|kind| record.about.starts_with(kind))
    }

    /// Removes unused layers of repositories, least recently used first, until all layers fit into `budget`.
    pub(crate) fn sweep_spares(
        &self,
        needed: &BTreeSet<LayerId>,
        budget: u64,
        sweep: GcMode,
        found: &mut Vec<GarbageItem>,
    ) -> Result<(), Failure> {
        let (mut spares, mut total) = (Vec::new(), 0);
        for entry in fs::read_dir(self.fleet.templates().layers_dir()).into_iter().flatten().flatten() {
            let Ok(record) = layers::read(&entry.path()) else { continue };
            total += record.bytes;
            if Self::is_spare(&record) && !needed.contains(&record.id) {
                let used = used(&entry.path());
                spares.push(UnusedLayer { record, used });
            }
        }
        // Layers of objects come last, because layers of trees depend on them.
        spares.sort_by_key(|spare| (spare.record.about.starts_with("objects "), spare.used));
        let mut gone: BTreeSet<LayerId> = BTreeSet::new();
        while total > budget {
            let stands = |id: &LayerId| {
                spares.iter().any(|other| !gone.contains(&other.record.id) && other.record.over.contains(id))
            };
            let Some(next) =
                spares.iter().find(|spare| !gone.contains(&spare.record.id) && !stands(&spare.record.id))
            else {
                break;
            };
            let record = &next.record;
            found.push(GarbageItem {
                kind: "layer",
                name: record.id.to_string(),
                bytes: record.bytes,
                why: "it is unused, and the store is over its budget".into(),
            });
            total = total.saturating_sub(record.bytes);
            if sweep == GcMode::Remove {
                let path = self.fleet.templates().layers_dir().join(record.id.as_str());
                snapshot::remove(&self.fleet.launch_context.programs, &record.ids, &path)
                    .map_err(failures::removal)?;
            }
            let id = record.id.clone();
            gone.insert(id);
        }
        Ok(())
    }

    /// Removes unused dependency layers, least recently used first, until all layers and snapshots fit into `budget`.
    pub(crate) fn sweep_dependencies(
        &self,
        budget: u64,
        sweep: GcMode,
        found: &mut Vec<GarbageItem>,
    ) -> Result<(), Failure> {
        let path = |id: &proto::SnapshotId| self.fleet.data.join("snapshots").join(id.as_str());
        let mut total: u64 = self.stored_bytes();
        let mut gone: BTreeSet<proto::SnapshotId> = BTreeSet::new();
        loop {
            let left: Vec<_> = self
                .fleet
                .snapshots()
                .manifests()
                .into_iter()
                .filter(|manifest| !gone.contains(&manifest.id))
                .collect();
            let mut spares: Vec<_> = left.iter().filter(|manifest| manifest.dependency.is_some()).collect();
            spares.sort_by_key(|manifest| {
                fs::metadata(path(&manifest.id).join("manifest.json"))
                    .and_then(|found| found.modified())
                    .unwrap_or(SystemTime::UNIX_EPOCH)
            });
            let specs = self.fleet.ids()?.into_iter().filter_map(|id| {
                let dir = body::BodyDir::at(self.fleet.body_path(&id));
                dir.spec().or_else(|_| dir.draft()).ok()
            });
            let needed: BTreeSet<_> = specs
                .flat_map(|spec| spec.snapshots)
                .chain(left.iter().flat_map(|manifest| manifest.below.clone()))
                .collect();
            let Some(next) = spares.into_iter().find(|manifest| !needed.contains(&manifest.id)) else {
                return Ok(());
            };
            if total <= budget {
                return Ok(());
            }
            found.push(GarbageItem {
                kind: "dependencies",
                name: next.id.to_string(),
                bytes: next.bytes,
                why: "it is unused, and the store is over its budget".into(),
            });
            total = total.saturating_sub(next.bytes);
            if sweep == GcMode::Remove {
                snapshot::remove(&self.fleet.launch_context.programs, &next.ids, &path(&next.id))
                    .map_err(failures::removal)?;
            }
            gone.insert(next.id.clone());
        }
    }

    /// The total size of all layers and snapshots.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let layers = fs::read_dir(self.fleet.templates().layers_dir())
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| layers::read(&entry.path()).ok())
            .map(|record| record.bytes)
            .sum::<u64>();
        layers + self.fleet.snapshots().manifests().iter().map(|manifest| manifest.bytes).sum::<u64>()
    }

    /// Removes unused layers and dependency layers until the store fits into `budget`.
    pub fn remove_unused_layers(&self, budget: Size) -> Result<Vec<GarbageItem>, Failure> {
        let mut found = Vec::new();
        self.sweep_dependencies(budget.0, GcMode::Remove, &mut found)?;
        self.sweep_layers_to(GcMode::Remove, budget.0, &mut found)?;
        Ok(found)
    }
}

fn used(layer: &Path) -> SystemTime {
    fs::metadata(layer.join("layer.json"))
        .and_then(|found| found.modified())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
