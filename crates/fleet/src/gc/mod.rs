//! Finds and removes files that nothing uses: remains of processes that were killed, never a user's work.

mod interrupted;
pub(crate) mod layers;
pub(crate) mod workspaces;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use body::{
    BodyDir,
    driver::{DriverGarbage, LayerInUse},
    egress::EgressDir,
    groups, snapshot,
};
use proto::{BodyId, Failure};

use crate::{Fleet, GarbageItem, Status, blocking::run_blocking};

/// How long to wait for a supervisor that still removes the remains of its Body.
const BURIAL: Duration = Duration::from_millis(200);

/// Whether garbage is listed or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcMode {
    /// List only.
    DryRun,
    /// Remove.
    Remove,
}

/// Finds and removes what no Body, snapshot or template uses any more, and reports what uses the disk.
#[derive(Debug, Clone, Copy)]
pub struct GarbageCollector<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl GarbageCollector<'_> {
    /// Removes garbage, or lists what it would remove.
    pub async fn collect(&self, sweep: GcMode) -> Result<Vec<GarbageItem>, Failure> {
        run_blocking(|| {
            let mut found = Vec::new();
            self.sweep_interrupted(sweep, &mut found)?;
            self.save_dead_bodies(sweep)?;
            self.sweep_snapshots(sweep, &mut found)?;
            self.sweep_dependencies(self.fleet.settings().budget()?.0, sweep, &mut found)?;
            self.fleet.templates().sweep(sweep, &mut found)?;
            self.sweep_layers(sweep, &mut found)?;
            self.sweep_drivers(sweep, &mut found)?;
            self.fleet.builds().sweep_scratch(sweep, &mut found);
            self.sweep_groups(sweep, &mut found)?;
            self.sweep_parts(sweep, &mut found);
            self.sweep_egress(sweep, &mut found)?;
            if sweep == GcMode::Remove {
                let _ = self.fleet.log().artifacts()?.sweep_artifacts();
                self.fleet.log().tidy()?;
            }
            Ok(found)
        })
    }

    /// Removes files of the drivers that no Body needs any more.
    fn sweep_drivers(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        let bodies: Vec<_> = self.fleet.ids()?.iter().filter_map(|id| self.fleet.view(id).ok()).collect();
        for driver in self.fleet.drivers.all() {
            let runs = |view: &crate::BodyView| {
                view.spec.layer == driver.layer() && matches!(view.status, Status::Running | Status::Paused)
            };
            let in_use = if bodies.iter().any(runs) { LayerInUse::Yes } else { LayerInUse::No };
            for DriverGarbage { kind, path, bytes, why } in driver.garbage(in_use) {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.push(GarbageItem { kind, name, bytes, why: why.to_owned() });
                if sweep == GcMode::Remove {
                    let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                }
            }
        }
        Ok(())
    }

    fn sweep_snapshots(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        let entries = fs::read_dir(self.fleet.data.join("snapshots")).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let manifest = snapshot::read(&path);
            let why = match &manifest {
                Err(_) if self.layers_in_use() => continue,
                Err(_) => "it is incomplete",
                Ok(manifest)
                    if manifest.for_forks
                        && self.fleet.snapshots().user_of(&manifest.id)?.is_none()
                        && !self.layers_in_use() =>
                {
                    "no fork uses it"
                }
                Ok(_) => continue,
            };
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push(GarbageItem { kind: "snapshot", name, bytes: bytes(&path), why: why.to_owned() });
            if sweep == GcMode::Remove {
                let ids = manifest.map_or_else(|_| has_ids(), |manifest| manifest.ids);
                snapshot::remove(&self.fleet.launch_context.programs, &ids, &path)
                    .map_err(crate::failures::removal)?;
            }
        }
        Ok(())
    }

    /// Whether the layers of snapshots may be in use: a snapshot is copied, and forks are created, only while a Body
    /// is locked.
    fn layers_in_use(&self) -> bool {
        let ids = self.fleet.ids().unwrap_or_default();
        let mut dirs = ids.iter().map(|id| BodyDir::at(self.fleet.body_path(id)));
        dirs.any(|dir| matches!(dir.try_lock(), Ok(None)) && !dir.is_parked())
    }

    fn sweep_groups(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        let orphaned = |(name, path): &(String, PathBuf)| {
            let Ok(id) = name.parse::<BodyId>() else { return false };
            // Bodies of another data directory have cgroups here too, and the cgroup of a Body that is being created
            // is still empty.
            let ours = || self.fleet.log().events(0, Some(&id), 1).is_ok_and(|events| !events.is_empty());
            let empty = || sys::cgroup::processes(path).is_ok_and(|pids| pids.is_empty());
            !self.fleet.body_path(&id).exists() && empty() && ours()
        };
        for (name, path) in lasting(|| groups::existing().into_iter().filter(orphaned).collect()) {
            if sweep == GcMode::Remove && sys::cgroup::remove(&path, Duration::ZERO).is_err() {
                continue;
            }
            found.push(GarbageItem { kind: "cgroup", name, bytes: 0, why: "its Body is gone".into() });
        }
        Ok(())
    }

    /// Removes temporary files of the data directory whose writer was killed.
    fn sweep_parts(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) {
        let entries = [self.fleet.data.clone(), self.fleet.data.join("bin")]
            .into_iter()
            .filter_map(|dir| fs::read_dir(dir).ok())
            .flatten()
            .flatten();
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(maker) = maker(&name) else { continue };
            if Path::new("/proc").join(maker.to_string()).exists() {
                continue;
            }
            let bytes = entry.metadata().map_or(0, |found| found.len());
            found.push(GarbageItem {
                kind: "temporary",
                name,
                bytes,
                why: "the process that wrote it is gone".into(),
            });
            if sweep == GcMode::Remove {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Imports the decisions of egress proxies into the log, and removes the directories of proxies whose Body is
    /// gone.
    fn sweep_egress(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        if sweep == GcMode::Remove {
            self.fleet.log().drain_all_egress()?;
        }
        let orphans = || {
            let bodies = EgressDir::bodies(&self.fleet.data).into_iter();
            bodies.filter(|id| !self.fleet.body_path(id).exists()).collect()
        };
        for id in lasting::<BodyId>(orphans) {
            found.push(GarbageItem {
                kind: "egress proxy",
                name: id.to_string(),
                bytes: bytes(EgressDir::of(&self.fleet.data, &id).path()),
                why: "its Body is gone".into(),
            });
            if sweep == GcMode::Remove {
                self.fleet.egress().close(&id)?;
            }
        }
        Ok(())
    }
}

/// All ids that the caller could have given to a Body, for files whose owner is unknown.
fn has_ids() -> proto::spec::Ids {
    body::ids::of_trees()
}

/// Returns what `look` still finds after a short wait: a supervisor that is removing its Body needs no help.
fn lasting<T: PartialEq>(look: impl Fn() -> Vec<T>) -> Vec<T> {
    let mut found = look();
    if !found.is_empty() {
        std::thread::sleep(BURIAL);
        let still = look();
        found.retain(|one| still.contains(one));
    }
    found
}

/// Parses the pid in the name of a temporary file: `key.123`, `pal-launch-0123.part123`.
fn maker(name: &str) -> Option<u32> {
    let (whole, end) = name.rsplit_once('.')?;
    let number = if whole == "key" { end } else { end.strip_prefix("part")? };
    number.parse().ok()
}

fn bytes(path: &Path) -> u64 {
    let dir = fs::File::open(path).ok();
    dir.and_then(|dir| sys::tree::usage(std::os::fd::AsFd::as_fd(&dir)).ok()).map_or(0, |used| used.bytes)
}
