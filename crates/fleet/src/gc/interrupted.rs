//! Finishes what killed processes left half done: creates, runs, removals, and their ends in the log.
//!
//! A create publishes the spec of a Body last, and a removal withdraws it first; so a directory without a spec that no
//! process has locked belongs to a process that was killed.
//!
//! Invariant: an interrupted removal is finished, and never undone.
//! Invariant: a Body that is gone has its end in the log once, whichever processes met its remains.

use std::{collections::BTreeMap, fs, path::PathBuf};

use body::{BodyDir, ProcessState, groups, process, snapshot};
use proto::{
    BodyId, Failure, Kind,
    event_data::{BodyRemoved, RemovedBy},
    launch::OwnerLink,
    spec::{BodyRole, Life},
};

use super::{BURIAL, GarbageCollector, GcMode, bytes, has_ids};
use crate::GarbageItem;

/// The remains of Bodies whose directories are gone.
#[derive(Debug)]
struct BodyRemains {
    /// Directories that a supervisor set aside to remove them.
    trash: Vec<PathBuf>,
    leases: Vec<BodyId>,
    /// Claims of host ids: the Body, its claim, and why it is garbage.
    claims: Vec<((String, OwnerLink), &'static str)>,
    /// Bodies without an end in the log.
    endless: Vec<BodyId>,
}

impl BodyRemains {
    fn is_empty(&self) -> bool {
        let Self { trash, leases, claims, endless } = self;
        trash.is_empty() && leases.is_empty() && claims.is_empty() && endless.is_empty()
    }

    /// Keeps what is still there.
    fn retain(&mut self, still: &Self) {
        self.trash.retain(|path| still.trash.contains(path));
        self.leases.retain(|id| still.leases.contains(id));
        self.claims.retain(|claim| still.claims.contains(claim));
        self.endless.retain(|id| still.endless.contains(id));
    }

    /// Lists what takes room. A missing event does not.
    fn list(&self, found: &mut Vec<GarbageItem>) {
        for path in &self.trash {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let why = "it ended, and its supervisor is gone".into();
            found.push(GarbageItem { kind: "body", name, bytes: bytes(path), why });
        }
        for id in &self.leases {
            let why = "its Body is gone".into();
            found.push(GarbageItem { kind: "lease", name: id.to_string(), bytes: 0, why });
        }
        let claims: BTreeMap<&String, &str> =
            self.claims.iter().map(|((body, _), why)| (body, *why)).collect();
        for (body, why) in claims {
            found.push(GarbageItem { kind: "ids", name: body.clone(), bytes: 0, why: why.into() });
        }
    }
}

impl GarbageCollector<'_> {
    /// Finishes the creates, runs and removals that a killed process left half done, and records their ends. A server
    /// calls this before it answers the first request.
    pub fn finish_interrupted(&self) -> Result<Vec<GarbageItem>, Failure> {
        let mut found = Vec::new();
        self.sweep_interrupted(GcMode::Remove, &mut found).map(|()| found)
    }

    pub(super) fn sweep_interrupted(
        &self,
        sweep: GcMode,
        found: &mut Vec<GarbageItem>,
    ) -> Result<(), Failure> {
        self.sweep_bodies(sweep, found)?;
        let mut remains = self.find_remains()?;
        if !remains.is_empty() {
            // A supervisor that is removing its Body needs no help.
            std::thread::sleep(BURIAL);
            remains.retain(&self.find_remains()?);
        }
        remains.list(found);
        if sweep == GcMode::Remove { self.clear_remains(remains) } else { Ok(()) }
    }

    /// Looks for what is left of Bodies without a directory.
    fn find_remains(&self) -> Result<BodyRemains, Failure> {
        let entries = fs::read_dir(self.fleet.data.join("bodies")).into_iter().flatten().flatten();
        let own = body::ids::orphans(&self.fleet.data).into_iter().map(|claim| (claim, "its Body is gone"));
        // No `pal` will open these data directories again, so no other `gc` would remove their claims.
        let others = body::ids::abandoned().into_iter().map(|claim| (claim, "its data directory is gone"));
        let log = self.fleet.log();
        let is_gone = |id: &BodyId| !self.fleet.body_path(id).exists();
        let is_open = |id: &BodyId| log.has_ended(id).is_ok_and(|ended| !ended);
        Ok(BodyRemains {
            trash: entries
                .map(|entry| entry.path())
                .filter(|path| proto::launch::is_set_aside(path))
                .collect(),
            leases: self.fleet.leases().orphans()?,
            claims: own.chain(others).collect(),
            endless: log.bodies_without_end()?.into_iter().filter(|id| is_gone(id) && is_open(id)).collect(),
        })
    }

    fn clear_remains(&self, remains: BodyRemains) -> Result<(), Failure> {
        for dir in remains.trash.into_iter().map(BodyDir::at) {
            let ids = dir.spec().or_else(|_| dir.draft()).map_or_else(|_| has_ids(), |spec| spec.ids);
            snapshot::remove(&self.fleet.launch_context.programs, &ids, dir.path())
                .map_err(crate::failures::removal)?;
        }
        remains.leases.iter().for_each(|id| self.fleet.leases().forget(id));
        for ((_, claim), _) in &remains.claims {
            let _ = sys::fd::remove_link(&claim.link, &claim.target);
        }
        // The supervisor of a killed `pal` removes its Body, and writes no event.
        remains.endless.iter().try_for_each(|id| self.fleet.log().append_end(id, None, removed_by_gc()))
    }

    /// Sweeps every Body, also after one has failed; returns the first failure.
    fn sweep_bodies(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        let mut failed = Ok(());
        for id in self.fleet.ids()? {
            failed = failed.and(self.sweep_body(&id, sweep, found));
        }
        failed
    }

    fn sweep_body(&self, id: &BodyId, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        let dir = BodyDir::at(self.fleet.body_path(id));
        // Another process is creating, changing or removing this Body.
        let Ok(Some(_lock)) = dir.try_lock() else { return Ok(()) };
        let Some(why) = self.why_garbage(id, &dir)? else {
            for half in dir.interrupted_suspends() {
                let why = "its suspend or resume was interrupted".to_owned();
                let name = id.to_string();
                found.push(GarbageItem { kind: "partial suspend", name, bytes: bytes(&half), why });
                if sweep == GcMode::Remove {
                    let _ = fs::remove_dir_all(half);
                }
            }
            return if sweep == GcMode::Remove { self.fleet.thaw_interrupted_save(&dir) } else { Ok(()) };
        };
        let (name, bytes) = (id.to_string(), bytes(dir.path()));
        found.push(GarbageItem { kind: "body", name, bytes, why: why.to_owned() });
        if sweep == GcMode::Remove { self.remove_leftover(id, &dir) } else { Ok(()) }
    }

    /// Decides that a Body is removed: withdraws its spec, then records its end. A process that is killed after that
    /// leaves a directory without a spec, which the next `pal` that meets it removes. If the end cannot be recorded, the
    /// Body stays. The caller holds the Body's lock.
    pub(crate) fn withdraw(&self, dir: &BodyDir, id: &BodyId, removed: BodyRemoved) -> Result<(), Failure> {
        dir.unpublish(self.fleet.launch_context.flush)
            .map_err(|error| Failure::new(Kind::Host, format!("cannot remove Body {id}")).because(error))?;
        let recorded =
            self.fleet.egress().close(id).and_then(|()| self.fleet.log().append_end(id, None, removed));
        recorded.inspect_err(|_| drop(dir.publish()))
    }

    /// Removes the directory of a create or a removal whose process was killed. Leaves Bodies and directories in use
    /// alone. A failure is ignored: the next `pal` that meets the directory tries again.
    pub(crate) fn clear_unpublished(&self, id: &BodyId) {
        let dir = BodyDir::at(self.fleet.body_path(id));
        let is_body = || dir.path().join("spec.json").exists();
        // The second look counts: a create may have published the Body until this process got the lock.
        if !is_body()
            && let Ok(Some(_lock)) = dir.try_lock()
            && !is_body()
        {
            let _ = self.remove_leftover(id, &dir);
        }
    }

    fn why_garbage(&self, id: &BodyId, dir: &BodyDir) -> Result<Option<&'static str>, Failure> {
        let spec = match dir.spec() {
            Ok(spec) => spec,
            Err(_) if !dir.path().join("spec.json").exists() => return Ok(Some("it is incomplete")),
            // The Body may hold a user's work, so an unreadable record is no permission to remove it.
            Err(_) => return Ok(None),
        };
        if spec.role == BodyRole::Step && dir.is_step_left() {
            return Ok(Some("it was created for a build step, and its `pal` is gone"));
        }
        if spec.life == Life::Kept {
            // An earlier version recorded a removal before it withdrew the spec.
            return Ok(self.fleet.log().has_ended(id)?.then_some("its removal was interrupted"));
        }
        if self.fleet.supervisors.owned().contains_key(id) {
            return Ok(None);
        }
        Ok(match dir.condition() {
            Ok(ProcessState::Running(running) | ProcessState::Paused(running)) => {
                (!body::dir::supervisor_lives(&running))
                    .then_some("its `pal run` and its supervisor are gone")
            }
            _ => Some("its `pal run` is gone"),
        })
    }

    /// Removes a directory that no process uses. The caller holds its lock.
    fn remove_leftover(&self, id: &BodyId, dir: &BodyDir) -> Result<(), Failure> {
        let log = self.fleet.log();
        log.drain_egress(id)?;
        // From here on it is no Body, whatever fails next.
        dir.unpublish(self.fleet.launch_context.flush).map_err(|error| {
            Failure::new(Kind::Host, "cannot remove leftover files").because(error).hint("try again: pal gc")
        })?;
        // A process that was killed early, and a pooled guest, have left no creation in the log.
        if log.has_begun(id)? {
            log.append_end(id, None, removed_by_gc())?;
        }
        if let Ok(ProcessState::Running(running) | ProcessState::Paused(running)) = dir.condition() {
            process::kill(dir, &running)
                .map_err(|error| crate::failures::process("cannot end a leftover Body", error))?;
        }
        if let Ok(spec) = dir.draft() {
            spec.workspaces.iter().for_each(|workspace| workspace::release(id, workspace));
            return self.fleet.remove_files(dir, &spec);
        }
        groups::remove_cgroups_by_name(id);
        self.fleet.egress().close(id)?;
        snapshot::remove(&self.fleet.launch_context.programs, &has_ids(), dir.path())
            .map_err(crate::failures::removal)
    }

    /// Saves the work of Bodies that died unnoticed: their time limit passed, their guest was killed, or the host
    /// restarted.
    pub(super) fn save_dead_bodies(&self, sweep: GcMode) -> Result<(), Failure> {
        let ids = if sweep == GcMode::Remove { self.fleet.ids()? } else { Vec::new() };
        for dir in ids.iter().map(|id| BodyDir::at(self.fleet.body_path(id))) {
            let Ok(Some(_lock)) = dir.try_lock() else { continue };
            if let (Ok(ProcessState::Dead(_) | ProcessState::Interrupted), Ok(spec)) =
                (dir.condition(), dir.spec())
            {
                self.fleet.workspaces().save_if_possible(&spec)?;
            }
        }
        Ok(())
    }
}

fn removed_by_gc() -> BodyRemoved {
    BodyRemoved { by: Some(RemovedBy::Gc), discarded: false }
}
