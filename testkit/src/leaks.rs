//! Finds what a test left behind.

use std::{
    fs,
    path::Path,
    sync::{Mutex, MutexGuard},
};

/// Leftovers are found by process, so tests in one process take turns. Under nextest each test has its own
/// process.
pub fn turn() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A process of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostProcess {
    /// Its pid.
    pub pid: i32,
    /// Its parent's pid.
    pub parent: i32,
    /// Its name.
    pub name: String,
    /// Its state letter.
    pub state: char,
}

/// Every visible process.
pub fn processes() -> Vec<HostProcess> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| process(entry.file_name().to_str()?.parse().ok()?)).collect()
}

fn process(pid: i32) -> Option<HostProcess> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (start, end) = (stat.find('(')?, stat.rfind(')')?);
    let mut rest = stat[end + 1..].split_ascii_whitespace();
    let state = rest.next()?.chars().next()?;
    Some(HostProcess {
        pid,
        parent: rest.next()?.parse().ok()?,
        name: stat[start + 1..end].to_owned(),
        state,
    })
}

/// All running descendants of this process. With [`watch`] no process can leave this tree.
pub fn descendants() -> Vec<HostProcess> {
    let all = processes();
    let mut family = vec![std::process::id() as i32];
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(parent) = family.get(at).copied() {
        for child in all.iter().filter(|process| process.parent == parent) {
            family.push(child.pid);
            found.push(child.clone());
        }
        at += 1;
    }
    found.retain(|process| !matches!(process.state, 'Z' | 'X'));
    found
}

/// Makes this process the parent of every orphaned descendant, so that none is missed.
pub fn watch() {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .expect("every process may adopt its orphans");
}

/// Reaps children that have ended and that no other code waits for.
pub fn reap() {
    while let Ok(Some(_)) = rustix::process::wait(rustix::process::WaitOptions::NOHANG) {}
}

/// Kills processes that this one or its children started.
pub fn end(processes: &[HostProcess]) {
    for process in processes {
        if let Some(pid) = rustix::process::Pid::from_raw(process.pid) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Lines of the mount table that name a path.
pub fn mounts(path: &Path) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let path = path.to_string_lossy();
    table.lines().filter(|line| line.contains(&*path)).map(str::to_owned).collect()
}

/// Cgroups of the Bodies with these ids.
pub fn cgroups(bodies: &[String]) -> Vec<String> {
    let found = body::groups::existing().into_iter().filter(|(body, _)| bodies.contains(body));
    found.map(|(_, path)| path.display().to_string()).collect()
}

/// The open descriptors of this process.
pub fn descriptors() -> Vec<String> {
    let open = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let named = |path: &Path| fs::read_link(path).map(|link| link.display().to_string()).ok();
    let mut open: Vec<String> =
        open.filter_map(|entry| named(&entry.path())).filter(|link| !link.starts_with("/proc")).collect();
    open.sort();
    open
}

/// The names in a directory, which may be missing.
pub fn entries(dir: &Path) -> Vec<String> {
    let found = fs::read_dir(dir).into_iter().flatten().flatten();
    found.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Kills one process that the caller started, with SIGKILL.
pub fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is there and ours");
}
