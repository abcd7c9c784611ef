//! Hypervisors besides QEMU: where they are, and whether machines run under them here.
//!
//! Invariant: a hypervisor is never replaced by another in silence; one that cannot run here is an error with a hint.

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

/// Most disks below the upper of a machine that Firecracker drives: it has no room for more devices.
const FIRECRACKER_IMAGES_MAX: usize = 14;
/// Images and shared directories of one machine: all its devices but its line, its disk and its balloon.
const DEVICES_MAX: usize = 21;
const VERSION_LEN_MAX: u64 = 120;
const VERSION_PATIENCE: Duration = Duration::from_secs(10);

impl Microvms {
    /// Prepares a hypervisor besides QEMU: remembers where it is, and finds out by starting a machine whether it runs.
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
        say(&format!("trying whether the processor runs machines under {which}"));
        known.verdict = Some(self.probe_engine(which)?);
        self.install().remember(which, &known).map_err(vm_failure)?;
        Ok(known)
    }

    fn probe_engine(&self, which: Engine) -> Result<KvmVerdict, Failure> {
        let boot_id = sys::proc::boot_id().unwrap_or_default();
        let setup = self.install().setup().map_err(vm_failure)?;
        let (accelerator, why) = match self.try_engine(&setup, which) {
            Ok(()) => (Accelerator::Kvm, "a machine was booted with it".to_owned()),
            // That says nothing of the processor.
            Err(failure) if super::jailer_setup::is_its_fault(&failure) => return Err(failure),
            Err(failure) => (Accelerator::Emulated, super::kvm_probe::first_line(&failure)),
        };
        Ok(KvmVerdict { accelerator, why, boot_id })
    }

    /// Where the program of a hypervisor besides QEMU is.
    pub(super) fn program_of(&self, which: Engine, setup: &SetupRecord) -> Result<PathBuf, Failure> {
        let decided = self.settings()?;
        let known = setup.engines.get(&which).and_then(|known| known.program.as_deref());
        let named = decided.program(which).or(known);
        hypervisor_root::other(which, named).map_err(|error| absent(which, error))
    }

    /// The root of a hypervisor, and what runs its machines.
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
        // What was found out of another program says nothing of this one.
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

/// How many images a machine has room for: directories that it shares are devices, too.
pub(super) fn room(spec: &Spec) -> usize {
    let shares = if spec.share.is_some() { spec.mounts.len() } else { 0 };
    match spec.engine.unwrap_or_default() {
        Engine::Firecracker => FIRECRACKER_IMAGES_MAX,
        _ => (DEVICES_MAX - shares).min(IMAGES_MAX),
    }
}

/// Whether so many images fit: they may come from a machine that had more room.
pub(super) fn fits(spec: &Spec, images: usize) -> Result<(), Failure> {
    let room = room(spec);
    if images > room { Err(vm_failure(VmError::Layers(images, room))) } else { Ok(()) }
}

fn needs_kvm(which: Engine, why: &str) -> Failure {
    Failure::new(Kind::Host, format!("machines do not run under {which} here"))
        .because(why.to_owned())
        .hint(format!("where that has changed, have it tried again: pal setup microvm --engine {which}"))
        .hint("or take the one that can emulate: --engine qemu")
}

fn absent(which: Engine, error: VmError) -> Failure {
    match error {
        VmError::Missing(_) => Failure::new(Kind::Host, format!("{which} is not installed here"))
            .hint(where_to_get(which))
            .hint("or take the one that is set up: --engine qemu"),
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

/// What a program of that name says of its version: the first line.
pub(super) fn version(name: &str, program: &Path, hint: &str) -> Result<String, Failure> {
    let no_engine = |why: String| {
        Failure::new(Kind::Host, format!("{} is no {name} that runs here", program.display()))
            .because(why)
            .hint(hint)
    };
    let said = first_words(program).map_err(|error| no_engine(error.to_string()))?;
    let first = proto::text::visible(said.lines().next().unwrap_or_default().trim());
    match first.to_lowercase().contains(name) {
        true => Ok(first),
        false if first.is_empty() => Err(no_engine("it does not tell its version".to_owned())),
        false => Err(no_engine(first)),
    }
}

/// The beginning of what a program says when it is asked for its version; one that takes its time is ended.
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
    // What fits a pipe is more than is wanted, so it can end without being read.
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

/// What is known of each hypervisor, for whoever wants to know what this host lacks.
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
                (Ok(_), None) => (
                    which,
                    Err("installed; whether machines run under it was not tried".to_owned()),
                    Some(try_it),
                ),
                (Ok(_), Some(KvmVerdict { accelerator: Accelerator::Kvm, .. })) => {
                    (which, Ok(known.map_or_else(String::new, |known| known.version.clone())), None)
                }
                (Ok(_), Some(verdict)) => (
                    which,
                    Err(format!("installed, but no machine comes up under it: {}", verdict.why)),
                    Some("use a machine with (nested) virtualisation".to_owned()),
                ),
            }
        })
        .collect()
}
