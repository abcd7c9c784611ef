//! Finds and removes files that nothing uses: remains of processes that were killed, never a user's work.

pub(crate) mod layers;
pub(crate) mod workspaces;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use body::{
    BodyDir, ProcessState,
    driver::{DriverGarbage, LayerInUse},
    egress::EgressDir,
    groups, process, snapshot,
};
use proto::{
    BodyId, Failure,
    event_data::{BodyRemoved, RemovedBy},
    launch::OwnerLink,
    spec::{BodyRole, Life},
};

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
            self.sweep_bodies(sweep, &mut found)?;
            self.sweep_leases(sweep, &mut found);
            self.sweep_trash(sweep, &mut found)?;
            self.sweep_snapshots(sweep, &mut found)?;
            self.sweep_dependencies(self.fleet.settings().budget()?.0, sweep, &mut found)?;
            self.fleet.templates().sweep(sweep, &mut found)?;
            self.sweep_layers(sweep, &mut found)?;
            self.sweep_drivers(sweep, &mut found)?;
            self.fleet.builds().sweep_scratch(sweep, &mut found);
            self.sweep_groups(sweep, &mut found)?;
            self.sweep_claims(sweep, &mut found);
            self.sweep_parts(sweep, &mut found);
            self.sweep_egress(sweep, &mut found)?;
            if sweep == GcMode::Remove {
                let _ = self.fleet.log().artifacts()?.sweep_artifacts();
                self.fleet.log().tidy()?;
            }
            Ok(found)
        })
    }

    fn sweep_bodies(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        for id in self.fleet.ids()? {
            let dir = BodyDir::at(self.fleet.body_path(&id));
            // Another process is creating, changing or removing this Body.
            let Ok(Some(_lock)) = dir.try_lock() else { continue };
            let Some(why) = self.why_garbage(&id, &dir) else {
                for half in dir.interrupted_suspends() {
                    let why = "its suspend or resume was interrupted".to_owned();
                    let name = id.to_string();
                    found.push(GarbageItem { kind: "partial suspend", name, bytes: bytes(&half), why });
                    if sweep == GcMode::Remove {
                        let _ = fs::remove_dir_all(half);
                    }
                }
                if sweep == GcMode::Remove {
                    self.fleet.thaw_interrupted_save(&dir)?;
                    self.save_dead_bodies(&dir)?;
                }
                continue;
            };
            found.push(GarbageItem {
                kind: "body",
                name: id.to_string(),
                bytes: bytes(dir.path()),
                why: why.to_owned(),
            });
            if sweep == GcMode::Remove {
                self.remove_leftover(&id, &dir)?;
            }
        }
        Ok(())
    }

    /// Removes files of the drivers that no Body needs any more.
    fn sweep_drivers(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        let bodies = self.fleet.list()?;
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

    /// Saves the work of a Body that died unnoticed: its time limit passed, its guest was killed, or the host
    /// restarted.
    fn save_dead_bodies(&self, dir: &BodyDir) -> Result<(), Failure> {
        match (dir.condition(), dir.spec()) {
            (Ok(ProcessState::Dead(_) | ProcessState::Interrupted), Ok(spec)) => {
                self.fleet.workspaces().save_if_possible(&spec)
            }
            _ => Ok(()),
        }
    }

    /// Removes directories of unpublished Bodies whose supervisor was killed before it had removed them.
    fn sweep_trash(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        let look = || {
            let entries = fs::read_dir(self.fleet.data.join("bodies")).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).filter(|path| proto::launch::is_set_aside(path)).collect()
        };
        for path in lasting::<PathBuf>(look) {
            let dir = BodyDir::at(path);
            let name = dir.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push(GarbageItem {
                kind: "body",
                name,
                bytes: bytes(dir.path()),
                why: "it ended, and its supervisor is gone".into(),
            });
            if sweep == GcMode::Remove {
                let ids = dir.spec().or_else(|_| dir.draft()).map_or_else(|_| has_ids(), |spec| spec.ids);
                snapshot::remove(&self.fleet.launch_context.programs, &ids, dir.path())
                    .map_err(crate::failures::removal)?;
            }
        }
        Ok(())
    }

    fn why_garbage(&self, id: &BodyId, dir: &BodyDir) -> Option<&'static str> {
        let spec = match dir.spec() {
            Ok(spec) => spec,
            Err(_) if !dir.path().join("spec.json").exists() => return Some("it is incomplete"),
            // The Body may hold a user's work, so an unreadable record is no permission to remove it.
            Err(_) => return None,
        };
        if spec.role == BodyRole::Step && dir.is_step_left() {
            return Some("it was created for a build step, and its `pal` is gone");
        }
        if spec.life == Life::Kept || self.fleet.supervisors.owned().contains_key(id) {
            return None;
        }
        match dir.condition() {
            Ok(ProcessState::Running(running) | ProcessState::Paused(running)) => {
                (!body::dir::supervisor_lives(&running))
                    .then_some("its `pal run` and its supervisor are gone")
            }
            _ => Some("its `pal run` is gone"),
        }
    }

    fn remove_leftover(&self, id: &BodyId, dir: &BodyDir) -> Result<(), Failure> {
        self.fleet.log().drain_egress(id)?;
        self.fleet.write(id, BodyRemoved { by: Some(RemovedBy::Gc), discarded: false })?;
        if let Ok(ProcessState::Running(running) | ProcessState::Paused(running)) = dir.condition() {
            process::kill(dir, &running)
                .map_err(|error| crate::failures::process("cannot end a leftover Body", error))?;
        }
        if let Ok(spec) = dir.spec().or_else(|_| dir.draft()) {
            return self.fleet.remove_files(dir, &spec);
        }
        groups::remove_cgroups_by_name(id);
        self.fleet.egress().close(id)?;
        snapshot::remove(&self.fleet.launch_context.programs, &has_ids(), dir.path())
            .map_err(crate::failures::removal)
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

    /// Removes leases whose Body is gone: the process that removed the Body was killed before it removed the lease.
    fn sweep_leases(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) {
        for id in lasting(|| self.fleet.leases().orphans().unwrap_or_default()) {
            if sweep == GcMode::Remove {
                self.fleet.leases().forget(&id);
            }
            let why = "its Body is gone".to_owned();
            found.push(GarbageItem { kind: "lease", name: id.to_string(), bytes: 0, why });
        }
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

    fn sweep_claims(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) {
        let mut named: Vec<String> = Vec::new();
        let look = || {
            let own =
                body::ids::orphans(&self.fleet.data).into_iter().map(|orphan| (orphan, "its Body is gone"));
            // No `pal` will open these data directories again, so no other `gc` would remove their claims.
            let others = body::ids::abandoned().into_iter().map(|left| (left, "its data directory is gone"));
            own.chain(others).collect()
        };
        for ((body, claim), why) in lasting::<((String, OwnerLink), &str)>(look) {
            if !named.contains(&body) {
                found.push(GarbageItem { kind: "ids", name: body.clone(), bytes: 0, why: why.into() });
                named.push(body);
            }
            if sweep == GcMode::Remove {
                let _ = sys::fd::remove_link(&claim.link, &claim.target);
            }
        }
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
