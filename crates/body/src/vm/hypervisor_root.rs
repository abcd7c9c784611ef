//! The hypervisor's root directory: the program, its libraries, its firmware, and nothing else of this host.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use proto::vm::Engine;
use sha2::{Digest, Sha256};

use super::{MicrovmInstall, VmError, VmStepExt, find_tool, images, run};

/// The program on this host.
pub const QEMU: &str = "qemu-system-x86_64";
/// Firmware that QEMU loads.
const FIRMWARE: &[&str] = &["bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin"];
const FIRMWARE_DIRS: &[&str] = &["/usr/share/qemu", "/usr/share/seabios", "/usr/local/share/qemu"];
/// Plugins that some distributions ship separately from the program.
const PLUGINS: &[&str] = &["accel-tcg-x86_64.so"];
const PLUGIN_DIRS: &[&str] = &["/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib64/qemu", "/usr/lib/qemu"];
/// The path of its firmware in its root.
pub const FIRMWARE_INSIDE: &str = "/usr/share/qemu";
/// Increased when the layout of the root changes.
const LAYOUT: u32 = 5;
/// Mount points.
const PLACES: &[&str] =
    &["boot/vmlinux", "boot/initrd", "disks/upper.img", "frozen/ram", "frozen/state", "save/ram"];
const DIRS: &[&str] = &["dev", "proc", "sys", "tmp", "run", "boot", "disks", "frozen", "save", "etc"];

/// A text that changes with the program, computed without reading its contents.
pub fn mark() -> Result<String, VmError> {
    let found = fs::metadata(find_tool(QEMU)?).step("read the hypervisor's metadata")?;
    Ok(format!("{LAYOUT}-{}-{}-{}", found.len(), found.mtime(), found.ino()))
}

/// Builds the root in a new directory.
pub fn build(root: &Path) -> Result<(), VmError> {
    let program = find_tool(QEMU)?;
    let mut files: BTreeSet<PathBuf> = BTreeSet::new();
    let find = |dirs: &[&str], name: &&str| {
        dirs.iter().map(|dir| Path::new(dir).join(name)).find(|path| path.exists())
    };
    let plugins: Vec<PathBuf> = PLUGINS.iter().filter_map(|name| find(PLUGIN_DIRS, name)).collect();
    for needs in std::iter::once(&program).chain(&plugins) {
        files.insert(needs.clone());
        files.extend(libraries(needs)?);
    }
    places(root)?;
    for file in files {
        put(&file, &root.join(file.strip_prefix("/").unwrap_or(&file)))?;
    }
    for name in FIRMWARE {
        let found = find(FIRMWARE_DIRS, name).ok_or_else(|| {
            VmError::Kernel(format!("the hypervisor's firmware {name} is not on this host"))
        })?;
        put(&found, &root.join(&FIRMWARE_INSIDE[1..]).join(name))?;
    }
    Ok(())
}

/// The path of the program in its root.
pub fn program(engine: Engine) -> PathBuf {
    match engine {
        Engine::Qemu => find_tool(QEMU).unwrap_or_else(|_| Path::new("/usr/bin").join(QEMU)),
        other => Path::new("/usr/bin").join(other.name()),
    }
}

/// The path of another hypervisor's program on this host: the configured one, or one in PATH.
pub fn other(engine: Engine, named: Option<&Path>) -> Result<PathBuf, VmError> {
    match named {
        Some(path) if path.is_file() => Ok(path.to_owned()),
        _ => find_tool(engine.name()),
    }
}

impl MicrovmInstall {
    /// The root of another hypervisor, built if it does not exist.
    pub fn other_engine(&self, engine: Engine, program: &Path) -> Result<PathBuf, VmError> {
        let found = fs::metadata(program).step("read the hypervisor's metadata")?;
        let mark = format!("{LAYOUT}-{}-{}-{}", found.len(), found.mtime(), found.ino());
        let name = format!("engine-{engine}-{}", &proto::event::hex(&Sha256::digest(&mark))[..16]);
        self.whole_dir(&name, |root| build_other(root, engine, program))?;
        Ok(self.dir().join(name))
    }
}

fn build_other(root: &Path, engine: Engine, program: &Path) -> Result<(), VmError> {
    places(root)?;
    put_with_libraries(program, &self::program(engine), root)
}

/// Copies a program and its shared libraries into a root.
pub(super) fn put_with_libraries(program: &Path, inside: &Path, root: &Path) -> Result<(), VmError> {
    put(program, &root.join(inside.strip_prefix("/").unwrap_or(inside)))?;
    // A statically linked program has none.
    for file in libraries(program).unwrap_or_default() {
        put(&file, &root.join(file.strip_prefix("/").unwrap_or(&file)))?;
    }
    Ok(())
}

fn places(root: &Path) -> Result<(), VmError> {
    for dir in DIRS {
        fs::create_dir_all(root.join(dir)).step("build the hypervisor's root")?;
    }
    // Disks and images are mounted over existing files: the microVM's ids cannot create files in this root.
    let images = (0..images::IMAGES_MAX).map(|index| format!("disks/image{index}"));
    for place in PLACES.iter().map(|place| (*place).to_owned()).chain(images) {
        fs::write(root.join(place), "").step("build the hypervisor's root")?;
    }
    Ok(())
}

fn put(from: &Path, to: &Path) -> Result<(), VmError> {
    let made = to.parent().map_or(Ok(()), fs::create_dir_all);
    made.and_then(|()| fs::copy(from, to).map(drop)).step("copy the hypervisor")
}

/// The shared libraries that the dynamic loader would load, and the loader itself.
pub(super) fn libraries(program: &Path) -> Result<Vec<PathBuf>, VmError> {
    let told = run(Command::new("ldd").arg(program), "ldd")?;
    let text = String::from_utf8_lossy(&told).into_owned();
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}
