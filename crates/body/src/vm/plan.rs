//! The launch plan of a microVM.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use proto::{
    Limits, Mechanism, Size, Spec,
    egress::SHARED,
    guest::{EGRESS_DIR, GuestConfig},
    launch::{LaunchPlan, Lower, OverlayAccess, OverlayMount, Rlimits, SeedEntry, Upper},
    spec::{Access, BodyRole, Life, Mount},
    vm::{
        Accelerator, EGRESS_INSIDE, Engine, FreezeReport, GuestSetup, JAIL_TOOLS, KVM, UPPER, URANDOM,
        VmPlan, VmStart,
    },
};

use super::{
    disks::{self, DISK_MIN},
    hypervisor_root,
    jailer::JailSetup,
    stack::VmLayout,
    virtiofsd,
};
use crate::{
    BodyDir,
    egress::CERTIFICATES,
    groups::{self, BodyCgroups},
    process::{self, LaunchContext, Launcher, ProcessError, StartingBody},
    root::{RootPlan, RootfsStack},
};

/// The longest file of certificates that fits into the setup of a guest.
const CERTIFICATES_LEN_MAX: u64 = 768 << 10;
/// Memory of the hypervisor itself, in addition to the microVM's memory.
const OVERHEAD: u64 = 256 << 20;
/// Address space that the hypervisor reserves and hardly uses, such as stacks of I/O threads; it counts where
/// there are no cgroups, because then only the address space can be limited.
const RESERVED: u64 = 1 << 30;
/// Threads of the hypervisor and the VMM process.
const THREADS_MAX: u32 = 256;
/// Threads of a jailed hypervisor in addition to its virtual CPUs.
const JAILED_THREADS: u32 = 16;
/// The hypervisor's own root is in memory, and holds a socket at most.
const ROOT_BYTES: u64 = 4 << 20;
const ROOT_INODES: u64 = 256;
const FILES_MAX: u64 = 4096;
/// The smallest memory with which the kernel and the guest start.
pub const MEMORY_MIN: Size = Size::mib(128);
/// The default memory of a microVM.
pub const MEMORY_DEFAULT: Size = Size::mib(512);
/// The default number of CPUs of a microVM, if the host has them.
pub const CPUS_DEFAULT: u32 = 2;
/// The largest number of CPUs of one microVM.
const CPUS_MAX: u32 = 16;
/// The default disk size of a microVM, if there is space for it.
pub const DISK_DEFAULT: Size = Size(16 << 30);
/// How long an emulated microVM may take from its start to its guest.
const BOOT_MS_MAX: u64 = 30_000;
/// How long a microVM under KVM may take from its start to its guest.
const KVM_BOOT_MS_MAX: u64 = 6_000;
/// The Body's own KVM device node: its name in the Body's directory, its path inside, and its device numbers.
const DOOR: (&str, &str, (u32, u32)) = ("kvm", KVM, (10, 232));
/// The random device that a jailer can give to Firecracker.
const RANDOM_DOOR: (&str, &str, (u32, u32)) = ("urandom", URANDOM, (1, 9));
/// The name of the private disk in a Body's directory and in a snapshot.
pub const UPPER_FILE: &str = "upper.img";
/// The name of the memory file in a snapshot.
pub const RAM_FILE: &str = "ram";
/// The name of the file with CPU and device state in a snapshot.
pub const STATE_FILE: &str = "state";
/// The directory in a Body's directory where a hypervisor writes memory that the VMM process then takes over.
const SCRATCH: &str = "scratch";
/// Space for sockets, and for the CPU and device state while a snapshot is taken.
const SHM_BYTES: u64 = 16 << 20;

/// The parts of a microVM.
#[derive(Debug, Clone)]
pub struct VmParts {
    /// The hypervisor.
    pub hypervisor: Engine,
    /// Its root.
    pub engine: PathBuf,
    /// The accelerator: KVM or emulation.
    pub accelerator: Accelerator,
    /// Read-only images, nearest first.
    pub images: Vec<PathBuf>,
    /// The meaning of the layers in the images.
    pub layout: VmLayout,
    /// The root of virtiofsd, if the microVM has shared directories.
    pub sharer: Option<PathBuf>,
    /// Firecracker's jailer; none with another hypervisor.
    pub jail: Option<JailSetup>,
    /// An empty disk of the right size.
    pub empty: PathBuf,
    /// How the microVM starts.
    pub start: VmStartMode,
}

/// How a microVM starts.
#[derive(Debug, Clone)]
pub enum VmStartMode {
    /// Boots its kernel, on its existing disk or on an empty one.
    Boot {
        /// The kernel.
        kernel: PathBuf,
        /// Its initramfs.
        initrd: PathBuf,
        /// Its command line.
        cmdline: String,
        /// A disk to copy, instead of an empty one.
        disk: Option<PathBuf>,
    },
    /// Restores a snapshot.
    Thaw(VmSnapshotRef),
}

/// A snapshot of a microVM.
#[derive(Debug, Clone)]
pub struct VmSnapshotRef {
    /// The directory with its memory, state and disk.
    pub dir: PathBuf,
    /// The guest's report before the snapshot.
    pub held: FreezeReport,
    /// The generation of the microVM that is restored from it.
    pub generation: u64,
}

/// The number of CPUs of a microVM with these limits.
pub fn cpus(limits: &Limits) -> u32 {
    limits.cpu_milli.div_ceil(1000).clamp(1, CPUS_MAX)
}

/// The limits of the hypervisor's process, which contains the microVM.
fn around(limits: &Limits) -> Limits {
    Limits { memory: Size(limits.memory.0.saturating_add(OVERHEAD)), pids: THREADS_MAX, ..limits.clone() }
}

/// Sends the plan of a microVM in `dir`, whose spec is already written.
pub fn begin(
    context: &LaunchContext,
    launcher: Launcher,
    dir: &BodyDir,
    spec: &Spec,
    token: &str,
    rootfs: &RootfsStack,
    parts: &VmParts,
) -> Result<StartingBody, ProcessError> {
    prepare_disk(dir.path(), spec, parts).map_err(ProcessError::Upper)?;
    let mut bounds = context.apply_limits(spec, &around(&spec.limits));
    if parts.is_jailed()
        && let Err(error) = groups::hand_over(&context.cgroups, &mut bounds, &spec.ids)
    {
        groups::remove_cgroups(&bounds.cgroups);
        return Err(ProcessError::Upper(error));
    }
    let root = RootPlan::of(rootfs, spec);
    let base = context.plan(dir, spec, token, &root, &bounds, limits_record(spec));
    let machine_id = process::machine_id(token);
    let mut seeds = root.seeds(&spec.id, &machine_id);
    // A microVM sees no directory of the host, so it gets the certificates as a file.
    if let Some(seed) = base.egress.as_ref().and_then(|egress| certificates_seed(&egress.dir)) {
        seeds.push(seed);
        if spec.role == BodyRole::Work {
            seeds.extend(root.certificate_seeds());
        }
    }
    let plan = plan(dir.path(), base, spec, parts, seeds, machine_id, &bounds);
    process::send(launcher, &plan, bounds)
}

/// The certificates that programs behind an egress proxy trust, as a file of the root.
fn certificates_seed(egress: &Path) -> Option<SeedEntry> {
    let contents = sys::fd::read_small(&egress.join(SHARED).join(CERTIFICATES), CERTIFICATES_LEN_MAX).ok()?;
    Some(SeedEntry::File { path: format!("root{EGRESS_DIR}/{CERTIFICATES}"), contents })
}

/// Creates the private disk in a Body's directory, unless an earlier start did.
fn prepare_disk(dir: &Path, spec: &Spec, parts: &VmParts) -> io::Result<()> {
    super::record::keep_images(&parts.images, dir).map_err(io::Error::other)?;
    for (name, _, device) in doors(parts) {
        own_door(dir, spec, name, device)?;
    }
    let place = dir.join(UPPER_FILE);
    let from = match &parts.start {
        VmStartMode::Boot { disk, .. } => disk.as_ref().unwrap_or(&parts.empty).clone(),
        VmStartMode::Thaw(frozen) => frozen.dir.join(UPPER_FILE),
    };
    let own = |path: &Path| -> io::Result<()> {
        let jailed = parts.is_jailed();
        let first = if spec.ids.has_root() && !jailed { 0 } else { proto::spec::USER_ID };
        if let (true, Some((user, group))) =
            (sys::caps::is_host_root(), spec.ids.user_outside(first).zip(spec.ids.group_outside(first)))
        {
            std::os::unix::fs::lchown(path, Some(user), Some(group))?;
        }
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
    };
    if !place.exists() {
        let part = dir.join("upper.part");
        disks::copy(&from, &part)?;
        own(&part)?;
        fs::rename(&part, &place)?;
    } else if parts.hypervisor == Engine::Firecracker {
        // The last start may have been with or without a jail, which changes the owner.
        own(&place)?;
    }
    if parts.hypervisor != Engine::Qemu {
        let scratch = dir.join(SCRATCH);
        fs::File::create(&scratch)?;
        own(&scratch)?;
    }
    Ok(())
}

impl VmParts {
    /// Whether Firecracker's jailer starts the hypervisor.
    pub fn is_jailed(&self) -> bool {
        self.jail.as_ref().is_some_and(|jail| jail.root().is_some())
    }
}

/// Device nodes that only the Body's ids can use, where they can be created.
fn doors(parts: &VmParts) -> impl Iterator<Item = (&'static str, &'static str, (u32, u32))> {
    let kvm = (parts.accelerator == Accelerator::Kvm && sys::caps::is_host_root()).then_some(DOOR);
    kvm.into_iter().chain(parts.is_jailed().then_some(RANDOM_DOOR))
}

/// Creates a device node that only the Body's ids can use: the host's own belongs to its group `kvm`, or to
/// root.
fn own_door(dir: &Path, spec: &Spec, name: &str, (major, minor): (u32, u32)) -> io::Result<()> {
    use rustix::fs::{CWD, FileType, Mode, makedev};
    let place = dir.join(name);
    match rustix::fs::mknodat(
        CWD,
        &place,
        FileType::CharacterDevice,
        Mode::RUSR | Mode::WUSR,
        makedev(major, minor),
    ) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    std::os::unix::fs::lchown(&place, spec.ids.user_outside(0), spec.ids.group_outside(0))
}

/// The plan of a microVM: the plan of a Body that contains only its hypervisor.
fn plan(
    dir: &Path,
    base: LaunchPlan,
    spec: &Spec,
    parts: &VmParts,
    seeds: Vec<SeedEntry>,
    machine_id: String,
    bounds: &BodyCgroups,
) -> LaunchPlan {
    let inside = |name: &str| Path::new("/disks").join(name);
    let show = |source: &Path, target: &Path, access| Mount {
        source: source.to_owned(),
        target: target.to_owned(),
        access,
    };
    let mut mounts = vec![show(&dir.join(UPPER_FILE), &inside(UPPER_FILE), Access::ReadWrite)];
    if parts.hypervisor != Engine::Qemu {
        mounts.push(show(&dir.join(SCRATCH), Path::new("/save/ram"), Access::ReadWrite));
    }
    if parts.accelerator == Accelerator::Kvm && !sys::caps::is_host_root() {
        mounts.push(show(Path::new(KVM), Path::new(KVM), Access::ReadWrite));
    }
    for (name, place, _) in doors(parts) {
        mounts.push(show(&dir.join(name), Path::new(place), Access::ReadWrite));
    }
    if let Some(tools) = parts.jail.as_ref().and_then(JailSetup::root) {
        mounts.push(show(tools, Path::new(JAIL_TOOLS), Access::ReadOnly));
    }
    let mut images = Vec::new();
    for (index, image) in parts.images.iter().enumerate() {
        images.push(inside(&format!("image{index}")));
        mounts.push(show(image, &images[index], Access::ReadOnly));
    }
    let egress = base.mounts.iter().find(|mount| mount.target == Path::new(EGRESS_DIR));
    mounts.extend(egress.map(|egress| show(&egress.source, Path::new(EGRESS_INSIDE), Access::ReadOnly)));
    let shares = virtiofsd::of(spec, parts.sharer.as_deref());
    mounts.extend(shares.mounts);
    let (begin, generation) = match &parts.start {
        VmStartMode::Boot { kernel, initrd, cmdline, .. } => {
            let (at_kernel, at_initrd) = (PathBuf::from("/boot/vmlinux"), PathBuf::from("/boot/initrd"));
            mounts.push(show(kernel, &at_kernel, Access::ReadOnly));
            mounts.push(show(initrd, &at_initrd, Access::ReadOnly));
            (VmStart::Boot { kernel: at_kernel, initrd: at_initrd, cmdline: cmdline.clone() }, 0)
        }
        VmStartMode::Thaw(frozen) => {
            let mut there = |name: &str| {
                let place = Path::new("/frozen").join(name);
                mounts.push(show(&frozen.dir.join(name), &place, Access::ReadOnly));
                place
            };
            let (ram, state) = (there(RAM_FILE), there(STATE_FILE));
            (VmStart::Thaw { ram, state, held: frozen.held.clone() }, frozen.generation)
        }
    };
    let welcome = GuestSetup {
        config: base.config.clone(),
        seeds,
        images: (0..images.len()).map(|index| device(parts.hypervisor, index + 1)).collect(),
        root_layers: parts.layout.root_layers.clone(),
        areas: parts.layout.areas.clone(),
        upper: device(parts.hypervisor, 0),
        shares: shares.shown,
        setuid: base.setuid,
        pids: spec.limits.pids,
        files: spec.limits.files.into(),
        shm_bytes: base.shm_bytes,
        machine_id,
        now_ns: 0,
        entropy: String::new(),
        generation,
    };
    let vm = VmPlan {
        engine: parts.hypervisor,
        program: hypervisor_root::program(parts.hypervisor),
        firmware: hypervisor_root::FIRMWARE_INSIDE.into(),
        accelerator: parts.accelerator,
        memory_bytes: spec.limits.memory.0 & !0xf_ffff,
        cpus: cpus(&spec.limits),
        upper: inside(UPPER_FILE),
        images,
        shares: shares.plans,
        sharer: shares.program,
        jailer: parts.jail.as_ref().map(|jail| {
            let threads = bounds.may_be_divided.then_some(cpus(&spec.limits) + JAILED_THREADS);
            jail.plan(threads)
        }),
        begin,
        welcome,
        boot_ms_max: if parts.accelerator == Accelerator::Kvm { KVM_BOOT_MS_MAX } else { BOOT_MS_MAX },
    };
    let file_bytes = spec.limits.disk.0.max(spec.limits.memory.0).saturating_add(OVERHEAD);
    LaunchPlan {
        config: GuestConfig { token: None, envs: Default::default(), ..base.config },
        upper: Upper::Memory { bytes: ROOT_BYTES, inodes: ROOT_INODES },
        areas: vec![OverlayMount {
            at: String::new(),
            owner: 0,
            kind: OverlayAccess::Private,
            lowers: vec![Lower { path: parts.engine.clone(), written_as: Some(spec.ids.clone()) }],
        }],
        seeds: Vec::new(),
        followed: Vec::new(),
        setuid: false,
        shm_bytes: SHM_BYTES,
        mounts,
        rlimits: Rlimits {
            files: FILES_MAX,
            file_bytes,
            data_bytes: bounds.rlimits.data_bytes.map(|bytes| bytes.saturating_add(RESERVED)),
            ..bounds.rlimits
        },
        vm: Some(vm),
        ..base
    }
}

/// The name by which the guest finds a disk: its serial number, or the kernel's device name where disks have
/// none.
fn device(engine: Engine, index: usize) -> String {
    match (engine, index) {
        (Engine::Firecracker, _) => format!("vd{}", char::from(b'a' + index as u8)),
        (_, 0) => UPPER.to_owned(),
        (_, _) => format!("image{}", index - 1),
    }
}

/// The limits of a microVM in addition to its hypervisor's cgroups.
fn limits_record(spec: &Spec) -> Vec<Mechanism> {
    let limits = &spec.limits;
    let kept = if spec.life == Life::Kept { "kept with the Body" } else { "gone with the Body" };
    vec![
        Mechanism::enforced(
            "disk limit",
            format!("{}: the size of the microVM's only writable disk, {kept}", limits.disk),
        ),
        Mechanism::enforced(
            "inode limit",
            format!(
                "{} files and directories: the inodes of the microVM's only writable disk",
                limits.inodes
            ),
        ),
        Mechanism::enforced("microVM memory", format!("{}: the size of its RAM", limits.memory)),
        Mechanism::enforced(
            "microVM processes",
            format!(
                "{} by its own kernel; if that is compromised, {THREADS_MAX} threads on the host",
                limits.pids
            ),
        ),
    ]
}

/// Whether a disk of that size can hold a file system.
pub fn disk_fits(size: Size) -> bool {
    size.0 >= DISK_MIN
}
