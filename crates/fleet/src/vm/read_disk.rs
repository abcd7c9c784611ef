//! Reads the disk of a microVM in any state: running, paused, stopped or dead.

use body::{
    BodyDir, ProcessState, process,
    vm::{freeze::HeldVm, upper_copy::UpperCopy},
};
use proto::{Failure, Kind, Spec, launch::RunRecord};

use super::{Microvms, vm_failure};
use crate::failures;

/// A running microVM that is paused, with all of its writes on its disk.
#[derive(Debug)]
pub(super) struct StillVm {
    held: HeldVm,
    /// The microVM's processes, if they were paused before; then they are paused again.
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
    /// Copies the repositories and the home of a microVM from its disk. The microVM is paused meanwhile.
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

    /// Pauses a microVM and flushes its writes; `None` if the microVM does not run.
    pub(super) fn hold_still(&self, dir: &BodyDir, spec: &Spec) -> Result<Option<StillVm>, Failure> {
        let condition = || dir.condition().map_err(|error| failures::dir(&spec.id, error));
        let paused = match condition()? {
            ProcessState::Running(_) => None,
            // The guest must run to flush its page cache.
            ProcessState::Paused(running) => {
                process::resume(&running)
                    .map_err(|error| failures::process("cannot resume the Body", error))?;
                Some(running)
            }
            _ => return Ok(None),
        };
        match HeldVm::hold(dir.path()) {
            Ok(held) => Ok(Some(StillVm { held, paused })),
            // The microVM may have ended meanwhile: then its disk does not change any more.
            Err(_) if !matches!(condition()?, ProcessState::Running(_) | ProcessState::Paused(_)) => Ok(None),
            Err(error) => Err(vm_failure(error)),
        }
    }
}
