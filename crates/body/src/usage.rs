//! Measures a Body's resource usage from the host, without asking the guest.

use std::{collections::BTreeSet, path::Path};

use proto::launch::{CgroupVersion, RunRecord};

const FILE_LEN_MAX: u64 = 64 << 10;
/// Processes that one measurement reads.
const PROCESSES_MAX: usize = 16 << 10;

/// The resource usage of a Body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BodyUsage {
    /// CPU time since its start, as far as it can still be counted.
    pub cpu_ms: u64,
    /// Memory, page cache included.
    pub memory: u64,
    /// The page cache that the kernel can drop.
    pub cache: u64,
    /// Number of processes.
    pub processes: u64,
}

/// Measures a running Body.
pub fn measure(running: &RunRecord) -> BodyUsage {
    let pids = processes(running);
    let (memory, cache) = memory(running).unwrap_or_else(|| (pids.iter().map(|pid| resident(*pid)).sum(), 0));
    let cpu_ms = cpu_v2(running).unwrap_or_else(|| pids.iter().map(|pid| cpu(*pid)).sum());
    BodyUsage { cpu_ms, memory, cache, processes: pids.len() as u64 }
}

fn processes(running: &RunRecord) -> BTreeSet<i32> {
    let listed = running.cgroups.first().and_then(|group| sys::cgroup::processes(&group.path).ok());
    let listed = listed.unwrap_or_else(|| crate::process::process_tree(running).unwrap_or_default());
    listed.into_iter().take(PROCESSES_MAX).collect()
}

fn memory(running: &RunRecord) -> Option<(u64, u64)> {
    let number = |path: &Path, name: &str| read(path, name)?.trim().parse::<u64>().ok();
    running.cgroups.iter().find_map(|group| {
        let used =
            number(&group.path, "memory.current").or_else(|| number(&group.path, "memory.usage_in_bytes"))?;
        let stat = read(&group.path, "memory.stat").unwrap_or_default();
        Some((used, field(&stat, "total_cache").or_else(|| field(&stat, "file")).unwrap_or(0)))
    })
}

fn cpu_v2(running: &RunRecord) -> Option<u64> {
    let group = running.cgroups.iter().find(|group| group.version == CgroupVersion::V2)?;
    field(&read(&group.path, "cpu.stat")?, "usage_usec").map(|micros| micros / 1000)
}

/// CPU time of a process and of its reaped children, in hundredths of a second.
fn cpu(pid: i32) -> u64 {
    let stat = read(Path::new(&format!("/proc/{pid}")), "stat").unwrap_or_default();
    let rest = stat.rfind(')').map_or("", |at| &stat[at + 1..]);
    rest.split_ascii_whitespace().skip(11).take(4).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>()
        * 10
}

fn resident(pid: i32) -> u64 {
    let status = read(Path::new(&format!("/proc/{pid}")), "status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn read(dir: &Path, name: &str) -> Option<String> {
    sys::fd::read_small(&dir.join(name), FILE_LEN_MAX).ok()
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}
