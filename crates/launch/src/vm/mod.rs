//! A machine in place of the guest: the Body's first process starts its hypervisor and minds it.
//!
//! It stands inside the same walls as every process Body, and so does the hypervisor: ids of its own, namespaces, an
//! almost empty root, no network, Landlock, the system call filter, cgroups. It joins callers on the Body's socket to
//! the guest in the machine, freezes the machine when asked, and ends when the machine ends.
//!
//! Invariant: everything the guest sends is parsed here, behind the walls, and nowhere outside of them.
//! Invariant: what the hypervisor may not change is read-only by its mount, never by an option of the hypervisor.

mod cloud_hypervisor;
mod firecracker;
mod http;
mod hypervisor;
pub mod jail;
mod memory;
mod migration_stream;
mod open_broker;
mod qemu;
mod qmp;
mod requests;
mod save;
mod scratch;
pub mod share;
pub mod sidecar;
mod vmm;
mod vsock;

use std::{
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
};

use proto::{
    Mechanism,
    vm::{Accelerator, Engine, StartReport, VmPlan},
};

use crate::report::StepError;

pub use http::ApiRequest;
pub use requests::{requests, traffic};

/// What the minder of a machine is given.
pub struct VmmInput {
    /// The machine.
    pub vm: VmPlan,
    /// Where callers of its guest come from.
    pub callers: UnixListener,
    /// Where it is asked to be frozen.
    pub control: UnixListener,
    /// Who shares directories with it.
    pub sharers: Vec<sidecar::Sidecar>,
    /// Firecracker's jailer, which starts the hypervisor.
    pub jailer: Option<sidecar::Sidecar>,
}

/// Starts the machine, tells how that went, and minds it to its end. The answer is an exit code.
pub fn run_vmm(input: VmmInput, tell: impl FnOnce(Result<StartReport, StepError>)) -> i32 {
    vmm::run(input, tell)
}

/// What holds a machine besides the walls around its hypervisor.
pub fn mechanisms(vm: &VmPlan, revival: &StartReport) -> Vec<Mechanism> {
    let accelerator = match vm.accelerator {
        Accelerator::Kvm => Mechanism::enforced("hypervisor", "kvm: the processor keeps the machine apart"),
        Accelerator::Emulated => Mechanism::enforced(
            "hypervisor",
            "emulated: a program runs the machine's every instruction, slower than the processor could",
        ),
    };
    let mut held = vec![
        Mechanism::enforced(
            "own kernel",
            format!("Linux {}, by {}", revival.receipt.kernel, called(vm.engine)),
        ),
        accelerator,
        Mechanism::enforced(
            "devices of the machine",
            format!(
                "one line to its guest, {} read-only images, one private disk; no network",
                vm.images.len()
            ),
        ),
    ];
    if !vm.shares.is_empty() {
        held.push(Mechanism::enforced(
            "shared directories",
            format!(
                "{} by virtiofsd, each in namespaces, ids and a root of its own; read-only by the mount; nothing setuid is made",
                vm.shares.len()
            ),
        ));
    }
    held.extend(vm.jailer.as_ref().map(jail::mechanism));
    held
}

/// A hypervisor, as a record calls it.
fn called(engine: Engine) -> &'static str {
    match engine {
        Engine::Qemu => "QEMU's microvm machine",
        Engine::CloudHypervisor => "Cloud Hypervisor",
        Engine::Firecracker => "Firecracker",
    }
}

/// The name of a file, for a message that must not name a place.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A pair of joined sockets.
fn pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}
