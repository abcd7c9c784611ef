//! Suspends a microVM: its memory is in `swap/` of its Body's directory, and none of its processes runs.
//!
//! Invariant: `swap/` is complete or absent. It is written while the microVM is paused, and the microVM is killed
//! before it continues, so its memory exists once.
//! Invariant: memory that cannot be restored stays in place; `pal stop` removes it and keeps the files.

use std::{fs, io, os::unix::fs::DirBuilderExt};

use body::{
    BodyDir,
    driver::StartMode,
    process,
    root::RootfsStack,
    vm::{VmParts, record::VmRecord},
};
use proto::{Failure, Kind, Spec, launch::RunRecord};

use super::{Microvms, incomplete};
use crate::failures;

const RECORD_LEN_MAX: u64 = 1 << 20;

impl Microvms {
    /// Saves the memory of a running microVM into its Body's directory, and ends it. The caller holds the Body's lock.
    pub(super) fn save_suspended(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        running: &RunRecord,
    ) -> Result<(), Failure> {
        let (part, place) = (dir.swap_draft(), dir.swap());
        let cannot = |error: io::Error| {
            Failure::new(Kind::Host, "cannot save the memory of the microVM to disk")
                .because(error)
                .hint("make room: pal gc")
        };
        let _ = fs::remove_dir_all(&part);
        fs::DirBuilder::new().mode(0o700).create(&part).map_err(cannot)?;
        let frozen = self.freeze_then(dir, spec, &part, |machine| {
            let text = serde_json::to_vec(machine).map_err(|error| cannot(error.into()))?;
            sys::fd::write_whole(&part.join(BodyDir::SWAP_RECORD), &text).map_err(cannot)?;
            // The microVM is killed first: otherwise it could continue while its saved memory is restored elsewhere. A
            // `pal` that is killed in between loses the memory, but none of the files.
            process::kill(dir, running)
                .map_err(|error| failures::process("cannot end the microVM", error))?;
            fs::rename(&part, &place).map_err(cannot)
        });
        let mut machine = frozen.inspect_err(|_| drop(fs::remove_dir_all(&part)))?;
        process::wait_unmounted(running);
        dir.clear_run_files().map_err(cannot)?;
        // The memory may stay on disk for long, so a restore verifies it completely.
        if let Some(frozen) = &mut machine.frozen {
            frozen.ram_sha256 = Some(body::vm::record::ram_hash(&place).map_err(cannot)?);
        }
        let text = serde_json::to_vec(&machine).map_err(|error| cannot(error.into()))?;
        sys::fd::write_whole(&place.join(BodyDir::SWAP_RECORD), &text).map_err(cannot)
    }

    /// The parts of a microVM that continues from its suspended memory.
    pub(super) fn suspended_parts(&self, spec: &Spec, rootfs: &RootfsStack) -> Result<VmParts, Failure> {
        let swap = BodyDir::at(self.context.body_path(&spec.id)).swap();
        let text = sys::fd::read_small(&swap.join(BodyDir::SWAP_RECORD), RECORD_LEN_MAX);
        let machine = text
            .and_then(|text| Ok(serde_json::from_str::<VmRecord>(&text)?))
            .map_err(|error| incomplete("its record cannot be read").because(error))?;
        self.snapshot_parts(spec, rootfs, &swap, &machine, StartMode::Restore)
            .map_err(|failure| failure.hint(format!("or discard its memory: pal stop {}", spec.id)))
    }
}
