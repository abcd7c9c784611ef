//! The layers that this `pal` has: the one place that maps a layer to its driver.

use std::sync::Arc;

use body::{
    driver::{Driver, DriverContext},
    process_driver::ProcessDriver,
};
use proto::{Failure, Kind, Layer};
use store::Records;

use crate::vm::Microvms;

/// The layer of a Body whose caller names none: the strongest layer that every host starts at interactive speed. An
/// emulated microVM is slow, so a caller must ask for it.
pub(crate) const DEFAULT_LAYER: Layer = Layer::Process;

/// A function that creates a driver for a data directory.
pub type DriverMaker<'a> = &'a dyn Fn(Arc<DriverContext>) -> Arc<dyn Driver>;

/// The drivers of a data directory.
#[derive(Debug)]
pub(crate) struct Drivers {
    pub context: Arc<DriverContext>,
    pub microvms: Arc<Microvms>,
    all: Vec<Arc<dyn Driver>>,
}

impl Drivers {
    /// Creates the built-in drivers and those that the caller brings.
    pub fn new(context: Arc<DriverContext>, records: &Arc<dyn Records>, others: &[DriverMaker<'_>]) -> Self {
        let microvms = Arc::new(Microvms::new(context.clone(), records.clone()));
        let mut all: Vec<Arc<dyn Driver>> =
            vec![Arc::new(ProcessDriver::new(context.clone())), microvms.clone()];
        all.extend(others.iter().map(|make| make(context.clone())));
        Self { context, microvms, all }
    }

    /// The driver of a layer, if this `pal` has one.
    pub fn find(&self, layer: Layer) -> Option<&Arc<dyn Driver>> {
        self.all.iter().find(|driver| driver.layer() == layer)
    }

    /// The driver of a layer. The failure names a layer that this `pal` has.
    pub fn get(&self, layer: Layer) -> Result<&Arc<dyn Driver>, Failure> {
        self.find(layer).ok_or_else(|| {
            Failure::new(Kind::Host, format!("this pal cannot start a Body on layer {layer}"))
                .hint(format!("choose `--layer {DEFAULT_LAYER}` (shares the host's kernel)"))
        })
    }

    /// All drivers.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Driver>> {
        self.all.iter()
    }
}
