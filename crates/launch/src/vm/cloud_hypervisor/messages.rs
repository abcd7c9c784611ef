//! What Cloud Hypervisor's API is sent, by the names its description has.

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

/// Processors.
#[derive(Debug, Serialize)]
pub struct CpusConfig {
    pub boot_vcpus: u32,
    pub max_vcpus: u32,
}

/// Memory.
#[derive(Debug, Serialize)]
pub struct MemoryConfig {
    pub size: u64,
    /// What shares directories reaches into it.
    pub shared: bool,
}

/// What is booted.
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
    /// Always said: what a guest writes to its disk must never be taken for the head of another format.
    pub image_type: &'static str,
}

impl DiskConfig {
    /// A disk that its guest finds by that name.
    pub fn of(serial: String, path: PathBuf, readonly: bool) -> Self {
        Self { path, readonly, serial, image_type: "Raw" }
    }
}

/// Randomness.
#[derive(Debug, Serialize)]
pub struct RngConfig {
    pub src: PathBuf,
}

/// Where a console goes.
#[derive(Debug, Serialize)]
pub struct ConsoleConfig {
    pub mode: &'static str,
}

/// The line.
#[derive(Debug, Serialize)]
pub struct VsockConfig {
    pub cid: u32,
    pub socket: String,
}

/// A directory that another program shares.
#[derive(Debug, Serialize)]
pub struct FsConfig {
    pub tag: String,
    pub socket: PathBuf,
    pub num_queues: u32,
    pub queue_size: u32,
}

impl FsConfig {
    /// One that its guest finds by that name.
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
