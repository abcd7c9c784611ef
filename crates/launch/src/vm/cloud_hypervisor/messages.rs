//! Requests of Cloud Hypervisor's API, with the field names of its OpenAPI description.

use std::path::PathBuf;

use serde::Serialize;

/// `PUT /vm.create`.
#[derive(Debug, Serialize)]
pub struct VmConfig {
    pub cpus: CpusConfig,
    pub memory: MemoryConfig,
    pub payload: PayloadConfig,
    pub disks: Vec<DiskConfig>,
    pub rng: RngConfig,
    pub serial: ConsoleConfig,
    pub console: ConsoleConfig,
    pub vsock: VsockConfig,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fs: Vec<FsConfig>,
}

/// The CPUs.
#[derive(Debug, Serialize)]
pub struct CpusConfig {
    pub boot_vcpus: u32,
    pub max_vcpus: u32,
}

/// The memory.
#[derive(Debug, Serialize)]
pub struct MemoryConfig {
    pub size: u64,
    /// Whether virtiofsd can map the memory.
    pub shared: bool,
}

/// The kernel to boot.
#[derive(Debug, Serialize)]
pub struct PayloadConfig {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub cmdline: String,
}

/// A disk.
#[derive(Debug, Serialize)]
pub struct DiskConfig {
    pub path: PathBuf,
    pub readonly: bool,
    pub serial: String,
    /// Always set: a guest must not be able to write a header that makes the hypervisor take its disk for another
    /// format.
    pub image_type: &'static str,
}

impl DiskConfig {
    /// A disk that the guest finds by its serial.
    pub fn of(serial: String, path: PathBuf, readonly: bool) -> Self {
        Self { path, readonly, serial, image_type: "Raw" }
    }
}

/// The source of randomness.
#[derive(Debug, Serialize)]
pub struct RngConfig {
    pub src: PathBuf,
}

/// The destination of a console.
#[derive(Debug, Serialize)]
pub struct ConsoleConfig {
    pub mode: &'static str,
}

/// The vsock device, which carries the channel.
#[derive(Debug, Serialize)]
pub struct VsockConfig {
    pub cid: u32,
    pub socket: String,
}

/// A directory that virtiofsd shares.
#[derive(Debug, Serialize)]
pub struct FsConfig {
    pub tag: String,
    pub socket: PathBuf,
    pub num_queues: u32,
    pub queue_size: u32,
}

impl FsConfig {
    /// A directory that the guest finds by its tag.
    pub fn of(tag: String, socket: PathBuf) -> Self {
        Self { tag, socket, num_queues: 1, queue_size: 1024 }
    }
}

/// `PUT /vm.snapshot`.
#[derive(Debug, Serialize)]
pub struct SnapshotConfig {
    pub destination_url: String,
}

/// `PUT /vm.restore`.
#[derive(Debug, Serialize)]
pub struct RestoreConfig {
    pub source_url: String,
    pub prefault: bool,
}
