//! The kernel of microVMs: Debian's cloud kernel, or one that the user provides.
//!
//! A compressed kernel decompresses itself at every boot, which takes an emulated microVM a third of a
//! second; so it is decompressed once, here.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::Command,
};

use super::{VmError, VmStepExt, run};

/// The package that depends on the newest kernel of the release.
const PACKAGE: &str = "linux-image-cloud-amd64";
/// The names of packages that depend on the newest kernel of one series.
const SERIES: &str = "^linux-image-[0-9.]+-cloud-amd64$";
const KERNEL_LEN_MAX: u64 = 256 << 20;
const ELF: &[u8] = b"\x7fELF";

/// The files of a kernel.
#[derive(Debug)]
pub struct KernelFiles {
    /// The kernel image, compressed or not.
    pub kernel: PathBuf,
    /// The directory of its modules, such as `/lib/modules/VERSION`.
    pub modules: Option<PathBuf>,
    /// A description of its origin.
    pub source: String,
}

/// The kernel packages that the archive offers: those that Debian's cloud package depends on, newest first,
/// then those of other series, such as backports.
pub fn packages(say: &dyn Fn(&str)) -> Result<Vec<String>, VmError> {
    let apt = super::find_tool("apt-get")?;
    say("asking for kernel packages");
    let ask = || run(Command::new("apt-cache").args(["show", PACKAGE]), "apt-cache");
    let about = match ask() {
        // A new host may never have fetched its package lists.
        Err(_) if sys::caps::is_host_root() => {
            say("fetching the lists of packages");
            run(Command::new(&apt).args(["update", "-qq"]), "apt-get update")?;
            ask()?
        }
        about => about?,
    };
    let mut packages = named_kernels(&String::from_utf8_lossy(&about));
    let series = run(Command::new("apt-cache").args(["search", "--names-only", SERIES]), "apt-cache")?;
    let series = String::from_utf8_lossy(&series).into_owned();
    for name in series.lines().filter_map(|line| line.split_whitespace().next()) {
        let about = run(Command::new("apt-cache").args(["show", "--no-all-versions", name]), "apt-cache")?;
        packages.extend(named_kernels(&String::from_utf8_lossy(&about)));
    }
    let mut offered: Vec<String> = Vec::new();
    for package in packages {
        if !offered.contains(&package) {
            offered.push(package);
        }
    }
    if offered.is_empty() {
        return Err(VmError::Kernel(format!("the package {PACKAGE} depends on no kernel")));
    }
    Ok(offered)
}

/// The kernel packages in these `Depends` fields.
fn named_kernels(about: &str) -> Vec<String> {
    let depends = about.lines().filter_map(|line| line.strip_prefix("Depends:"));
    depends.filter_map(|depends| Some(depends.split_whitespace().next()?.to_owned())).collect()
}

/// Downloads a kernel package into a directory and unpacks it there; it is not installed.
pub fn fetch(package: &str, into: &Path, say: &dyn Fn(&str)) -> Result<KernelFiles, VmError> {
    let apt = super::find_tool("apt-get")?;
    let field = |text: &str, name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_owned()))
    };
    say(&format!("fetching {package}"));
    run(
        Command::new(apt).current_dir(into).args(["download", "-o", "APT::Sandbox::User=root", package]),
        "apt-get download",
    )?;
    let file = fs::read_dir(into)
        .step("list the downloaded files")?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "deb"));
    let file = file.ok_or_else(|| VmError::Kernel("apt-get downloaded nothing".into()))?;
    let wanted = run(Command::new("apt-cache").args(["show", "--no-all-versions", package]), "apt-cache")?;
    let wanted = field(&String::from_utf8_lossy(&wanted), "SHA256:").unwrap_or_default();
    let summed = run(Command::new("sha256sum").arg(&file), "sha256sum")?;
    if wanted.len() != 64 || !summed.starts_with(wanted.as_bytes()) {
        return Err(VmError::Kernel(format!("the checksum of {package} does not match its archive's index")));
    }
    say("unpacking it");
    let tree = into.join("tree");
    run(Command::new("dpkg-deb").arg("-x").arg(&file).arg(&tree), "dpkg-deb")?;
    let first = |dir: PathBuf, begins: &str| {
        let found = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        found
            .into_iter()
            .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begins)))
    };
    let kernel = first(tree.join("boot"), "vmlinuz")
        .ok_or_else(|| VmError::Kernel(format!("{package} contains no kernel")))?;
    let modules = first(tree.join("lib/modules"), "").or_else(|| first(tree.join("usr/lib/modules"), ""));
    Ok(KernelFiles { kernel, modules, source: package.to_owned() })
}

/// The kernel as it is booted: decompressed, if its compression is known.
pub fn unpack(path: &Path) -> Result<Vec<u8>, VmError> {
    let mut bytes = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(KERNEL_LEN_MAX).read_to_end(&mut bytes))
        .step("read the kernel")?;
    if bytes.starts_with(ELF) {
        return Ok(bytes);
    }
    let number = |at: usize, len: usize| {
        bytes
            .get(at..at + len)
            .map_or(0, |bytes| bytes.iter().rev().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte)))
    };
    if bytes.get(0x202..0x206) != Some(b"HdrS") {
        return Err(VmError::Kernel(format!(
            "{} is not a Linux kernel for x86-64",
            path.file_name().unwrap_or_default().to_string_lossy()
        )));
    }
    let sectors = match number(0x1f1, 1) {
        0 => 4,
        sectors => sectors,
    };
    let from = (sectors + 1) * 512 + number(0x248, 4);
    let payload = bytes.get(from..from.saturating_add(number(0x24c, 4))).unwrap_or_default();
    // A kernel with another compression decompresses itself when it boots.
    Ok(unpacked(payload).filter(|kernel| kernel.starts_with(ELF)).unwrap_or(bytes))
}

fn unpacked(payload: &[u8]) -> Option<Vec<u8>> {
    match payload {
        [0x02, 0x21, 0x4c, 0x18, blocks @ ..] => lz4(blocks),
        [0x1f, 0x8b, ..] => {
            let mut kernel = Vec::new();
            flate2::read::GzDecoder::new(payload).take(KERNEL_LEN_MAX).read_to_end(&mut kernel).ok()?;
            Some(kernel)
        }
        _ => None,
    }
}

/// Decompresses the legacy LZ4 format: blocks of at most 8 MiB, each after its length; the kernel's own
/// length follows the last block.
fn lz4(mut blocks: &[u8]) -> Option<Vec<u8>> {
    const BLOCK_LEN_MAX: usize = 8 << 20;
    let mut kernel = Vec::new();
    while let Some((len, rest)) = blocks.split_first_chunk::<4>() {
        let len = u32::from_le_bytes(*len) as usize;
        let Some(block) = rest.get(..len).filter(|block| !block.is_empty()) else { break };
        kernel.extend(lz4_flex::block::decompress(block, BLOCK_LEN_MAX).ok()?);
        if kernel.len() as u64 > KERNEL_LEN_MAX {
            return None;
        }
        blocks = &rest[len..];
    }
    Some(kernel)
}
