//! Whether this host's processor really runs machines: found out by having it run one.
//!
//! A `/dev/kvm` that opens proves nothing: there are hosts where a machine is made and never runs.

use body::{
    root::Under,
    vm::{Setup, setup::Verdict},
};
use proto::{
    BodyId, Failure, Layer, Spec,
    spec::{Ids, Life, Network},
    vm::{Accelerator, Engine, KVM},
};

use super::{Hypervisor, failure};
use crate::{Create, Fleet};

impl Fleet {
    /// Finds out, unless that was done in this boot, and writes it down.
    pub(super) fn judge(&self, setup: Setup, tell: &dyn Fn(&str)) -> Result<Setup, Failure> {
        let boot_id = sys::proc::boot_id().unwrap_or_default();
        if setup.verdict.as_ref().is_some_and(|verdict| verdict.boot_id == boot_id) {
            return Ok(setup);
        }
        let opened = std::fs::File::options().read(true).write(true).open(KVM);
        let (accelerator, why) = match opened {
            Err(error) => (Accelerator::Emulated, format!("{KVM}: {error}")),
            Ok(_) => {
                tell("trying whether the processor runs machines");
                match self.try_kvm() {
                    Ok(()) => (Accelerator::Kvm, "a machine was booted with it".to_owned()),
                    Err(failure) => (
                        Accelerator::Emulated,
                        format!(
                            "{KVM} opens, but a machine does not come up with it: {}",
                            failure.causes().pop().unwrap_or_else(|| failure.to_string())
                        ),
                    ),
                }
            }
        };
        let setup = Setup { verdict: Some(Verdict { accelerator, why, boot_id }), ..setup };
        self.ground().write(&setup).map_err(failure)?;
        Ok(setup)
    }

    fn try_kvm(&self) -> Result<(), Failure> {
        self.try_engine(Engine::Qemu)
    }

    /// Boots a machine with the processor, under this hypervisor.
    pub(super) fn try_engine(&self, which: Engine) -> Result<(), Failure> {
        let request = Create { layer: Some(Layer::Microvm), ..Create::run() };
        let request = Create { limits: self.machine_limits(&request), ..request };
        let spec = Spec {
            v: proto::spec::VERSION,
            id: BodyId::from_random([0; 12]),
            created_at: store::clock::now(),
            layer: Layer::Microvm,
            engine: Some(which),
            template: "host".into(),
            snapshots: Vec::new(),
            base: None,
            parent: None,
            limits: self.limits(&request)?,
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
            life: Life::Run,
            ids: Ids { users: Vec::new(), groups: Vec::new() },
        };
        let under = Under::default();
        let images = self.images(&self.ground(), &spec, &under)?;
        let setup = self.ground().setup().map_err(failure)?;
        let (root, _) = self.engine_root(which, &setup)?;
        let parts = self.parts_by(
            Hypervisor { hypervisor: which, root, accelerator: Accelerator::Kvm },
            &spec,
            images,
            None,
        )?;
        self.with_nobodys(&spec, &under, &parts, |_, _| Ok(()))
    }
}
