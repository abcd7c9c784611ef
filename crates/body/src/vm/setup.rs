//! The setup of microVMs on this host: kernel, hypervisors and initramfs, shared by all Bodies of a data
//! directory.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proto::vm::{Accelerator, Engine, LINE_WORD, OPTIONAL_MODULE};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    VmError, VmStepExt,
    cpio::CpioArchive,
    hypervisor_root, kernel,
    kernel_drivers::{DRIVERS, DriverRecord, DriverSet, KernelDriver, LoadOrder, Module, ModuleTree},
};
use crate::programs::Programs;

const RECORD: &str = "setup.json";
const RECORD_LEN_MAX: u64 = 1 << 20;
/// The version of the record.
const VERSION: u32 = 1;
/// The directory of modules that only microVMs of some hypervisors need.
const MORE: &str = "more";
/// Prefix of the directories of modules that only microVMs with shared directories need; the kernel's name
/// follows.
const SHARING: &str = "sharing-";
/// Prefix of the directories of modules that only microVMs with an egress policy load.
const REDIRECT: &str = "redirect-";
/// The file with the result of the driver search, in the kernel's directory.
const DRIVER_RECORD: &str = "drivers.json";
/// How long the TSC is measured: long enough for an accuracy of some millionths.
const TICKS_WATCHED: Duration = Duration::from_millis(250);

/// `setup.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetupRecord {
    /// Version of this record.
    pub v: u32,
    /// The kernel's directory, named by its contents.
    pub kernel: String,
    /// A description of the kernel's origin.
    pub kernel_source: String,
    /// SHA-256 of the kernel as it is booted.
    pub kernel_sha256: String,
    /// The hypervisor's root, named by the state of the program that it was built from.
    pub engine: String,
    /// That state.
    pub engine_mark: String,
    /// The TSC frequency of this CPU, in kHz.
    pub ticks_khz: u64,
    /// The result of the KVM probe, with the boot of the host in which it was done.
    #[serde(default)]
    pub verdict: Option<KvmVerdict>,
    /// Other hypervisors that the user configured or probed, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub engines: BTreeMap<Engine, HypervisorRecord>,
}

/// Whether this host really runs microVMs with KVM: the probe starts one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmVerdict {
    /// The accelerator to use.
    pub accelerator: Accelerator,
    /// The reason, for users.
    pub why: String,
    /// The boot of the host in which the probe was done.
    pub boot_id: String,
}

/// A hypervisor in addition to QEMU, which is always set up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HypervisorRecord {
    /// Its path on this host, if the user configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// The version that it reports.
    pub version: String,
    /// Whether microVMs run under it here: the probe starts one.
    pub verdict: Option<KvmVerdict>,
}

/// The directory of the setup.
#[derive(Debug, Clone)]
pub struct MicrovmInstall {
    dir: PathBuf,
}

impl MicrovmInstall {
    /// The directory of microVM parts in a data directory.
    pub fn of(data: &Path) -> Self {
        Self { dir: data.join("vm") }
    }

    /// Its path.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The current setup.
    pub fn setup(&self) -> Result<SetupRecord, VmError> {
        let text = match sys::fd::read_small(&self.dir.join(RECORD), RECORD_LEN_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(VmError::NotSetUp),
            read => read.step("read the microVM setup")?,
        };
        let setup: SetupRecord =
            serde_json::from_str(&text).map_err(io::Error::from).step("read the microVM setup")?;
        if setup.v == VERSION { Ok(setup) } else { Err(VmError::NotSetUp) }
    }

    /// Creates missing parts, and returns the setup that [`MicrovmInstall::adopt`] puts into use. A given
    /// kernel replaces the current one; without one, it downloads the first kernel package that is not in
    /// `refused`.
    pub fn prepare(
        &self,
        own_kernel: Option<kernel::KernelFiles>,
        refused: &[String],
        say: &dyn Fn(&str),
    ) -> Result<SetupRecord, VmError> {
        let _turn = self.turn()?;
        let before = self.setup().ok();
        for tool in [hypervisor_root::QEMU, "mkfs.erofs", "mke2fs"] {
            super::find_tool(tool)?;
        }
        let (kernel, kernel_source, kernel_sha256) = match (own_kernel, &before) {
            (None, Some(setup)) if self.kernel_is_whole(setup) && !refused.contains(&setup.kernel_source) => {
                (setup.kernel.clone(), setup.kernel_source.clone(), setup.kernel_sha256.clone())
            }
            (Some(found), _) => self.keep_kernel(&found, say)?,
            (None, _) => {
                let offered = kernel::packages(say)?;
                let package = offered.iter().find(|package| !refused.contains(package));
                let package = package
                    .ok_or_else(|| VmError::Kernel("no kernel package of the archive works here".into()))?;
                let scratch = self.dir.join("fetched");
                let _ = fs::remove_dir_all(&scratch);
                fs::create_dir(&scratch).step("create a directory for the kernel")?;
                let kept =
                    kernel::fetch(package, &scratch, say).and_then(|found| self.keep_kernel(&found, say));
                let _ = fs::remove_dir_all(&scratch);
                kept?
            }
        };
        let (engine, engine_mark) = self.keep_engine(say)?;
        let engines = before.as_ref().map(|before| before.engines.clone()).unwrap_or_default();
        Ok(SetupRecord {
            v: VERSION,
            verdict: before
                .filter(|before| before.kernel == kernel && before.engine == engine)
                .and_then(|before| before.verdict),
            kernel,
            kernel_source,
            kernel_sha256,
            engine,
            engine_mark,
            ticks_khz: measure_ticks(),
            engines,
        })
    }

    /// Lets one caller at a time set up microVMs, until the lock is dropped.
    pub fn lock_setup(&self) -> Result<fs::File, VmError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)
            .step("create the directory for microVMs")?;
        self.lock("setup.lock")
    }

    /// Puts a setup into use, atomically.
    pub fn adopt(&self, setup: &SetupRecord) -> Result<(), VmError> {
        let _turn = self.turn()?;
        let engines = self.setup().map_or_else(|_| setup.engines.clone(), |now| now.engines);
        self.write(&SetupRecord { engines, ..setup.clone() })
    }

    /// Removes a kernel that was prepared and is not put into use.
    pub fn discard_kernel(&self, setup: &SetupRecord) {
        let initrds = fs::read_dir(self.dir.join("initrd")).into_iter().flatten().flatten();
        for initrd in initrds.filter(|entry| entry.file_name().to_string_lossy().starts_with(&setup.kernel)) {
            let _ = fs::remove_file(initrd.path());
        }
        for dir in [&setup.kernel, &share_modules(&setup.kernel), &redirect_modules(&setup.kernel)] {
            let _ = fs::remove_dir_all(self.dir.join(dir));
        }
    }

    /// Writes the record of the setup.
    pub fn write(&self, setup: &SetupRecord) -> Result<(), VmError> {
        let text = serde_json::to_vec(setup).map_err(io::Error::from).step("write the microVM setup")?;
        sys::fd::write_whole(&self.dir.join(RECORD), &text).step("write the microVM setup")
    }

    /// Records facts about a hypervisor.
    pub fn remember(&self, which: Engine, known: &HypervisorRecord) -> Result<(), VmError> {
        let _turn = self.turn()?;
        let mut setup = self.setup()?;
        setup.engines.insert(which, known.clone());
        self.write(&setup)
    }

    fn turn(&self) -> Result<fs::File, VmError> {
        self.lock("lock")
    }

    fn lock(&self, name: &str) -> Result<fs::File, VmError> {
        let lock = fs::File::create(self.dir.join(name)).step("lock the microVM setup")?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).step("lock the microVM setup")?;
        Ok(lock)
    }

    fn kernel_is_whole(&self, setup: &SetupRecord) -> bool {
        let read = fs::read(self.kernel(setup));
        let whole = read.is_ok_and(|bytes| proto::event::hex(&Sha256::digest(bytes)) == setup.kernel_sha256);
        // An older version searched for other drivers.
        let complete = self.driver_record(setup).is_some_and(|record| record.is_current());
        let parts = [self.more_modules(setup), self.share_modules(setup), self.redirect_modules(setup)];
        whole && complete && parts.iter().all(|part| part.exists())
    }

    fn driver_record(&self, setup: &SetupRecord) -> Option<DriverRecord> {
        let path = self.dir.join(&setup.kernel).join(DRIVER_RECORD);
        serde_json::from_str(&sys::fd::read_small(&path, RECORD_LEN_MAX).ok()?).ok()
    }

    fn keep_kernel(
        &self,
        found: &kernel::KernelFiles,
        say: &dyn Fn(&str),
    ) -> Result<(String, String, String), VmError> {
        let bytes = kernel::unpack(&found.kernel)?;
        let tree = found.modules.as_deref().map(ModuleTree::read).transpose()?;
        let order = |set: DriverSet, before: &[Module]| {
            let wanted: Vec<KernelDriver> =
                DRIVERS.iter().filter(|driver| driver.set == set).copied().collect();
            tree.as_ref().map_or_else(|| Ok(LoadOrder::default()), |tree| tree.load_order(&wanted, before))
        };
        let base = order(DriverSet::Base, &[])?;
        // A microVM may have one of these sets without the other.
        let more = order(DriverSet::Bus, &base.modules)?;
        let sharing = order(DriverSet::Share, &base.modules)?;
        let redirect = order(DriverSet::Redirect, &base.modules)?;
        let orders = [&base, &more, &sharing, &redirect];
        let record = DriverRecord::new(orders.map(|order| order.lacking.clone()).concat());
        if !record.lacking.is_empty() {
            say(&format!("the kernel lacks drivers that some microVMs need: {}", record.lacking.join(", ")));
        }
        let record = serde_json::to_vec(&record).map_err(io::Error::from).step("write the kernel")?;
        let sha256 = proto::event::hex(&Sha256::digest(&bytes));
        let mut hash = Sha256::new();
        hash.update(&bytes);
        hash.update(&record);
        base.modules.iter().chain(&more.modules).for_each(|module| {
            hash.update(module.name.as_bytes());
            hash.update(&module.bytes);
        });
        let name = format!("kernel-{}", &proto::event::hex(&hash.finalize())[..16]);
        self.whole_dir(&name, |dir| {
            fs::write(dir.join("vmlinux"), &bytes).step("write the kernel")?;
            fs::write(dir.join(DRIVER_RECORD), &record).step("write the kernel")?;
            let kept = [("modules", &base.modules, 0), (MORE, &more.modules, base.modules.len())];
            for (place, modules, first) in kept {
                fs::create_dir(dir.join(place)).step("write the kernel")?;
                write_modules(&dir.join(place), modules, first)?;
            }
            Ok(())
        })?;
        // These modules are not part of the kernel's name, so that snapshots from before they existed can
        // still be restored.
        let mut first = base.modules.len() + more.modules.len();
        for (place, modules) in
            [(share_modules(&name), &sharing.modules), (redirect_modules(&name), &redirect.modules)]
        {
            self.whole_dir(&place, |dir| write_modules(dir, modules, first))?;
            first += modules.len();
        }
        Ok((name, found.source.clone(), sha256))
    }

    fn keep_engine(&self, say: &dyn Fn(&str)) -> Result<(String, String), VmError> {
        let mark = hypervisor_root::mark()?;
        let name = format!("engine-{}", &proto::event::hex(&Sha256::digest(&mark))[..16]);
        if !self.dir.join(&name).exists() {
            say("putting the hypervisor into a root of its own");
        }
        self.whole_dir(&name, hypervisor_root::build)?;
        Ok((name, mark))
    }

    /// Creates a directory that is complete under its name or does not exist; other ids than ours can read
    /// it.
    pub(super) fn whole_dir(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let place = self.dir.join(name);
        if place.exists() {
            return Ok(());
        }
        // A lock of its own, because only some callers hold the setup lock.
        let _turn = self.lock("parts.lock")?;
        if place.exists() {
            return Ok(());
        }
        let part = self.dir.join(format!("{name}.part"));
        let _ = fs::remove_dir_all(&part);
        fs::create_dir(&part).step("create a directory for microVMs")?;
        fill(&part)
            .and_then(|()| open_up(&part).step("let Bodies read it"))
            .and_then(|()| fs::rename(&part, &place).step("put it in place"))
            .inspect_err(|_| drop(fs::remove_dir_all(&part)))
    }

    /// The path of the kernel.
    pub fn kernel(&self, setup: &SetupRecord) -> PathBuf {
        self.dir.join(&setup.kernel).join("vmlinux")
    }

    /// The hypervisor's root, built again if the program on this host has changed.
    pub fn engine(&self, setup: &SetupRecord) -> Result<PathBuf, VmError> {
        let root = self.dir.join(&setup.engine);
        if root.exists() && hypervisor_root::mark().is_ok_and(|mark| mark == setup.engine_mark) {
            return Ok(root);
        }
        let _turn = self.turn()?;
        let (engine, engine_mark) = self.keep_engine(&|_| ())?;
        // The new hypervisor may not restore snapshots of the old one, and needs a new KVM probe.
        let setup = SetupRecord { engine: engine.clone(), engine_mark, verdict: None, ..self.setup()? };
        self.write(&setup)?;
        Ok(self.dir.join(engine))
    }

    fn more_modules(&self, setup: &SetupRecord) -> PathBuf {
        self.dir.join(&setup.kernel).join(MORE)
    }

    fn share_modules(&self, setup: &SetupRecord) -> PathBuf {
        self.dir.join(share_modules(&setup.kernel))
    }

    fn redirect_modules(&self, setup: &SetupRecord) -> PathBuf {
        self.dir.join(redirect_modules(&setup.kernel))
    }

    /// The initramfs for this kernel, this hypervisor and this version of the guest, with the modules of these sets.
    pub fn initrd(
        &self,
        setup: &SetupRecord,
        programs: &Programs,
        engine: Engine,
        wanted: &[DriverSet],
    ) -> Result<PathBuf, VmError> {
        let version = programs.launch.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut dirs = vec![self.dir.join(&setup.kernel).join("modules")];
        let mut sets = vec![DriverSet::Base];
        let mut name = format!("{}-{version}", setup.kernel);
        if engine != Engine::Qemu {
            dirs.push(self.more_modules(setup));
            sets.push(DriverSet::Bus);
            name += "-more";
        }
        if wanted.contains(&DriverSet::Share) {
            dirs.push(self.share_modules(setup));
            sets.push(DriverSet::Share);
            name += "-sharing";
        }
        if dirs.iter().any(|dir| !dir.exists()) {
            // An older version set up fewer modules.
            return Err(VmError::NotSetUp);
        }
        // Without these modules the guest reports that it cannot redirect connections, and boots.
        let redirect = self.redirect_modules(setup);
        if wanted.contains(&DriverSet::Redirect) && redirect.exists() {
            dirs.push(redirect);
            sets.push(DriverSet::Redirect);
            name += "-redirect";
        }
        let record = self.driver_record(setup).unwrap_or_default();
        if let Some(driver) = record.missing_for(engine, &sets) {
            return Err(VmError::Driver { kernel: setup.kernel_source.clone(), driver });
        }
        let path = self.dir.join("initrd").join(name + ".cpio");
        if path.exists() {
            return Ok(path);
        }
        let mut archive = CpioArchive::default();
        for dir in ["dev", "proc", "sys", "stage", "modules"] {
            archive.dir(dir);
        }
        archive.device("dev/console", 5, 1);
        archive.device("dev/null", 1, 3);
        archive.file("init", 0o755, &fs::read(&programs.launch).step("read the guest")?);
        for dir in dirs {
            for entry in fs::read_dir(dir).step("read the kernel's modules")?.flatten() {
                archive.file(
                    &format!("modules/{}", entry.file_name().to_string_lossy()),
                    0o644,
                    &fs::read(entry.path()).step("read a module")?,
                );
            }
        }
        fs::create_dir_all(self.dir.join("initrd")).step("create a directory for initramfs images")?;
        sys::fd::write_whole(&path, &archive.finish()).step("write the initramfs")?;
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o444))
            .step("write the initramfs")?;
        Ok(path)
    }

    /// The kernel's command line.
    pub fn cmdline(&self, setup: &SetupRecord, accelerator: Accelerator, engine: Engine) -> String {
        let mut words = vec![
            "console=ttyS0 quiet loglevel=4 panic=-1 audit=0 8250.nr_uarts=1 cryptomgr.notests random.trust_cpu=on rcupdate.rcu_expedited=1 psi=0".to_owned(),
        ];
        if accelerator == Accelerator::Emulated {
            // Without these options the kernel calibrates its clock, which is slow and sometimes fails under
            // emulation.
            let khz = setup.ticks_khz;
            words.push(format!(
                "tsc_early_khz={khz} lpj={} tsc=reliable no_timer_check nowatchdog deferred_probe_timeout=0 mitigations=off",
                khz * 4
            ));
            // The emulator translates code once for each address: programs that are loaded at the same
            // addresses again cost a third.
            words.push("norandmaps".to_owned());
            // Hardening inside the microVM and unused accounting cost emulated instructions.
            words.push("lsm=landlock noautogroup cgroup_disable=memory init_on_alloc=0 transparent_hugepage=never randomize_kstack_offset=off hardened_usercopy=off".to_owned());
        }
        words.push(match engine {
            Engine::Qemu => "reboot=t".to_owned(),
            // A Firecracker microVM ends when its kernel requests a reset by the keyboard controller, and it
            // has no PCI bus to scan.
            Engine::Firecracker => format!("reboot=k pci=off {LINE_WORD}"),
            Engine::CloudHypervisor => format!("reboot=k {LINE_WORD}"),
        });
        words.join(" ")
    }
}

/// The directory of a kernel's modules that only microVMs with shared directories need.
pub fn share_modules(kernel: &str) -> String {
    format!("{SHARING}{kernel}")
}

/// The directory of a kernel's modules that only microVMs with an egress policy load.
pub fn redirect_modules(kernel: &str) -> String {
    format!("{REDIRECT}{kernel}")
}

/// Writes modules with names whose order is the load order.
fn write_modules(dir: &Path, modules: &[Module], first: usize) -> Result<(), VmError> {
    modules.iter().enumerate().try_for_each(|(index, module)| {
        let end = if module.required { "" } else { OPTIONAL_MODULE };
        let file = format!("{:03}-{}{end}.ko", first + index, module.name);
        fs::write(dir.join(file), &module.bytes).step("write a module")
    })
}

/// Measures the TSC frequency of this CPU, in kHz.
fn measure_ticks() -> u64 {
    let (began, from) = (Instant::now(), sys::proc::ticks());
    std::thread::sleep(TICKS_WATCHED);
    let (took, to) = (began.elapsed(), sys::proc::ticks());
    let khz = u128::from(to.wrapping_sub(from)) * 1_000_000 / took.as_nanos().max(1);
    u64::try_from(khz).unwrap_or(0)
}

/// Makes a tree readable for all ids, and its programs executable, whatever the umask was.
fn open_up(dir: &Path) -> io::Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(dir)? {
        let (path, kind) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))?;
        if kind.is_dir() {
            open_up(&path)?;
        } else if kind.is_file() {
            let mode = fs::metadata(&path)?.permissions().mode();
            let run = if mode & 0o100 == 0 { 0 } else { 0o111 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode | 0o444 | run))?;
        }
    }
    Ok(())
}
