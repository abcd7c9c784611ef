//! Proves a microVM setup: an emulated microVM boots with it and runs a command. Emulated, because every host can do
//! that.
//!
//! Invariant: a kernel that does not boot is never put into use; the previous one stays in use.

use std::time::Duration;

use body::{
    BodyDir,
    driver::{Driver, LimitRequest, Origin, StartMode},
    guest::{GuestClient, GuestError},
    root::RootfsStack,
    vm::{LastBoot, SetupRecord, measure, stack::VmLayers},
};
use proto::{
    BodyId, Failure, Kind, Spec,
    spec::{Ids, Life, Network},
    vm::{Accelerator, Engine, StartReport},
    wire::process::{ProcessConfig, StartRequest, process_event},
};

use super::{HypervisorChoice, Microvms};

/// How long the command may take. An emulated microVM on a busy host is slow.
const COMMAND_PATIENCE: Duration = Duration::from_secs(30);
/// Prints the kernel's release, and uses the upper's file system after dropping its caches: Debian's 6.1.192 boots,
/// but dereferences a null pointer in ext4 as soon as memory gets short.
const SELF_TEST: &str = "set -e; uname -r; dir=/root/.kernel-self-test; mkdir $dir; \
    head -c 262144 /dev/zero > $dir/file; sync; echo 3 > /proc/sys/vm/drop_caches; \
    rm -r $dir; mkdir $dir; rmdir $dir";
const OUTPUT_LEN_MAX: usize = 4096;

impl Microvms {
    /// Boots an emulated microVM with this setup and runs a command in it. If that fails, removes the kernel unless it
    /// is in use; the failure names the kernel that is in use.
    pub(super) fn prove_boot(&self, setup: &SetupRecord, tell: &dyn Fn(&str)) -> Result<LastBoot, Failure> {
        tell(&format!("booting an emulated microVM with the kernel {}", setup.kernel_source));
        let proof = |dir: &BodyDir, spec: &Spec| {
            let release = self.run_in_probe(dir, spec).map_err(|failure| with_console(dir, failure))?;
            let took_ms = dir.revival().map_or(0, |revival| revival.took_ms);
            tell(&format!("the kernel {release} booted in {took_ms} ms and ran a command"));
            Ok(last_boot(setup, Engine::Qemu, Accelerator::Emulated, release, took_ms))
        };
        self.boot_probe(setup, Engine::Qemu, Accelerator::Emulated, proof).map_err(|why| {
            let source = &setup.kernel_source;
            let install = self.install();
            let (message, hint) = match install.setup() {
                Ok(now) if now.kernel == setup.kernel => {
                    (format!("the kernel {source}, which is in use, does not boot"), None)
                }
                Ok(now) => {
                    install.discard_kernel(setup);
                    let stays = &now.kernel_source;
                    (
                        format!("the kernel {source} does not boot; the kernel {stays} stays in use"),
                        Some("try the kernel that is in use: pal run --layer microvm -- uname -r"),
                    )
                }
                Err(_) => {
                    install.discard_kernel(setup);
                    (format!("the kernel {source} does not boot; microVMs are not set up"), None)
                }
            };
            let told = Failure::new(Kind::Host, message).because(why);
            let told = hint.into_iter().fold(told, Failure::hint);
            told.hint("use another kernel and its modules: pal setup microvm --kernel FILE --modules DIR")
        })
    }

    /// Records the successful boot of a microVM with the current setup.
    pub(super) fn record_boot(&self, spec: &Spec, revival: &StartReport) {
        let install = self.install();
        if revival.how != "boot" {
            return;
        }
        let Ok(setup) = install.setup() else { return };
        let engine = spec.engine.unwrap_or_default();
        let accelerator = match (engine.emulates(), &setup.verdict) {
            (false, _) => Accelerator::Kvm,
            (true, verdict) => verdict.as_ref().map_or(Accelerator::Emulated, |verdict| verdict.accelerator),
        };
        let release = revival.receipt.kernel.clone();
        // If this fails, `pal doctor` reports an earlier boot.
        let _ = install.record_boot(&last_boot(&setup, engine, accelerator, release, revival.took_ms));
    }

    /// Boots a microVM without an owner, with a setup that may not be in use; calls `act` with it and ends it.
    pub(super) fn boot_probe<T>(
        &self,
        setup: &SetupRecord,
        which: Engine,
        accelerator: Accelerator,
        act: impl FnOnce(&BodyDir, &Spec) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let spec = Spec {
            v: proto::spec::VERSION,
            id: BodyId::from_random([0; 12]),
            name: None,
            created_at: store::clock::now(),
            layer: self.layer(),
            engine: Some(which),
            template: "host".into(),
            snapshots: Vec::new(),
            base: None,
            parent: None,
            limits: self.limits(&LimitRequest::default(), Life::Run, &Origin::Template(StartMode::Boot))?,
            env: Default::default(),
            mounts: Vec::new(),
            share: None,
            workspaces: Vec::new(),
            home: None,
            at_start: Vec::new(),
            ports: Vec::new(),
            workdir: None,
            user: "user".into(),
            network: Network::Closed,
            egress: None,
            role: Default::default(),
            life: Life::Run,
            ids: Ids { users: Vec::new(), groups: Vec::new() },
        };
        let rootfs = RootfsStack::default();
        let layers = VmLayers::of(&rootfs, &spec);
        let images = self.images(&self.install(), &spec, &layers)?;
        let (root, _) = self.engine_root(which, setup)?;
        let by = HypervisorChoice { hypervisor: which, root, accelerator };
        let parts = self.parts_by(setup, by, &spec, (images, layers.layout), None)?;
        self.with_nobodys(&spec, &rootfs, &parts, act)
    }

    /// Runs the self-test in a microVM, and returns the kernel's release.
    fn run_in_probe(&self, dir: &BodyDir, spec: &Spec) -> Result<String, Failure> {
        let guest = GuestClient::new(dir.path(), self.context.token(&spec.id));
        // The caller may be inside an async runtime, which cannot block on another, so the test runs on a thread of
        // its own.
        let ran = std::thread::scope(|scope| scope.spawn(|| run_self_test(&guest)).join());
        ran.unwrap_or_else(|_| Err(Failure::new(Kind::Internal, "the test of the microVM was interrupted")))
    }
}

fn run_self_test(guest: &GuestClient) -> Result<String, Failure> {
    let cannot = |error: &dyn std::fmt::Display| {
        Failure::new(Kind::Host, "the self-test of the kernel does not pass in the microVM")
            .because(error.to_string())
    };
    let args = vec!["-c".into(), SELF_TEST.into()];
    let process = ProcessConfig { cmd: "/bin/sh".into(), args, ..ProcessConfig::default() };
    let start = StartRequest { process: Some(process), stdin: Some(false), ..StartRequest::default() };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| cannot(&error))?;
    let ran = async {
        let (mut output, mut code) = (Vec::new(), None);
        let options = body::guest::StartOptions { user: Some("root"), ..Default::default() };
        let mut stream = guest.connect_http().await?.start(&start, options).await?;
        while let Some(event) = stream.next().await? {
            match event.event {
                Some(process_event::Event::Data(data)) => {
                    if let Some(process_event::data_event::Output::Stdout(bytes)) = data.output
                        && output.len() < OUTPUT_LEN_MAX
                    {
                        output.extend_from_slice(&bytes);
                    }
                }
                Some(process_event::Event::End(end)) => code = Some(crate::exec::exit_of(&end).0),
                _ => {}
            }
        }
        Ok::<_, GuestError>((output, code))
    };
    let ran = runtime.block_on(async { tokio::time::timeout(COMMAND_PATIENCE, ran).await });
    let (output, code) =
        ran.map_err(|_| cannot(&"it did not end in time"))?.map_err(|error| cannot(&error))?;
    let release = proto::text::visible_bytes(output.trim_ascii());
    match code {
        Some(0) if !release.is_empty() => Ok(release),
        code => Err(cannot(&format!("the self-test ended with {code:?} and said: {release}"))),
    }
}

/// Adds the end of the guest's console to a failure in a booted microVM.
fn with_console(dir: &BodyDir, failure: Failure) -> Failure {
    let console = measure::console(dir.path()).unwrap_or_default();
    let why = failure.causes().join(": ");
    Failure { source: None, ..failure }
        .because(format!("{why}\nthe guest's console ends with:\n{}", console.join("\n")))
}

fn last_boot(
    setup: &SetupRecord,
    engine: Engine,
    accelerator: Accelerator,
    release: String,
    took_ms: u64,
) -> LastBoot {
    LastBoot {
        at: store::clock::now(),
        release,
        kernel: setup.kernel.clone(),
        kernel_source: setup.kernel_source.clone(),
        engine,
        engine_mark: setup.engine_mark.clone(),
        accelerator,
        took_ms,
    }
}
