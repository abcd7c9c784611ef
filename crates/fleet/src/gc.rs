//! Finding and removing what nobody needs: leftovers of `kill -9`, never somebody's work.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use body::{BodyDir, Condition, groups, process, snapshot};
use proto::{BodyId, Failure, launch::Claim, spec::Life};

use crate::{Fleet, Garbage};

/// How long a keeper may take for the last of a Body that is gone.
const BURIAL: Duration = Duration::from_millis(200);

/// Whether to look or to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Look.
    DryRun,
    /// Act.
    Remove,
}

impl Fleet {
    /// Removes what nobody needs, or says what that would be.
    pub async fn gc(&self, sweep: Sweep) -> Result<Vec<Garbage>, Failure> {
        let mut found = Vec::new();
        self.sweep_bodies(sweep, &mut found)?;
        self.sweep_set_aside(sweep, &mut found)?;
        self.sweep_snapshots(sweep, &mut found)?;
        self.sweep_dependencies(self.budget()?.0, sweep, &mut found)?;
        self.sweep_layers(sweep, &mut found)?;
        self.sweep_machines(sweep, &mut found)?;
        self.sweep_scratch(sweep, &mut found);
        self.sweep_groups(sweep, &mut found)?;
        self.sweep_claims(sweep, &mut found);
        self.sweep_parts(sweep, &mut found);
        self.sweep_ways_out(sweep, &mut found);
        if sweep == Sweep::Remove {
            let store = self.store()?;
            let _ = store.sweep_artifacts();
            store.tidy();
        }
        Ok(found)
    }

    fn sweep_bodies(&self, sweep: Sweep, found: &mut Vec<Garbage>) -> Result<(), Failure> {
        for id in self.ids()? {
            let dir = BodyDir::at(self.body_path(&id));
            // Somebody is making, changing or removing it right now.
            let Ok(Some(_lock)) = dir.try_lock() else { continue };
            let Some(why) = self.why_garbage(&id, &dir) else {
                for half in self.half_swapped(&dir) {
                    let why = "its way to the disk or back was cut short".to_owned();
                    let name = id.to_string();
                    found.push(Garbage { kind: "half a machine", name, bytes: bytes(&half), why });
                    if sweep == Sweep::Remove {
                        let _ = fs::remove_dir_all(half);
                    }
                }
                if sweep == Sweep::Remove {
                    self.thaw_held(&dir)?;
                    self.save_of_the_dead(&dir)?;
                }
                continue;
            };
            found.push(Garbage {
                kind: "body",
                name: id.to_string(),
                bytes: bytes(dir.path()),
                why: why.to_owned(),
            });
            if sweep == Sweep::Remove {
                self.remove_leftover(&id, &dir)?;
            }
        }
        Ok(())
    }

    /// A death that nobody noticed: its time was over, its guest was killed, the host restarted.
    fn save_of_the_dead(&self, dir: &BodyDir) -> Result<(), Failure> {
        match (dir.condition(), dir.spec()) {
            (Ok(Condition::Dead(_) | Condition::Lost), Ok(spec)) => self.save_if_possible(&spec),
            _ => Ok(()),
        }
    }

    /// Directories of Bodies that were gone for everybody, and whose keeper was killed before it had removed them.
    fn sweep_set_aside(&self, sweep: Sweep, found: &mut Vec<Garbage>) -> Result<(), Failure> {
        let look = || {
            let entries = fs::read_dir(self.data.join("bodies")).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).filter(|path| proto::launch::is_set_aside(path)).collect()
        };
        for path in lasting::<PathBuf>(look) {
            let dir = BodyDir::at(path);
            let name = dir.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push(Garbage {
                kind: "body",
                name,
                bytes: bytes(dir.path()),
                why: "it ended, and its keeper is gone".into(),
            });
            if sweep == Sweep::Remove {
                let ids = dir.spec().or_else(|_| dir.draft()).map_or_else(|_| any_ids(), |spec| spec.ids);
                snapshot::remove(&self.maker.programs, &ids, dir.path()).map_err(crate::failures::removal)?;
            }
        }
        Ok(())
    }

    fn why_garbage(&self, id: &BodyId, dir: &BodyDir) -> Option<&'static str> {
        let spec = match dir.spec() {
            Ok(spec) => spec,
            Err(_) if !dir.path().join("spec.json").exists() => return Some("it was never finished"),
            // Somebody's work may be in it: a record that cannot be read is no leave to remove it.
            Err(_) => return None,
        };
        if let Some(egress) = &spec.egress
            && std::os::unix::net::UnixStream::connect(egress.dir.join(body::egress::SOCKET)).is_err()
        {
            return Some("it was being prepared, and its `pal` is gone");
        }
        if spec.life == Life::Kept || self.tethers().contains_key(id) {
            return None;
        }
        match dir.condition() {
            Ok(Condition::Running(running) | Condition::Paused(running)) => {
                (!body::dir::keeper_lives(running.keeper)).then_some("its `pal run` and its keeper are gone")
            }
            _ => Some("its `pal run` is gone"),
        }
    }

    fn remove_leftover(&self, id: &BodyId, dir: &BodyDir) -> Result<(), Failure> {
        self.write("body.removed", id, serde_json::json!({ "by": "gc" }))?;
        if let Ok(Condition::Running(running) | Condition::Paused(running)) = dir.condition() {
            process::kill(dir, &running)
                .map_err(|error| crate::failures::process("cannot end a leftover Body", error))?;
        }
        if let Ok(spec) = dir.spec().or_else(|_| dir.draft()) {
            return self.clear_away(dir, &spec);
        }
        groups::unbound_by_name(id);
        snapshot::remove(&self.maker.programs, &any_ids(), dir.path()).map_err(crate::failures::removal)
    }

    fn sweep_snapshots(&self, sweep: Sweep, found: &mut Vec<Garbage>) -> Result<(), Failure> {
        let entries = fs::read_dir(self.data.join("snapshots")).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let manifest = snapshot::read(&path);
            let why = match &manifest {
                Err(_) if self.being_taken() => continue,
                Err(_) => "it was never finished",
                Ok(manifest)
                    if manifest.for_forks && self.user_of(&manifest.id)?.is_none() && !self.being_taken() =>
                {
                    "no fork stands on it"
                }
                Ok(_) => continue,
            };
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push(Garbage { kind: "snapshot", name, bytes: bytes(&path), why: why.to_owned() });
            if sweep == Sweep::Remove {
                let ids = manifest.map_or_else(|_| any_ids(), |manifest| manifest.ids);
                snapshot::remove(&self.maker.programs, &ids, &path).map_err(crate::failures::removal)?;
            }
        }
        Ok(())
    }

    /// A snapshot is being copied, and forks of it are being made, exactly while some Body is locked.
    fn being_taken(&self) -> bool {
        let ids = self.ids().unwrap_or_default();
        let mut dirs = ids.iter().map(|id| BodyDir::at(self.body_path(id)));
        dirs.any(|dir| matches!(dir.try_lock(), Ok(None)) && !dir.is_parked())
    }

    fn sweep_groups(&self, sweep: Sweep, found: &mut Vec<Garbage>) -> Result<(), Failure> {
        let orphaned = |(name, path): &(String, PathBuf)| {
            let Ok(id) = name.parse::<BodyId>() else { return false };
            // Another data directory's Bodies have groups here too, and one that is being made holds nobody yet.
            let ours = || self.events(0, Some(&id), 1).is_ok_and(|events| !events.is_empty());
            let empty = || sys::cgroup::processes(path).is_ok_and(|pids| pids.is_empty());
            !self.body_path(&id).exists() && empty() && ours()
        };
        for (name, path) in lasting(|| groups::existing().into_iter().filter(orphaned).collect()) {
            if sweep == Sweep::Remove && sys::cgroup::remove(&path, Duration::ZERO).is_err() {
                continue;
            }
            found.push(Garbage { kind: "cgroup", name, bytes: 0, why: "its Body is gone".into() });
        }
        Ok(())
    }

    /// Files of the data directory itself whose maker was killed.
    fn sweep_parts(&self, sweep: Sweep, found: &mut Vec<Garbage>) {
        let entries = [self.data.clone(), self.data.join("bin")]
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
            found.push(Garbage { kind: "temporary", name, bytes, why: "its maker is gone".into() });
            if sweep == Sweep::Remove {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Sockets of proxies whose maker was killed.
    fn sweep_ways_out(&self, sweep: Sweep, found: &mut Vec<Garbage>) {
        for entry in fs::read_dir(self.data.join("egress")).into_iter().flatten().flatten() {
            let socket = entry.path().join(body::egress::SOCKET);
            if !socket.exists() || std::os::unix::net::UnixStream::connect(&socket).is_ok() {
                continue;
            }
            found.push(Garbage {
                kind: "temporary",
                name: entry.file_name().to_string_lossy().into_owned(),
                bytes: 0,
                why: "its maker is gone".into(),
            });
            if sweep == Sweep::Remove {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    fn sweep_claims(&self, sweep: Sweep, found: &mut Vec<Garbage>) {
        let mut named: Vec<String> = Vec::new();
        let look = || {
            let own = body::ids::orphans(&self.data).into_iter().map(|orphan| (orphan, "its Body is gone"));
            // Nobody will open these directories again, so nobody else would clear them away.
            let others = body::ids::abandoned().into_iter().map(|left| (left, "its data directory is gone"));
            own.chain(others).collect()
        };
        for ((body, claim), why) in lasting::<((String, Claim), &str)>(look) {
            if !named.contains(&body) {
                found.push(Garbage { kind: "ids", name: body.clone(), bytes: 0, why: why.into() });
                named.push(body);
            }
            if sweep == Sweep::Remove {
                let _ = sys::fd::remove_link(&claim.link, &claim.target);
            }
        }
    }
}

/// Of what nobody knows whose it is: every id that the caller could have given to a Body.
fn any_ids() -> proto::spec::Ids {
    body::ids::of_trees()
}

/// What is still there after a moment: a keeper that is just clearing its Body away needs no help.
fn lasting<T: PartialEq>(look: impl Fn() -> Vec<T>) -> Vec<T> {
    let mut found = look();
    if !found.is_empty() {
        std::thread::sleep(BURIAL);
        let still = look();
        found.retain(|one| still.contains(one));
    }
    found
}

/// The process that a file in the making is named for: `key.123`, `pal-launch-0123.part123`.
fn maker(name: &str) -> Option<u32> {
    let (whole, end) = name.rsplit_once('.')?;
    let number = if whole == "key" { end } else { end.strip_prefix("part")? };
    number.parse().ok()
}

fn bytes(path: &Path) -> u64 {
    let dir = fs::File::open(path).ok();
    dir.and_then(|dir| sys::tree::usage(std::os::fd::AsFd::as_fd(&dir)).ok()).map_or(0, |used| used.bytes)
}
