//! The root of a microVM: read-only images and one private upper, each on a block device of its own.
//!
//! The few files that hold the microVM's identity are on a tmpfs between the two. A restore changes them in
//! microseconds, and a Body that writes to one gets a copy in its upper, as with any other file.

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
    egress::{CERTIFICATES, JAVA_CERTIFICATES, java_trust_store},
    guest::EGRESS_DIR,
    launch::{SeedEntry, area_dir},
    spec::Access,
    vm::{GuestArea, GuestSetup, LAYERS_MAX, PACK, ROOT_UPPER, SharedDir},
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
/// The directory for mounts that later become the root. It is in memory, and hidden under that root.
const STAGE: &str = "/stage";
const PTYS_MAX: u32 = 256;
/// Size of the tmpfs for the identity files.
const NAMES_BYTES: u32 = 64 << 10;
/// The mount points with which a seed's path may begin, longest first.
const AREAS: &[&str] = &["usr/local", "etc", "opt", ""];

/// Mounts the kernel file systems that this process itself needs.
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

/// The mounted root.
#[derive(Debug)]
pub struct GuestRoot {
    /// The upper: the Body's writes go there.
    pub upper: OwnedFd,
    /// The uppers of directories that are mounts of their own.
    pub areas: Vec<OwnedFd>,
    /// The directory of the identity files, below everything the Body wrote and above its images.
    pub names: OwnedFd,
}

/// Mounts all layers as one root and enters it.
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
    let mut layers = Vec::new();
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
        layers.extend(layers_in(place));
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
    // A killed microVM loses data that its kernel has not written back, so limit that to some seconds.
    for name in ["dirty_writeback_centisecs", "dirty_expire_centisecs"] {
        let _ = fs::write(Path::new("/proc/sys/vm").join(name), "100");
    }
    let (upper, work) = (private.join(ROOT_UPPER), private.join("work"));
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
    let names_dir = stage.join("names");
    let mut lowers: Vec<&Path> = vec![&names_dir];
    if welcome.root_layers.is_empty() {
        lowers.extend(layers.iter().map(PathBuf::as_path));
    }
    for index in &welcome.root_layers {
        let layer =
            layers.get(*index).ok_or_else(|| io::Error::other("the images lack a layer of the root"))?;
        lowers.push(layer);
    }
    let overlay =
        Overlay { lowers: &lowers, upper: &upper, work: &work, volatile: false, setuid: welcome.setuid };
    overlay
        .mount(&root)
        .map_err(|error| io::Error::other(format!("cannot mount the root overlay: {error}")))?;
    let upper = rustix::fs::open(&upper, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let areas = welcome.areas.iter().map(|area| mount_area(&root, &private, &layers, area, welcome.setuid));
    let areas = areas.collect::<io::Result<_>>()?;
    mount_kernel_views(&root, welcome)?;
    welcome.shares.iter().try_for_each(|share| mount_share(&root, share))?;
    move_root(&root)?;
    Ok(GuestRoot { upper, areas, names })
}

/// Turns off periodic work of the kernel that helps large machines with slow disks, and that an emulated microVM
/// repeats after each restore. Failures are ignored, because nothing depends on it.
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
            // The host schedules the disk, so the guest's I/O scheduler and writeback throttling only add delay.
            for (setting, value) in [("wbt_lat_usec", "0"), ("scheduler", "none")] {
                let _ = fs::write(queue.join(setting), value);
            }
        }
    }
}

/// Mounts the overlay of a directory that is a mount of its own.
fn mount_area(
    root: &Path,
    private: &Path,
    layers: &[PathBuf],
    area: &GuestArea,
    setuid: bool,
) -> io::Result<OwnedFd> {
    let cannot = |why: String| io::Error::other(format!("cannot mount /{}: {why}", area.at));
    let upper = private.join(area.upper_dir());
    let work = private.join("areas-work").join(area_dir(&area.at));
    for dir in [&upper, &work] {
        fs::create_dir_all(dir.parent().unwrap_or(private))?;
    }
    if !upper.exists() {
        rustix::fs::mkdir(&upper, Mode::from_raw_mode(0o755))?;
        chown(&upper, Some(area.owner), Some(area.owner))?;
    }
    make(fs::create_dir(&work))?;
    let mut lowers = Vec::new();
    for lower in &area.lowers {
        let layer =
            layers.get(lower.layer).ok_or_else(|| cannot("the images lack a layer of it".to_owned()))?;
        lowers.push(layer.join(&lower.dir));
    }
    if lowers.is_empty() {
        // The kernel insists on one.
        let nothing = Path::new(STAGE).join("nothing");
        fs::create_dir_all(&nothing)?;
        chown(&nothing, Some(area.owner), Some(area.owner))?;
        lowers.push(nothing);
    }
    let place = directory(root, Path::new(&area.at))?
        .ok_or_else(|| cannot("something else is in its place".to_owned()))?;
    let lowers: Vec<&Path> = lowers.iter().map(PathBuf::as_path).collect();
    Overlay { lowers: &lowers, upper: &upper, work: &work, volatile: false, setuid }
        .mount(&place)
        .map_err(|error| cannot(error.to_string()))?;
    Ok(rustix::fs::open(&upper, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The layers of an image, nearest first: the image itself, or as many as its pack file says.
fn layers_in(image: PathBuf) -> Vec<PathBuf> {
    let pack_file = image.join(PACK);
    let short = fs::symlink_metadata(&pack_file).is_ok_and(|found| found.is_file() && found.len() < 8);
    let count = short.then(|| fs::read_to_string(&pack_file).ok()?.parse().ok()).flatten();
    match count {
        Some(count @ 1..=LAYERS_MAX) => (0..count).map(|index| image.join(index.to_string())).collect(),
        _ => vec![image],
    }
}

/// Treats an entry that exists already as created.
fn make(made: io::Result<()>) -> io::Result<()> {
    match made {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Finds a block device by the serial that the host gave it, or by its kernel name: not every hypervisor can set
/// serials.
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
            return Err(io::Error::other(format!("the device {name} did not appear")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Writes a seed into the upper, unless its path exists. No link is followed, because the upper may come from an
/// earlier run of the Body.
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
            // The authority of an earlier run is no longer one.
            if is_certificates(&inside) {
                let _ = fs::remove_file(&place);
            }
            create_file(&place, contents.as_bytes()).and_then(|()| {
                let for_java = place.with_file_name(JAVA_CERTIFICATES);
                if !is_certificates(&inside) {
                    return Ok(());
                }
                let _ = fs::remove_file(&for_java);
                create_file(&for_java, &java_trust_store(contents))
            })
        }
        SeedEntry::Hidden { .. } => {
            rustix::fs::mknodat(CWD, &place, FileType::CharacterDevice, Mode::empty(), 0)
                .map_err(io::Error::from)
        }
    })
}

fn create_file(place: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = fs::File::options().write(true).create_new(true).open(place)?;
    io::Write::write_all(&mut file, contents)?;
    fs::set_permissions(place, fs::Permissions::from_mode(0o644))
}

/// Whether a path of the root is the file of certificates that programs trust.
fn is_certificates(inside: &str) -> bool {
    Path::new("/").join(inside) == Path::new(EGRESS_DIR).join(CERTIFICATES)
}

fn seed_path(seed: &SeedEntry) -> &str {
    let (SeedEntry::Dir { path, .. }
    | SeedEntry::Link { path, .. }
    | SeedEntry::File { path, .. }
    | SeedEntry::Hidden { path }) = seed;
    path
}

/// Maps a seed's path, which begins with the directory of a mount, to its place in the root.
fn place_of(path: &str) -> Option<String> {
    let (area, rest) = path.split_once('/')?;
    let at = AREAS.iter().find(|at| area_dir(at) == area)?;
    Some(if at.is_empty() { rest.to_owned() } else { format!("{at}/{rest}") })
}

/// A directory of the upper, created if missing; `None` if the Body put something else at that path.
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

/// Mounts the kernel file systems of the root.
fn mount_kernel_views(root: &Path, welcome: &GuestSetup) -> io::Result<()> {
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

/// Mounts a shared directory of the host by virtiofs. The device enforces read-only access; the mount flags here keep
/// its files from having power in the guest.
fn mount_share(root: &Path, share: &SharedDir) -> io::Result<()> {
    let inside = share.target.strip_prefix("/").unwrap_or(&share.target);
    let place = directory(root, inside)?.ok_or_else(|| {
        io::Error::other(format!("the mount point {} is not a directory", share.target.display()))
    })?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, share.access == Access::ReadOnly);
    mount(&share.tag, "virtiofs", &place, flags, "")
}

/// An initramfs cannot be left with `pivot_root`, so the new root is moved over it.
fn move_root(root: &Path) -> io::Result<()> {
    rustix::process::chdir(root)?;
    rustix::mount::mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Sets limits in the guest's own kernel. The host's limits hold without them.
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

/// Creates one cgroup for all processes, this one included, and one below it for processes to freeze.
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
