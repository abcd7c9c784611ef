//! The kernel of machines: Debian's for clouds, or one that the user brings.
//!
//! A kernel in its packed form unpacks itself at every boot, which takes an emulated machine a third of a second; so it
//! is unpacked once, here.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Step, VmError, run};

/// Drivers a machine needs, in the order they are loaded. Those that a kernel has built in are not among its modules.
pub const MODULES: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "virtio_balloon",
    "libcrc32c",
    "erofs",
    "overlay",
];
/// The one of them that was added last.
pub const NEWEST: &str = "virtio_balloon";
/// What machines need besides where their devices are PCI's or their line is a vsock.
pub const MORE_MODULES: &[&str] = &[
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
    "virtio_rng",
];
/// What machines need besides to see a directory of the host live.
pub const SHARE_MODULES: &[&str] = &["fuse", "virtiofs"];
/// The package that always names the newest.
const PACKAGE: &str = "linux-image-cloud-amd64";
const KERNEL_LEN_MAX: u64 = 256 << 20;
const ELF: &[u8] = b"\x7fELF";

/// A kernel that was found.
#[derive(Debug)]
pub struct Found {
    /// The kernel, packed or not.
    pub kernel: PathBuf,
    /// Where its modules are: a directory such as `/lib/modules/VERSION`.
    pub modules: Option<PathBuf>,
    /// Where it comes from, in words.
    pub source: String,
}

/// Whether a kernel that comes from there was fetched: it has modules.
pub fn is_fetched(source: &str) -> bool {
    source.starts_with("linux-image-")
}

/// Fetches Debian's into a directory. Nothing is installed: the package is only unpacked.
pub fn fetch(into: &Path, say: &dyn Fn(&str)) -> Result<Found, VmError> {
    let apt = super::find_tool("apt-get")?;
    say("asking for the newest kernel package");
    let about = run(Command::new("apt-cache").args(["show", "--no-all-versions", PACKAGE]), "apt-cache")?;
    let about = String::from_utf8_lossy(&about).into_owned();
    let field = |text: &str, name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_owned()))
    };
    let package =
        field(&about, "Depends:").and_then(|depends| depends.split_whitespace().next().map(str::to_owned));
    let package = package.ok_or_else(|| VmError::Kernel(format!("the package {PACKAGE} names no kernel")))?;
    say(&format!("fetching {package}"));
    run(
        Command::new(apt).current_dir(into).args(["download", "-o", "APT::Sandbox::User=root", &package]),
        "apt-get download",
    )?;
    let file = fs::read_dir(into)
        .step("look at what was fetched")?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "deb"));
    let file = file.ok_or_else(|| VmError::Kernel("apt-get fetched nothing".into()))?;
    let wanted = run(Command::new("apt-cache").args(["show", "--no-all-versions", &package]), "apt-cache")?;
    let wanted = field(&String::from_utf8_lossy(&wanted), "SHA256:").unwrap_or_default();
    let summed = run(Command::new("sha256sum").arg(&file), "sha256sum")?;
    if wanted.len() != 64 || !summed.starts_with(wanted.as_bytes()) {
        return Err(VmError::Kernel(format!(
            "{package} is not what its archive says it is: the checksum differs"
        )));
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
        .ok_or_else(|| VmError::Kernel(format!("{package} has no kernel in it")))?;
    let modules = first(tree.join("lib/modules"), "").or_else(|| first(tree.join("usr/lib/modules"), ""));
    Ok(Found { kernel, modules, source: package })
}

/// The kernel as it is run: unpacked where its packing is known.
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
            "{} is no Linux kernel for this processor",
            path.file_name().unwrap_or_default().to_string_lossy()
        )));
    }
    let sectors = match number(0x1f1, 1) {
        0 => 4,
        sectors => sectors,
    };
    let from = (sectors + 1) * 512 + number(0x248, 4);
    let payload = bytes.get(from..from.saturating_add(number(0x24c, 4))).unwrap_or_default();
    // One that is packed in another way unpacks itself when it is started.
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

/// The old form of LZ4: blocks of at most 8 MiB, each behind its length; what follows the last is a length of its own.
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

/// Those of these modules that the kernel has not built in, in order.
pub fn modules(dir: &Path, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>, VmError> {
    let mut found = Vec::new();
    let mut files = Vec::new();
    list(dir, 0, &mut files);
    for name in names {
        let plain = |path: &&PathBuf| {
            path.file_name()
                .is_some_and(|file| file.to_string_lossy().replace('-', "_").split('.').next() == Some(name))
        };
        let Some(path) = files.iter().find(plain) else { continue };
        let bytes = match path.extension().and_then(|end| end.to_str()) {
            Some("xz") => run(Command::new("xz").arg("-dc").arg(path), "xz")?,
            Some("zst") => run(Command::new("zstd").args(["-q", "-dc"]).arg(path), "zstd")?,
            Some("gz") => run(Command::new("gzip").arg("-dc").arg(path), "gzip")?,
            _ => fs::read(path).step("read a module of the kernel")?,
        };
        found.push(((*name).to_owned(), bytes));
    }
    Ok(found)
}

fn list(dir: &Path, depth: usize, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth < 12 => list(&entry.path(), depth + 1, files),
            Ok(kind) if kind.is_file() && entry.file_name().to_string_lossy().contains(".ko") => {
                files.push(entry.path())
            }
            _ => {}
        }
    }
}
