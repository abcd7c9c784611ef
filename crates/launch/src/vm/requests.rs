//! All requests to hypervisors with an API, for tests that compare them with the API's description.

use std::{collections::BTreeMap, io};

use proto::vm::{DiskTraffic, Engine, VmPlan, VmStart};

use super::{
    cloud_hypervisor,
    firecracker::{self, messages::VmRunState},
    http::ApiRequest,
};

/// The requests of a microVM of this plan, from its start to its end, once each.
pub fn requests(vm: &VmPlan) -> io::Result<Vec<ApiRequest>> {
    let mut asked = match (vm.engine, &vm.begin) {
        (Engine::Qemu, _) => return Ok(Vec::new()),
        (Engine::Firecracker, VmStart::Boot { kernel, initrd, cmdline }) => {
            let mut asked = vec![firecracker::metrics()?];
            asked.extend(firecracker::boot(vm, kernel, initrd, cmdline)?);
            asked
        }
        (Engine::Firecracker, VmStart::Thaw { ram, state, .. }) => {
            vec![firecracker::metrics()?, firecracker::thaw(ram, state)?]
        }
        (Engine::CloudHypervisor, VmStart::Boot { kernel, initrd, cmdline }) => {
            cloud_hypervisor::boot(vm, kernel, initrd, cmdline)?
        }
        (Engine::CloudHypervisor, VmStart::Thaw { .. }) => cloud_hypervisor::thaw()?,
    };
    asked.extend(match vm.engine {
        Engine::Firecracker => vec![
            firecracker::flush()?,
            firecracker::state(VmRunState::Paused)?,
            firecracker::save()?,
            firecracker::state(VmRunState::Resumed)?,
        ],
        _ => vec![
            cloud_hypervisor::counters(),
            cloud_hypervisor::pause(),
            cloud_hypervisor::save()?,
            cloud_hypervisor::resume(),
            cloud_hypervisor::stop(),
        ],
    });
    Ok(asked)
}

/// Parses a hypervisor's counters of its disks, for tests with a real one.
pub fn traffic(engine: Engine, told: &str) -> BTreeMap<String, DiskTraffic> {
    let mut counted = BTreeMap::new();
    match engine {
        Engine::Qemu => {}
        Engine::Firecracker => firecracker::add_up(told, &mut counted),
        Engine::CloudHypervisor => {
            counted = cloud_hypervisor::disks(&serde_json::from_str(told).unwrap_or_default());
        }
    }
    counted
}
