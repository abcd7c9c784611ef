//! Tests whether KVM works on this host, by booting a microVM with it.
//!
//! A `/dev/kvm` that opens proves nothing: on some hosts KVM creates a VM that never runs.

use body::vm::{SetupRecord, setup::KvmVerdict};
use proto::{
    Failure,
    vm::{Accelerator, Engine, KVM},
};

use super::{Microvms, vm_failure};

/// The reason of a failure, without the console output that may follow it.
pub(super) fn first_line(failure: &Failure) -> String {
    let why = failure.causes().pop().unwrap_or_else(|| failure.to_string());
    why.lines().next().unwrap_or_default().to_owned()
}

impl Microvms {
    /// Tests KVM, unless that was done since the host's last boot, and records the result.
    pub(super) fn probe_kvm(&self, setup: SetupRecord, tell: &dyn Fn(&str)) -> Result<SetupRecord, Failure> {
        let boot_id = sys::proc::boot_id().unwrap_or_default();
        if setup.verdict.as_ref().is_some_and(|verdict| verdict.boot_id == boot_id) {
            return Ok(setup);
        }
        let opened = std::fs::File::options().read(true).write(true).open(KVM);
        let (accelerator, why) = match opened {
            Err(error) => (Accelerator::Emulated, format!("{KVM}: {error}")),
            Ok(_) => {
                tell("testing KVM: booting a microVM with it");
                match self.try_engine(&setup, Engine::Qemu) {
                    Ok(()) => (Accelerator::Kvm, "a microVM booted with it".to_owned()),
                    Err(failure) => (
                        Accelerator::Emulated,
                        format!("{KVM} opens, but no microVM boots with it: {}", first_line(&failure)),
                    ),
                }
            }
        };
        let setup = SetupRecord { verdict: Some(KvmVerdict { accelerator, why, boot_id }), ..setup };
        self.install().write(&setup).map_err(vm_failure)?;
        Ok(setup)
    }

    /// Boots a microVM with KVM under this hypervisor.
    pub(super) fn try_engine(&self, setup: &SetupRecord, which: Engine) -> Result<(), Failure> {
        self.boot_probe(setup, which, Accelerator::Kvm, |_, _| Ok(()))
    }
}
