//! Mounts of the kernel and, by name, of the host in a Body: `/proc`, `/sys`, `/dev`, the mounts of its spec.
//!
//! Mounts that are equal for every Body are made on the stage before there is a plan, and moved into the root later.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
};

use proto::{Mechanism, launch::LaunchPlan};
use rustix::fs::{FileType, Mode, OFlags};
use sys::mount::{MountAttrs, Submounts};

use crate::{
    git_dirs::Summary,
    lower_dirs::LowerDirs,
    report::{StepError, StepExt},
    root::STAGE,
};

/// Files of `/proc` that reveal something about the host to every user, or act on it; `/dev/null` hides them. Files
/// that only the host's root may open (`kcore`, `kmsg`, `slabinfo`, …) are not hidden: no id of the Body maps to that
/// root, and "permission denied" says more than an empty file.
const PROC_FILES: &[&str] = &[
    "keys",
    "key-users",
    "kallsyms",
    "interrupts",
    "iomem",
    "ioports",
    "sched_debug",
    "latency_stats",
    "timer_stats",
    "sysrq-trigger",
    "config.gz",
    "modules",
    "diskstats",
    "partitions",
    "swaps",
    "schedstat",
];
/// Directories of `/proc` that reveal something about the host; an empty directory hides them.
const PROC_DIRS: &[&str] =
    &["acpi", "asound", "bus", "driver", "dynamic_debug", "fs", "irq", "scsi", "sysvipc", "tty"];
/// Devices that are safe to share: they keep no data and reach nothing.
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];
/// Parts of `/sys` that programs need: the number and topology of CPUs.
const SYS_DIRS: &[&str] = &["devices/system/cpu", "devices/system/node"];
/// Mounts that are moved from the stage into the root.
const VIEWS: &[&str] = &["dev", "sys", "proc"];
/// An empty directory in which no process can create files; it is mounted over hidden directories.
const HIDING: &str = "fs/cgroup";
/// Most terminals of one Body.
const PTYS_MAX: u32 = 256;

const KERNEL: MountAttrs = MountAttrs { read_only: false, no_exec: true, devices: false };
const KERNEL_READ_ONLY: MountAttrs = MountAttrs { read_only: true, no_exec: true, devices: false };

/// Mounts on the stage what needs no plan.
pub fn ahead() -> Result<(), StepError> {
    let stage = Path::new(STAGE);
    for name in VIEWS {
        rustix::fs::mkdir(stage.join(name), Mode::from_raw_mode(0o755))
            .step("make a directory on the stage")?;
    }
    devices(&stage.join("dev"))?;
    kernel_objects(&stage.join("sys"))?;
    processes(stage)?;
    sys::mount::make_read_only(&stage.join("sys")).step("make /sys read-only")
}

/// Moves the stage's mounts into the root, which is the current directory, and adds the mounts of the plan.
pub fn mount_all(plan: &LaunchPlan, trees: &LowerDirs) -> Result<Vec<Mechanism>, StepError> {
    for name in VIEWS {
        sys::mount::carry(&Path::new(STAGE).join(name), Path::new(name)).step(format!("mount /{name}"))?;
    }
    let options = format!("mode=1777,size={},nr_inodes=65536", plan.shm_bytes);
    sys::mount::mount_new("tmpfs", Path::new("dev/shm"), KERNEL, &options).step("mount /dev/shm")?;
    for (mount, named) in plan.mounts.iter().zip(&trees.mounts) {
        let step = || format!("mount {}", mount.target.display());
        mount_named(named.tree.as_fd(), &mount.target).step(step()).map_err(|error| {
            match error.cause().kind() {
                io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                    error.hint("the mount point cannot be made there: choose another one, such as /mnt/NAME")
                }
                _ => error,
            }
        })?;
        for hold in &named.holds {
            sys::mount::attach(hold.tree.as_fd(), &sys::fd::path_of(hold.place.as_fd())).step(step())?;
        }
    }
    let mut mechanisms = vec![
        Mechanism::enforced("procfs", "own processes only; host-wide files hidden, settings read-only"),
        Mechanism::enforced("sysfs", "only the CPU topology, read-only"),
        Mechanism::enforced(
            "devices",
            format!("null, zero, full, random, urandom, tty; at most {PTYS_MAX} terminals"),
        ),
    ];
    mechanisms.extend(trees.git.as_ref().map(Summary::record));
    Ok(mechanisms)
}

fn devices(dev: &Path) -> Result<(), StepError> {
    let attrs = MountAttrs { no_exec: true, ..MountAttrs::default() };
    sys::mount::mount_new("tmpfs", dev, attrs, "mode=0755,size=64k,nr_inodes=64").step("mount /dev")?;
    for name in DEVICES {
        let place = dev.join(name);
        create_mount_point(&place)
            .and_then(|()| sys::mount::bind_plain(&Path::new("/dev").join(name), &place))
            .step(format!("mount /dev/{name}"))?;
    }
    for name in ["pts", "shm"] {
        rustix::fs::mkdir(dev.join(name), Mode::from_raw_mode(0o755)).step("make a directory in /dev")?;
    }
    let options = format!("newinstance,ptmxmode=0666,mode=0620,max={PTYS_MAX}");
    sys::mount::mount_new("devpts", &dev.join("pts"), attrs_pts(), &options).step("mount /dev/pts")?;
    let links = [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ];
    for (name, target) in links {
        rustix::fs::symlink(target, dev.join(name)).step("make a link in /dev")?;
    }
    Ok(())
}

fn attrs_pts() -> MountAttrs {
    MountAttrs { no_exec: true, devices: true, read_only: false }
}

fn processes(stage: &Path) -> Result<(), StepError> {
    let proc = &stage.join("proc");
    sys::mount::mount_new("proc", proc, KERNEL, "").step("mount /proc").map_err(|error| {
        error.hint("inside another container, /proc can only be mounted when the outer one does not mask parts of it")
    })?;
    let (null, empty) = (&stage.join("dev/null"), &stage.join("sys").join(HIDING));
    for name in PROC_FILES {
        skip_missing(sys::mount::bind_plain(null, &proc.join(name))).step(format!("hide /proc/{name}"))?;
    }
    for name in PROC_DIRS {
        skip_missing(sys::mount::bind_plain(empty, &proc.join(name))).step(format!("hide /proc/{name}"))?;
    }
    let settings = proc.join("sys");
    sys::mount::bind(&settings, &settings, KERNEL_READ_ONLY, Submounts::No)
        .step("make /proc/sys read-only")?;
    own_boot_id(&stage.join("dev/boot-id"), &settings.join("kernel/random/boot_id"))
        .step("give the Body a boot id of its own")
}

/// Gives each start of a Body its own boot id: the host's would reveal to Bodies that they share a host. The file
/// loses its name once it is mounted.
fn own_boot_id(file: &Path, place: &Path) -> io::Result<()> {
    let mut bytes: [u8; 16] = sys::random::bytes()?;
    // As the kernel does: a random UUID, version 4.
    (bytes[6], bytes[8]) = (bytes[6] & 0x0f | 0x40, bytes[8] & 0x3f | 0x80);
    let hex = proto::event::hex(&bytes);
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    std::fs::write(file, parts.join("-") + "\n")?;
    sys::mount::bind(file, place, KERNEL_READ_ONLY, Submounts::No)?;
    std::fs::remove_file(file)
}

fn kernel_objects(sys_dir: &Path) -> Result<(), StepError> {
    sys::mount::mount_new("tmpfs", sys_dir, KERNEL, "mode=0755,size=16k,nr_inodes=32").step("mount /sys")?;
    for name in SYS_DIRS {
        let (source, place) = (Path::new("/sys").join(name), sys_dir.join(name));
        if source.is_dir() {
            std::fs::create_dir_all(&place).step("make a directory in /sys")?;
            sys::mount::bind(&source, &place, KERNEL_READ_ONLY, Submounts::No)
                .step(format!("mount /sys/{name}"))?;
        }
    }
    std::fs::create_dir_all(sys_dir.join(HIDING)).step("make a directory in /sys")
}

/// Mounts a directory or file of the spec. Its mount point is created below the new root, and never through a link.
fn mount_named(tree: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(tree)?.st_mode);
    let place = make_place(target, kind == FileType::Directory)?;
    sys::mount::attach(tree, &sys::fd::path_of(place.as_fd()))
}

/// Opens the path from the root by descriptor, and creates missing parts.
pub fn make_place(target: &Path, is_dir: bool) -> io::Result<OwnedFd> {
    let parts: Vec<PathBuf> = target
        .components()
        .filter_map(|part| match part {
            Component::Normal(name) => Some(PathBuf::from(name)),
            _ => None,
        })
        .collect();
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut at = rustix::fs::open(".", flags, Mode::empty())?;
    for (index, name) in parts.iter().enumerate() {
        let last = index + 1 == parts.len();
        if last && !is_dir {
            let create = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match rustix::fs::openat(&at, name, create, Mode::from_raw_mode(0o644)) {
                // An existing file or directory becomes the mount point, whoever owns it.
                Ok(_) | Err(rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        } else {
            match rustix::fs::mkdirat(&at, name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        at = rustix::fs::openat(&at, name, flags, Mode::empty())?;
    }
    Ok(at)
}

fn create_mount_point(path: &Path) -> io::Result<()> {
    File::create(path).map(drop)
}

fn skip_missing(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
