//! A microVM instead of the guest: the Body's first process becomes the VMM process, which starts the hypervisor and
//! supervises it.
//!
//! The VMM process and the hypervisor run inside the sandbox of every process Body: ids of its own, namespaces, an
//! almost empty root, no network, Landlock, seccomp, cgroups. The VMM process connects callers on the Body's socket
//! to the guest in the microVM, saves the microVM on request, and ends with it.
//!
//! Invariant: everything the guest sends is parsed here, inside the sandbox, and nowhere outside.
//! Invariant: files that the hypervisor must not change are read-only by their mount, never by an option of the
//! hypervisor.

mod cloud_hypervisor;
mod firecracker;
pub mod firecracker_jail;
mod http;
mod hypervisor;
mod memory;
mod migration_stream;
mod open_broker;
mod qemu;
mod qmp;
mod requests;
mod save;
mod scratch;
pub mod sidecar;
pub mod virtiofs_daemons;
mod vmm;
mod vsock;

use std::{
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
};

use proto::{
    Mechanism,
    guest::EGRESS_PORT,
    vm::{Accelerator, Engine, GuestReceipt, NOT_TRANSPARENT, StartReport, VmPlan},
};

use crate::report::StepError;

pub use http::ApiRequest;
pub use requests::{requests, traffic};

/// The input of the VMM process.
pub struct VmmInput {
    /// The plan of the microVM.
    pub vm: VmPlan,
    /// The socket on which callers of the guest connect.
    pub callers: UnixListener,
    /// The socket for control requests, such as saving the microVM.
    pub control: UnixListener,
    /// The virtiofsd processes that share directories with it.
    pub sharers: Vec<sidecar::Sidecar>,
    /// Firecracker's jailer, which starts the hypervisor.
    pub jailer: Option<sidecar::Sidecar>,
}

/// Starts the microVM, reports the result, and supervises it to its end. Returns an exit code.
pub fn run_vmm(input: VmmInput, tell: impl FnOnce(Result<StartReport, StepError>)) -> i32 {
    vmm::run(input, tell)
}

/// The mechanisms that enforce the boundary of a microVM, besides the sandbox around its hypervisor.
pub fn mechanisms(vm: &VmPlan, start: &StartReport) -> Vec<Mechanism> {
    let accelerator = match vm.accelerator {
        Accelerator::Kvm => Mechanism::enforced("hypervisor", "kvm: the CPU isolates the microVM"),
        Accelerator::Emulated => Mechanism::enforced(
            "hypervisor",
            "emulated: a program runs each instruction of the microVM, slower than the CPU could",
        ),
    };
    let mut held = vec![
        Mechanism::enforced(
            "own kernel",
            format!("Linux {}, by {}", start.receipt.kernel, engine_name(vm.engine)),
        ),
        accelerator,
        Mechanism::enforced(
            "microVM devices",
            format!(
                "one channel to its guest, {} read-only images, one private disk; no network",
                vm.images.len()
            ),
        ),
    ];
    if !vm.shares.is_empty() {
        held.push(Mechanism::enforced(
            "shared directories",
            format!(
                "{} by virtiofsd, each in namespaces, ids and a root of its own; read-only by the mount; no setuid files",
                vm.shares.len()
            ),
        ));
    }
    held.extend(vm.jailer.as_ref().map(firecracker_jail::mechanism));
    held.extend(network_mechanism(vm, &start.receipt));
    held
}

/// Whether programs of a microVM with an egress policy open connections as usual.
fn network_mechanism(vm: &VmPlan, receipt: &GuestReceipt) -> Option<Mechanism> {
    const NAME: &str = "transparent network";
    vm.welcome.config.forward.as_ref().filter(|forward| forward.transparent)?;
    Some(match receipt.transparent {
        true => Mechanism::enforced(
            NAME,
            "the guest's kernel redirects connections and name lookups to the egress proxy; a process that is root in the microVM can undo that, and then reaches nothing",
        ),
        false => Mechanism::degraded(
            NAME,
            format!(
                "programs must use the proxy at 127.0.0.1:{EGRESS_PORT}: {}",
                receipt
                    .trouble
                    .iter()
                    .find(|line| line.starts_with(NOT_TRANSPARENT))
                    .map_or("the guest was saved without the redirect", String::as_str)
            ),
        ),
    })
}

/// The name of a hypervisor in the enforcement record.
fn engine_name(engine: Engine) -> &'static str {
    match engine {
        Engine::Qemu => "QEMU's microvm machine",
        Engine::CloudHypervisor => "Cloud Hypervisor",
        Engine::Firecracker => "Firecracker",
    }
}

/// The file name of a path, for messages that must not contain host paths.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A pair of connected sockets.
fn pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}
