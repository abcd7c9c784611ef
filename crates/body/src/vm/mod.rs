//! The microVM layer: a Body with its own kernel, under a hypervisor that runs inside the sandbox of the
//! process layer.
//!
//! The process layer starts, freezes and ends these Bodies: the Body's first process is a VMM process that
//! supervises a hypervisor, instead of the guest. This module adds the parts of a microVM: kernel, initramfs,
//! hypervisor, disks, memory.
//!
//! ```text
//! vm/setup.json        the current setup; written last
//!    last-boot.json    the kernel that last booted
//!    kernel-HASH/      vmlinux, modules/ in load order, drivers.json
//!    engine-HASH/      a root with only the hypervisor; engine-NAME-HASH/ for others than QEMU
//!    sharing-KERNEL/   modules that only microVMs with shared directories load
//!    redirect-KERNEL/  modules that only microVMs with an egress policy load
//!    share-HASH/       a root with virtiofsd
//!    jail-HASH/        a root with Firecracker's jailer and the program that it executes
//!    initrd/           initramfs images, one for each version of pal and kernel
//!    images/           read-only file systems, one for each layer of a template, one for each state of this host
//!    uppers/           empty disks, one for each size and number of inodes
//!    warm/KEY/         boot snapshots of templates, taken when their guest was ready
//! ```
//! Invariant: a file or directory in `vm/` with its final name is complete and never changes; it can be
//! created again.
//! Invariant: all microVMs share the images and none can write to them: their mounts are read-only.

pub mod assign;
pub mod cpio;
pub mod disks;
pub mod freeze;
pub mod host_images;
pub mod hypervisor_root;
pub mod images;
pub mod jailer;
pub mod kernel;
pub mod kernel_drivers;
pub mod last_boot;
pub mod measure;
pub mod plan;
pub mod record;
pub mod setup;
pub mod stack;
pub mod upper_copy;
pub mod virtiofsd;

pub use last_boot::LastBoot;
pub use plan::{VmParts, VmSnapshotRef, VmStartMode};
pub use setup::{HypervisorRecord, MicrovmInstall, SetupRecord};

use std::io;

/// Why a microVM cannot be created or changed.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// MicroVMs are not set up.
    #[error("microVMs are not set up here")]
    NotSetUp,
    /// A tool is missing.
    #[error("{0} is not installed")]
    Missing(&'static str),
    /// A tool failed.
    #[error("{tool} failed: {said}")]
    Tool {
        /// The name of the tool.
        tool: String,
        /// The end of its output.
        said: String,
    },
    /// A step failed.
    #[error("cannot {0}")]
    Io(String, #[source] io::Error),
    /// The given kernel cannot be used.
    #[error("{0}")]
    Kernel(String),
    /// The kernel of the setup lacks a driver that this microVM needs.
    #[error("the kernel {kernel} has no driver {driver}, which this microVM needs")]
    Driver {
        /// The kernel.
        kernel: String,
        /// The driver.
        driver: &'static str,
    },
    /// The snapshot of the microVM failed.
    #[error("cannot take a snapshot of the microVM: {0}")]
    Freeze(String),
    /// The microVM did not accept its new identity.
    #[error("cannot assign the pooled microVM to this Body: {0}")]
    Taken(String),
    /// There are more layers than devices for them.
    #[error("the template has {0} layers, and a microVM can have at most {1}")]
    Layers(usize, usize),
}

/// Names the step that a result belongs to.
pub(crate) trait VmStepExt<T> {
    fn step(self, step: impl Into<String>) -> Result<T, VmError>;
}

impl<T, E: Into<io::Error>> VmStepExt<T> for Result<T, E> {
    fn step(self, step: impl Into<String>) -> Result<T, VmError> {
        self.map_err(|error| VmError::Io(step.into(), error.into()))
    }
}

/// Runs a tool of this host to its end.
pub(crate) fn run(command: &mut std::process::Command, tool: &str) -> Result<Vec<u8>, VmError> {
    let output = command
        .stdin(std::process::Stdio::null())
        .env("PATH", TOOLS.join(":"))
        .env("LC_ALL", "C")
        .output()
        .step(format!("run {tool}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = [output.stderr, output.stdout].concat();
    let tail = said.len().saturating_sub(600);
    Err(VmError::Tool { tool: tool.to_owned(), said: proto::text::visible_bytes(said[tail..].trim_ascii()) })
}

const TOOLS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The path of a tool on this host.
pub fn find_tool(name: &'static str) -> Result<std::path::PathBuf, VmError> {
    let found = TOOLS.iter().map(|dir| std::path::Path::new(dir).join(name)).find(|path| path.is_file());
    found.ok_or(VmError::Missing(name))
}
