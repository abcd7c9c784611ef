//! Firecracker's jailer: whether a machine has it, and why not.
//!
//! Invariant: one that was named and cannot be used is an error, never left out in silence.

use std::path::{Path, PathBuf};

use body::vm::{
    SetupRecord,
    jailer::{self, JAILER, JailSetup},
};
use proto::{Failure, Kind, vm::Engine};

use super::{Microvms, hypervisors::version, vm_failure};
use crate::{Setting, settings::NONE};

/// Where to get it.
const GET_IT: &str = "it comes with Firecracker: https://github.com/firecracker-microvm/firecracker/releases; put it beside Firecracker, or name it: pal config set microvm.jailer FILE";

impl Microvms {
    /// The jailer of a machine under that hypervisor; none where it is not Firecracker.
    pub(super) fn jail_of(&self, which: Engine, setup: &SetupRecord) -> Result<Option<JailSetup>, Failure> {
        if which != Engine::Firecracker {
            return Ok(None);
        }
        let firecracker = self.program_of(which, setup)?;
        let jailer = match self.jailer(&firecracker)? {
            Ok(jailer) => jailer,
            Err(why) => return Ok(Some(JailSetup::Absent { why })),
        };
        let (install, programs) = (self.install(), &self.context.launch.programs);
        let place = install.jail(&jailer, programs).map_err(vm_failure)?;
        if !place.exists() {
            let version = version(JAILER, &jailer, GET_IT)?;
            if !jailer::is_whole(&jailer) {
                return Err(Failure::new(Kind::Host, format!("{} needs libraries", jailer.display()))
                    .because("a jailer leaves the root in which they are before it has done its work")
                    .hint("take one that was linked statically, as those of releases are")
                    .hint(GET_IT));
            }
            install.make_jail(&place, &jailer, programs, &version).map_err(vm_failure)?;
        }
        jailer::of(place, &firecracker).map(Some).map_err(vm_failure)
    }

    /// Where it is, or why it is not used.
    fn jailer(&self, firecracker: &Path) -> Result<Result<PathBuf, String>, Failure> {
        let decided = self.settings()?.jailer;
        match decided {
            Some(none) if none == Path::new(NONE) => {
                Ok(Err("it was decided to do without Firecracker's: pal config get microvm.jailer".to_owned()))
            }
            _ if !sys::caps::is_host_root() => Ok(Err(
                "Firecracker's is not used: an ordinary user cannot give the processor's device to the id it takes; the walls above hold Firecracker".to_owned(),
            )),
            Some(named) if named.is_file() => Ok(Ok(named)),
            Some(named) => {
                Err(Failure::new(Kind::NotFound, format!("there is no jailer {}", named.display())).hint(GET_IT))
            }
            None => Ok(jailer::find(firecracker).ok_or_else(|| format!("Firecracker's is not here: {GET_IT}"))),
        }
    }
}

/// What is said of it.
pub(super) fn said(jail: &JailSetup) -> String {
    match jail {
        JailSetup::Used { version, .. } => format!("jailer: {version}"),
        JailSetup::Absent { why } => format!("no jailer: {why}"),
    }
}

/// Whether a machine failed because of the jailer: then there is something to decide about it.
pub(super) fn is_its_fault(failure: &Failure) -> bool {
    failure.hints.iter().any(|hint| hint.contains(Setting::Jailer.name()))
}
