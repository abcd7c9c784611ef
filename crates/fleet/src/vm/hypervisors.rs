//! Hypervisors besides QEMU: their location, and whether microVMs boot under them on this host.
//!
//! Invariant: `pal` never silently replaces a hypervisor by another; one that cannot run here is an error with a hint.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use body::vm::{
    HypervisorRecord, SetupRecord, VmError, hypervisor_root, images::IMAGES_MAX, setup::KvmVerdict,
};
use proto::{
    Failure, Kind, Spec,
    vm::{Accelerator, Engine, KVM},
};

use super::{Microvms, vm_failure};
use crate::{Settings, templates::ProgressFn};

/// Most images of a microVM under Firecracker, which supports only a few devices.
const FIRECRACKER_IMAGES_MAX: usize = 14;
/// Most images and shared directories of one microVM: all device slots except those of the host channel, the disk and
/// the balloon.
const DEVICES_MAX: usize = 21;
const VERSION_LEN_MAX: u64 = 120;
const VERSION_PATIENCE: Duration = Duration::from_secs(10);

impl Microvms {
    /// Sets up a hypervisor besides QEMU: records its location, and boots a microVM to test it.
    pub fn setup_engine(
        &self,
        which: Engine,
        program: Option<PathBuf>,
        say: ProgressFn<'_>,
    ) -> Result<HypervisorRecord, Failure> {
        let setup = self.proven_setup(say)?;
        if which == Engine::Qemu {
            return Ok(HypervisorRecord {
                program: None,
                version: setup.engine_mark,
                verdict: setup.verdict,
            });
        }
        if let Some(named) = program.as_ref().filter(|named| !named.is_file()) {
            return Err(Failure::new(Kind::NotFound, format!("there is no program {}", named.display()))
                .hint(where_to_get(which)));
        }
        let decided = self.settings()?;
        let known = setup.engines.get(&which).and_then(|known| known.program.as_deref());
        let named = program.or_else(|| decided.program(which).or(known).map(Path::to_owned));
        let found = hypervisor_root::other(which, named.as_deref()).map_err(|error| absent(which, error))?;
        let mut known = HypervisorRecord {
            program: named,
            version: version(which.name(), &found, &where_to_get(which))?,
            verdict: None,
        };
        self.install().remember(which, &known).map_err(vm_failure)?;
        if let Some(jail) = self.jail_of(which, &self.install().setup().map_err(vm_failure)?)? {
            say(&super::jailer_setup::said(&jail));
        }
        say(&format!("testing KVM: booting a microVM under {which}"));
        known.verdict = Some(self.probe_engine(which)?);
        self.install().remember(which, &known).map_err(vm_failure)?;
        Ok(known)
    }

    fn probe_engine(&self, which: Engine) -> Result<KvmVerdict, Failure> {
        let boot_id = sys::proc::boot_id().unwrap_or_default();
        let setup = self.install().setup().map_err(vm_failure)?;
        let (accelerator, why) = match self.try_engine(&setup, which) {
            Ok(()) => (Accelerator::Kvm, "a microVM booted with it".to_owned()),
            // A failure of the jailer says nothing about KVM.
            Err(failure) if super::jailer_setup::is_its_fault(&failure) => return Err(failure),
            Err(failure) => (Accelerator::Emulated, super::kvm_probe::first_line(&failure)),
        };
        Ok(KvmVerdict { accelerator, why, boot_id })
    }

    /// The path of a hypervisor's binary, for one besides QEMU.
    pub(super) fn program_of(&self, which: Engine, setup: &SetupRecord) -> Result<PathBuf, Failure> {
        let decided = self.settings()?;
        let known = setup.engines.get(&which).and_then(|known| known.program.as_deref());
        let named = decided.program(which).or(known);
        hypervisor_root::other(which, named).map_err(|error| absent(which, error))
    }

    /// The root directory of a hypervisor, and its accelerator.
    pub(super) fn engine_root(
        &self,
        which: Engine,
        setup: &SetupRecord,
    ) -> Result<(PathBuf, Accelerator), Failure> {
        let install = self.install();
        if which.emulates() {
            let accelerator =
                setup.verdict.as_ref().map_or(Accelerator::Emulated, |verdict| verdict.accelerator);
            return Ok((install.engine(setup).map_err(vm_failure)?, accelerator));
        }
        let decided = self.settings()?;
        let known = setup.engines.get(&which);
        let named = decided.program(which).or(known.and_then(|known| known.program.as_deref()));
        let program = self.program_of(which, setup)?;
        // The result for another binary says nothing about this one.
        let known = known.filter(|known| named.is_none() || known.program.as_deref() == named);
        if let Err(error) = std::fs::File::options().read(true).write(true).open(KVM) {
            return Err(needs_kvm(which, &format!("{KVM}: {error}")));
        }
        let boot_id = sys::proc::boot_id().unwrap_or_default();
        match known.and_then(|known| known.verdict.as_ref()).filter(|verdict| verdict.boot_id == boot_id) {
            Some(KvmVerdict { accelerator: Accelerator::Emulated, why, .. }) => Err(needs_kvm(which, why)),
            _ => Ok((install.other_engine(which, &program).map_err(vm_failure)?, Accelerator::Kvm)),
        }
    }
}

/// The number of images for which a microVM has device slots; a shared directory takes a slot too.
pub(super) fn room(spec: &Spec) -> usize {
    let shares = if spec.share.is_some() { spec.mounts.len() } else { 0 };
    match spec.engine.unwrap_or_default() {
        Engine::Firecracker => FIRECRACKER_IMAGES_MAX,
        _ => (DEVICES_MAX - shares).min(IMAGES_MAX),
    }
}

/// Checks that a microVM has slots for this many images: they may come from a snapshot under another hypervisor.
pub(super) fn fits(spec: &Spec, images: usize) -> Result<(), Failure> {
    let room = room(spec);
    if images > room { Err(vm_failure(VmError::Layers(images, room))) } else { Ok(()) }
}

fn needs_kvm(which: Engine, why: &str) -> Failure {
    Failure::new(Kind::Host, format!("microVMs do not boot under {which} on this host"))
        .because(why.to_owned())
        .hint(format!("if that has changed, test it again: pal setup microvm --engine {which}"))
        .hint("or use the engine that can emulate: --engine qemu")
}

fn absent(which: Engine, error: VmError) -> Failure {
    match error {
        VmError::Missing(_) => Failure::new(Kind::Host, format!("{which} is not installed"))
            .hint(where_to_get(which))
            .hint("or use the engine that is set up: --engine qemu"),
        error => vm_failure(error),
    }
}

fn where_to_get(which: Engine) -> String {
    let releases = match which {
        Engine::Qemu => return "install it: apt-get install qemu-system-x86".to_owned(),
        Engine::CloudHypervisor => "https://github.com/cloud-hypervisor/cloud-hypervisor/releases",
        Engine::Firecracker => "https://github.com/firecracker-microvm/firecracker/releases",
    };
    format!(
        "get it from {releases}, then: pal setup microvm --engine {which} --program FILE, or pal config set microvm.{which} FILE"
    )
}

/// Runs a program with `--version` and returns the first line of its output.
pub(super) fn version(name: &str, program: &Path, hint: &str) -> Result<String, Failure> {
    let no_engine = |why: String| {
        Failure::new(Kind::Host, format!("{} is not a working {name}", program.display()))
            .because(why)
            .hint(hint)
    };
    let said = first_words(program).map_err(|error| no_engine(error.to_string()))?;
    let first = proto::text::visible(said.lines().next().unwrap_or_default().trim());
    match first.to_lowercase().contains(name) {
        true => Ok(first),
        false if first.is_empty() => Err(no_engine("it does not print its version".to_owned())),
        false => Err(no_engine(first)),
    }
}

/// The beginning of a program's version output. A program that takes too long is killed.
fn first_words(program: &Path) -> io::Result<String> {
    let mut command = Command::new(program);
    let mut child = command
        .arg("--version")
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let deadline = Instant::now() + VERSION_PATIENCE;
    // The output fits into the pipe's buffer, so the program can end before it is read.
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut said = Vec::new();
    if let Some(stdout) = child.stdout {
        stdout.take(VERSION_LEN_MAX).read_to_end(&mut said)?;
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// One finding for each hypervisor, for `pal doctor`.
pub(super) fn report(
    setup: Option<&SetupRecord>,
    settings: &Settings,
) -> Vec<(Engine, Result<String, String>, Option<String>)> {
    let boot_id = sys::proc::boot_id().unwrap_or_default();
    let others = Engine::ALL.into_iter().filter(|which| !which.emulates());
    others
        .map(|which| {
            let known = setup.and_then(|setup| setup.engines.get(&which));
            let try_it = format!("pal setup microvm --engine {which}");
            let named = settings.program(which).or(known.and_then(|known| known.program.as_deref()));
            let found = hypervisor_root::other(which, named);
            let verdict =
                known.and_then(|known| known.verdict.as_ref()).filter(|verdict| verdict.boot_id == boot_id);
            match (found, verdict) {
                (Err(_), _) => (
                    which,
                    Err("not installed; another hypervisor for microVMs".to_owned()),
                    Some(where_to_get(which)),
                ),
                (Ok(_), None) => (which, Err("installed; not tested yet".to_owned()), Some(try_it)),
                (Ok(_), Some(KvmVerdict { accelerator: Accelerator::Kvm, .. })) => {
                    (which, Ok(known.map_or_else(String::new, |known| known.version.clone())), None)
                }
                (Ok(_), Some(verdict)) => (
                    which,
                    Err(format!("installed, but no microVM boots under it: {}", verdict.why)),
                    Some("use a host with (nested) virtualisation".to_owned()),
                ),
            }
        })
        .collect()
}
