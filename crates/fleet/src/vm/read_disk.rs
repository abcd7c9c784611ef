//! Reading what a microVM wrote, whether it runs, is paused, stopped or dead.

use std::path::PathBuf;

use body::{
    BodyDir, ProcessState, process,
    vm::{freeze::HeldVm, upper_copy::UpperCopy},
};
use proto::{BodyId, Failure, Kind, Layer, Spec, launch::RunRecord};

use super::vm_failure;
use crate::{Fleet, failures};

/// A running microVM that stands still, with everything it wrote on its disk.
#[derive(Debug)]
pub(crate) struct StillVm {
    held: HeldVm,
    /// Where it was paused before: then it is paused again.
    paused: Option<RunRecord>,
}

impl StillVm {
    fn release(self) -> Result<(), Failure> {
        let Self { held, paused } = self;
        let stood = held.check().map_err(vm_failure);
        drop(held);
        if let Some(running) = paused {
            process::pause(&running)
                .map_err(|error| failures::process("cannot pause the Body again", error))?;
        }
        stood
    }
}

impl Fleet {
    /// Where a process Body's writes are.
    pub(crate) fn upper_path(&self, id: &BodyId) -> PathBuf {
        self.body_path(id).join("disk/upper")
    }

    /// Copies the repositories and the home of a microVM from its disk, where the Body is one. It stands still meanwhile.
    pub(crate) fn read_disk(&self, spec: &Spec) -> Result<Option<UpperCopy>, Failure> {
        if spec.layer != Layer::Microvm {
            return Ok(None);
        }
        let dir = BodyDir::at(self.body_path(&spec.id));
        let still = self.hold_still(&dir, spec)?;
        let read = UpperCopy::read(&self.launch_context.programs, dir.path(), spec).map_err(|error| {
            Failure::new(Kind::Host, format!("cannot read the disk of Body {}", spec.id))
                .because(error)
                .hint("make room: pal gc")
        });
        still.map_or(Ok(()), StillVm::release)?;
        read.map(Some)
    }

    /// Has a microVM stand still that runs or is paused; none where the Body is neither.
    pub(crate) fn hold_still(&self, dir: &BodyDir, spec: &Spec) -> Result<Option<StillVm>, Failure> {
        if spec.layer != Layer::Microvm {
            return Ok(None);
        }
        let condition = || dir.condition().map_err(|error| failures::dir(&spec.id, error));
        let paused = match condition()? {
            ProcessState::Running(_) => None,
            // Its guest must run to write what its kernel holds in memory.
            ProcessState::Paused(running) => {
                process::resume(&running)
                    .map_err(|error| failures::process("cannot let the Body go on", error))?;
                Some(running)
            }
            _ => return Ok(None),
        };
        match HeldVm::hold(dir.path()) {
            Ok(held) => Ok(Some(StillVm { held, paused })),
            // It may have ended meanwhile: then its disk does not change any more.
            Err(_) if !matches!(condition()?, ProcessState::Running(_) | ProcessState::Paused(_)) => Ok(None),
            Err(error) => Err(vm_failure(error)),
        }
    }
}
