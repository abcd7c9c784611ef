//! Machines: what a microVM of this fleet is made from.

mod boot_proof;
mod boot_snapshot;
mod driver;
mod findings;
mod garbage;
mod hypervisors;
mod jailer_setup;
mod kvm_probe;
mod memory_snapshot;
mod shared_mounts;
mod suspend;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use body::{
    driver::DriverContext,
    root::RootfsStack,
    vm::{self, LastBoot, MicrovmInstall, SetupRecord, VmError, VmParts, VmStartMode, images, kernel},
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

/// A kernel that the user brings.
#[derive(Debug, Clone)]
pub struct CustomKernel {
    /// The kernel: packed or not.
    pub file: PathBuf,
    /// Its modules, such as `/lib/modules/VERSION`; none where everything is built in.
    pub modules: Option<PathBuf>,
}

/// What machines of this fleet boot with.
#[derive(Debug, Clone)]
pub struct BootFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its first file system.
    pub initrd: PathBuf,
    /// What it is told.
    pub cmdline: String,
    /// Memory of a machine that asks for none.
    pub memory: Size,
}

/// What was set up, and the boot that proved it.
#[derive(Debug, Clone, Serialize)]
pub struct SetupReport {
    /// What is in use from now on.
    #[serde(flatten)]
    pub setup: SetupRecord,
    /// The boot.
    pub last_boot: LastBoot,
}

/// What drives a machine, and how.
struct HypervisorChoice {
    hypervisor: Engine,
    root: PathBuf,
    accelerator: Accelerator,
}

/// The driver of the microVM layer: what microVMs of a data directory are made from, and how they are frozen.
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

    /// What a benchmark needs to boot the same kernel without Palisade.
    pub fn boot_files(&self) -> Result<BootFiles, Failure> {
        let install = self.install();
        let setup = install.setup().map_err(vm_failure)?;
        Ok(BootFiles {
            kernel: install.kernel(&setup),
            initrd: install
                .initrd(&setup, &self.context.launch.programs, Engine::Qemu, None)
                .map_err(vm_failure)?,
            cmdline: install.cmdline(&setup, Accelerator::Emulated, Engine::Qemu),
            memory: vm::plan::MEMORY_DEFAULT,
        })
    }

    /// Prepares this host for microVMs: kernel, hypervisor, the image of this host. What is there is kept. At the end an
    /// emulated microVM boots and runs a command; what is set up is put into use only after that.
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
                // Another package may have a kernel that works.
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

    /// What is set up, where it was seen to boot; set up now otherwise.
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
        if !images::host_is_made(&install.dir().join("images")) {
            tell("making an image of this host's programs");
        }
        images::of_host(&self.context.launch.programs, &install.dir().join("images")).map_err(vm_failure)?;
        if vm::virtiofsd::find().is_err() {
            tell(&format!("directories cannot be shared with microVMs: virtiofsd is not here; {SHARE_TOOL}"));
        }
        Ok(setup)
    }

    /// What a machine of that spec is made from; it boots.
    fn parts(&self, spec: &Spec, rootfs: &RootfsStack) -> Result<VmParts, Failure> {
        // Asked first: images take a minute and gigabytes to make, and are of no use without the rest.
        self.install().setup().map_err(vm_failure)?;
        let images = self.images(&self.install(), spec, rootfs)?;
        self.parts_with(spec, images, None)
    }

    fn parts_with(
        &self,
        spec: &Spec,
        images: Vec<PathBuf>,
        disk: Option<PathBuf>,
    ) -> Result<VmParts, Failure> {
        let setup = self.install().setup().map_err(vm_failure)?;
        let hypervisor = spec.engine.unwrap_or_default();
        let (root, accelerator) = self.engine_root(hypervisor, &setup)?;
        self.parts_by(&setup, HypervisorChoice { hypervisor, root, accelerator }, spec, images, disk)
    }

    fn parts_by(
        &self,
        setup: &SetupRecord,
        by: HypervisorChoice,
        spec: &Spec,
        images: Vec<PathBuf>,
        disk: Option<PathBuf>,
    ) -> Result<VmParts, Failure> {
        let HypervisorChoice { hypervisor, root, accelerator } = by;
        hypervisors::fits(spec, images.len())?;
        let install = self.install();
        let start = VmStartMode::Boot {
            kernel: install.kernel(setup),
            initrd: install
                .initrd(setup, &self.context.launch.programs, hypervisor, spec.share)
                .map_err(vm_failure)?,
            cmdline: install.cmdline(setup, accelerator, hypervisor),
            disk,
        };
        let (disk_bytes, inodes) = (spec.limits.disk.0, spec.limits.inodes);
        let empty =
            vm::disks::empty(&install.dir().join("uppers"), disk_bytes, inodes).map_err(vm_failure)?;
        let jail = self.jail_of(hypervisor, setup)?;
        let sharer = spec.share.map(|_| install.sharer()).transpose().map_err(vm_failure)?;
        Ok(VmParts { hypervisor, engine: root, accelerator, images, sharer, jail, empty, start })
    }

    fn images(
        &self,
        install: &MicrovmInstall,
        spec: &Spec,
        rootfs: &RootfsStack,
    ) -> Result<Vec<PathBuf>, Failure> {
        let dir = install.dir().join("images");
        let programs = &self.context.launch.programs;
        let (Some(layers), Some(base)) = (&rootfs.layers, &spec.base) else {
            return images::of_host(programs, &dir).map_err(vm_failure);
        };
        let named: Vec<_> = base.layers.iter().map(|id| id.as_str()).zip(layers).collect();
        images::of_layers(programs, &dir, &named, hypervisors::room(spec)).map_err(vm_failure)
    }
}

/// Installs the tools that are missing, where that can be done.
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
            format!("microVMs need programs that are not here: {}", missing.join(", ")),
        )
        .because(why)
        .hint(format!("install them: {command}"))
        .hint("where there is no apt, install QEMU, erofs-utils and e2fsprogs by your system's own way"))
    };
    if !sys::caps::is_host_root() || !Path::new("/usr/bin/apt-get").exists() {
        return failed("only root can install them, and only where there is apt-get".to_owned());
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
        // A fresh host may never have fetched the lists of its archives, or long ago.
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

/// A machine that cannot be put together, as a person meets it.
fn vm_failure(error: VmError) -> Failure {
    let set_up = "set it up once: pal setup microvm";
    match error {
        VmError::NotSetUp => Failure::new(Kind::Host, "microVMs are not set up here").hint(set_up).hint("or choose `--layer process` (weaker: shares the host's kernel)"),
        VmError::Missing("apt-get") => {
            Failure::new(Kind::Host, "there is no apt-get here to fetch a kernel with").hint("bring one: pal setup microvm --kernel FILE --modules DIR")
        }
        VmError::Missing(vm::virtiofsd::VIRTIOFSD) => shared_mounts::virtiofsd_missing(),
        VmError::Missing("xz") => {
            Failure::new(Kind::Host, "the kernel's modules are packed with xz, which is not here to unpack them").hint("apt-get install xz-utils")
        }
        VmError::Driver { .. } => Failure::new(Kind::Host, error.to_string()).hint("bring a kernel that has it: pal setup microvm --kernel FILE --modules DIR"),
        VmError::Missing(tool) => Failure::new(Kind::Host, format!("microVMs need {tool}, which is not installed")).hint(set_up),
        VmError::Kernel(what) => Failure::new(Kind::Usage, what).hint("name a kernel for this processor: vmlinux or bzImage, with virtio-mmio, virtio-blk, virtio-console, erofs, overlay and ext4"),
        VmError::Layers(..) => Failure::new(Kind::Host, error.to_string()).hint("build the template in fewer steps, or choose `--layer process`"),
        error => Failure::new(Kind::Host, "cannot put the machine together").because(error).hint("see what this host lacks: pal doctor"),
    }
}
