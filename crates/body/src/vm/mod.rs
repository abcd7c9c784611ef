//! The microVM layer: a Body with a kernel of its own, under a hypervisor that stands inside the process layer's walls.
//!
//! Making, freezing and ending are the process layer's: the Body's first process minds a hypervisor instead of being
//! the guest. What is added here are the parts of a machine: kernel, first file system, hypervisor, disks, memory.
//!
//! ```text
//! vm/setup.json        what is set up; written last
//!    last-boot.json    the kernel that was last seen to boot
//!    kernel-HASH/      vmlinux, modules/ in the order they are loaded, drivers.json
//!    engine-HASH/      a root with the hypervisor and nothing else; engine-NAME-HASH/ for others than QEMU
//!    share-HASH/       a root with the program that shares directories
//!    jail-HASH/        a root with Firecracker's jailer and what it executes
//!    initrd/           first file systems, one for each version of pal and kernel
//!    images/           read-only file systems, one for each layer of a template, one for each state of this host
//!    uppers/           empty disks, one for each size and number of inodes
//!    warm/KEY/         machines of a template that were frozen when their guest was ready
//! ```
//! Invariant: what stands in `vm/` under its final name is whole and never changes; it can be made again.
//! Invariant: images are shared by all machines and writable by none: their mounts are read-only.

pub mod assign;
pub mod cpio;
pub mod disks;
pub mod freeze;
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
pub mod virtiofsd;

pub use last_boot::LastBoot;
pub use plan::{VmParts, VmSnapshotRef, VmStartMode};
pub use setup::{HypervisorRecord, MicrovmInstall, SetupRecord};

use std::io;

/// Why a machine cannot be put together.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// Nothing is set up.
    #[error("microVMs are not set up here")]
    NotSetUp,
    /// A tool is missing.
    #[error("{0} is not installed")]
    Missing(&'static str),
    /// A tool failed.
    #[error("{tool} failed: {said}")]
    Tool {
        /// Which.
        tool: String,
        /// The end of what it said.
        said: String,
    },
    /// A step failed.
    #[error("cannot {0}")]
    Io(String, #[source] io::Error),
    /// What was given as a kernel is none.
    #[error("{0}")]
    Kernel(String),
    /// The kernel that is set up lacks a driver that this machine needs.
    #[error("the kernel {kernel} has no driver {driver}, which this microVM needs")]
    Driver {
        /// The kernel.
        kernel: String,
        /// The driver.
        driver: &'static str,
    },
    /// The machine could not be frozen.
    #[error("the machine could not be frozen: {0}")]
    Freeze(String),
    /// The machine is not whose it was told to be.
    #[error("the machine could not be given to somebody: {0}")]
    Taken(String),
    /// More layers than a machine can have devices.
    #[error("the template has {0} layers, and a machine has room for {1}")]
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

/// Where a tool of this host is.
pub fn find_tool(name: &'static str) -> Result<std::path::PathBuf, VmError> {
    let found = TOOLS.iter().map(|dir| std::path::Path::new(dir).join(name)).find(|path| path.is_file());
    found.ok_or(VmError::Missing(name))
}
