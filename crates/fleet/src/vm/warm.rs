//! Warm machines: a template's machine is booted once, frozen when its guest is ready, and thawed as every later Body.
//!
//! One that is emulated is thawed once more at first, runs what its template has to be run, and is frozen again with the
//! process of its hypervisor: what that has translated it need not translate again for anybody.
//!
//! Invariant: a warm machine has run nothing but the template's own `true`, and nothing of one Body is in it.
//! Invariant: at most [`WARM_MAX`] are kept, none older than [`AGE_MAX`]; the one that was used longest ago goes first.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use body::{
    BodyDir,
    guest::Guest,
    ids,
    root::Under,
    vm::{
        Frozen, Parts, Start,
        freeze::Extent,
        plan::{IMPRINT_FILE, RAM_FILE, STATE_FILE, UPPER_FILE},
        record::{FrozenMemory, Machine},
    },
};
use proto::{BodyId, Failure, Kind, Spec, spec::Life, vm::Accelerator};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::spare;
use crate::{Fleet, data, failures};

/// Most warm machines on this host.
pub(crate) const WARM_MAX: usize = 8;
/// How long one is kept.
pub(crate) const AGE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
const RECORD: &str = "warm.json";
const RECORD_LEN_MAX: u64 = 1 << 20;

/// `warm.json`, written last.
#[derive(Debug, Serialize, Deserialize)]
struct Warm {
    machine: Machine,
    about: String,
}

impl Fleet {
    /// Has a machine that would boot begin where its template's was frozen instead. One that cannot be frozen boots.
    pub(crate) fn warm(&self, spec: &Spec, under: &Under, mut parts: Parts) -> Result<Parts, Failure> {
        let dir = self.warm_dir().join(key(spec, &parts));
        if self.read_warm(&dir, &parts).is_none() {
            self.make_warm(spec, under, &parts, &dir)?;
        }
        if let Some(frozen) = self.read_warm(&dir, &parts) {
            // Used last: others go before it.
            let _ = File::open(&dir).and_then(|dir| dir.set_modified(SystemTime::now()));
            parts.images = (0..parts.images.len()).map(|index| dir.join(format!("image{index}"))).collect();
            parts.start = Start::Thaw(frozen);
        }
        Ok(parts)
    }

    pub(super) fn warm_dir(&self) -> PathBuf {
        self.ground().dir().join("warm")
    }

    /// The machine in that directory, if it is whole.
    pub(super) fn warm_machine(&self, dir: &Path) -> Option<Machine> {
        let text = sys::fd::read_small(&dir.join(RECORD), RECORD_LEN_MAX).ok()?;
        serde_json::from_str::<Warm>(&text).ok().map(|warm| warm.machine)
    }

    fn read_warm(&self, dir: &Path, parts: &Parts) -> Option<Frozen> {
        let machine = self.warm_machine(dir)?;
        let setup = self.ground().setup().ok()?;
        let frozen = machine.check(dir, &setup, parts).ok()?;
        // One that has lost the process of its hypervisor is made anew: the host has booted since.
        let whole = frozen.is_whole(dir);
        (whole || frozen.imprint.is_none()).then(|| Frozen {
            dir: dir.to_owned(),
            held: Some(frozen.held.clone()),
            whole,
            generation: machine.generation + 1,
        })
    }

    /// Boots a machine that is nobody's and freezes it.
    fn make_warm(&self, spec: &Spec, under: &Under, parts: &Parts, dir: &Path) -> Result<(), Failure> {
        let cannot = |error: io::Error| {
            Failure::new(Kind::Host, "cannot keep a warm machine").because(error).hint("make room: pal gc")
        };
        let warm = self.warm_dir();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&warm).map_err(cannot)?;
        let lock = File::create(warm.join("lock")).map_err(cannot)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|errno| cannot(errno.into()))?;
        if self.read_warm(dir, parts).is_some() {
            return Ok(());
        }
        let part = dir.with_extension("part");
        let _ = fs::remove_dir_all(&part);
        let _ = fs::remove_dir_all(dir);
        fs::DirBuilder::new().mode(0o700).create(&part).map_err(cannot)?;
        let frozen = self.boot_and_freeze(spec, under, parts, &part);
        let made = frozen.and_then(|machine| self.practise(spec, under, parts, machine, &part)).and_then(
            |mut machine| {
                if let Some(frozen) = &mut machine.frozen {
                    frozen.ram_sha256 = Some(body::vm::record::ram_hash(&part).map_err(cannot)?);
                }
                let about = Warm { machine, about: spec.template.clone() };
                let text = serde_json::to_vec(&about).map_err(|error| cannot(error.into()))?;
                sys::fd::write_whole(&part.join(RECORD), &text)
                    .and_then(|()| fs::rename(&part, dir))
                    .map_err(cannot)
            },
        );
        if made.is_err() {
            let _ = fs::remove_dir_all(&part);
        }
        self.drop_old_warm(dir);
        made
    }

    fn boot_and_freeze(
        &self,
        spec: &Spec,
        under: &Under,
        parts: &Parts,
        to: &Path,
    ) -> Result<Machine, Failure> {
        let parts = Parts { ahead: true, ..parts.clone() };
        self.with_nobodys(spec, under, &parts, |dir, spec| self.freeze_into(dir, spec, to, Extent::Lasting))
    }

    /// Thaws an emulated machine that was just frozen, has it run something, and freezes it with its hypervisor instead.
    fn practise(
        &self,
        spec: &Spec,
        under: &Under,
        parts: &Parts,
        machine: Machine,
        at: &Path,
    ) -> Result<Machine, Failure> {
        let Some(frozen) = &machine.frozen else { return Ok(machine) };
        if machine.accelerator != Accelerator::Emulated {
            return Ok(machine);
        }
        let start = Start::Thaw(Frozen {
            dir: at.to_owned(),
            held: Some(frozen.held.clone()),
            whole: false,
            generation: machine.generation + 1,
        });
        let again = at.with_extension("again");
        let _ = fs::remove_dir_all(&again);
        let cannot = |error: io::Error| Failure::new(Kind::Host, "cannot keep a warm machine").because(error);
        fs::DirBuilder::new().mode(0o700).create(&again).map_err(cannot)?;
        let parts = Parts { start, alone: false, ..parts.clone() };
        let practised = self.with_nobodys(spec, under, &parts, |dir, spec| {
            self.run_something(dir, spec)?;
            self.freeze_into(dir, spec, &again, Extent::Whole)
        });
        // What cannot be practised is as good as it was.
        let Ok(mut practised) = practised else {
            let _ = fs::remove_dir_all(&again);
            return Ok(machine);
        };
        fs::remove_dir_all(at).and_then(|()| fs::rename(&again, at)).map_err(cannot)?;
        if let Some(frozen) = &mut practised.frozen
            && !self.goes_on(spec, under, &parts, frozen, at)
        {
            // A host on which copies of processes do not live is served without them.
            frozen.imprint = None;
            fs::remove_file(at.join(IMPRINT_FILE)).map_err(cannot)?;
        }
        Ok(practised)
    }

    /// Whether a machine that was frozen with its hypervisor lives and runs something.
    fn goes_on(&self, spec: &Spec, under: &Under, parts: &Parts, frozen: &FrozenMemory, at: &Path) -> bool {
        let start = Start::Thaw(Frozen {
            dir: at.to_owned(),
            held: Some(frozen.held.clone()),
            whole: frozen.is_whole(at),
            generation: 1,
        });
        let parts = Parts { start, ..parts.clone() };
        self.with_nobodys(spec, under, &parts, |dir, spec| self.run_something(dir, spec)).is_ok()
    }

    fn run_something(&self, dir: &BodyDir, spec: &Spec) -> Result<(), Failure> {
        let guest = Guest::new(dir.path(), self.token(&spec.id));
        // Whoever asked may be one that others wait for.
        let ran = std::thread::scope(|scope| scope.spawn(|| spare::rehearse_all(&guest)).join());
        ran.ok().flatten().ok_or_else(|| Failure::new(Kind::Host, "a warm machine runs nothing"))
    }

    /// Boots a machine that is nobody's, does something with it, and ends it.
    pub(super) fn with_nobodys<T>(
        &self,
        spec: &Spec,
        under: &Under,
        parts: &Parts,
        act: impl FnOnce(&BodyDir, &Spec) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let drawn = sys::random::bytes()
            .map_err(|error| Failure::new(Kind::Host, "cannot draw an id").because(error))?;
        let id = BodyId::from_random(drawn);
        let cannot = |error: io::Error| {
            Failure::new(Kind::Host, "cannot make a directory for a warm machine").because(error)
        };
        let dir = BodyDir::create(self.body_path(&id)).map_err(cannot)?;
        let _lock = dir.try_lock().map_err(cannot)?;
        let claimed = ids::claim(&self.data, &id, ids::Root::Wanted)
            .map_err(failures::ids)
            .inspect_err(|_| drop(fs::remove_dir_all(dir.path())))?;
        let spec = Spec {
            id: id.clone(),
            ids: claimed,
            life: Life::Run,
            env: Default::default(),
            workdir: None,
            ..spec.clone()
        };
        let under = Under { vm: Some(parts.clone()), ..under.clone() };
        let booted = self
            .maker
            .start_launcher()
            .and_then(|launcher| {
                self.maker.begin(launcher, &dir, &spec, &data::token(&self.key, &id), &under)
            })
            .and_then(body::process::Begun::finish);
        let done = match booted {
            Ok(mut made) => {
                let done = act(&dir, &spec);
                made.tether.bury();
                done
            }
            Err(error) => Err(failures::process("cannot start a machine", error)),
        };
        if dir.path().exists() {
            body::groups::unbound_by_name(&id);
            let _ = body::snapshot::remove(&self.maker.programs, &spec.ids, dir.path());
        }
        ids::release(&self.data, &spec.ids, &id);
        done
    }

    /// Removes those that are too many or too old, but not the one that is about to be used.
    pub(crate) fn drop_old_warm(&self, keep: &Path) -> Vec<(String, u64)> {
        let entries = fs::read_dir(self.warm_dir()).into_iter().flatten().flatten();
        let mut found: Vec<(SystemTime, PathBuf)> = entries
            .filter(|entry| {
                entry.path() != keep && entry.path().is_dir() && entry.path().extension().is_none()
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        found.sort();
        let too_many = (found.len() + 1).saturating_sub(WARM_MAX);
        let old = |at: &SystemTime| at.elapsed().is_ok_and(|age| age > AGE_MAX);
        let mut dropped = Vec::new();
        for (index, (at, path)) in found.iter().enumerate() {
            if index < too_many || old(at) {
                let bytes = [RAM_FILE, STATE_FILE, IMPRINT_FILE, UPPER_FILE]
                    .iter()
                    .map(|name| body::vm::disks::used(&path.join(name)))
                    .sum();
                if fs::remove_dir_all(path).is_ok() {
                    dropped
                        .push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), bytes));
                }
            }
        }
        dropped
    }
}

/// What two machines must have in common to begin alike.
pub(super) fn key(spec: &Spec, parts: &Parts) -> String {
    let Start::Boot { kernel, initrd, cmdline, .. } = &parts.start else { return String::new() };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let images: Vec<String> = parts.images.iter().map(|image| name(image)).collect();
    let limits = &spec.limits;
    let setuid = spec.base.as_ref().is_some_and(|base| base.sudo);
    let all = serde_json::json!([
        kernel.parent().map(name),
        name(initrd),
        cmdline,
        name(&parts.engine),
        images,
        parts.accelerator,
        limits.memory.0,
        limits.cpu_milli.div_ceil(1000),
        limits.disk.0,
        limits.pids,
        limits.files,
        setuid,
    ]);
    proto::event::hex(&Sha256::digest(all.to_string()))[..24].to_owned()
}
