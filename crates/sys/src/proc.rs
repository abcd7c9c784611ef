//! What procfs tells about processes and this host.

use std::{collections::BTreeSet, io, os::unix::fs::MetadataExt, path::Path};

use crate::fd::read_small;

const STAT_LEN_MAX: u64 = 4096;
/// A process may be in 65,536 groups, and all of them are listed.
const STATUS_LEN_MAX: u64 = 1 << 20;

/// When a process started, in the kernel's ticks since boot: together with the pid a name for good.
pub fn start_ticks(pid: i32) -> io::Result<u64> {
    Ok(stat(pid)?.ticks)
}

/// What the kernel says of a process in one line.
#[derive(Debug, Clone, Copy)]
pub struct Stat {
    /// Its state's letter: `R`, `S`, `Z`, …
    pub state: char,
    /// Whether it is past its end and only being taken apart: it runs no code any more, whatever its state says.
    pub ending: bool,
    /// When it began.
    pub ticks: u64,
}

/// The kernel's flag of a process that is being taken apart (`PF_EXITING`).
const ENDING: u64 = 0x4;

/// Reads that line.
pub fn stat(pid: i32) -> io::Result<Stat> {
    let text = read_small(Path::new(&format!("/proc/{pid}/stat")), STAT_LEN_MAX)?;
    // The name stands in parentheses and may hold any byte, so fields are counted from its end.
    let rest = text.rfind(')').map_or("", |at| &text[at + 1..]);
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next().and_then(|field| field.chars().next());
    let flags: Option<u64> = fields.nth(5).and_then(|field| field.parse().ok());
    let ticks = fields.nth(12).and_then(|field| field.parse().ok());
    let stat = |((state, flags), ticks)| Stat { state, ending: flags & ENDING != 0, ticks };
    state
        .zip(flags)
        .zip(ticks)
        .map(stat)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a stat line without its fields"))
}

/// Whether a process has one of these user ids. Where that cannot be told, one has.
pub fn has_process(ids: std::ops::Range<u32>) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else { return true };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(user_ids).flatten().any(|id| ids.contains(&id))
}

/// The inode that the kernel gives the first pid namespace, the one around all others (`PROC_PID_INIT_INO`).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Whether the caller sees the processes of the whole host, and not only those of a pid namespace of its own.
pub fn sees_every_process() -> bool {
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST_PID_NAMESPACE)
}

/// Every user id that a process has which the caller sees.
pub fn user_ids_in_use() -> io::Result<BTreeSet<u32>> {
    let entries = std::fs::read_dir("/proc")?;
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    Ok(pids.filter_map(user_ids).flatten().collect())
}

/// The user ids of a process: real, effective, saved, of file access. None when it is gone.
fn user_ids(pid: i32) -> Option<Vec<u32>> {
    let text = read_small(Path::new(&format!("/proc/{pid}/status")), STATUS_LEN_MAX).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    Some(line.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect())
}

/// How many threads the caller has.
pub fn thread_count() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

/// The id of this boot.
pub fn boot_id() -> io::Result<String> {
    Ok(read_small(Path::new("/proc/sys/kernel/random/boot_id"), 64)?.trim().to_owned())
}

/// Physical memory in bytes.
pub fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// Processors this process may run on.
pub fn cpu_count() -> u32 {
    let count = rustix::thread::sched_getaffinity(None).map(|set| set.count());
    count.unwrap_or(1).max(1)
}

/// The processor's own counter.
#[cfg(target_arch = "x86_64")]
pub fn ticks() -> u64 {
    // SAFETY: reads a counter that every 64-bit x86 processor has and Linux leaves readable.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The processor's own counter; others than x86 need not be told of it.
#[cfg(not(target_arch = "x86_64"))]
pub fn ticks() -> u64 {
    0
}
