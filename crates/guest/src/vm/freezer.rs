//! Everybody but this process stands still: so that what is frozen is what was looked at.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// The group of everybody, below the kernel's own root of groups.
pub const GROUP: &str = "body";
/// How long everybody may take: a process in the middle of a long call stops after it.
const PATIENCE: Duration = Duration::from_secs(5);
/// The parent of the kernel's own threads.
const KERNEL_THREADS: u32 = 2;

/// Whether anybody was told to stand still.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Programs that run in the machine: neither this one nor the kernel's threads.
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

/// Stops them all, and whoever they start meanwhile.
///
/// Whoever calls this starts nobody meanwhile; so where there is nobody, nobody has to be told.
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
            // One that ended meanwhile needs no stopping.
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

/// Lets them go on.
pub fn thaw_programs() {
    if STOPPED.swap(false, Ordering::Relaxed) {
        let _ = fs::write(group("held").join("cgroup.freeze"), "0");
    }
}

fn group(name: &str) -> PathBuf {
    Path::new("/sys/fs/cgroup").join(GROUP).join(name)
}
