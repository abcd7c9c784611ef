//! Firecracker's jailer: finds it and sets it up, or explains why it is not used.
//!
//! Invariant: a jailer that the user named and that cannot be used is an error; `pal` never silently runs without it.

use std::path::{Path, PathBuf};

use body::vm::{
    SetupRecord,
    jailer::{self, JAILER, JailSetup},
};
use proto::{Failure, Kind, vm::Engine};

use super::{Microvms, hypervisors::version, vm_failure};
use crate::{Setting, settings::NONE};

/// The hint that says where to get the jailer.
const GET_IT: &str = "it comes with Firecracker: https://github.com/firecracker-microvm/firecracker/releases; put it beside Firecracker, or name it: pal config set microvm.jailer FILE";

impl Microvms {
    /// The jailer for a microVM under that hypervisor; `None` unless the hypervisor is Firecracker.
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
                    .because("the jailer changes its root directory, where the libraries are missing, before it has finished")
                    .hint("use a statically linked jailer, as in Firecracker's releases")
                    .hint(GET_IT));
            }
            install.make_jail(&place, &jailer, programs, &version).map_err(vm_failure)?;
        }
        jailer::of(place, &firecracker).map(Some).map_err(vm_failure)
    }

    /// The path of the jailer, or the reason why it is not used.
    fn jailer(&self, firecracker: &Path) -> Result<Result<PathBuf, String>, Failure> {
        let decided = self.settings()?.jailer;
        match decided {
            Some(none) if none == Path::new(NONE) => {
                Ok(Err("the setting microvm.jailer disables it: pal config get microvm.jailer".to_owned()))
            }
            _ if !sys::caps::is_host_root() => Ok(Err(
                "an ordinary user cannot give /dev/kvm to the jailer's user id; the other mechanisms still confine Firecracker".to_owned(),
            )),
            Some(named) if named.is_file() => Ok(Ok(named)),
            Some(named) => {
                Err(Failure::new(Kind::NotFound, format!("there is no jailer {}", named.display())).hint(GET_IT))
            }
            None => Ok(jailer::find(firecracker).ok_or_else(|| format!("it is not installed: {GET_IT}"))),
        }
    }
}

/// Describes the jailer's setup.
pub(super) fn said(jail: &JailSetup) -> String {
    match jail {
        JailSetup::Used { version, .. } => format!("jailer: {version}"),
        JailSetup::Absent { why } => format!("no jailer: {why}"),
    }
}

/// Whether a microVM failed because of the jailer; then a hint names the jailer's setting.
pub(super) fn is_its_fault(failure: &Failure) -> bool {
    failure.hints.iter().any(|hint| hint.contains(Setting::Jailer.name()))
}
