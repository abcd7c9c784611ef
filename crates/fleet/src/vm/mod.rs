//! The microVM layer: the files and programs from which microVMs are built.

mod boot_proof;
mod boot_snapshot;
mod driver;
mod findings;
mod garbage;
mod hypervisors;
mod jailer_setup;
mod kvm_probe;
mod memory_snapshot;
mod read_disk;
mod shared_mounts;
mod suspend;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use body::{
    driver::DriverContext,
    root::RootfsStack,
    vm::{
        self, LastBoot, MicrovmInstall, SetupRecord, VmError, VmParts, VmStartMode, host_images, images,
        kernel,
        kernel_drivers::DriverSet,
        stack::{VmLayers, VmLayout},
    },
};
use proto::{
    Failure, Kind, Size, Spec,
    vm::{Accelerator, Engine},
};

use serde::Serialize;
use store::Records;

use crate::{Settings, settings, templates::ProgressFn};

pub(crate) use memory_snapshot::incomplete;
use shared_mounts::SHARE_TOOL;

/// A kernel that the user provides.
#[derive(Debug, Clone)]
pub struct CustomKernel {
    /// The kernel, compressed or not.
    pub file: PathBuf,
    /// The modules, such as `/lib/modules/VERSION`; `None` if everything is built in.
    pub modules: Option<PathBuf>,
}

/// The files with which microVMs boot.
#[derive(Debug, Clone)]
pub struct BootFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
    /// The kernel's command line.
    pub cmdline: String,
    /// The default memory of a microVM.
    pub memory: Size,
}

/// The result of a setup, and the boot that proved it.
#[derive(Debug, Clone, Serialize)]
pub struct SetupReport {
    /// The setup that is in use now.
    #[serde(flatten)]
    pub setup: SetupRecord,
    /// The boot that proved it.
    pub last_boot: LastBoot,
}

/// The hypervisor of a microVM, its root directory and its accelerator.
struct HypervisorChoice {
    hypervisor: Engine,
    root: PathBuf,
    accelerator: Accelerator,
}

/// The driver of the microVM layer: builds, snapshots and restores the microVMs of a data directory.
#[derive(Debug, Clone)]
pub struct Microvms {
    context: Arc<DriverContext>,
    records: Arc<dyn Records>,
}

impl Microvms {
    pub(crate) fn new(context: Arc<DriverContext>, records: Arc<dyn Records>) -> Self {
        Self { context, records }
    }

    fn install(&self) -> MicrovmInstall {
        MicrovmInstall::of(&self.context.data)
    }

    fn settings(&self) -> Result<Settings, Failure> {
        settings::read(&*self.records)
    }

    /// The accelerator with which microVMs run on this host, if a boot has proved their setup; else the reason why they
    /// cannot be relied on. This is cheap: nothing boots.
    pub fn proven_accelerator(&self) -> Result<Accelerator, String> {
        let install = self.install();
        let (setup, booted) = (install.setup().ok(), install.last_boot());
        if let Some(lack) = findings::unproven(setup.as_ref(), booted.as_ref()) {
            return Err(lack.to_owned());
        }
        let boot_id = sys::proc::boot_id().unwrap_or_default();
        let verdict = setup.and_then(|setup| setup.verdict).filter(|verdict| verdict.boot_id == boot_id);
        Ok(verdict.map_or(Accelerator::Emulated, |verdict| verdict.accelerator))
    }

    /// The files that a benchmark needs to boot the same kernel without Palisade.
    pub fn boot_files(&self) -> Result<BootFiles, Failure> {
        let install = self.install();
        let setup = install.setup().map_err(vm_failure)?;
        Ok(BootFiles {
            kernel: install.kernel(&setup),
            initrd: install
                .initrd(&setup, &self.context.launch.programs, Engine::Qemu, &[])
                .map_err(vm_failure)?,
            cmdline: install.cmdline(&setup, Accelerator::Emulated, Engine::Qemu),
            memory: vm::plan::MEMORY_DEFAULT,
        })
    }

    /// Sets up this host for microVMs: kernel, hypervisor and an image of this host's programs. Reuses existing parts.
    /// At the end an emulated microVM boots and runs a command; only then is the setup put into use.
    pub fn setup(&self, own: Option<CustomKernel>, say: ProgressFn<'_>) -> Result<SetupReport, Failure> {
        let say = std::cell::RefCell::new(say);
        let tell = |what: &str| (say.borrow_mut())(what);
        let install = self.install();
        let _turn = install.lock_setup().map_err(vm_failure)?;
        let mut refused: Vec<String> = Vec::new();
        let (setup, last_boot) = loop {
            let setup = self.prepare_microvm(own.clone(), &refused, &tell)?;
            match self.prove_boot(&setup, &tell) {
                Ok(last_boot) => break (setup, last_boot),
                // Another package may contain a kernel that works.
                Err(failure) if own.is_none() && setup.kernel_source.starts_with("linux-image-") => {
                    tell(&format!("{failure}; trying another kernel"));
                    refused.push(setup.kernel_source);
                }
                Err(failure) => return Err(failure),
            }
        };
        install.adopt(&setup).and_then(|()| install.record_boot(&last_boot)).map_err(vm_failure)?;
        Ok(SetupReport { setup: self.probe_kvm(setup, &tell)?, last_boot })
    }

    /// The current setup if a boot has proved it; otherwise sets up microVMs now.
    fn proven_setup(&self, say: ProgressFn<'_>) -> Result<SetupRecord, Failure> {
        let install = self.install();
        match (install.setup(), install.last_boot()) {
            (Ok(setup), Some(boot)) if boot.proves(&setup) => self.probe_kvm(setup, &|_| ()),
            _ => Ok(self.setup(None, say)?.setup),
        }
    }

    fn prepare_microvm(
        &self,
        own: Option<CustomKernel>,
        refused: &[String],
        tell: &dyn Fn(&str),
    ) -> Result<SetupRecord, Failure> {
        let install = self.install();
        install_tools(tell)?;
        let found = own.map(|own| kernel::KernelFiles {
            source: own.file.display().to_string(),
            kernel: own.file,
            modules: own.modules,
        });
        let setup = install.prepare(found, refused, tell).map_err(vm_failure)?;
        host_images::of_host(&self.context.launch.programs, &install.dir().join("images"), tell)
            .map_err(vm_failure)?;
        if vm::virtiofsd::find().is_err() {
            tell(&format!("microVMs cannot share directories: virtiofsd is not installed; {SHARE_TOOL}"));
        }
        Ok(setup)
    }

    /// Sets the listener for lines about work that takes long, such as an image of the host's programs.
    pub fn on_notice(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        self.context.notices.listen(listener);
    }

    /// The parts of a microVM with this spec; it boots.
    fn parts(&self, spec: &Spec, rootfs: &RootfsStack) -> Result<VmParts, Failure> {
        // The setup is checked first: building images takes a minute and gigabytes, which are wasted without a setup.
        self.install().setup().map_err(vm_failure)?;
        let layers = VmLayers::of(rootfs, spec);
        let images = self.images(&self.install(), spec, &layers)?;
        self.parts_with(spec, images, layers.layout, None)
    }

    fn parts_with(
        &self,
        spec: &Spec,
        images: Vec<PathBuf>,
        layout: VmLayout,
        disk: Option<PathBuf>,
    ) -> Result<VmParts, Failure> {
        let setup = self.install().setup().map_err(vm_failure)?;
        let hypervisor = spec.engine.unwrap_or_default();
        let (root, accelerator) = self.engine_root(hypervisor, &setup)?;
        self.parts_by(
            &setup,
            HypervisorChoice { hypervisor, root, accelerator },
            spec,
            (images, layout),
            disk,
        )
    }

    fn parts_by(
        &self,
        setup: &SetupRecord,
        by: HypervisorChoice,
        spec: &Spec,
        (images, layout): (Vec<PathBuf>, VmLayout),
        disk: Option<PathBuf>,
    ) -> Result<VmParts, Failure> {
        let HypervisorChoice { hypervisor, root, accelerator } = by;
        hypervisors::fits(spec, images.len())?;
        let install = self.install();
        let start = VmStartMode::Boot {
            kernel: install.kernel(setup),
            initrd: install
                .initrd(setup, &self.context.launch.programs, hypervisor, &driver_sets(spec))
                .map_err(vm_failure)?,
            cmdline: install.cmdline(setup, accelerator, hypervisor),
            disk,
        };
        let (disk_bytes, inodes) = (spec.limits.disk.0, spec.limits.inodes);
        let empty =
            vm::disks::empty(&install.dir().join("uppers"), disk_bytes, inodes).map_err(vm_failure)?;
        let jail = self.jail_of(hypervisor, setup)?;
        let sharer = spec.share.map(|_| install.sharer()).transpose().map_err(vm_failure)?;
        Ok(VmParts { hypervisor, engine: root, accelerator, images, layout, sharer, jail, empty, start })
    }

    fn images(
        &self,
        install: &MicrovmInstall,
        spec: &Spec,
        layers: &VmLayers,
    ) -> Result<Vec<PathBuf>, Failure> {
        let dir = install.dir().join("images");
        let programs = &self.context.launch.programs;
        let tell = |line: &str| self.context.notices.tell(line);
        let mut found = match layers.host {
            true => host_images::of_host(programs, &dir, &tell).map_err(vm_failure)?,
            false => Vec::new(),
        };
        let named: Vec<_> = layers.layers.iter().map(|(name, layer)| (name.as_str(), layer)).collect();
        let room = hypervisors::room(spec).saturating_sub(found.len());
        found.extend(images::of_layers(programs, &dir, &named, room).map_err(vm_failure)?);
        Ok(found)
    }
}

/// The sets of drivers that a microVM with this spec loads in addition to those of its hypervisor.
fn driver_sets(spec: &Spec) -> Vec<DriverSet> {
    let share = spec.share.map(|_| DriverSet::Share);
    let redirect = spec.egress.as_ref().map(|_| DriverSet::Redirect);
    share.into_iter().chain(redirect).collect()
}

/// Installs missing tools with apt, if possible.
fn install_tools(tell: &dyn Fn(&str)) -> Result<(), Failure> {
    const TOOLS: [(&str, &str); 3] =
        [("qemu-system-x86_64", "qemu-system-x86"), ("mkfs.erofs", "erofs-utils"), ("mke2fs", "e2fsprogs")];
    let missing: Vec<&str> =
        TOOLS.iter().filter(|(tool, _)| vm::find_tool(tool).is_err()).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let command = format!("apt-get install --no-install-recommends {}", missing.join(" "));
    let failed = |why: String| {
        Err(Failure::new(
            Kind::Host,
            format!("microVMs need programs that are not installed: {}", missing.join(", ")),
        )
        .because(why)
        .hint(format!("install them: {command}"))
        .hint("without apt, install QEMU, erofs-utils and e2fsprogs with your system's package manager"))
    };
    if !sys::caps::is_host_root() || !Path::new("/usr/bin/apt-get").exists() {
        return failed("only root can install them, and only with apt-get".to_owned());
    }
    tell(&format!("installing {}", missing.join(", ")));
    let apt = |verb: &[&str]| {
        std::process::Command::new("/usr/bin/apt-get")
            .args(verb)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(std::process::Stdio::null())
            .output()
    };
    let install = || apt(&[&["install", "-y", "-qq", "--no-install-recommends"], &missing[..]].concat());
    let installed = match install() {
        // The package lists of a fresh host may be missing or outdated.
        Ok(output) if !output.status.success() => apt(&["update", "-qq"]).and_then(|_| install()),
        installed => installed,
    };
    match installed {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            failed(proto::text::visible_bytes(&output.stderr[output.stderr.len().saturating_sub(400)..]))
        }
        Err(error) => failed(error.to_string()),
    }
}

/// Converts an error into a failure with a hint for the user.
fn vm_failure(error: VmError) -> Failure {
    let set_up = "set it up once: pal setup microvm";
    match error {
        VmError::NotSetUp => Failure::new(Kind::Host, "microVMs are not set up on this host").hint(set_up).hint("or choose `--layer process` (weaker: shares the host's kernel)"),
        VmError::Missing("apt-get") => {
            Failure::new(Kind::Host, "this host has no apt-get to download a kernel").hint("provide one: pal setup microvm --kernel FILE --modules DIR")
        }
        VmError::Missing(vm::virtiofsd::VIRTIOFSD) => shared_mounts::virtiofsd_missing(),
        VmError::Missing("xz") => {
            Failure::new(Kind::Host, "the kernel's modules are compressed with xz, which is not installed").hint("apt-get install xz-utils")
        }
        VmError::Driver { .. } => Failure::new(Kind::Host, error.to_string()).hint("provide a kernel that has it: pal setup microvm --kernel FILE --modules DIR"),
        VmError::Missing(tool) => Failure::new(Kind::Host, format!("microVMs need {tool}, which is not installed")).hint(set_up),
        VmError::Kernel(what) => Failure::new(Kind::Usage, what).hint("provide a kernel for this CPU: vmlinux or bzImage, with virtio-mmio, virtio-blk, virtio-console, erofs, overlay and ext4"),
        VmError::Layers(..) => Failure::new(Kind::Host, error.to_string()).hint("build the template in fewer steps, or choose `--layer process`"),
        error => Failure::new(Kind::Host, "cannot assemble the microVM").because(error).hint("see what this host lacks: pal doctor"),
    }
}
