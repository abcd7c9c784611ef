//! Reading what a microVM wrote, whether it runs, is paused, stopped or dead.

use body::{
    BodyDir, ProcessState, process,
    vm::{freeze::HeldVm, upper_copy::UpperCopy},
};
use proto::{Failure, Kind, Spec, launch::RunRecord};

use super::{Microvms, vm_failure};
use crate::failures;

/// A running microVM that stands still, with everything it wrote on its disk.
#[derive(Debug)]
pub(super) struct StillVm {
    held: HeldVm,
    /// Its processes, where they were paused before: then they are paused again.
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

impl Microvms {
    /// Copies the repositories and the home of a microVM from its disk. The microVM stands still meanwhile.
    pub(super) fn copy_upper(&self, dir: &BodyDir, spec: &Spec) -> Result<UpperCopy, Failure> {
        let still = self.hold_still(dir, spec)?;
        let read = UpperCopy::read(&self.context.launch.programs, dir.path(), spec).map_err(|error| {
            Failure::new(Kind::Host, format!("cannot read the disk of Body {}", spec.id))
                .because(error)
                .hint("make room: pal gc")
        });
        still.map_or(Ok(()), StillVm::release)?;
        read
    }

    /// Has a microVM stand still that runs or is paused; none where the Body is neither.
    pub(super) fn hold_still(&self, dir: &BodyDir, spec: &Spec) -> Result<Option<StillVm>, Failure> {
        let condition = || dir.condition().map_err(|error| failures::dir(&spec.id, error));
        let paused = match condition()? {
            ProcessState::Running(_) => None,
            // Its guest must run to write what its kernel holds in memory.
            ProcessState::Paused(running) => {
                process::resume(&running)
                    .map_err(|error| failures::process("cannot resume the Body", error))?;
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
