//! The kernel that last booted on this host. An installed kernel alone does not prove that microVMs work.

use std::io;

use proto::vm::{Accelerator, Engine};
use serde::{Deserialize, Serialize};

use super::{MicrovmInstall, SetupRecord, VmError, VmStepExt};

const RECORD: &str = "last-boot.json";
const RECORD_LEN_MAX: u64 = 64 << 10;

/// `last-boot.json`: a microVM whose guest answered after its kernel had booted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastBoot {
    /// The time of the boot.
    pub at: String,
    /// The kernel's version, as the guest's `uname -r` has it.
    pub release: String,
    /// The kernel's directory.
    pub kernel: String,
    /// A description of the kernel's origin.
    pub kernel_source: String,
    /// The hypervisor.
    pub engine: Engine,
    /// The state of QEMU's program at that time.
    pub engine_mark: String,
    /// The accelerator: KVM or emulation.
    pub accelerator: Accelerator,
    /// Milliseconds from the start of the hypervisor to the guest's answer.
    pub took_ms: u64,
}

impl LastBoot {
    /// Whether the boot used the current setup.
    pub fn proves(&self, setup: &SetupRecord) -> bool {
        self.kernel == setup.kernel && self.engine_mark == setup.engine_mark
    }
}

impl MicrovmInstall {
    /// The last boot that succeeded, if there was one.
    pub fn last_boot(&self) -> Option<LastBoot> {
        let text = sys::fd::read_small(&self.dir().join(RECORD), RECORD_LEN_MAX).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Records a boot that succeeded.
    pub fn record_boot(&self, boot: &LastBoot) -> Result<(), VmError> {
        let text = serde_json::to_vec(boot).map_err(io::Error::from).step("record a boot")?;
        sys::fd::write_whole(&self.dir().join(RECORD), &text).step("record a boot")
    }
}
