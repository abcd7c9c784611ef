//! A third layer for tests: the machinery of the process layer under the name of another, with fewer capabilities.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use body::{
    BodyDir,
    driver::{Capabilities, Capability, ChangedLimits, Driver, DriverContext, LimitRequest, Origin, Recipe},
    process_driver::ProcessDriver,
    root::RootfsStack,
    snapshot::SnapshotManifest,
};
use fleet::{Durability, Fleet, FleetConfig};
use proto::{Failure, Layer, Limits, Spec, launch::RunRecord, spec::Life};

/// The layer whose name it takes: no driver of `pal` has it.
pub const TEST_LAYER: Layer = Layer::Container;

/// The calls that a fleet made to its test driver, oldest first.
#[derive(Debug, Clone, Default)]
pub struct DriverCalls(Arc<Mutex<Vec<&'static str>>>);

impl DriverCalls {
    /// Takes the calls that were recorded.
    pub fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record(&self, call: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

/// Opens a data directory with the test driver, and gives the calls that it will record.
pub fn open_with_test_driver(data: &Path) -> (Fleet, DriverCalls) {
    let calls = DriverCalls::default();
    let make = |context: Arc<DriverContext>| -> Arc<dyn Driver> {
        Arc::new(TestDriver { process: ProcessDriver::new(context), calls: calls.clone() })
    };
    let config = FleetConfig { data: data.to_owned(), durability: Durability::Process };
    let fleet = Fleet::open_with(config, &[&make]).expect("the data directory can be opened");
    (fleet, calls)
}

#[derive(Debug)]
struct TestDriver {
    process: ProcessDriver,
    calls: DriverCalls,
}

impl Driver for TestDriver {
    fn layer(&self) -> Layer {
        TEST_LAYER
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { has: &[Capability::Homes], engines: &[] }
    }

    fn limits(&self, asked: &LimitRequest, life: Life, origin: &Origin) -> Result<Limits, Failure> {
        self.process.limits(asked, life, origin)
    }

    fn check(&self, spec: &Spec, origin: &Origin) -> Result<(), Failure> {
        self.calls.record("check");
        self.process.check(spec, origin)
    }

    fn prepare(&self, spec: &Spec, rootfs: RootfsStack, origin: &Origin) -> Result<Arc<dyn Recipe>, Failure> {
        self.calls.record("prepare");
        self.process.prepare(spec, rootfs, origin)
    }

    fn change_limits(
        &self,
        running: &RunRecord,
        spec: &Spec,
        new: &Limits,
    ) -> Result<ChangedLimits, Failure> {
        self.calls.record("change_limits");
        self.process.change_limits(running, spec, new)
    }

    fn pause(&self, running: &RunRecord) -> Result<(), Failure> {
        self.calls.record("pause");
        self.process.pause(running)
    }

    fn resume(&self, running: &RunRecord) -> Result<(), Failure> {
        self.calls.record("resume");
        self.process.resume(running)
    }

    fn kill(&self, dir: &BodyDir, running: &RunRecord) -> Result<(), Failure> {
        self.calls.record("kill");
        self.process.kill(dir, running)
    }

    fn snapshot(
        &self,
        dir: &BodyDir,
        spec: &Spec,
        to: &Path,
        manifest: SnapshotManifest,
    ) -> Result<SnapshotManifest, Failure> {
        self.calls.record("snapshot");
        self.process.snapshot(dir, spec, to, manifest)
    }
}
