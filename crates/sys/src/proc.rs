//! Information from procfs about processes and this host.

use std::{collections::BTreeSet, io, os::unix::fs::MetadataExt, path::Path, time::Duration};

use crate::fd::read_small;

const STAT_LEN_MAX: u64 = 4096;
/// A process may be in 65,536 groups, and the file lists all of them.
const STATUS_LEN_MAX: u64 = 1 << 20;

/// The start time of a process, in clock ticks since boot. Together with the pid it identifies a process for good.
pub fn start_ticks(pid: i32) -> io::Result<u64> {
    Ok(stat(pid)?.ticks)
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy)]
pub struct ProcessStat {
    /// Its state's letter: `R`, `S`, `Z`, …
    pub state: char,
    /// The pid of its parent.
    pub parent: i32,
    /// Whether it is a thread of the kernel.
    pub kernel: bool,
    /// Whether it was killed or is exiting: it runs no code of its own any more, whatever its state says.
    pub ending: bool,
    /// Its start time.
    pub ticks: u64,
    /// The CPU time that it has used, over all threads.
    pub busy: Duration,
}

/// The kernel counts CPU time in hundredths of a second.
const TICK_MS: u64 = 10;

/// Kernel flags of a process that is exiting (`PF_EXITING`) or has received its fatal signal (`PF_SIGNALED`).
const ENDING: u64 = 0x4 | 0x400;
/// The kernel flag of a thread of the kernel (`PF_KTHREAD`).
const KERNEL: u64 = 0x20_0000;
/// `SIGKILL` among the pending signals. On a busy host, the process may have to wait for a CPU before it dies.
const KILLED: u64 = 1 << 8;

/// Reads `/proc/PID/stat`.
pub fn stat(pid: i32) -> io::Result<ProcessStat> {
    let text = read_small(Path::new(&format!("/proc/{pid}/stat")), STAT_LEN_MAX)?;
    parse_stat(&text)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a stat line without its fields"))
}

fn parse_stat(text: &str) -> Option<ProcessStat> {
    // The name is in parentheses and may contain any byte, so fields are counted from its end.
    let rest = text.rfind(')').map_or("", |at| &text[at + 1..]);
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let flags = number(6)?;
    Some(ProcessStat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        kernel: flags & KERNEL != 0,
        ending: flags & ENDING != 0 || number(28)? & KILLED != 0,
        ticks: number(19)?,
        busy: Duration::from_millis((number(11)? + number(12)?) * TICK_MS),
    })
}

/// The time since a process started that began at these ticks.
pub fn age(ticks: u64) -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
    now.saturating_sub(Duration::from_millis(ticks * TICK_MS))
}

/// The pids of all processes that the caller sees, in order.
pub fn pids() -> io::Result<BTreeSet<i32>> {
    let entries = std::fs::read_dir("/proc")?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Fields of `/proc/PID/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStatus {
    /// Its effective user id.
    pub user: u32,
    /// Its resident memory in bytes; 0 for a zombie.
    pub resident: u64,
}

/// Reads `/proc/PID/status`; `None` if the process has ended.
pub fn status(pid: i32) -> Option<ProcessStatus> {
    let text = read_status(pid)?;
    let user = *user_ids_in(&text)?.get(1)?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Some(ProcessStatus { user, resident: kib.unwrap_or(0) * 1024 })
}

/// Whether a thread of a process runs or is ready to run.
pub fn wants_processor(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| stat(task.file_name().to_str()?.parse().ok()?).ok()).any(|stat| stat.state == 'R')
}

/// Whether any process has one of these user ids; true if that cannot be determined.
pub fn has_process(ids: std::ops::Range<u32>) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else { return true };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(user_ids).flatten().any(|id| ids.contains(&id))
}

/// The inode number of the initial pid namespace (`PROC_PID_INIT_INO`).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Whether the caller sees the processes of the whole host, and not only those of its own pid namespace.
pub fn sees_every_process() -> bool {
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST_PID_NAMESPACE)
}

/// All user ids of the processes that the caller sees.
pub fn user_ids_in_use() -> io::Result<BTreeSet<u32>> {
    let entries = std::fs::read_dir("/proc")?;
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    Ok(pids.filter_map(user_ids).flatten().collect())
}

/// The user ids of a process: real, effective, saved, file system. `None` if it has ended.
fn user_ids(pid: i32) -> Option<Vec<u32>> {
    user_ids_in(&read_status(pid)?)
}

fn read_status(pid: i32) -> Option<String> {
    read_small(Path::new(&format!("/proc/{pid}/status")), STATUS_LEN_MAX).ok()
}

fn user_ids_in(text: &str) -> Option<Vec<u32>> {
    let line = text.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    Some(line.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect())
}

/// How many threads the caller has.
pub fn thread_count() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

/// Whether the caller is the only thread of its process.
pub fn is_only_thread() -> io::Result<bool> {
    if libc_is_single_threaded() { Ok(true) } else { Ok(thread_count()? == 1) }
}

/// Whether the C library, which starts every thread, has started none yet: asking the kernel takes five calls.
#[cfg(target_env = "gnu")]
fn libc_is_single_threaded() -> bool {
    unsafe extern "C" {
        /// `sys/single_threaded.h`.
        static __libc_single_threaded: libc::c_char;
    }
    // SAFETY: one byte that the C library writes when it starts a thread, and only the caller could be doing that.
    unsafe { __libc_single_threaded != 0 }
}

#[cfg(not(target_env = "gnu"))]
fn libc_is_single_threaded() -> bool {
    false
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

/// The number of CPUs that this process may run on.
pub fn cpu_count() -> u32 {
    let count = rustix::thread::sched_getaffinity(None).map(|set| set.count());
    count.unwrap_or(1).max(1)
}

/// The calling thread and its helpers.
const OWN_RUNNING: u32 = 3;

/// Whether some CPU is idle, not counting the caller and two processes that it may just have started; false if that
/// cannot be determined.
pub fn has_idle_processor() -> bool {
    let text = read_small(Path::new("/proc/loadavg"), STAT_LEN_MAX).unwrap_or_default();
    let running =
        text.split_ascii_whitespace().nth(3).and_then(|field| field.split('/').next()?.parse().ok());
    running.is_some_and(|running: u32| running < cpu_count() + OWN_RUNNING)
}

/// The CPU's timestamp counter.
#[cfg(target_arch = "x86_64")]
pub fn ticks() -> u64 {
    // SAFETY: reads a counter that every 64-bit x86 CPU has and Linux leaves readable.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Only x86 has a timestamp counter that is used here.
#[cfg(not(target_arch = "x86_64"))]
pub fn ticks() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_works_wants_a_processor_and_has_had_one() {
        let own = std::process::id() as i32;
        let before = stat(own).unwrap().busy;
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while stat(own).unwrap().busy < before + Duration::from_millis(3 * TICK_MS) {
            assert!(std::time::Instant::now() < deadline, "what is used is not counted");
        }
        assert!(wants_processor(own));
        let mut waiting = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = waiting.id() as i32;
        while wants_processor(pid) {
            assert!(std::time::Instant::now() < deadline, "who sleeps wants nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
        waiting.kill().unwrap();
        waiting.wait().unwrap();
    }
}
