//! Machines: what a microVM of this fleet is made from.

pub(crate) mod engines;
mod fork;
mod frozen;
mod jail;
mod judge;
mod share;
pub(crate) mod spare;
mod swap;
mod sweep;
mod warm;

use std::path::{Path, PathBuf};

use body::{
    root::Under,
    vm::{self, Ground, Parts, Setup, Start, VmError, images, kernel},
};
use proto::{
    Failure, Kind, Size, Spec,
    vm::{Accelerator, Engine},
};

use crate::{Create, Fleet, templates::Say};

pub(crate) use fork::Beside;
pub(crate) use frozen::inherit;
pub(crate) use share::{SHARE_TOOL, cannot_freeze, wrong_layer};

/// A kernel that the user brings.
#[derive(Debug, Clone)]
pub struct OwnKernel {
    /// The kernel: packed or not.
    pub file: PathBuf,
    /// Its modules, such as `/lib/modules/VERSION`; none where everything is built in.
    pub modules: Option<PathBuf>,
}

/// What machines of this fleet boot with.
#[derive(Debug, Clone)]
pub struct Boots {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its first file system.
    pub initrd: PathBuf,
    /// What it is told.
    pub cmdline: String,
    /// Memory of a machine that asks for none.
    pub memory: Size,
}

/// What drives a machine, and how.
struct Hypervisor {
    hypervisor: Engine,
    root: PathBuf,
    accelerator: Accelerator,
}

impl Fleet {
    /// For whoever boots the same without Palisade, to compare.
    pub fn boots(&self) -> Result<Boots, Failure> {
        let ground = self.ground();
        let setup = ground.setup().map_err(failure)?;
        Ok(Boots {
            kernel: ground.kernel(&setup),
            initrd: ground.initrd(&setup, &self.maker.programs, Engine::Qemu, None).map_err(failure)?,
            cmdline: ground.cmdline(&setup, Accelerator::Emulated, Engine::Qemu),
            memory: vm::plan::MEMORY_DEFAULT,
        })
    }

    pub(crate) fn ground(&self) -> Ground {
        Ground::of(&self.data)
    }

    /// Whether microVMs were set up here.
    pub fn has_microvms(&self) -> bool {
        self.ground().setup().is_ok()
    }

    /// Prepares this host for microVMs: kernel, hypervisor, the image of this host. What is there is kept.
    pub fn setup_microvm(&self, own: Option<OwnKernel>, say: Say<'_>) -> Result<Setup, Failure> {
        let ground = self.ground();
        let say = std::cell::RefCell::new(say);
        let tell = |what: &str| (say.borrow_mut())(what);
        install_tools(&tell)?;
        let found = own.map(|own| kernel::Found {
            source: own.file.display().to_string(),
            kernel: own.file,
            modules: own.modules,
        });
        let setup = ground.make(found, &tell).map_err(failure)?;
        ground.initrd(&setup, &self.maker.programs, Engine::Qemu, None).map_err(failure)?;
        if !images::host_is_made(&ground.dir().join("images")) {
            tell("making an image of this host's programs");
        }
        images::of_host(&self.maker.programs, &ground.dir().join("images")).map_err(failure)?;
        if vm::share::find().is_err() {
            tell(&format!("directories cannot be shared with microVMs: virtiofsd is not here; {SHARE_TOOL}"));
        }
        self.judge(setup, &tell)
    }

    /// What a machine of that spec is made from; it boots.
    pub(crate) fn parts(&self, spec: &Spec, under: &Under) -> Result<Parts, Failure> {
        // Asked first: images take a minute and gigabytes to make, and are of no use without the rest.
        self.ground().setup().map_err(failure)?;
        let images = self.images(&self.ground(), spec, under)?;
        self.parts_with(spec, images, None)
    }

    fn parts_with(&self, spec: &Spec, images: Vec<PathBuf>, disk: Option<PathBuf>) -> Result<Parts, Failure> {
        let setup = self.ground().setup().map_err(failure)?;
        let hypervisor = spec.engine.unwrap_or_default();
        let (root, accelerator) = self.engine_root(hypervisor, &setup)?;
        self.parts_by(Hypervisor { hypervisor, root, accelerator }, spec, images, disk)
    }

    fn parts_by(
        &self,
        by: Hypervisor,
        spec: &Spec,
        images: Vec<PathBuf>,
        disk: Option<PathBuf>,
    ) -> Result<Parts, Failure> {
        let Hypervisor { hypervisor, root, accelerator } = by;
        engines::fits(spec, images.len())?;
        share::check_engine(spec, hypervisor)?;
        let ground = self.ground();
        let setup = ground.setup().map_err(failure)?;
        let start = Start::Boot {
            kernel: ground.kernel(&setup),
            initrd: ground.initrd(&setup, &self.maker.programs, hypervisor, spec.share).map_err(failure)?,
            cmdline: ground.cmdline(&setup, accelerator, hypervisor),
            disk,
        };
        let empty = vm::disks::empty(&ground.dir().join("uppers"), spec.limits.disk.0).map_err(failure)?;
        let jail = self.jail_of(hypervisor, &setup)?;
        let sharer = spec.share.map(|_| ground.sharer()).transpose().map_err(failure)?;
        Ok(Parts {
            hypervisor,
            engine: root,
            accelerator,
            images,
            sharer,
            jail,
            empty,
            start,
            ahead: false,
            alone: true,
        })
    }

    fn images(&self, ground: &Ground, spec: &Spec, under: &Under) -> Result<Vec<PathBuf>, Failure> {
        let dir = ground.dir().join("images");
        let programs = &self.maker.programs;
        let (Some(layers), Some(base)) = (&under.layers, &spec.base) else {
            return images::of_host(programs, &dir).map_err(failure);
        };
        let named: Vec<_> = base.layers.iter().map(|id| id.as_str()).zip(layers).collect();
        images::of_layers(programs, &dir, &named, engines::room(spec)).map_err(failure)
    }

    /// Limits that a machine cannot have, and those it has when nothing is asked for.
    pub(crate) fn machine_limits(&self, request: &Create) -> crate::AskedLimits {
        let mut asked = request.limits.clone();
        asked.memory = asked.memory.or(Some(vm::plan::MEMORY_DEFAULT));
        asked.cpu_milli = asked.cpu_milli.or(Some(1000 * vm::plan::CPUS_DEFAULT.min(sys::proc::cpu_count())));
        let room = Size((self.maker.capacity.disk.0 / 4) & !0xfff);
        asked.disk = asked.disk.or(Some(vm::plan::DISK_DEFAULT.min(room)));
        asked
    }
}

/// What cannot be asked of a machine.
pub(crate) fn check(request: &Create, has_workspaces: bool) -> Result<(), Failure> {
    if has_workspaces {
        return Err(Failure::new(
            Kind::Usage,
            "a microVM has no repositories in it yet: their work could not be brought out",
        )
        .hint("choose `--layer process`, or copy files: pal cp DIR BODY:PATH"));
    }
    share::check(request)?;
    let too_small = |what: &str, asked: Size, min: Size| {
        Err(Failure::new(
            Kind::Usage,
            format!("{what} of {asked} is too small for a microVM: at least {min} is needed"),
        )
        .hint("ask for more, or for `--layer process`"))
    };
    match (request.limits.memory, request.limits.disk) {
        (Some(memory), _) if memory < vm::plan::MEMORY_MIN => {
            too_small("memory", memory, vm::plan::MEMORY_MIN)
        }
        (_, Some(disk)) if !vm::plan::disk_fits(disk) => too_small("disk", disk, Size(vm::disks::DISK_MIN)),
        _ => Ok(()),
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
    let installed = std::process::Command::new("/usr/bin/apt-get")
        .args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null())
        .output();
    match installed {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            failed(proto::text::visible_bytes(&output.stderr[output.stderr.len().saturating_sub(400)..]))
        }
        Err(error) => failed(error.to_string()),
    }
}

/// A machine that cannot be put together, as a person meets it.
pub(crate) fn failure(error: VmError) -> Failure {
    let set_up = "set it up once: pal setup microvm";
    match error {
        VmError::NotSetUp => Failure::new(Kind::Host, "microVMs are not set up here").hint(set_up).hint("or choose `--layer process` (weaker: shares the host's kernel)"),
        VmError::Missing("apt-get") => {
            Failure::new(Kind::Host, "there is no apt-get here to fetch a kernel with").hint("bring one: pal setup microvm --kernel FILE --modules DIR")
        }
        VmError::Missing(vm::share::VIRTIOFSD) => share::missing(),
        VmError::Missing(tool) => Failure::new(Kind::Host, format!("microVMs need {tool}, which is not installed")).hint(set_up),
        VmError::Kernel(what) => Failure::new(Kind::Usage, what).hint("name a kernel for this processor: vmlinux or bzImage, with virtio-mmio, virtio-blk, virtio-console, erofs and overlay"),
        VmError::Layers(..) => Failure::new(Kind::Host, error.to_string()).hint("build the template in fewer steps, or choose `--layer process`"),
        error => Failure::new(Kind::Host, "cannot put the machine together").because(error).hint("see what this host lacks: pal doctor"),
    }
}
