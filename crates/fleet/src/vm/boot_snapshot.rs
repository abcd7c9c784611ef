//! Boot snapshots: the first microVM of a template boots once and is snapshotted when its guest is ready; every later
//! Body is restored from this snapshot.
//!
//! Invariant: no command of the template has run in a boot snapshot, and it contains nothing of any Body.
//! Invariant: at most [`WARM_MAX`] boot snapshots exist, none older than [`AGE_MAX`]; the least recently used goes
//! first.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use body::{
    BodyDir, ids,
    root::RootfsStack,
    vm::{
        VmParts, VmSnapshotRef, VmStartMode,
        plan::{RAM_FILE, STATE_FILE, UPPER_FILE},
        record::VmRecord,
    },
};
use proto::{BodyId, Failure, Kind, Spec, spec::Life};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Microvms;
use crate::failures;

/// Most boot snapshots on this host.
pub(super) const WARM_MAX: usize = 8;
/// How long an unused boot snapshot is kept.
pub(super) const AGE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
const RECORD: &str = "warm.json";
const RECORD_LEN_MAX: u64 = 1 << 20;

/// The record `warm.json`, written last.
#[derive(Debug, Serialize, Deserialize)]
struct BootSnapshotRecord {
    machine: VmRecord,
    about: String,
}

impl Microvms {
    /// Changes the parts of a microVM that would boot, so that it is restored from its template's boot snapshot.
    pub(super) fn use_boot_snapshot(
        &self,
        spec: &Spec,
        rootfs: &RootfsStack,
        mut parts: VmParts,
    ) -> Result<VmParts, Failure> {
        let dir = self.boot_snapshot_dir().join(key(spec, &parts));
        let mut frozen = self.read_warm(&dir, &parts);
        if frozen.is_none() {
            self.make_warm(spec, rootfs, &parts, &dir)?;
            frozen = self.read_warm(&dir, &parts);
        }
        if let Some(frozen) = frozen {
            // Marks the snapshot as used now; the least recently used is removed first.
            let _ = File::open(&dir).and_then(|dir| dir.set_modified(SystemTime::now()));
            parts.images = (0..parts.images.len()).map(|index| dir.join(format!("image{index}"))).collect();
            parts.start = VmStartMode::Thaw(frozen);
        }
        Ok(parts)
    }

    pub(super) fn boot_snapshot_dir(&self) -> PathBuf {
        self.install().dir().join("warm")
    }

    /// The record of the boot snapshot in that directory, if it is complete.
    pub(super) fn boot_snapshot_at(&self, dir: &Path) -> Option<VmRecord> {
        let text = sys::fd::read_small(&dir.join(RECORD), RECORD_LEN_MAX).ok()?;
        serde_json::from_str::<BootSnapshotRecord>(&text).ok().map(|warm| warm.machine)
    }

    fn read_warm(&self, dir: &Path, parts: &VmParts) -> Option<VmSnapshotRef> {
        let machine = self.boot_snapshot_at(dir)?;
        let setup = self.install().setup().ok()?;
        let held = machine.check(dir, &setup, parts).ok()?.held.clone();
        Some(VmSnapshotRef { dir: dir.to_owned(), held, generation: 1 })
    }

    /// Creates the boot snapshot in that directory, unless another process has just done so.
    fn make_warm(
        &self,
        spec: &Spec,
        rootfs: &RootfsStack,
        parts: &VmParts,
        dir: &Path,
    ) -> Result<(), Failure> {
        let warm = self.boot_snapshot_dir();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&warm).map_err(freeze_failure)?;
        let lock = File::create(warm.join("lock")).map_err(freeze_failure)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|errno| freeze_failure(errno.into()))?;
        if self.read_warm(dir, parts).is_some() {
            return Ok(());
        }
        self.context.notices.tell("booting a microVM once; later ones of this kind start from its snapshot");
        let part = dir.with_extension("part");
        let _ = fs::remove_dir_all(&part);
        let _ = fs::remove_dir_all(dir);
        fs::DirBuilder::new().mode(0o700).create(&part).map_err(freeze_failure)?;
        let made = self
            .boot_and_freeze(spec, rootfs, parts, &part)
            .and_then(|machine| publish_snapshot(&part, dir, machine, spec.template.clone()));
        if made.is_err() {
            let _ = fs::remove_dir_all(&part);
        }
        self.drop_old_warm(dir);
        made
    }

    fn boot_and_freeze(
        &self,
        spec: &Spec,
        rootfs: &RootfsStack,
        parts: &VmParts,
        to: &Path,
    ) -> Result<VmRecord, Failure> {
        self.with_nobodys(spec, rootfs, parts, |dir, spec| {
            dir.revival().iter().for_each(|revival| self.record_boot(spec, revival));
            self.freeze_into(dir, spec, to)
        })
    }

    /// Boots a microVM without an owner, calls `act` with it and ends it.
    pub(super) fn with_nobodys<T>(
        &self,
        spec: &Spec,
        rootfs: &RootfsStack,
        parts: &VmParts,
        act: impl FnOnce(&BodyDir, &Spec) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let drawn = sys::random::bytes().map_err(|error| {
            Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
        })?;
        let id = BodyId::from_random(drawn);
        let dir = BodyDir::create(self.context.body_path(&id)).map_err(freeze_failure)?;
        let _lock = dir.try_lock().map_err(freeze_failure)?;
        let claimed = ids::claim(&self.context.data, &id, ids::MapRoot::Yes)
            .map_err(failures::ids)
            .inspect_err(|_| drop(fs::remove_dir_all(dir.path())))?;
        let spec = Spec {
            id: id.clone(),
            name: None,
            ids: claimed,
            life: Life::Run,
            env: Default::default(),
            workdir: None,
            ..spec.clone()
        };
        let launch = &self.context.launch;
        let booted = launch
            .start_launcher()
            .and_then(|launcher| {
                let token = self.context.token(&id);
                body::vm::plan::begin(launch, launcher, &dir, &spec, &token, rootfs, parts)
            })
            .and_then(body::process::StartingBody::finish);
        let done = match booted {
            Ok(mut made) => {
                let kept = made.ready.revival.as_ref().map_or(Ok(()), |revival| dir.write_receipt(revival));
                let done = kept.map_err(freeze_failure).and_then(|()| act(&dir, &spec));
                made.supervisor.reap();
                done
            }
            Err(error) => Err(failures::process("cannot start a microVM", error)),
        };
        if dir.path().exists() {
            body::groups::remove_cgroups_by_name(&id);
            let _ = body::snapshot::remove(&self.context.launch.programs, &spec.ids, dir.path());
        }
        ids::release(&self.context.data, &spec.ids, &id);
        done
    }

    /// Removes boot snapshots that are too many or too old, except the one that is about to be used.
    pub(super) fn drop_old_warm(&self, keep: &Path) -> Vec<(String, u64)> {
        let entries = fs::read_dir(self.boot_snapshot_dir()).into_iter().flatten().flatten();
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
                let bytes = [RAM_FILE, STATE_FILE, UPPER_FILE]
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

/// Records the boot snapshot in `part`, and moves it to its final place.
fn publish_snapshot(part: &Path, dir: &Path, mut machine: VmRecord, about: String) -> Result<(), Failure> {
    if let Some(frozen) = &mut machine.frozen {
        frozen.ram_sha256 = Some(body::vm::record::ram_hash(part).map_err(freeze_failure)?);
    }
    let text = serde_json::to_vec(&BootSnapshotRecord { machine, about })
        .map_err(|error| freeze_failure(error.into()))?;
    sys::fd::write_whole(&part.join(RECORD), &text)
        .and_then(|()| fs::rename(part, dir))
        .map_err(freeze_failure)
}

fn freeze_failure(error: io::Error) -> Failure {
    Failure::new(Kind::Host, "cannot store a boot snapshot").because(error).hint("make room: pal gc")
}

/// The properties that two microVMs must share to start from the same boot snapshot.
fn key(spec: &Spec, parts: &VmParts) -> String {
    let limits = &spec.limits;
    let setuid = spec.base.as_ref().is_some_and(|base| base.sudo);
    let all = serde_json::json!([
        parts_key(parts),
        limits.memory.0,
        limits.cpu_milli.div_ceil(1000),
        limits.disk.0,
        limits.inodes,
        limits.pids,
        limits.files,
        setuid,
    ]);
    proto::event::hex(&Sha256::digest(all.to_string()))[..24].to_owned()
}

/// The names of the kernel, the hypervisor and the images of a microVM.
pub(super) fn parts_key(parts: &VmParts) -> serde_json::Value {
    let VmStartMode::Boot { kernel, initrd, cmdline, .. } = &parts.start else { return Default::default() };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let images: Vec<String> = parts.images.iter().map(|image| name(image)).collect();
    serde_json::json!([
        kernel.parent().map(name),
        name(initrd),
        cmdline,
        name(&parts.engine),
        images,
        parts.accelerator,
    ])
}
