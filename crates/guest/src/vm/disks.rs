//! A machine's root: read-only images and one private upper, each a device of its own.
//!
//! The few files that name the machine are in memory, between the two: who is thawed has them changed in microseconds,
//! while a Body that writes to one gets a copy in its upper as of any other file.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{PermissionsExt, chown, symlink},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proto::{
    launch::{SeedEntry, area_dir},
    spec::Access,
    vm::{GuestSetup, LAYERS_MAX, PACK, SharedDir},
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags},
    mount::MountFlags,
    process::{Resource, Rlimit},
};
use sys::mount::Overlay;

use super::identity;

/// How long the kernel may take to find a device.
const DEVICE_PATIENCE: Duration = Duration::from_secs(10);
/// Where things are mounted before they are one root. In memory, and hidden under that root.
const STAGE: &str = "/stage";
const PTYS_MAX: u32 = 256;
/// Room for the files that name the machine.
const NAMES_BYTES: u32 = 64 << 10;
/// The areas a seed's path may begin with, longest first.
const AREAS: &[&str] = &["usr/local", "etc", "opt", ""];

/// What this process itself needs of the kernel.
pub fn kernel_views() -> io::Result<()> {
    for (kind, place) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        fs::create_dir_all(place)?;
        mount(kind, kind, Path::new(place), MountFlags::NOSUID, "")?;
    }
    Ok(())
}

fn mount(source: &str, kind: &str, target: &Path, flags: MountFlags, options: &str) -> io::Result<()> {
    let options = CString::new(options)?;
    let step = |error: rustix::io::Errno| {
        io::Error::other(format!("cannot mount {kind} at {}: {error}", target.display()))
    };
    rustix::mount::mount(source, target, kind, flags, options.as_c_str()).map_err(step)
}

/// A root that was put together.
#[derive(Debug)]
pub struct GuestRoot {
    /// Where the Body's writes go.
    pub upper: OwnedFd,
    /// Where the files that name the machine are, below everything the Body wrote and above its images.
    pub names: OwnedFd,
}

/// Mounts everything as one root and makes it this process's.
pub fn enter_root(welcome: &GuestSetup) -> io::Result<GuestRoot> {
    let stage = Path::new(STAGE);
    let setuid = if welcome.setuid { MountFlags::empty() } else { MountFlags::NOSUID };
    let names = stage.join("names");
    fs::create_dir_all(&names)?;
    mount(
        "tmpfs",
        "tmpfs",
        &names,
        MountFlags::NODEV | MountFlags::NOEXEC | setuid,
        &format!("mode=0755,size={NAMES_BYTES}"),
    )?;
    fs::create_dir(names.join("etc"))?;
    let mut lowers = vec![names.clone()];
    for name in &welcome.images {
        let place = stage.join(name);
        fs::create_dir_all(&place)?;
        mount(
            &device(name)?.to_string_lossy(),
            "erofs",
            &place,
            MountFlags::RDONLY | MountFlags::NODEV | setuid,
            "",
        )?;
        lowers.extend(layers_in(place));
    }
    let private = stage.join("private");
    fs::create_dir_all(&private)?;
    mount(
        &device(&welcome.upper)?.to_string_lossy(),
        "ext4",
        &private,
        MountFlags::NODEV | MountFlags::NOATIME | setuid,
        "commit=1,noinit_itable,no_prefetch_block_bitmaps",
    )?;
    quiet_kernel_log(welcome);
    // A machine that is killed loses what its kernel has not written: that is kept to some seconds.
    for name in ["dirty_writeback_centisecs", "dirty_expire_centisecs"] {
        let _ = fs::write(Path::new("/proc/sys/vm").join(name), "100");
    }
    let (upper, work) = (private.join("upper"), private.join("work"));
    for dir in [&upper, &work] {
        make(fs::create_dir(dir))?;
    }
    fs::set_permissions(&upper, fs::Permissions::from_mode(0o755))?;
    rustix::process::umask(Mode::empty());
    let named = |seed: &&SeedEntry| identity::names(place_of(seed_path(seed)).as_deref());
    welcome.seeds.iter().filter(|seed| !named(seed)).try_for_each(|seed| place_seeds(&upper, seed))?;
    let names = rustix::fs::open(&names, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    identity::write_names(names.as_fd(), welcome)?;
    let root = stage.join("root");
    fs::create_dir_all(&root)?;
    let lowers: Vec<&Path> = lowers.iter().map(PathBuf::as_path).collect();
    let overlay =
        Overlay { lowers: &lowers, upper: &upper, work: &work, volatile: false, setuid: welcome.setuid };
    overlay.mount(&root).map_err(|error| io::Error::other(format!("cannot stack the root: {error}")))?;
    let upper = rustix::fs::open(&upper, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    views(&root, welcome)?;
    welcome.shares.iter().try_for_each(|share| show(&root, share))?;
    switch(&root)?;
    Ok(GuestRoot { upper, names })
}

/// What the kernel does every now and then for large machines with slow disks, and a small emulated one pays for again
/// whenever it is thawed. None of it is missed where it cannot be turned off.
fn quiet_kernel_log(welcome: &GuestSetup) {
    for (place, value) in [
        ("/proc/sys/vm/stat_interval", "120"),
        ("/proc/sys/vm/compaction_proactiveness", "0"),
        ("/proc/sys/vm/dirty_writeback_centisecs", "1500"),
    ] {
        let _ = fs::write(place, value);
    }
    for name in welcome.images.iter().chain([&welcome.upper]) {
        if let Some(name) = device(name).ok().as_deref().and_then(Path::file_name) {
            let queue = Path::new("/sys/block").join(name).join("queue");
            // The disk's order is the host's affair, and so is who waits.
            for (setting, value) in [("wbt_lat_usec", "0"), ("scheduler", "none")] {
                let _ = fs::write(queue.join(setting), value);
            }
        }
    }
}

/// The layers of an image, nearest first: it is one, or says how many it holds.
fn layers_in(image: PathBuf) -> Vec<PathBuf> {
    let told = image.join(PACK);
    let short = fs::symlink_metadata(&told).is_ok_and(|found| found.is_file() && found.len() < 8);
    let count = short.then(|| fs::read_to_string(&told).ok()?.parse().ok()).flatten();
    match count {
        Some(count @ 1..=LAYERS_MAX) => (0..count).map(|index| image.join(index.to_string())).collect(),
        _ => vec![image],
    }
}

/// What is there already is as good.
fn make(made: io::Result<()>) -> io::Result<()> {
    match made {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// The block device that its host called so, or that the kernel did: not every hypervisor lets its devices be called.
fn device(name: &str) -> io::Result<PathBuf> {
    let deadline = Instant::now() + DEVICE_PATIENCE;
    let plain = Path::new("/dev").join(name);
    loop {
        if Path::new("/sys/block").join(name).exists() && plain.exists() {
            return Ok(plain);
        }
        for entry in fs::read_dir("/sys/block")?.flatten() {
            let called = fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
            let path = Path::new("/dev").join(entry.file_name());
            if called.trim() == name && path.exists() {
                return Ok(path);
            }
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("the device {name} is not there")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Puts a seed into the upper, unless something is there. No link is followed: an upper may be from an earlier life.
fn place_seeds(upper: &Path, seed: &SeedEntry) -> io::Result<()> {
    let Some(inside) = place_of(seed_path(seed)) else { return Ok(()) };
    let Some(parent) = directory(upper, Path::new(&inside).parent().unwrap_or(Path::new("")))? else {
        return Ok(());
    };
    let place = parent.join(Path::new(&inside).file_name().unwrap_or_default());
    make(match seed {
        SeedEntry::Dir { mode, owner, .. } => rustix::fs::mkdir(&place, Mode::from_raw_mode(*mode))
            .map_err(io::Error::from)
            .and_then(|()| chown(&place, Some(*owner), Some(*owner))),
        SeedEntry::Link { target, .. } => symlink(target, &place),
        SeedEntry::File { contents, .. } => {
            let file = fs::File::options().write(true).create_new(true).open(&place);
            file.and_then(|mut file| io::Write::write_all(&mut file, contents.as_bytes()))
                .and_then(|()| fs::set_permissions(&place, fs::Permissions::from_mode(0o644)))
        }
        SeedEntry::Hidden { .. } => {
            rustix::fs::mknodat(CWD, &place, FileType::CharacterDevice, Mode::empty(), 0)
                .map_err(io::Error::from)
        }
    })
}

fn seed_path(seed: &SeedEntry) -> &str {
    let (SeedEntry::Dir { path, .. }
    | SeedEntry::Link { path, .. }
    | SeedEntry::File { path, .. }
    | SeedEntry::Hidden { path }) = seed;
    path
}

/// Where in the root a seed belongs, whose path begins with the directory of an area.
fn place_of(path: &str) -> Option<String> {
    let (area, rest) = path.split_once('/')?;
    let at = AREAS.iter().find(|at| area_dir(at) == area)?;
    Some(if at.is_empty() { rest.to_owned() } else { format!("{at}/{rest}") })
}

/// A directory of the upper, made if need be; none where the Body put something else in the way.
fn directory(upper: &Path, inside: &Path) -> io::Result<Option<PathBuf>> {
    let mut place = upper.to_owned();
    for part in inside.components() {
        place.push(part);
        match fs::symlink_metadata(&place) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Ok(None),
            Err(_) => {
                rustix::fs::mkdir(&place, Mode::from_raw_mode(0o755))?;
            }
        }
    }
    Ok(Some(place))
}

/// What every root shows of the kernel.
fn views(root: &Path, welcome: &GuestSetup) -> io::Result<()> {
    for name in ["dev", "proc", "sys"] {
        let place = root.join(name);
        make(fs::create_dir(&place))?;
        rustix::mount::mount_move(Path::new("/").join(name), &place)?;
    }
    let dev = root.join("dev");
    for name in ["pts", "shm"] {
        make(fs::create_dir(dev.join(name)))?;
    }
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount(
        "devpts",
        "devpts",
        &dev.join("pts"),
        quiet,
        &format!("newinstance,ptmxmode=0666,mode=0620,max={PTYS_MAX}"),
    )?;
    mount(
        "tmpfs",
        "tmpfs",
        &dev.join("shm"),
        quiet | MountFlags::NODEV,
        &format!("mode=1777,size={}", welcome.shm_bytes),
    )?;
    let _ = fs::remove_file(dev.join("ptmx"));
    for (name, target) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        make(symlink(target, dev.join(name)))?;
    }
    Ok(())
}

/// A directory of the host, live. Its device decides what can be done there; that nothing of it has power here is our own
/// doing.
fn show(root: &Path, share: &SharedDir) -> io::Result<()> {
    let inside = share.target.strip_prefix("/").unwrap_or(&share.target);
    let place = directory(root, inside)?
        .ok_or_else(|| io::Error::other(format!("{} is no directory of its own", share.target.display())))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, share.access == Access::ReadOnly);
    mount(&share.tag, "virtiofs", &place, flags, "")
}

/// A first file system cannot be left by pivoting: the new root is moved over it instead.
fn switch(root: &Path) -> io::Result<()> {
    rustix::process::chdir(root)?;
    rustix::mount::mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Limits that the machine's own kernel holds. The host's hold without them.
pub fn bounds(welcome: &GuestSetup) -> Vec<String> {
    let files = Rlimit { current: Some(welcome.files), maximum: Some(welcome.files) };
    let cores = Rlimit { current: Some(0), maximum: Some(0) };
    let tried = [
        ("limit open files", rustix::process::setrlimit(Resource::Nofile, files).map_err(io::Error::from)),
        ("forbid core files", rustix::process::setrlimit(Resource::Core, cores).map_err(io::Error::from)),
        ("limit processes", pids(welcome.pids)),
        ("bring up its loopback", sys::namespace::loopback_up()),
    ];
    tried
        .into_iter()
        .filter_map(|(what, done)| done.err().map(|error| format!("cannot {what}: {error}")))
        .collect()
}

/// A group for everybody, this process included, and one below it for those who are to stand still.
fn pids(max: u32) -> io::Result<()> {
    let root = Path::new("/sys/fs/cgroup");
    mount("cgroup2", "cgroup2", root, MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, "")?;
    let group = root.join(super::freezer::GROUP);
    fs::write(root.join("cgroup.subtree_control"), "+pids")?;
    for dir in [group.clone(), group.join("main"), group.join("held")] {
        make(fs::create_dir(dir))?;
    }
    fs::write(group.join("pids.max"), max.to_string())?;
    fs::write(group.join("main/cgroup.procs"), "1")
}
