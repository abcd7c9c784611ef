//! The record of a microVM snapshot, which shows whether this host can restore it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};

use proto::{
    Size,
    vm::{Accelerator, BOARD, Engine, FreezeReport},
};
use rustix::{fs::SeekFrom, io::Errno};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    SetupRecord, VmError, VmParts,
    plan::{RAM_FILE, STATE_FILE, UPPER_FILE},
};

const STATE_LEN_MAX: u64 = 256 << 20;
/// How far the TSC frequencies of two CPUs may differ, in thousandths.
const TICKS_TOLERANCE: u64 = 2;

/// A microVM that does not run: its disk, and its memory if it was saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// Its memory size.
    pub memory: Size,
    /// Its number of CPUs.
    pub cpus: u32,
    /// The size of its disk.
    pub disk: Size,
    /// The number of inodes of its disk; missing in a record of a version that left that to mke2fs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inodes: Option<u64>,
    /// The accelerator: KVM or emulation.
    pub accelerator: Accelerator,
    /// The hypervisor.
    #[serde(default)]
    pub hypervisor: Engine,
    /// The state of the hypervisor's program.
    pub engine: String,
    /// The version of the microVM's hardware layout.
    #[serde(default)]
    pub board: u32,
    /// The kernel that it runs.
    pub kernel: String,
    /// The TSC frequency.
    pub ticks_khz: u64,
    /// The number of its images: `image0`, …
    pub images: usize,
    /// How many times it was restored before.
    pub generation: u64,
    /// The record of its memory, if that was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<MemoryRecord>,
}

/// The record of saved memory, CPU and device state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRecord {
    /// The guest's report before the snapshot.
    pub held: FreezeReport,
    /// SHA-256 of the CPU and device state.
    pub state_sha256: String,
    /// SHA-256 of the memory of a snapshot that is kept; forks are restored at once and have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_sha256: Option<String>,
}

/// The file that records in which boot of the host the memory was verified, and which file that was.
const LOOKED: &str = "ram.looked";
const LOOKED_LEN_MAX: u64 = 4096;
const RAM_READ_LEN: usize = 1 << 20;
const ZEROS: [u8; 4096] = [0; 4096];

/// The hash of the saved memory: of its non-zero pages and their offsets.
pub fn ram_hash(dir: &Path) -> io::Result<String> {
    let file = File::open(dir.join(RAM_FILE))?;
    let len = file.metadata()?.len();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; RAM_READ_LEN];
    let mut at = 0;
    while at < len {
        at = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(at) => at,
            // Only a hole is left.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(at))?;
        while at < end {
            let piece = usize::try_from(end - at).unwrap_or(RAM_READ_LEN).min(RAM_READ_LEN);
            file.read_exact_at(&mut buffer[..piece], at)?;
            // A file system may or may not store zeros; only the contents that are read count.
            for (index, page) in
                buffer[..piece].chunks(4096).enumerate().filter(|(_, page)| **page != ZEROS[..page.len()])
            {
                hash.update((at + index as u64 * 4096).to_le_bytes());
                hash.update(page);
            }
            at += piece as u64;
        }
    }
    hash.update(len.to_le_bytes());
    Ok(proto::event::hex(&hash.finalize()))
}

/// Whether the memory is unchanged. It is verified once in each boot of the host, because that takes longer
/// than a restore.
fn ram_is_whole(dir: &Path, wanted: &str) -> bool {
    let Ok(found) = fs::metadata(dir.join(RAM_FILE)) else { return false };
    let boot = sys::proc::boot_id().unwrap_or_default();
    let mark = format!("{boot} {} {} {} {wanted}", found.ino(), found.mtime(), found.mtime_nsec());
    if sys::fd::read_small(&dir.join(LOOKED), LOOKED_LEN_MAX).is_ok_and(|seen| seen == mark) {
        return true;
    }
    let whole = ram_hash(dir).is_ok_and(|hash| hash == wanted);
    if whole {
        let _ = sys::fd::write_whole(&dir.join(LOOKED), mark.as_bytes());
    }
    whole
}

/// The hash of the CPU and device state.
pub fn state_hash(dir: &Path) -> io::Result<String> {
    let path = dir.join(STATE_FILE);
    if fs::metadata(&path)?.len() > STATE_LEN_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(proto::event::hex(&Sha256::digest(fs::read(path)?)))
}

impl VmRecord {
    /// Checks whether the snapshot can be restored here; the error says why not.
    pub fn check(&self, dir: &Path, setup: &SetupRecord, parts: &VmParts) -> Result<&MemoryRecord, String> {
        let Some(frozen) = &self.frozen else { return Err("its memory was not saved".to_owned()) };
        if self.hypervisor != parts.hypervisor {
            return Err(format!(
                "it was saved with {}, and cannot be restored with {}",
                self.hypervisor, parts.hypervisor
            ));
        }
        let accelerator = parts.accelerator;
        if Some(self.engine.as_str()) != parts.engine.file_name().and_then(|name| name.to_str()) {
            return Err("it was saved with another version of the hypervisor".to_owned());
        }
        if self.board != BOARD {
            return Err(
                "it was saved by a version of pal with another hardware layout of microVMs".to_owned()
            );
        }
        if self.accelerator != accelerator {
            return Err(format!(
                "it was {}, and microVMs here are {}",
                self.accelerator.name(),
                accelerator.name()
            ));
        }
        if self.ticks_khz.abs_diff(setup.ticks_khz) > setup.ticks_khz * TICKS_TOLERANCE / 1000 {
            return Err("it was saved on another CPU".to_owned());
        }
        let len = |name: &str| fs::metadata(dir.join(name)).map(|found| found.len()).ok();
        if len(RAM_FILE) != Some(self.memory.0) || len(UPPER_FILE) != Some(self.disk.0) {
            return Err("its memory or its disk is incomplete".to_owned());
        }
        if !state_hash(dir).is_ok_and(|hash| hash == frozen.state_sha256) {
            return Err("its CPU and device state is damaged".to_owned());
        }
        match &frozen.ram_sha256 {
            Some(wanted) if !ram_is_whole(dir, wanted) => Err("its memory is damaged".to_owned()),
            _ => Ok(frozen),
        }
    }
}

/// Links images into a directory, so that they are not removed while a microVM needs them.
pub fn keep_images(images: &[std::path::PathBuf], dir: &Path) -> Result<(), VmError> {
    use super::VmStepExt;
    for (index, image) in images.iter().enumerate() {
        let place = dir.join(format!("image{index}"));
        let _ = fs::remove_file(&place);
        // If the image is on another file system, or cannot be linked, a symbolic link names it.
        fs::hard_link(image, &place)
            .or_else(|_| std::os::unix::fs::symlink(image, &place))
            .step("keep an image")?;
    }
    Ok(())
}
