//! Requests of Firecracker's API, with the field names of its OpenAPI description.

use std::path::PathBuf;

use serde::Serialize;

/// `PUT /machine-config`.
#[derive(Debug, Serialize)]
pub struct MachineConfig {
    pub vcpu_count: u32,
    pub mem_size_mib: u64,
    pub smt: bool,
    pub track_dirty_pages: bool,
}

/// `PUT /boot-source`.
#[derive(Debug, Serialize)]
pub struct BootSource {
    pub kernel_image_path: PathBuf,
    pub initrd_path: PathBuf,
    pub boot_args: String,
}

/// `PUT /drives/{drive_id}`.
#[derive(Debug, Serialize)]
pub struct Drive {
    pub drive_id: String,
    pub path_on_host: PathBuf,
    pub is_root_device: bool,
    pub is_read_only: bool,
    pub cache_type: &'static str,
    pub io_engine: &'static str,
}

impl Drive {
    /// A disk. With "Writeback", data that the guest has synced is synced on the host; a read-only disk does not need
    /// that.
    pub fn of(drive_id: String, path_on_host: PathBuf, is_read_only: bool) -> Self {
        let cache_type = if is_read_only { "Unsafe" } else { "Writeback" };
        Self { drive_id, path_on_host, is_root_device: false, is_read_only, cache_type, io_engine: "Sync" }
    }
}

/// `PUT /vsock`.
#[derive(Debug, Serialize)]
pub struct Vsock {
    pub guest_cid: u32,
    pub uds_path: String,
}

/// `PUT /metrics`.
#[derive(Debug, Serialize)]
pub struct MetricsConfig {
    pub metrics_path: PathBuf,
}

/// `PUT /entropy`: without a rate limit.
#[derive(Debug, Serialize)]
pub struct Entropy {}

/// `PUT /actions`.
#[derive(Debug, Serialize)]
pub struct Action {
    pub action_type: &'static str,
}

/// `PATCH /vm`.
#[derive(Debug, Serialize)]
pub struct VmPatch {
    pub state: VmRunState,
}

/// Whether the CPUs run.
#[derive(Debug, Serialize)]
pub enum VmRunState {
    /// The CPUs are paused.
    Paused,
    /// The CPUs run.
    Resumed,
}

/// `PUT /snapshot/create`.
#[derive(Debug, Serialize)]
pub struct SnapshotCreate {
    pub snapshot_type: &'static str,
    pub snapshot_path: PathBuf,
    pub mem_file_path: PathBuf,
}

/// `PUT /snapshot/load`.
#[derive(Debug, Serialize)]
pub struct SnapshotLoad {
    pub snapshot_path: PathBuf,
    pub mem_backend: MemoryBackend,
    pub track_dirty_pages: bool,
    pub resume_vm: bool,
    pub vsock_override: VsockOverride,
}

/// The source of the saved memory.
#[derive(Debug, Serialize)]
pub struct MemoryBackend {
    pub backend_type: &'static str,
    pub backend_path: PathBuf,
}

/// The socket of a restored microVM's vsock device.
#[derive(Debug, Serialize)]
pub struct VsockOverride {
    pub uds_path: String,
}
