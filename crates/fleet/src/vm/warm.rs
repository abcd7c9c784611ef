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
        record::{FrozenMemory, Imprint, Machine},
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
    /// Has a machine that would boot begin where its template's was frozen instead.
    pub(crate) fn warm(&self, spec: &Spec, under: &Under, mut parts: Parts) -> Result<Parts, Failure> {
        let dir = self.warm_dir().join(key(spec, &parts));
        let mut frozen = self.read_warm(&dir, &parts);
        if frozen.is_none() {
            let made = self.make_warm(spec, under, &parts, &dir);
            frozen = self.read_warm(&dir, &parts).or_else(|| self.without_process(&dir, &parts));
            if frozen.is_none() {
                made?;
            }
        }
        if let Some(frozen) = frozen {
            // Used last: others go before it.
            let _ = File::open(&dir).and_then(|dir| dir.set_modified(SystemTime::now()));
            parts.images = (0..parts.images.len()).map(|index| dir.join(format!("image{index}"))).collect();
            parts.start = Start::Thaw(frozen);
        }
        Ok(parts)
    }

    /// Has a machine whose hypervisor could not go on as a copy be thawed without one, it and all after it. False where that
    /// is so already.
    pub(crate) fn forget_copy(&self, parts: &mut Parts) -> bool {
        let Start::Thaw(frozen) = &mut parts.start else { return false };
        if !frozen.whole || !frozen.dir.starts_with(self.warm_dir()) {
            return false;
        }
        frozen.whole = false;
        if let Some(mut warm) = read_record(&frozen.dir) {
            // Who cannot be told this time is told the next.
            let _ = without_imprint(&frozen.dir, &mut warm.machine)
                .and_then(|()| write_record(&frozen.dir, &warm));
        }
        true
    }

    pub(super) fn warm_dir(&self) -> PathBuf {
        self.ground().dir().join("warm")
    }

    /// The machine in that directory, if it is whole.
    pub(super) fn warm_machine(&self, dir: &Path) -> Option<Machine> {
        read_record(dir).map(|warm| warm.machine)
    }

    fn read_warm(&self, dir: &Path, parts: &Parts) -> Option<Frozen> {
        let machine = self.frozen_at(dir, parts)?;
        // One that has lost the process of its hypervisor is made anew: the host has booted since.
        let frozen = machine.frozen.as_ref().filter(|frozen| frozen.is_up_to_date(dir))?;
        Some(begin_at(dir, frozen, frozen.is_whole(dir)))
    }

    /// The same, whatever became of that process.
    fn without_process(&self, dir: &Path, parts: &Parts) -> Option<Frozen> {
        self.frozen_at(dir, parts)?.frozen.map(|frozen| begin_at(dir, &frozen, false))
    }

    /// A machine that can be thawed.
    fn frozen_at(&self, dir: &Path, parts: &Parts) -> Option<Machine> {
        let machine = self.warm_machine(dir)?;
        let setup = self.ground().setup().ok()?;
        machine.check(dir, &setup, parts).ok()?;
        Some(machine)
    }

    /// Has one in that directory, unless there is one that others have just made.
    fn make_warm(&self, spec: &Spec, under: &Under, parts: &Parts, dir: &Path) -> Result<(), Failure> {
        let warm = self.warm_dir();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&warm).map_err(cannot)?;
        let lock = File::create(warm.join("lock")).map_err(cannot)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|errno| cannot(errno.into()))?;
        if self.read_warm(dir, parts).is_some() {
            return Ok(());
        }
        let (part, again) = (dir.with_extension("part"), dir.with_extension("again"));
        for place in [&part, &again] {
            let _ = fs::remove_dir_all(place);
        }
        let made = self.make_warm_in(spec, under, parts, dir, (&part, &again));
        for place in [&part, &again] {
            let _ = fs::remove_dir_all(place);
        }
        self.drop_old_warm(dir);
        made
    }

    /// What is there already is kept until something takes its place.
    fn make_warm_in(
        &self,
        spec: &Spec,
        under: &Under,
        parts: &Parts,
        dir: &Path,
        (part, again): (&Path, &Path),
    ) -> Result<(), Failure> {
        let (from, mut machine) = match self.frozen_at(dir, parts) {
            Some(machine) => (dir, machine),
            None => {
                fs::DirBuilder::new().mode(0o700).create(part).map_err(cannot)?;
                (part, self.boot_and_freeze(spec, under, parts, part)?)
            }
        };
        let about = spec.template.clone();
        match self.practise(spec, under, parts, &machine, (from, again)) {
            Some(practised) => put_in_place(again, dir, practised, about),
            // What cannot be practised is as good as it was.
            None => without_imprint(from, &mut machine)
                .map_err(cannot)
                .and_then(|()| put_in_place(from, dir, machine, about)),
        }
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

    /// Thaws an emulated machine, has it run something, and freezes it with its hypervisor into another directory. Nothing
    /// where that cannot be done, or where what comes of it does not live.
    fn practise(
        &self,
        spec: &Spec,
        under: &Under,
        parts: &Parts,
        machine: &Machine,
        (from, to): (&Path, &Path),
    ) -> Option<Machine> {
        let frozen = machine.frozen.as_ref().filter(|_| machine.accelerator == Accelerator::Emulated)?;
        fs::DirBuilder::new().mode(0o700).create(to).ok()?;
        let thawed = |from: &Path, frozen: &FrozenMemory, whole: bool| Parts {
            start: Start::Thaw(begin_at(from, frozen, whole)),
            alone: false,
            ..parts.clone()
        };
        let freeze = |dir: &BodyDir, spec: &Spec| {
            self.run_something(dir, spec)?;
            self.freeze_into(dir, spec, to, Extent::Whole)
        };
        let practised = self.with_nobodys(spec, under, &thawed(from, frozen, false), freeze).ok()?;
        // A host on which copies of processes do not live is served without them.
        let frozen = practised.frozen.as_ref().filter(|frozen| frozen.is_whole(to))?;
        let lives = |dir: &BodyDir, spec: &Spec| {
            self.run_something(dir, spec)?;
            Ok(dir.revival().is_some_and(|revival| revival.copied))
        };
        let lived = self.with_nobodys(spec, under, &thawed(to, frozen, true), lives);
        lived.is_ok_and(|copied| copied).then_some(practised)
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
                let kept = made.ready.revival.as_ref().map_or(Ok(()), |revival| dir.keep_revival(revival));
                let done = kept.map_err(cannot).and_then(|()| act(&dir, &spec));
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

/// Where whoever is thawed from that machine begins.
fn begin_at(dir: &Path, frozen: &FrozenMemory, whole: bool) -> Frozen {
    Frozen { dir: dir.to_owned(), held: Some(frozen.held.clone()), whole, generation: 1 }
}

/// Gives up the process of its hypervisor until the host boots again.
fn without_imprint(dir: &Path, machine: &mut Machine) -> io::Result<()> {
    if let Some(frozen) = machine.frozen.as_mut().filter(|_| machine.accelerator == Accelerator::Emulated) {
        frozen.imprint = Some(Imprint::none()?);
    }
    match fs::remove_file(dir.join(IMPRINT_FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes down what is in a directory, and puts it where it is looked for.
fn put_in_place(from: &Path, dir: &Path, mut machine: Machine, about: String) -> Result<(), Failure> {
    if let Some(frozen) = machine.frozen.as_mut().filter(|frozen| frozen.ram_sha256.is_none()) {
        frozen.ram_sha256 = Some(body::vm::record::ram_hash(from).map_err(cannot)?);
    }
    write_record(from, &Warm { machine, about }).map_err(cannot)?;
    if from == dir {
        return Ok(());
    }
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(cannot)?;
    }
    fs::rename(from, dir).map_err(cannot)
}

fn read_record(dir: &Path) -> Option<Warm> {
    serde_json::from_str(&sys::fd::read_small(&dir.join(RECORD), RECORD_LEN_MAX).ok()?).ok()
}

fn write_record(dir: &Path, warm: &Warm) -> io::Result<()> {
    sys::fd::write_whole(&dir.join(RECORD), &serde_json::to_vec(warm)?)
}

fn cannot(error: io::Error) -> Failure {
    Failure::new(Kind::Host, "cannot keep a warm machine").because(error).hint("make room: pal gc")
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
