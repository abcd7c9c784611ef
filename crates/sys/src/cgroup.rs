//! Cgroups of both versions: their mount points, entering, freezing and removing a group.
//!
//! Invariant: a process enters a v1 group by writing `0` to `tasks` itself. The kernel then needs no grace period:
//! 0.1 ms for four controllers, where moving another process costs 8 ms and more.

use std::{
    fs::File,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::fd::{read_small, write_kernel};

const FILE_LEN_MAX: u64 = 1 << 20;
/// More than the kernel writes to any file that is read in one call.
const SMALL_LEN_MAX: usize = 1 << 10;

/// The cgroup mount points of this host.
#[derive(Debug, Clone, Default)]
pub struct CgroupMounts {
    /// The v1 hierarchies: controller and mount point.
    pub v1: Vec<(String, PathBuf)>,
    /// The v2 hierarchy, if it is mounted.
    pub v2: Option<PathBuf>,
}

impl CgroupMounts {
    /// Looks at the usual paths first, and only then at the mount table, which the kernel takes longer to write than
    /// it takes for all other steps here.
    pub fn find() -> io::Result<Self> {
        if let Some(usual) = Self::usual() {
            return Ok(usual);
        }
        Ok(Self::parse(&read_small(Path::new("/proc/self/mountinfo"), FILE_LEN_MAX)?))
    }

    /// Recognises the usual layout: only v2, or every v1 hierarchy that a Body can use under its own name.
    fn usual() -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let is = |path: &Path, magic: i64| rustix::fs::statfs(path).is_ok_and(|found| found.f_type == magic);
        if is(root, libc::CGROUP2_SUPER_MAGIC) {
            return Some(Self { v1: Vec::new(), v2: Some(root.to_owned()) });
        }
        let v1 = |name: &str| {
            Some(root.join(name))
                .filter(|path| is(path, libc::CGROUP_SUPER_MAGIC))
                .map(|path| (name.to_owned(), path))
        };
        let v1 = ["memory", "pids", "freezer", "cpu"].into_iter().map(v1).collect::<Option<_>>()?;
        Some(Self { v1, v2: Some(root.join("unified")).filter(|path| is(path, libc::CGROUP2_SUPER_MAGIC)) })
    }

    fn parse(mountinfo: &str) -> Self {
        let mut found = Self::default();
        for line in mountinfo.lines() {
            let Some((before, after)) = line.split_once(" - ") else { continue };
            let (Some(point), mut after) = (before.split(' ').nth(4), after.split(' ')) else { continue };
            match after.next() {
                Some("cgroup2") => found.v2 = Some(PathBuf::from(point)),
                Some("cgroup") => {
                    let controllers = after.nth(1).unwrap_or_default().split(',');
                    found.v1.extend(controllers.map(|name| (name.to_owned(), PathBuf::from(point))));
                }
                _ => {}
            }
        }
        found
    }

    /// The v1 hierarchy of a controller.
    pub fn v1_of(&self, controller: &str) -> Option<&Path> {
        self.v1.iter().find(|(name, _)| name == controller).map(|(_, path)| path.as_path())
    }

    /// Controllers that the root of the v2 hierarchy offers.
    pub fn v2_controllers(&self) -> Vec<String> {
        let text = self.v2.as_ref().and_then(|root| read_small(&root.join("cgroup.controllers"), 4096).ok());
        text.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    }
}

/// The caller's own group in the v2 hierarchy, relative to its mount point.
pub fn own_v2() -> Option<PathBuf> {
    let text = read_small(Path::new("/proc/self/cgroup"), 65536).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::/")).map(PathBuf::from)
}

/// Opens the `tasks` file of a v1 group. Any process with the descriptor can enter: the kernel checks the rights of
/// the opener.
pub fn door_v1(group: &Path) -> io::Result<OwnedFd> {
    Ok(File::options().write(true).open(group.join("tasks"))?.into())
}

/// Moves the caller into a v1 group.
pub fn enter_v1(door: BorrowedFd<'_>) -> io::Result<()> {
    rustix::io::write(door, b"0")?;
    Ok(())
}

/// Moves a process into a v2 group.
pub fn move_v2(pid: i32, group: &Path) -> io::Result<()> {
    write_kernel(&group.join("cgroup.procs"), &pid.to_string())
}

/// Removes a group with the groups below it. A missing group is no error; one that is still emptying is waited for.
pub fn remove(group: &Path, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        match std::fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty) =>
            {
                if remove_below(group) {
                    continue;
                }
                if Instant::now() >= deadline {
                    return Err(error);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Removes the empty groups below a group; returns whether any was removed.
fn remove_below(group: &Path) -> bool {
    let mut went = false;
    for entry in std::fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let below = remove_below(&entry.path());
            went |= std::fs::remove_dir(entry.path()).is_ok() || below;
        }
    }
    went
}

/// The processes of a group.
pub fn processes(group: &Path) -> io::Result<Vec<i32>> {
    let text = read_small(&group.join("cgroup.procs"), FILE_LEN_MAX)?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// How often the OOM killer ran in this group; `None` if the group does not limit memory.
pub fn oom_kills(group: &Path) -> Option<u64> {
    OomCounter::of(group)?.count()
}

/// An open file with the OOM count, for callers that ask more than once.
#[derive(Debug)]
pub struct OomCounter(File);

impl OomCounter {
    /// Opens the count of a group; `None` if the group does not limit memory.
    pub fn of(group: &Path) -> Option<Self> {
        let open = |name: &str| File::open(group.join(name)).ok();
        open("memory.oom_control").or_else(|| open("memory.events")).map(Self)
    }

    /// The current count; `None` if the group was removed.
    pub fn count(&self) -> Option<u64> {
        read_once(&self.0, |text| {
            let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
            count.and_then(|count| count.trim().parse().ok())
        })?
    }
}

/// Freezes every process of a v1 freezer group, and waits until all are frozen.
///
/// A v1 group in which processes keep forking can stay `FREEZING` forever, because the kernel misses a process that
/// is forked at the wrong moment. So the request is repeated, and the group is sometimes thawed for a moment, as runc
/// does.
pub fn freeze_v1(group: &Path, patience: Duration) -> io::Result<()> {
    const LOOKS: u32 = 50;
    let file = group.join("freezer.state");
    let mut looks = 0;
    let frozen = wait_until(patience, || {
        looks += 1;
        if looks % LOOKS == 0 {
            write_kernel(&file, "THAWED")?;
            std::thread::sleep(Duration::from_millis(10));
        }
        write_kernel(&file, "FROZEN")?;
        Ok(read_small(&file, 64)?.trim() == "FROZEN")
    });
    // A partly frozen group is thawed.
    frozen.inspect_err(|_| drop(write_kernel(&file, "THAWED")))
}

/// Thaws every process of a v1 freezer group.
pub fn thaw_v1(group: &Path, patience: Duration) -> io::Result<()> {
    let file = group.join("freezer.state");
    write_kernel(&file, "THAWED")?;
    wait_until(patience, || Ok(read_small(&file, 64)?.trim() == "THAWED"))
}

/// Freezes or thaws every process of a v2 group.
pub fn freeze_v2(group: &Path, frozen: bool, patience: Duration) -> io::Result<()> {
    let wanted = if frozen { "frozen 1" } else { "frozen 0" };
    write_kernel(&group.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
    wait_until(patience, || {
        Ok(read_small(&group.join("cgroup.events"), 4096)?.lines().any(|line| line == wanted))
    })
}

fn wait_until(patience: Duration, mut done: impl FnMut() -> io::Result<bool>) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    while !done()? {
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Whether a group is frozen or being frozen; `None` if it has no freezer.
pub fn frozen(group: &Path) -> Option<bool> {
    FreezerState::of(group)?.is_frozen()
}

/// An open file with the freezer state, for callers that ask more than once.
#[derive(Debug)]
pub struct FreezerState(File);

impl FreezerState {
    /// Opens the state of a group; `None` if it has no freezer.
    pub fn of(group: &Path) -> Option<Self> {
        let open = |name: &str| File::open(group.join(name)).ok();
        open("freezer.state").or_else(|| open("cgroup.freeze")).map(Self)
    }

    /// Whether the group is frozen now; `None` if it was removed.
    pub fn is_frozen(&self) -> Option<bool> {
        read_once(&self.0, |state| !matches!(state.trim(), "THAWED" | "0"))
    }
}

/// Reads a kernel file of a few lines in one call.
fn read_once<T>(file: &File, read: impl FnOnce(&str) -> T) -> Option<T> {
    let mut room = [0; SMALL_LEN_MAX];
    let len = rustix::io::pread(file, &mut room[..], 0).ok()?;
    std::str::from_utf8(room.get(..len)?).ok().map(read)
}

/// Whether a group is frozen; false where there is no freezer.
pub fn is_frozen(group: &Path) -> bool {
    frozen(group).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_in_mountinfo() {
        let mounts = CgroupMounts::parse(
            "30 24 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
             31 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
             32 24 0:28 / / rw shared:1 - ext4 /dev/vda rw\nbroken line\n",
        );
        assert_eq!(mounts.v1_of("cpu"), Some(Path::new("/sys/fs/cgroup/cpu,cpuacct")));
        assert_eq!(mounts.v1_of("memory"), None);
        assert_eq!(mounts.v2.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
    }

    #[test]
    fn a_group_goes_with_those_below_it() {
        // Plain directories suffice here: a group is removed like one.
        let group = std::env::temp_dir().join(format!("pal-group-{}", std::process::id()));
        std::fs::create_dir_all(group.join("one/two")).unwrap();
        std::fs::create_dir(group.join("three")).unwrap();
        remove(&group, Duration::ZERO).unwrap();
        assert!(!group.exists());
        remove(&group, Duration::ZERO).unwrap();
        std::fs::create_dir_all(group.join("held")).unwrap();
        std::fs::write(group.join("held/member"), "").unwrap();
        assert!(remove(&group, Duration::ZERO).is_err(), "a group that is not empty stays");
        std::fs::remove_dir_all(&group).unwrap();
    }
}
