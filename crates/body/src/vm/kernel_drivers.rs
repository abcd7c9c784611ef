//! The drivers that a microVM needs, and the modules of its kernel that hold them, in an order in which they load.
//!
//! [`DRIVERS`] lists the drivers; the kernel's own files give the rest. `modules.builtin` lists the drivers
//! that need no module. `modules.dep` lists the dependencies of each module, where `depmod` wrote it: that
//! happens when a kernel is installed. A kernel package has none (Debian runs `depmod` after it has unpacked
//! the package), and a host need not have `depmod`. Then the field `depends=` in the section `.modinfo` of
//! each module gives its dependencies: the kernel's build writes that field into every module. `depmod` and
//! the build find dependencies in the same way, by the symbols that modules use. Only `.modinfo` names the
//! modules that another one requests while it loads (`softdep=`), such as those of a checksum; the guest
//! loads them before it, because it has no `modprobe` that could answer the request.
//!
//! Invariant: a load order contains each module once, after all modules that it depends on.
//! Invariant: a driver that every microVM needs to boot, and that is neither built in nor a module, is an
//! error that names it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::Command,
};

use proto::vm::Engine;
use serde::{Deserialize, Serialize};

use super::{VmError, VmStepExt, find_tool, run};

/// A driver that some microVMs need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelDriver {
    /// Its name, with `_` where file names may have `-`.
    pub name: &'static str,
    /// Which microVMs load it.
    pub set: DriverSet,
    /// Which microVMs cannot run without it.
    pub need: Need,
}

/// Which microVMs load a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverSet {
    /// All microVMs.
    Base,
    /// MicroVMs under another hypervisor than QEMU.
    Bus,
    /// MicroVMs with a shared directory of the host.
    Share,
    /// MicroVMs with an egress policy: their kernel redirects connections to the guest.
    Redirect,
}

/// Which microVMs cannot run without a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// All microVMs: a kernel without it is refused.
    Boot,
    /// MicroVMs that load it, under this hypervisor, or under any if none is named.
    Engine(Option<Engine>),
    /// None: microVMs run without it.
    Nothing,
}

const fn driver(name: &'static str, set: DriverSet, need: Need) -> KernelDriver {
    KernelDriver { name, set, need }
}

/// All drivers that microVMs may need.
pub const DRIVERS: &[KernelDriver] = &[
    driver("virtio_mmio", DriverSet::Base, Need::Boot),
    driver("virtio_blk", DriverSet::Base, Need::Boot),
    driver("virtio_console", DriverSet::Base, Need::Boot),
    driver("virtio_balloon", DriverSet::Base, Need::Nothing),
    driver("erofs", DriverSet::Base, Need::Boot),
    driver("overlay", DriverSet::Base, Need::Boot),
    driver("ext4", DriverSet::Base, Need::Boot),
    driver("virtio_pci", DriverSet::Bus, Need::Engine(Some(Engine::CloudHypervisor))),
    driver("vmw_vsock_virtio_transport", DriverSet::Bus, Need::Engine(None)),
    driver("virtio_rng", DriverSet::Bus, Need::Nothing),
    driver("fuse", DriverSet::Share, Need::Engine(None)),
    driver("virtiofs", DriverSet::Share, Need::Engine(None)),
    driver("nf_tables", DriverSet::Redirect, Need::Nothing),
    driver("nft_chain_nat", DriverSet::Redirect, Need::Nothing),
    driver("nft_redir", DriverSet::Redirect, Need::Nothing),
];

/// The result of the search in a kernel: `drivers.json` in its directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverRecord {
    /// The drivers that were searched for.
    pub wanted: Vec<String>,
    /// The drivers that the kernel has neither built in nor as a module.
    pub lacking: Vec<String>,
}

impl DriverRecord {
    /// The record of a search for all of [`DRIVERS`].
    pub fn new(lacking: Vec<String>) -> Self {
        Self { wanted: DRIVERS.iter().map(|driver| driver.name.to_owned()).collect(), lacking }
    }

    /// Whether the search covered all drivers of this version.
    pub fn is_current(&self) -> bool {
        self.wanted == Self::new(Vec::new()).wanted
    }

    /// A driver that the kernel lacks and that a microVM under this hypervisor, with these sets, cannot run
    /// without.
    pub fn missing_for(&self, engine: Engine, sets: &[DriverSet]) -> Option<&'static str> {
        let needs = |driver: &&KernelDriver| match driver.need {
            Need::Boot => true,
            Need::Engine(which) => sets.contains(&driver.set) && which.is_none_or(|which| which == engine),
            Need::Nothing => false,
        };
        let lacks = |driver: &&KernelDriver| self.lacking.iter().any(|name| name == driver.name);
        DRIVERS.iter().filter(needs).find(lacks).map(|driver| driver.name)
    }
}

/// A module to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its name.
    pub name: String,
    /// The module itself, decompressed.
    pub bytes: Vec<u8>,
    /// Whether a microVM cannot boot if the kernel refuses the module.
    pub required: bool,
}

/// Modules in an order in which they load.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LoadOrder {
    /// The modules.
    pub modules: Vec<Module>,
    /// Drivers that the kernel has neither built in nor as a module, and that microVMs can boot without.
    pub lacking: Vec<String>,
}

const MODULE_LEN_MAX: u64 = 64 << 20;
const TABLE_LEN_MAX: u64 = 16 << 20;
const DEPTH_MAX: usize = 12;

/// The modules of one kernel.
#[derive(Debug)]
pub struct ModuleTree {
    dir: PathBuf,
    /// Each module's file, by the module's name.
    files: BTreeMap<String, PathBuf>,
    /// Drivers that are built into the kernel, where it lists them.
    builtin: Option<BTreeSet<String>>,
    /// Aliases of those.
    builtin_aliases: BTreeSet<String>,
    /// The contents of `modules.dep`.
    dependencies: Option<BTreeMap<String, Vec<String>>>,
}

impl ModuleTree {
    /// Reads a directory such as `/lib/modules/VERSION`.
    pub fn read(dir: &Path) -> Result<Self, VmError> {
        let mut files = BTreeMap::new();
        find_modules(dir, 0, &mut files);
        let table = |name: &str| -> Result<Option<String>, VmError> {
            let path = dir.join(name);
            if !path.exists() {
                return Ok(None);
            }
            let bytes = read_bounded(&path, TABLE_LEN_MAX).step(format!("read {}", path.display()))?;
            Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
        };
        let builtin = table("modules.builtin")?.map(|text| text.lines().filter_map(name_of).collect());
        let dependencies = table("modules.dep")?.map(|text| {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .filter_map(|(module, needs)| {
                    Some((name_of(module)?, needs.split_whitespace().filter_map(name_of).collect()))
                })
                .collect()
        });
        // Fields such as `crc32c_generic.alias=crc32c`, each ended by a zero byte.
        let builtin_aliases = table("modules.builtin.modinfo")?
            .map(|text| {
                text.split('\0')
                    .filter_map(|field| field.split_once(".alias="))
                    .map(|(_, alias)| plain(alias))
                    .collect()
            })
            .unwrap_or_default();
        Ok(Self { dir: dir.to_owned(), files, builtin, builtin_aliases, dependencies })
    }

    /// The modules of these drivers and of all their dependencies, without those that are loaded before.
    pub fn load_order(&self, drivers: &[KernelDriver], before: &[Module]) -> Result<LoadOrder, VmError> {
        let done = before.iter().map(|module| module.name.clone()).collect();
        let mut walk = DependencyWalk { tree: self, done, under_way: Vec::new(), found: Vec::new() };
        let mut lacking = Vec::new();
        for driver in drivers {
            if driver.need == Need::Boot {
                walk.require(driver.name)?;
            } else if !walk.add(driver.name)? {
                lacking.push(driver.name.to_owned());
            }
        }
        let mut required: BTreeSet<String> = drivers
            .iter()
            .filter(|driver| driver.need == Need::Boot)
            .map(|driver| driver.name.to_owned())
            .collect();
        // Modules come after those that they depend on.
        for found in walk.found.iter().rev() {
            if required.contains(&found.name) {
                required.extend(found.needs.iter().cloned());
            }
        }
        let modules = walk.found.into_iter().map(|found| Module {
            required: required.contains(&found.name),
            name: found.name,
            bytes: found.bytes,
        });
        Ok(LoadOrder { modules: modules.collect(), lacking })
    }

    fn is_builtin(&self, name: &str) -> bool {
        self.builtin.as_ref().is_some_and(|builtin| builtin.contains(name))
    }

    /// The modules that satisfy a soft dependency: it may be an alias of several modules, or of a built-in
    /// driver.
    fn find_soft(&self, wanted: &str) -> Result<Vec<String>, VmError> {
        let wanted = plain(wanted);
        if self.is_builtin(&wanted) || self.builtin_aliases.contains(&wanted) {
            return Ok(Vec::new());
        }
        if self.files.contains_key(&wanted) {
            return Ok(vec![wanted]);
        }
        // Names of modules of one algorithm begin with its name: `crc32c_generic` for `crypto-crc32c`.
        let begins = wanted.strip_prefix("crypto_").unwrap_or(&wanted);
        let mut means = Vec::new();
        for (name, path) in self.files.iter().filter(|(name, _)| name.starts_with(begins)) {
            let aliases = fields(&read_module(path)?, "alias");
            if aliases.iter().any(|alias| plain(alias) == wanted) {
                means.push(name.clone());
            }
        }
        Ok(means)
    }
}

/// A module that is being added to an order.
struct FoundModule {
    name: String,
    bytes: Vec<u8>,
    /// Modules that it depends on.
    needs: Vec<String>,
}

/// A depth-first walk through module dependencies.
struct DependencyWalk<'a> {
    tree: &'a ModuleTree,
    done: BTreeSet<String>,
    /// The modules whose dependencies are being walked.
    under_way: Vec<String>,
    found: Vec<FoundModule>,
}

impl DependencyWalk<'_> {
    /// Adds a module after all its dependencies, unless it is already there or built in.
    fn require(&mut self, name: &str) -> Result<(), VmError> {
        let tree = self.tree;
        if self.done.contains(name) || tree.is_builtin(name) {
            return Ok(());
        }
        if self.under_way.iter().any(|under_way| under_way == name) {
            return Err(VmError::Kernel(format!(
                "modules of the kernel depend on each other in a circle: {} -> {name}",
                self.under_way.join(" -> ")
            )));
        }
        let Some(path) = tree.files.get(name) else { return self.report_missing(name) };
        let bytes = read_module(path)?;
        let needs = match &tree.dependencies {
            Some(table) => table.get(name).cloned().unwrap_or_default(),
            None => fields(&bytes, "depends").iter().flat_map(|list| names(list)).collect(),
        };
        let (soft_before, soft_after) = soft_dependencies(&bytes);
        self.under_way.push(name.to_owned());
        for need in &needs {
            self.require(need)?;
        }
        self.add_soft(&soft_before)?;
        self.under_way.pop();
        self.done.insert(name.to_owned());
        self.found.push(FoundModule { name: name.to_owned(), bytes, needs });
        self.add_soft(&soft_after)
    }

    /// Adds a module as [`DependencyWalk::require`] does; adds nothing and returns false if the kernel lacks
    /// it or one of its dependencies.
    fn add(&mut self, name: &str) -> Result<bool, VmError> {
        let (reached, depth) = (self.found.len(), self.under_way.len());
        match self.require(name) {
            Err(VmError::Kernel(_)) => {
                for undone in self.found.drain(reached..) {
                    self.done.remove(&undone.name);
                }
                self.under_way.truncate(depth);
                Ok(false)
            }
            outcome => outcome.map(|()| true),
        }
    }

    /// Adds the soft dependencies of a module. The module works without those that do not exist.
    fn add_soft(&mut self, wanted: &[String]) -> Result<(), VmError> {
        for wanted in wanted {
            for module in self.tree.find_soft(wanted)? {
                self.add(&module)?;
            }
        }
        Ok(())
    }

    fn report_missing(&self, name: &str) -> Result<(), VmError> {
        if self.under_way.is_empty() && self.tree.builtin.is_none() {
            // The kernel does not list its built-in drivers; only a boot shows whether it has this one.
            return Ok(());
        }
        let needed_by =
            self.under_way.last().map(|by| format!(", which {by} depends on")).unwrap_or_default();
        Err(VmError::Kernel(format!(
            "the kernel has no driver {name}{needed_by}: it is neither built in nor a module in {}",
            self.tree.dir.display()
        )))
    }
}

/// The name of a module as the kernel spells it.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// The name of the module in a file such as `kernel/drivers/char/hw_random/virtio-rng.ko.xz`.
fn name_of(path: &str) -> Option<String> {
    let file = path.trim().rsplit('/').next()?;
    let (name, packing) = file.rsplit_once(".ko")?;
    (!name.is_empty() && (packing.is_empty() || packing.starts_with('.'))).then(|| plain(name))
}

/// The names in a list such as `virtio,virtio_ring`.
fn names(list: &str) -> impl Iterator<Item = String> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(plain)
}

fn find_modules(dir: &Path, depth: usize, files: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth < DEPTH_MAX => find_modules(&entry.path(), depth + 1, files),
            Ok(kind) if kind.is_file() => {
                if let Some(name) = name_of(&entry.file_name().to_string_lossy()) {
                    files.insert(name, entry.path());
                }
            }
            _ => {}
        }
    }
}

fn read_bounded(path: &Path, len_max: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(len_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads and decompresses a module.
fn read_module(path: &Path) -> Result<Vec<u8>, VmError> {
    let step = || format!("read the module {}", path.display());
    let packing = path.extension().and_then(|end| end.to_str());
    if packing == Some("xz") {
        return run(Command::new(find_tool("xz")?).arg("-dc").arg(path), "xz");
    }
    let packed = read_bounded(path, MODULE_LEN_MAX).step(step())?;
    let mut bytes = Vec::new();
    match packing {
        Some("zst") => zstd::Decoder::new(&packed[..])
            .and_then(|unpacking| unpacking.take(MODULE_LEN_MAX).read_to_end(&mut bytes)),
        Some("gz") => flate2::read::GzDecoder::new(&packed[..]).take(MODULE_LEN_MAX).read_to_end(&mut bytes),
        _ => return Ok(packed),
    }
    .step(step())?;
    Ok(bytes)
}

/// The soft dependencies of a module, to load before and after it: `softdep=pre: crc32c post: x y`.
fn soft_dependencies(module: &[u8]) -> (Vec<String>, Vec<String>) {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for field in fields(module, "softdep") {
        let mut comes_after = false;
        for word in field.split_whitespace() {
            match word {
                "pre:" => comes_after = false,
                "post:" => comes_after = true,
                name if comes_after => after.push(name.to_owned()),
                name => before.push(name.to_owned()),
            }
        }
    }
    (before, after)
}

/// The values of a field in a module's section `.modinfo`; none if the file is not a module.
fn fields(module: &[u8], field: &str) -> Vec<String> {
    let info = section(module, b".modinfo").unwrap_or_default();
    let texts = info.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    texts
        .filter_map(|text| text.split_once('='))
        .filter(|(name, _)| *name == field)
        .map(|(_, value)| value.to_owned())
        .collect()
}

/// A section of a 64-bit little-endian ELF file.
fn section<'a>(file: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    const HEADER_LEN: usize = 64;
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = file.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
    };
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (headers, count, names) = (number(0x28, 8)?, number(0x3c, 2)?, number(0x3e, 2)?);
    let header = |index: usize| headers.checked_add(index.checked_mul(HEADER_LEN)?);
    let contents = |index: usize| -> Option<&'a [u8]> {
        let at = header(index)?;
        let (from, len) = (number(at.checked_add(0x18)?, 8)?, number(at.checked_add(0x20)?, 8)?);
        file.get(from..from.checked_add(len)?)
    };
    let names = contents(names)?;
    (0..count).find_map(|index| {
        let name = names.get(number(header(index)?, 4)?..)?.split(|byte| *byte == 0).next()?;
        (name == wanted).then(|| contents(index)).flatten()
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A directory of modules, removed when it is dropped.
    struct TestTree(PathBuf);

    impl TestTree {
        fn new(name: &str, files: &[(&str, &[u8])]) -> Self {
            let dir = std::env::temp_dir().join(format!("pal-drivers-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&dir);
            for (path, contents) in files {
                let path = dir.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, contents).unwrap();
            }
            Self(dir)
        }

        fn order(&self, drivers: &[KernelDriver]) -> Result<LoadOrder, VmError> {
            ModuleTree::read(&self.0).unwrap().load_order(drivers, &[])
        }
    }

    impl Drop for TestTree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const fn needed(name: &'static str) -> KernelDriver {
        driver(name, DriverSet::Base, Need::Boot)
    }

    const fn optional(name: &'static str) -> KernelDriver {
        driver(name, DriverSet::Base, Need::Nothing)
    }

    fn names_of(order: &LoadOrder) -> Vec<&str> {
        order.modules.iter().map(|module| module.name.as_str()).collect()
    }

    /// A module with only these fields: three sections, of which the second is `.modinfo`.
    fn module(info: &[&str]) -> Vec<u8> {
        let info: Vec<u8> = info.iter().flat_map(|field| field.bytes().chain([0])).collect();
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        let headers = 64 + info.len() + names.len();
        file[0x28..0x30].copy_from_slice(&(headers as u64).to_le_bytes());
        file[0x3c] = 3;
        file[0x3e] = 2;
        file.extend_from_slice(&info);
        file.extend_from_slice(names);
        for (name, from, len) in [(0, 0, 0), (1, 64, info.len()), (10, 64 + info.len(), names.len())] {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&u32::to_le_bytes(name));
            header[0x18..0x20].copy_from_slice(&(from as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(len as u64).to_le_bytes());
            file.extend_from_slice(&header);
        }
        file
    }

    #[test]
    fn modules_dep_decides_the_order() {
        let files: [(&str, &[u8]); 7] = [
            ("kernel/virtio.ko", b""),
            ("kernel/virtio_ring.ko", b""),
            ("kernel/virtio_mmio.ko", b""),
            ("kernel/char/virtio-rng.ko", b""),
            ("kernel/unused.ko", b""),
            ("modules.builtin", b"kernel/fs/ext4/ext4.ko\n"),
            (
                "modules.dep",
                b"kernel/virtio_ring.ko:\n\
                  kernel/virtio.ko: kernel/virtio_ring.ko\n\
                  kernel/virtio_mmio.ko: kernel/virtio_ring.ko kernel/virtio.ko\n\
                  kernel/char/virtio-rng.ko: kernel/virtio.ko kernel/virtio_ring.ko\n\
                  kernel/unused.ko:\n",
            ),
        ];
        let tree = TestTree::new("dep", &files);
        let order = tree.order(&[needed("virtio_mmio"), optional("virtio_rng"), needed("ext4")]).unwrap();
        assert_eq!(names_of(&order), ["virtio_ring", "virtio", "virtio_mmio", "virtio_rng"]);
        let required: Vec<bool> = order.modules.iter().map(|module| module.required).collect();
        assert_eq!(required, [true, true, true, false], "what a needed driver depends on is needed");
        assert_eq!(order.lacking, Vec::<String>::new());
        // The reverse order, as in another build of the kernel.
        let other = String::from_utf8(files[6].1.to_vec())
            .unwrap()
            .replace("kernel/virtio_ring.ko:\n", "kernel/virtio_ring.ko: kernel/virtio.ko\n")
            .replace("kernel/virtio.ko: kernel/virtio_ring.ko\n", "kernel/virtio.ko:\n");
        fs::write(tree.0.join("modules.dep"), other).unwrap();
        let order = tree.order(&[needed("virtio_mmio")]).unwrap();
        assert_eq!(names_of(&order), ["virtio", "virtio_ring", "virtio_mmio"]);
    }

    #[test]
    fn without_modules_dep_each_module_says_what_it_needs() {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&module(&["license=GPL", "depends=virtio_ring"])).unwrap();
        let gz = gz.finish().unwrap();
        let zst = zstd::encode_all(&module(&["depends="])[..], 1).unwrap();
        let files: [(&str, &[u8]); 7] = [
            ("kernel/virtio.ko.gz", &gz),
            ("kernel/virtio_ring.ko.zst", &zst),
            ("kernel/fs/erofs.ko", &module(&["depends=libcrc32c"])),
            ("kernel/lib/libcrc32c.ko", &module(&["softdep=pre: crc32c post: later", "depends="])),
            ("kernel/crypto/crc32c-generic.ko", &module(&["alias=crypto-crc32c", "alias=crc32c"])),
            ("kernel/crypto/crc32c-other.ko", &module(&["alias=crc32c-other"])),
            ("kernel/later.ko", &module(&["depends=libcrc32c"])),
        ];
        let tree = TestTree::new("modinfo", &files);
        let order = tree.order(&[needed("erofs"), needed("virtio")]).unwrap();
        assert_eq!(
            names_of(&order),
            ["crc32c_generic", "libcrc32c", "later", "erofs", "virtio_ring", "virtio"]
        );
        let soft: Vec<&str> = order
            .modules
            .iter()
            .filter(|module| !module.required)
            .map(|module| module.name.as_str())
            .collect();
        assert_eq!(soft, ["crc32c_generic", "later"]);
        fs::write(tree.0.join("modules.builtin.modinfo"), "crc32c_x.alias=crc32c\0crc32c_x.license=GPL\0")
            .unwrap();
        let order = tree.order(&[needed("erofs")]).unwrap();
        assert_eq!(names_of(&order), ["libcrc32c", "later", "erofs"], "what is built in is not loaded");
    }

    #[test]
    fn a_driver_that_is_not_there_is_named() {
        let files: [(&str, &[u8]); 3] = [
            ("modules.builtin", b"kernel/fs/overlayfs/overlay.ko\n"),
            ("kernel/erofs.ko", &module(&["depends=libcrc32c"])),
            ("kernel/fuse.ko", &module(&["depends="])),
        ];
        let tree = TestTree::new("lacking", &files);
        let refused = tree.order(&[needed("overlay"), needed("virtio_blk")]).unwrap_err().to_string();
        assert!(refused.contains("no driver virtio_blk: it is neither built in"), "{refused}");
        let refused = tree.order(&[needed("erofs")]).unwrap_err().to_string();
        assert!(refused.contains("no driver libcrc32c, which erofs depends on"), "{refused}");
        let order = tree.order(&[optional("erofs"), optional("virtiofs"), needed("fuse")]).unwrap();
        assert_eq!(
            (names_of(&order), order.lacking.clone()),
            (vec!["fuse"], vec!["erofs".into(), "virtiofs".into()])
        );
        let record = DriverRecord::new(order.lacking);
        assert!(record.is_current());
        assert_eq!(record.missing_for(Engine::Qemu, &[DriverSet::Base]), Some("erofs"));
        let record = DriverRecord::new(vec!["virtiofs".into(), "virtio_pci".into()]);
        assert_eq!(record.missing_for(Engine::Qemu, &[DriverSet::Base]), None);
        assert_eq!(record.missing_for(Engine::Qemu, &[DriverSet::Base, DriverSet::Share]), Some("virtiofs"));
        assert_eq!(record.missing_for(Engine::Firecracker, &[DriverSet::Base, DriverSet::Bus]), None);
        assert_eq!(
            record.missing_for(Engine::CloudHypervisor, &[DriverSet::Base, DriverSet::Bus]),
            Some("virtio_pci")
        );
    }

    #[test]
    fn modules_that_need_each_other_are_refused() {
        let files: [(&str, &[u8]); 3] = [
            ("kernel/a.ko", b""),
            ("kernel/b.ko", b""),
            ("modules.dep", b"kernel/a.ko: kernel/b.ko\nkernel/b.ko: kernel/a.ko\n"),
        ];
        let refused = TestTree::new("circle", &files).order(&[needed("a")]).unwrap_err().to_string();
        assert!(refused.ends_with("in a circle: a -> b -> a"), "{refused}");
    }

    #[test]
    fn a_file_that_is_cut_short_has_no_fields() {
        let whole = module(&["depends=virtio"]);
        assert_eq!(fields(&whole, "depends"), ["virtio"]);
        // The last bytes of the last section header are not read.
        for len in 0..whole.len() - 24 {
            assert!(fields(&whole[..len], "depends").is_empty(), "{len}");
        }
    }
}
