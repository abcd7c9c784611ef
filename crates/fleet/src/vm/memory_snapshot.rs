//! Snapshots of microVMs with their memory: taken of a running microVM, restored in others.

use std::{fs, os::unix::fs::DirBuilderExt, path::Path};

use body::{
    BodyDir, ProcessState,
    driver::{LimitRequest, StartMode},
    process,
    root::RootfsStack,
    snapshot::{self, SnapshotManifest},
    vm::{
        self, VmParts, VmSnapshotRef, VmStartMode,
        freeze::FreezeFiles,
        plan::UPPER_FILE,
        record::{MemoryRecord, VmRecord},
        stack::VmLayers,
    },
};
use proto::{Failure, Kind, Spec};

use super::{Microvms, vm_failure};
use crate::failures;

impl Microvms {
    /// Takes a snapshot of a microVM's disk, and of its memory if it runs. The caller holds the Body's lock.
    pub(super) fn take_snapshot(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        to: &Path,
        manifest: SnapshotManifest,
    ) -> Result<SnapshotManifest, Failure> {
        let cannot = |what: &str, error: std::io::Error| {
            Failure::new(Kind::Host, what.to_owned()).because(error).hint("make room: pal gc")
        };
        // A dependency layer consists of plain files on every layer, because it becomes a lower layer of other Bodies.
        if manifest.dependency.is_some() {
            return snapshot::take_from_disk(&self.context.launch.programs, dir.path(), spec, to, manifest)
                .map_err(failures::snapshot);
        }
        make_dir(to)?;
        let mut machine = self.freeze_into(dir, spec, to)?;
        if let (Some(frozen), false) = (&mut machine.frozen, manifest.for_forks) {
            // The microVM runs on while its saved memory is hashed.
            frozen.ram_sha256 = Some(
                vm::record::ram_hash(to).map_err(|error| cannot("cannot read the saved microVM", error))?,
            );
        }
        // The disk includes the changes of the disk snapshots below it, but not those of snapshots of plain files.
        let has_files = |id: &proto::SnapshotId| {
            snapshot::read(&self.context.data.join("snapshots").join(id.as_str()))
                .is_ok_and(|below| below.machine.is_none())
        };
        let below = manifest.below.iter().filter(|id| has_files(id)).cloned().collect();
        keep(to, SnapshotManifest { below, ..manifest }, machine)
    }

    /// Saves a Body's microVM into a directory, and returns the record of its contents.
    pub(super) fn freeze_into(&self, dir: &BodyDir, spec: &Spec, to: &Path) -> Result<VmRecord, Failure> {
        self.freeze_then(dir, spec, to, |_| Ok(()))
    }

    /// Saves a Body's microVM into a directory, and calls `last` before the microVM continues.
    pub(super) fn freeze_then(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        to: &Path,
        last: impl FnOnce(&VmRecord) -> Result<(), Failure>,
    ) -> Result<VmRecord, Failure> {
        let machine = self.describe(dir, spec, to)?;
        match dir.condition().map_err(|error| failures::dir(&spec.id, error))? {
            ProcessState::Running(_) | ProcessState::Paused(_) => {
                self.freeze_memory(dir, spec, to, machine, last)
            }
            _ => {
                let copied = vm::disks::copy(&dir.path().join(UPPER_FILE), &to.join(UPPER_FILE));
                copied.map_err(|error| {
                    Failure::new(Kind::Host, "cannot copy the microVM's disk")
                        .because(error)
                        .hint("make room: pal gc")
                })?;
                Ok(machine)
            }
        }
    }

    /// Drafts the record of the directory into which a Body's microVM will be saved, and links its images there.
    fn describe(&self, dir: &BodyDir, spec: &Spec, to: &Path) -> Result<VmRecord, Failure> {
        let setup = self.install().setup().map_err(vm_failure)?;
        let images: Vec<_> = (0..)
            .map(|index| dir.path().join(format!("image{index}")))
            .take_while(|path| path.exists())
            .collect();
        vm::record::keep_images(
            &images.iter().map(|path| fs::canonicalize(path).unwrap_or(path.clone())).collect::<Vec<_>>(),
            to,
        )
        .map_err(vm_failure)?;
        let hypervisor = spec.engine.unwrap_or_default();
        let (root, accelerator) = self.engine_root(hypervisor, &setup)?;
        Ok(VmRecord {
            memory: proto::Size(spec.limits.memory.0 & !0xf_ffff),
            cpus: vm::plan::cpus(&spec.limits),
            disk: spec.limits.disk,
            inodes: Some(spec.limits.inodes),
            accelerator,
            hypervisor,
            engine: root.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            // Another version of `pal` may have started the microVM.
            board: dir.revival().map_or(0, |revival| revival.board),
            kernel: setup.kernel,
            ticks_khz: setup.ticks_khz,
            images: images.len(),
            generation: dir.revival().map_or(0, |revival| revival.receipt.generation),
            frozen: None,
        })
    }

    /// Saves the memory and the disk of a running or paused microVM. Calls `last` when both are in `to`, before the
    /// microVM continues.
    fn freeze_memory(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        to: &Path,
        machine: VmRecord,
        last: impl FnOnce(&VmRecord) -> Result<(), Failure>,
    ) -> Result<VmRecord, Failure> {
        super::shared_mounts::check_freeze(spec)?;
        let memory = machine.memory.0;
        let (running, paused) = match dir.condition().map_err(|error| failures::dir(&spec.id, error))? {
            ProcessState::Running(running) => (running, false),
            ProcessState::Paused(running) => (running, true),
            _ => return Err(Failure::new(Kind::Conflict, format!("Body {} has just ended", spec.id))),
        };
        if paused {
            // The guest must run to take part; the microVM is paused again afterwards.
            process::resume(&running)
                .map_err(|error| failures::process("cannot snapshot the microVM", error))?;
        }
        let mut outcome = None;
        let saved = |held| {
            let hashed = vm::record::state_hash(to)
                .map_err(|error| Failure::new(Kind::Host, "cannot read the saved microVM").because(error));
            outcome = Some(hashed.and_then(|state_sha256| {
                let frozen = Some(MemoryRecord { held, state_sha256, ram_sha256: None });
                let machine = VmRecord { frozen, ..machine };
                last(&machine).map(|()| machine)
            }));
        };
        let frozen =
            FreezeFiles::make(to, memory).and_then(|files| vm::freeze::freeze(dir.path(), to, files, saved));
        if paused {
            process::pause(&running)
                .map_err(|error| failures::process("cannot pause the microVM again", error))?;
        }
        frozen.map_err(vm_failure)?;
        outcome.unwrap_or_else(|| Err(Failure::new(Kind::Internal, "the microVM was not saved")))
    }

    /// The parts of a Body's microVM that starts from a snapshot.
    pub(super) fn snapshot_parts(
        &self,
        spec: &Spec,
        rootfs: &RootfsStack,
        dir: &Path,
        machine: &VmRecord,
        mode: StartMode,
    ) -> Result<VmParts, Failure> {
        let images = (0..machine.images).map(|index| dir.join(format!("image{index}"))).collect();
        let layout = VmLayers::of(rootfs, spec).layout;
        let mut parts = self.parts_with(spec, images, layout, Some(dir.join(UPPER_FILE)))?;
        if machine.frozen.is_some() && mode == StartMode::Restore {
            if spec.share.is_some() {
                return Err(Failure::new(
                    Kind::Usage,
                    "a microVM that is restored from its memory cannot get a mount",
                )
                .hint("boot it with its files: --boot"));
            }
            let setup = self.install().setup().map_err(vm_failure)?;
            let frozen = machine.check(dir, &setup, &parts).map_err(|why| incomplete(&why))?;
            let (held, generation) = (frozen.held.clone(), machine.generation + 1);
            parts.start = VmStartMode::Thaw(VmSnapshotRef { dir: dir.to_owned(), held, generation });
        }
        Ok(parts)
    }
}

/// Writes the manifest of a microVM's snapshot.
fn keep(to: &Path, mut manifest: SnapshotManifest, machine: VmRecord) -> Result<SnapshotManifest, Failure> {
    let files = fs::read_dir(to).into_iter().flatten().flatten().map(|entry| entry.path());
    // Images are shared, so they do not count towards the size of this snapshot.
    manifest.bytes = files
        .filter(|path| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("image")))
        .map(|path| vm::disks::used(&path))
        .sum();
    manifest.machine = Some(machine);
    snapshot::write(to, manifest).map_err(failures::snapshot)
}

/// Creates the directory of a snapshot.
fn make_dir(to: &Path) -> Result<(), Failure> {
    fs::DirBuilder::new().mode(0o700).create(to).map_err(|error| {
        Failure::new(Kind::Host, "cannot create the snapshot's directory")
            .because(error)
            .hint("make room: pal gc")
    })
}

/// The limits of a Body that starts from a snapshot: those of the snapshotted microVM if its memory is restored.
pub(super) fn inherit(
    asked: &LimitRequest,
    mode: StartMode,
    machine: &VmRecord,
) -> Result<LimitRequest, Failure> {
    let mut limits = asked.clone();
    let cpu = limits.cpu_milli.unwrap_or(machine.cpus * 1000);
    let same = limits.memory.is_none_or(|memory| memory.0 & !0xf_ffff == machine.memory.0)
        && cpu.div_ceil(1000) == machine.cpus;
    if machine.frozen.is_some() && mode == StartMode::Restore && !same {
        return Err(Failure::new(
            Kind::Usage,
            format!(
                "the microVM in this snapshot has {} memory and {} CPUs, which a restore keeps",
                machine.memory, machine.cpus
            ),
        )
        .hint("leave --memory and --cpus out, or boot it instead: --boot"));
    }
    if limits.disk.is_some_and(|disk| disk != machine.disk) {
        return Err(Failure::new(Kind::Usage, format!("the disk in this snapshot has {}", machine.disk))
            .hint("leave --disk out"));
    }
    limits.memory = limits.memory.or(Some(machine.memory));
    limits.cpu_milli = Some(cpu);
    if let (Some(asked), Some(made)) = (limits.inodes, machine.inodes)
        && asked != made
    {
        return Err(Failure::new(Kind::Usage, format!("the disk in this snapshot has {made} inodes"))
            .hint("leave --inodes out"));
    }
    limits.disk = Some(machine.disk);
    limits.inodes = machine.inodes;
    Ok(limits)
}

/// The failure of a snapshot that cannot be restored completely.
pub(crate) fn incomplete(why: &str) -> Failure {
    Failure::new(
        Kind::RestoreIncomplete,
        format!("{}: the microVM cannot be restored: {why}", proto::failure::RESTORE_INCOMPLETE),
    )
    .hint("its files are intact; boot it with them: --boot")
}
