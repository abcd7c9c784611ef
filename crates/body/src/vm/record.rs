//! What is written down of a machine that was frozen, so that whoever thaws it knows whether that can be done here.

use std::{fs, io, path::Path};

use proto::{
    Size,
    vm::{Accelerator, Held},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    Setup, VmError,
    plan::{RAM_FILE, STATE_FILE, UPPER_FILE},
};

const STATE_LEN_MAX: u64 = 256 << 20;
/// How far two processors' counters may differ, in thousandths.
const TICKS_TOLERANCE: u64 = 2;

/// A machine that does not run: its disk, and its memory if that was frozen too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Memory it has.
    pub memory: Size,
    /// Processors.
    pub cpus: u32,
    /// The size of its disk.
    pub disk: Size,
    /// What ran it.
    pub accelerator: Accelerator,
    /// The hypervisor's state.
    pub engine: String,
    /// The kernel it runs.
    pub kernel: String,
    /// How fast the processor's counter counted.
    pub ticks_khz: u64,
    /// How many images it has: `image0`, …
    pub images: usize,
    /// How often it was thawed before.
    pub generation: u64,
    /// What was frozen besides its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<FrozenMemory>,
}

/// Memory, processors and devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenMemory {
    /// What its guest said before.
    pub held: Held,
    /// SHA-256 of processors and devices.
    pub state_sha256: String,
}

/// The hash of what was frozen besides memory and disk.
pub fn state_hash(dir: &Path) -> io::Result<String> {
    let path = dir.join(STATE_FILE);
    if fs::metadata(&path)?.len() > STATE_LEN_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(proto::event::hex(&Sha256::digest(fs::read(path)?)))
}

impl Machine {
    /// Whether it can be thawed here, or why not.
    pub fn check(&self, dir: &Path, setup: &Setup, accelerator: Accelerator) -> Result<&FrozenMemory, String> {
        let Some(frozen) = &self.frozen else { return Err("its memory was not frozen".to_owned()) };
        if self.engine != setup.engine {
            return Err("it was frozen by another version of the hypervisor".to_owned());
        }
        if self.accelerator != accelerator {
            return Err(format!("it was {}, and machines here are {}", self.accelerator.name(), accelerator.name()));
        }
        if self.ticks_khz.abs_diff(setup.ticks_khz) > setup.ticks_khz * TICKS_TOLERANCE / 1000 {
            return Err("it was frozen on another processor".to_owned());
        }
        let len = |name: &str| fs::metadata(dir.join(name)).map(|found| found.len()).ok();
        if len(RAM_FILE) != Some(self.memory.0) || len(UPPER_FILE) != Some(self.disk.0) {
            return Err("its memory or its disk is not whole".to_owned());
        }
        match state_hash(dir) {
            Ok(hash) if hash == frozen.state_sha256 => Ok(frozen),
            _ => Err("what was frozen of its processors and devices is damaged".to_owned()),
        }
    }
}

/// Keeps images from going while a machine needs them, at no cost.
pub fn keep_images(images: &[std::path::PathBuf], dir: &Path) -> Result<(), VmError> {
    use super::Step;
    for (index, image) in images.iter().enumerate() {
        let place = dir.join(format!("image{index}"));
        let _ = fs::remove_file(&place);
        // Another file system, or an image that is not ours to link: then by name.
        fs::hard_link(image, &place).or_else(|_| std::os::unix::fs::symlink(image, &place)).step("keep an image")?;
    }
    Ok(())
}
