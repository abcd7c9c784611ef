//! The locks of the Bodies in which build and prepare steps run.
//!
//! Invariant: `gc` leaves the Body of a step alone while another process holds its lock.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Mutex};

use body::BodyDir;
use proto::{BodyId, Failure, Kind, Spec, spec::BodyRole};

use crate::lock_mutex;

/// The locks that this process holds, each from the creation of a step's Body until its removal.
#[derive(Debug, Default)]
pub(crate) struct StepLocks {
    held: Mutex<HashMap<BodyId, OwnedFd>>,
}

impl StepLocks {
    /// Locks the Body of a step until [`StepLocks::release`], or until this process ends. Ignores other Bodies.
    pub(crate) fn hold(&self, dir: &BodyDir, spec: &Spec) -> Result<(), Failure> {
        if spec.role == BodyRole::Step {
            let lock = dir.lock_step().map_err(|error| {
                Failure::new(Kind::Host, "cannot lock the Body of a step")
                    .because(error)
                    .hint("make room: pal gc")
            })?;
            lock_mutex(&self.held).insert(spec.id.clone(), lock);
        }
        Ok(())
    }

    /// Releases the lock of a removed Body.
    pub(crate) fn release(&self, id: &BodyId) {
        lock_mutex(&self.held).remove(id);
    }
}
