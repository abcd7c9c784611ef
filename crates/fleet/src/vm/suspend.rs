//! A machine that is paused and takes no memory: it waits in its Body's directory, frozen.
//!
//! Invariant: `swap/` is whole or not there. It is written while the machine stands still, and the machine is ended
//! before it goes on: what waits there is all it ever did.
//! Invariant: a machine that cannot be thawed stays where it is; `pal stop` gives its memory up and keeps its files.

use std::{fs, io, os::unix::fs::DirBuilderExt, path::PathBuf};

use body::{BodyDir, ProcessState, process, vm::record::VmRecord};
use proto::{
    BodyId, Failure, Kind, Layer, Spec,
    event_data::{BodyPaused, BodyResumed},
    spec::Life,
};

use crate::{BodyView, Fleet, Rest, failures};

const RECORD_LEN_MAX: u64 = 1 << 20;

impl Fleet {
    /// Pauses a machine and gives its memory back to the host: it goes on from the disk.
    pub async fn pause_to_disk(&self, id: &BodyId) -> Result<BodyView, Failure> {
        let (dir, spec, _lock) = self.lock_body(id)?;
        let refused =
            |why: &str, hint: String| Err(Failure::new(Kind::Usage, format!("Body {id} {why}")).hint(hint));
        if spec.layer != Layer::Microvm {
            return refused(
                "is no machine, and its memory cannot be put on the disk",
                format!("pause it in memory: pal pause {id}"),
            );
        }
        if spec.life == Life::Run {
            return refused("ends with its `pal run`", format!("pause it in memory: pal pause {id}"));
        }
        super::cannot_freeze(&spec)?;
        if dir.is_swapped() {
            return Err(Failure::new(Kind::Conflict, format!("Body {id} is paused already")));
        }
        if let ProcessState::Paused(running) = dir.condition().map_err(|error| failures::dir(id, error))? {
            // It must run to be asked.
            process::resume(&running)
                .map_err(|error| failures::process("cannot freeze the machine", error))?;
        }
        let running = self.running(id)?;
        self.note_lease_paused(id, Rest::Memory)?;
        self.write(id, BodyPaused { swap: true })?;
        let (part, place) = (interrupted_suspend(&dir), dir.swap());
        let cannot = |error: io::Error| {
            Failure::new(Kind::Host, "cannot put the machine on the disk")
                .because(error)
                .hint("make room: pal gc")
        };
        let _ = fs::remove_dir_all(&part);
        fs::DirBuilder::new().mode(0o700).create(&part).map_err(cannot)?;
        let frozen = self.freeze_then(&dir, &spec, &part, |machine| {
            let text = serde_json::to_vec(machine).map_err(|error| cannot(error.into()))?;
            sys::fd::write_whole(&part.join(BodyDir::SWAP_RECORD), &text).map_err(cannot)?;
            // First: one that went on beside what waits for it would be two. Whoever is killed in between loses
            // its memory, and none of its files.
            process::kill(&dir, &running)
                .map_err(|error| failures::process("cannot end the machine", error))?;
            fs::rename(&part, &place).map_err(cannot)
        });
        let mut machine = frozen.inspect_err(|_| drop(fs::remove_dir_all(&part)))?;
        process::wait_unmounted(&running);
        if let Some(mut supervisor) = self.take_supervisor(id) {
            supervisor.reap();
        }
        dir.clear_run_files().map_err(cannot)?;
        // It may wait for long.
        if let Some(frozen) = &mut machine.frozen {
            frozen.ram_sha256 = Some(body::vm::record::ram_hash(&place).map_err(cannot)?);
        }
        let text = serde_json::to_vec(&machine).map_err(|error| cannot(error.into()))?;
        sys::fd::write_whole(&place.join(BodyDir::SWAP_RECORD), &text).map_err(cannot)?;
        self.view(id)
    }

    /// Has a machine go on that waits on the disk. The caller has the Body's lock.
    pub(crate) fn resume_from_disk(&self, dir: &BodyDir, spec: &Spec) -> Result<(), Failure> {
        let text = sys::fd::read_small(&dir.swap().join(BodyDir::SWAP_RECORD), RECORD_LEN_MAX);
        let machine =
            text.and_then(|text| Ok(serde_json::from_str::<VmRecord>(&text)?)).map_err(|error| {
                super::memory_snapshot::incomplete("its record cannot be read").because(error)
            })?;
        self.reclaim_ids(spec)?;
        let mut rootfs = self.templates().rootfs_stack(spec)?;
        rootfs.vm = Some(
            self.thawed_parts(spec, &rootfs, &dir.swap(), &machine, false)
                .map_err(|failure| failure.hint(format!("or give its memory up: pal stop {}", spec.id)))?,
        );
        // Whoever paused it may have been killed before it had forgotten its last guest.
        if let Some(last) = dir.running().map_err(|error| failures::dir(&spec.id, error))? {
            process::wait_unmounted(&last);
        }
        dir.clear_run_files().map_err(|error| {
            Failure::new(Kind::Host, "cannot forget the machine's last guest").because(error)
        })?;
        self.note_lease_resumed(&spec.id)?;
        self.write(&spec.id, BodyResumed { swap: true })?;
        let launcher = self.launcher()?;
        self.start_guest(self.begin(launcher, dir, spec, &rootfs)?, dir, spec, None)?;
        self.drop_suspended_memory(dir)
    }

    /// What a pause to the disk left that was cut short, or a resume that was. The caller has the Body's lock.
    pub(crate) fn interrupted_suspends(&self, dir: &BodyDir) -> Vec<PathBuf> {
        let stale = (!dir.is_swapped()).then(|| dir.swap());
        [Some(interrupted_suspend(dir)), stale].into_iter().flatten().filter(|path| path.exists()).collect()
    }

    /// What waited on the disk is not needed any more. Its disk is the Body's own.
    pub(crate) fn drop_suspended_memory(&self, dir: &BodyDir) -> Result<(), Failure> {
        match fs::remove_dir_all(dir.swap()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::new(Kind::Host, "cannot remove the machine's memory from the disk")
                    .because(error))
            }
            _ => Ok(()),
        }
    }
}

/// A machine on its way to the disk.
fn interrupted_suspend(dir: &BodyDir) -> PathBuf {
    dir.path().join("swap.part")
}
