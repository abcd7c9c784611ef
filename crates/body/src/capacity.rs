//! Measures the capacity of this host: CPUs, memory and disk.

use std::path::Path;

use proto::{Size, limits::HostCapacity};

/// Measures this host; the disk is the one below `data`.
pub fn measure(data: &Path) -> HostCapacity {
    let disk = rustix::fs::statvfs(data).map_or(u64::MAX, |disk| disk.f_blocks.saturating_mul(disk.f_frsize));
    HostCapacity { memory: Size(sys::proc::memory_bytes()), cpus: sys::proc::cpu_count(), disk: Size(disk) }
}
