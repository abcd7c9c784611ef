//! A machine as its launcher is told of it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use proto::{
    Limits, Mechanism, Size, Spec,
    guest::GuestConfig,
    launch::{LaunchPlan, Lower, OverlayAccess, OverlayMount, Rlimits, SeedEntry, Upper},
    spec::{Access, Life, Mount},
    vm::{Accelerator, Engine, FreezeReport, GuestSetup, JAIL_TOOLS, KVM, UPPER, URANDOM, VmPlan, VmStart},
};

use super::{
    disks::{self, DISK_MIN},
    hypervisor_root,
    jailer::JailSetup,
    virtiofsd,
};
use crate::{
    BodyDir,
    groups::{self, BodyCgroups},
    process::{self, LaunchContext, Launcher, ProcessError, StartingBody},
    root::{RootPlan, RootfsStack},
};

/// What the hypervisor itself needs beside the machine's memory.
const OVERHEAD: u64 = 256 << 20;
/// What it reserves and hardly fills, such as the stacks of threads that write to disks: counted where there are no
/// groups, and only the reservation can be bounded.
const RESERVED: u64 = 1 << 30;
/// Threads of the hypervisor and of who minds it.
const THREADS_MAX: u32 = 256;
/// Threads of a jailed hypervisor besides those that are its machine's processors.
const JAILED_THREADS: u32 = 16;
/// The hypervisor's own root is memory, and holds a socket at most.
const ROOT_BYTES: u64 = 4 << 20;
const ROOT_INODES: u64 = 256;
const FILES_MAX: u64 = 4096;
/// The least with which the kernel and its guest come up.
pub const MEMORY_MIN: Size = Size::mib(128);
/// Memory of a machine that asks for none.
pub const MEMORY_DEFAULT: Size = Size::mib(512);
/// CPUs of a machine that asks for none, where the host has them.
pub const CPUS_DEFAULT: u32 = 2;
/// Most processors of one machine.
const CPUS_MAX: u32 = 16;
/// The disk of a machine that asks for none, where there is room for it.
pub const DISK_DEFAULT: Size = Size(16 << 30);
/// How long an emulated machine may take from its start to its guest.
const BOOT_MS_MAX: u64 = 30_000;
/// And one that the processor runs.
const KVM_BOOT_MS_MAX: u64 = 6_000;
/// Its own door to the processor, and where it is seen: its name in a Body's directory, and the device.
const DOOR: (&str, &str, (u32, u32)) = ("kvm", KVM, (10, 232));
/// Randomness that a jailer can give to Firecracker.
const RANDOM_DOOR: (&str, &str, (u32, u32)) = ("urandom", URANDOM, (1, 9));
/// The name of the private disk in a Body's directory and in what was frozen.
pub const UPPER_FILE: &str = "upper.img";
/// The names of memory and the rest in what was frozen.
pub const RAM_FILE: &str = "ram";
/// Processors and devices.
pub const STATE_FILE: &str = "state";
/// Where a hypervisor writes memory that its minder then takes over, in a Body's directory.
const SCRATCH: &str = "scratch";
/// Room for sockets, and for what is frozen of a machine besides its memory on its way out.
const SHM_BYTES: u64 = 16 << 20;

/// What a machine is made from.
#[derive(Debug, Clone)]
pub struct VmParts {
    /// The hypervisor.
    pub hypervisor: Engine,
    /// Its root.
    pub engine: PathBuf,
    /// What runs the machine.
    pub accelerator: Accelerator,
    /// Read-only images, nearest first.
    pub images: Vec<PathBuf>,
    /// The root of the program that shares directories of the host, where there are any.
    pub sharer: Option<PathBuf>,
    /// Firecracker's jailer; none where the hypervisor is another.
    pub jail: Option<JailSetup>,
    /// An empty disk of the right size.
    pub empty: PathBuf,
    /// How it begins.
    pub start: VmStartMode,
}

/// How a machine begins.
#[derive(Debug, Clone)]
pub enum VmStartMode {
    /// With its kernel, on the disk it has or on an empty one.
    Boot {
        /// The kernel.
        kernel: PathBuf,
        /// Its first file system.
        initrd: PathBuf,
        /// What it is told.
        cmdline: String,
        /// A disk to begin with, instead of an empty one.
        disk: Option<PathBuf>,
    },
    /// Where another one was frozen.
    Thaw(VmSnapshotRef),
}

/// A machine that was frozen.
#[derive(Debug, Clone)]
pub struct VmSnapshotRef {
    /// Holds its memory, its state and its disk.
    pub dir: PathBuf,
    /// What its guest said before.
    pub held: FreezeReport,
    /// The generation of who is thawed from it.
    pub generation: u64,
}

/// Processors of a machine with these limits.
pub fn cpus(limits: &Limits) -> u32 {
    limits.cpu_milli.div_ceil(1000).clamp(1, CPUS_MAX)
}

/// Limits of the hypervisor's process, which holds the machine.
fn around(limits: &Limits) -> Limits {
    Limits { memory: Size(limits.memory.0.saturating_add(OVERHEAD)), pids: THREADS_MAX, ..limits.clone() }
}

/// Sends the plan of a microVM in `dir`, whose spec is written already.
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
    let seeds = root.seeds(&spec.id, &machine_id);
    let plan = plan(dir.path(), base, spec, parts, seeds, machine_id, &bounds);
    process::send(launcher, &plan, bounds)
}

/// Puts the private disk into a Body's directory, unless it has one from an earlier life.
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
        // Its last life may have been one without a jail, or with one.
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

/// Devices for the Body's ids alone, where they can be made.
fn doors(parts: &VmParts) -> impl Iterator<Item = (&'static str, &'static str, (u32, u32))> {
    let kvm = (parts.accelerator == Accelerator::Kvm && sys::caps::is_host_root()).then_some(DOOR);
    kvm.into_iter().chain(parts.is_jailed().then_some(RANDOM_DOOR))
}

/// A device for the Body's ids alone: the host's own belongs to its group `kvm`, or to its root.
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

/// The plan of a machine: that of a Body in which nothing but its hypervisor lives.
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

/// What the guest finds a disk by: the name it was given, or where disks have none, its kernel's.
fn device(engine: Engine, index: usize) -> String {
    match (engine, index) {
        (Engine::Firecracker, _) => format!("vd{}", char::from(b'a' + index as u8)),
        (_, 0) => UPPER.to_owned(),
        (_, _) => format!("image{}", index - 1),
    }
}

/// What bounds a machine beyond its hypervisor's groups.
fn limits_record(spec: &Spec) -> Vec<Mechanism> {
    let limits = &spec.limits;
    let kept = if spec.life == Life::Kept { "kept with the Body" } else { "gone with the Body" };
    vec![
        Mechanism::enforced(
            "disk limit",
            format!("{}: the size of the machine's only writable disk, {kept}", limits.disk),
        ),
        Mechanism::enforced(
            "inode limit",
            format!(
                "{} files and directories: the machine's only writable disk was made for them",
                limits.inodes
            ),
        ),
        Mechanism::enforced("memory of the machine", format!("{}: it has no more", limits.memory)),
        Mechanism::enforced(
            "processes of the machine",
            format!("{} by its own kernel; whatever that becomes, {THREADS_MAX} on the host", limits.pids),
        ),
    ]
}

/// Whether a disk of that size can hold a file system.
pub fn disk_fits(size: Size) -> bool {
    size.0 >= DISK_MIN
}
