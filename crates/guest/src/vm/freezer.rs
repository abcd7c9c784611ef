//! Freezes every process but this one, so that a snapshot holds exactly the state that was reported.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// The cgroup of all processes, below the cgroup root.
pub const GROUP: &str = "body";
/// How long freezing may take: a process in a long system call stops only after it.
const PATIENCE: Duration = Duration::from_secs(5);
/// The pid of kthreadd, the parent of all kernel threads.
const KERNEL_THREADS: u32 = 2;

/// Whether processes are frozen now.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Pids of the programs in the microVM: all processes but this one and the kernel threads.
pub fn programs() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid > KERNEL_THREADS && is_program(*pid)).collect()
}

fn is_program(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let mut fields = stat.rfind(')').map_or("", |at| &stat[at + 1..]).split_ascii_whitespace();
    let state = fields.next();
    let parent = fields.next().and_then(|parent| parent.parse::<u32>().ok());
    !matches!(state, None | Some("Z" | "X")) && parent != Some(KERNEL_THREADS)
}

/// Freezes all programs, and the processes that they start meanwhile.
///
/// The caller starts no process meanwhile, so if no program runs, there is nothing to freeze.
pub fn freeze_programs() -> io::Result<()> {
    if programs().is_empty() {
        return Ok(());
    }
    let held = group("held");
    let deadline = Instant::now() + PATIENCE;
    STOPPED.store(true, Ordering::Relaxed);
    fs::write(held.join("cgroup.freeze"), "1")?;
    loop {
        let mut moved = 0;
        for pid in programs().into_iter().filter(|pid| !is_held(*pid)) {
            // The write fails for a process that has ended meanwhile, which needs no freezing.
            moved += usize::from(fs::write(held.join("cgroup.procs"), pid.to_string()).is_ok());
        }
        let frozen = fs::read_to_string(held.join("cgroup.events"))
            .is_ok_and(|events| events.lines().any(|line| line == "frozen 1"));
        if moved == 0 && (frozen || programs().is_empty()) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_held(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|group| group.trim_end().ends_with("/held"))
}

/// Lets the programs continue.
pub fn thaw_programs() {
    if STOPPED.swap(false, Ordering::Relaxed) {
        let _ = fs::write(group("held").join("cgroup.freeze"), "0");
    }
}

fn group(name: &str) -> PathBuf {
    Path::new("/sys/fs/cgroup").join(GROUP).join(name)
}
