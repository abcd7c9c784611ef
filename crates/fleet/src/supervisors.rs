//! Launchers and supervisors that are children of this process.
//!
//! Invariant: dropped, it has waited for every supervisor that was about to exit.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use body::process::{LaunchContext, Launcher, SupervisorHandle};
use proto::{BodyId, Failure, Spec, launch::RunRecord};

use crate::{data::Prestart, failures, lock_mutex};

/// A Body that this process created.
#[derive(Debug)]
pub(crate) struct OwnedBody {
    pub supervisor: SupervisorHandle,
    /// Where it runs and what it is: each exec asks for that.
    pub running: RunRecord,
    pub spec: Spec,
    /// Whether its end is in the log.
    pub recorded: bool,
}

/// The launchers and supervisors of one process.
#[derive(Debug)]
pub(crate) struct Supervisors {
    context: Arc<LaunchContext>,
    prestart: Prestart,
    /// Started before a Body is asked for.
    launcher: Mutex<Option<Launcher>>,
    owned: Mutex<HashMap<BodyId, OwnedBody>>,
    /// Supervisors that have cleaned up and are about to exit.
    leaving: Mutex<Vec<SupervisorHandle>>,
}

impl Supervisors {
    /// Starts the first launcher, unless `prestart` says otherwise.
    pub fn open(context: Arc<LaunchContext>, prestart: Prestart) -> Result<Self, Failure> {
        let launcher = match prestart {
            Prestart::Once | Prestart::Always => Some(start_launcher(&context)?),
            Prestart::None => None,
        };
        Ok(Self {
            context,
            prestart,
            launcher: Mutex::new(launcher),
            owned: Default::default(),
            leaving: Default::default(),
        })
    }

    /// A launcher for one Body.
    pub fn take_launcher(&self) -> Result<Launcher, Failure> {
        let prestarted = lock_mutex(&self.launcher).take();
        prestarted.map_or_else(|| start_launcher(&self.context), Ok)
    }

    /// Starts the launcher of the next Body while this one is created. A launcher that cannot be started now is started
    /// when it is needed, and fails there.
    pub fn prestart_launcher(&self) {
        if self.prestart == Prestart::Always {
            *lock_mutex(&self.launcher) = self.context.start_launcher().ok();
        }
    }

    /// The Bodies whose supervisors are children of this process.
    pub fn owned(&self) -> MutexGuard<'_, HashMap<BodyId, OwnedBody>> {
        lock_mutex(&self.owned)
    }

    /// Takes the supervisor of a Body out of the table.
    pub fn take(&self, id: &BodyId) -> Option<SupervisorHandle> {
        self.owned().remove(id).map(|body| body.supervisor)
    }

    /// Lets a supervisor exit in its own time, and reaps those that have.
    pub fn reap_later(&self, supervisor: SupervisorHandle) {
        let mut leaving = lock_mutex(&self.leaving);
        leaving.retain_mut(|supervisor| !supervisor.try_reap());
        leaving.push(supervisor);
    }
}

impl Drop for Supervisors {
    fn drop(&mut self) {
        for mut supervisor in std::mem::take(&mut *lock_mutex(&self.leaving)) {
            supervisor.reap();
        }
    }
}

fn start_launcher(context: &LaunchContext) -> Result<Launcher, Failure> {
    context.start_launcher().map_err(|error| failures::process("cannot start a Body", error))
}
