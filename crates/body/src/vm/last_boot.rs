//! The kernel that was last seen to boot on this host. What is installed proves nothing.

use std::io;

use proto::vm::{Accelerator, Engine};
use serde::{Deserialize, Serialize};

use super::{MicrovmInstall, SetupRecord, VmError, VmStepExt};

const RECORD: &str = "last-boot.json";
const RECORD_LEN_MAX: u64 = 64 << 10;

/// `last-boot.json`: a microVM whose guest answered after its kernel had booted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastBoot {
    /// When.
    pub at: String,
    /// The kernel's version, as the guest's `uname -r` has it.
    pub release: String,
    /// The kernel's directory.
    pub kernel: String,
    /// Where the kernel comes from, in words.
    pub kernel_source: String,
    /// The hypervisor.
    pub engine: Engine,
    /// The state of QEMU's program at that time.
    pub engine_mark: String,
    /// What ran the machine.
    pub accelerator: Accelerator,
    /// From the start of the hypervisor to the guest's answer.
    pub took_ms: u64,
}

impl LastBoot {
    /// Whether it was a boot of what is set up now.
    pub fn proves(&self, setup: &SetupRecord) -> bool {
        self.kernel == setup.kernel && self.engine_mark == setup.engine_mark
    }
}

impl MicrovmInstall {
    /// The last boot that was seen, if there was one.
    pub fn last_boot(&self) -> Option<LastBoot> {
        let text = sys::fd::read_small(&self.dir().join(RECORD), RECORD_LEN_MAX).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Records a boot that was seen.
    pub fn record_boot(&self, boot: &LastBoot) -> Result<(), VmError> {
        let text = serde_json::to_vec(boot).map_err(io::Error::from).step("record a boot")?;
        sys::fd::write_whole(&self.dir().join(RECORD), &text).step("record a boot")
    }
}
