//! What the two sides of a microVM tell each other, and what the launcher is told of one.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{guest::GuestConfig, launch::SeedEntry, spec::Access};

/// The name of the line's port on the machine.
pub const PORT: &str = "palisade";
/// The device by which a hypervisor has the processor run its machine.
pub const KVM: &str = "/dev/kvm";
/// What the device with the private upper is called.
pub const UPPER: &str = "upper";
/// A file at the root of an image that holds several layers, each in a directory named by its number, nearest first: it
/// says how many. One in an image of a single layer misleads nobody but who made that layer.
pub const PACK: &str = ".palisade-layers";
/// Most layers of one machine: its kernel takes so many names in one mount.
pub const LAYERS_MAX: usize = 200;
/// The port on which a guest waits for its host, where its line is a vsock.
pub const LINE_PORT: u32 = 1024;
/// Where the root of the program that shares directories is, in the machine's root.
pub const SHARES: &str = "/run";
/// Where the programs of Firecracker's jail are, in the machine's root. Firecracker shares no directories.
pub const JAIL_TOOLS: &str = "/run";
/// Where the jail itself is made.
pub const JAIL: &str = "/tmp";
/// What is executed in a jail: the launcher, under the name that the jailer insists on.
pub const JAILED: &str = "firecracker";
/// Where programs find randomness.
pub const URANDOM: &str = "/dev/urandom";
/// A word for the kernel that it does not know, and its guest does: the line is a vsock.
pub const LINE_WORD: &str = "palisade.line=vsock";
/// How the name of a module's file ends, before `.ko`, where the guest goes on although the kernel refuses the module.
pub const OPTIONAL_MODULE: &str = ".optional";
/// How a line on the console begins in which the guest says why it gives up.
pub const GUEST_SAYS: &str = "pal-guest: ";

/// How machines are put together by this version: grows whenever their processor or their devices change, for what was
/// frozen with others cannot go on with these.
pub const BOARD: u32 = 4;

/// The first word to a guest, and to one that was thawed: who it is from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSetup {
    /// What every guest is told.
    pub config: GuestConfig,
    /// What its upper holds from the start; of no use to one that was thawed.
    pub seeds: Vec<SeedEntry>,
    /// Read-only devices below its upper, nearest first: what they are called.
    pub images: Vec<String>,
    /// What the device with its upper is called.
    #[serde(default = "upper")]
    pub upper: String,
    /// Directories of the host that it sees live.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<SharedDir>,
    /// Whether setuid programs of its root work.
    pub setuid: bool,
    /// Processes and threads.
    pub pids: u32,
    /// Open files of one process.
    pub files: u64,
    /// Memory of `/dev/shm`.
    pub shm_bytes: u64,
    /// Its machine id.
    pub machine_id: String,
    /// What time it is, in nanoseconds since 1970.
    pub now_ns: u64,
    /// Randomness that no other machine gets: 64 bytes as hex.
    pub entropy: String,
    /// How often this machine was thawed before: its generation.
    pub generation: u64,
}

/// A live directory, as a guest is told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDir {
    /// What its device is called.
    pub tag: String,
    /// Where it is seen.
    pub target: PathBuf,
    /// What will be refused anyway need not be tried.
    pub access: Access,
}

fn upper() -> String {
    UPPER.to_owned()
}

/// What a guest proves of itself after its welcome.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestReceipt {
    /// Whose guest says so.
    pub body: crate::BodyId,
    /// The generation it was told.
    pub generation: u64,
    /// What its clock says when it sends this, in nanoseconds since 1970.
    pub clock_ns: u64,
    /// How long it had its welcome by then.
    pub spent_ns: u64,
    /// Whether the kernel has taken the randomness and draws from it.
    pub reseeded: bool,
    /// Processes started through the guest that still run.
    pub processes: u32,
    /// What its upper holds: names, kinds, modes, owners, sizes and times.
    pub tree: UpperDigest,
    /// Its kernel.
    pub kernel: String,
    /// What could not be done, in words.
    #[serde(default)]
    pub trouble: Vec<String>,
}

/// What stands in an upper, in short.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpperDigest {
    /// SHA-256 over its entries, as far as they were looked at.
    pub hash: String,
    /// How many were.
    pub entries: u64,
    /// Whether that is all of them.
    pub whole: bool,
}

impl UpperDigest {
    /// Whether it has the form of one: a guest may say anything.
    pub fn is_sound(&self) -> bool {
        self.hash.len() == 64 && self.hash.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

/// Longest name of a kernel, and longest complaint of a guest.
const TOLD_LEN_MAX: usize = 200;
/// Most complaints of a guest.
const TROUBLE_MAX: usize = 16;

impl GuestReceipt {
    /// The same, fit to be kept and shown: what a hostile guest says is neither long nor anything but text.
    pub fn bounded(self) -> Self {
        let text = |told: String| crate::text::visible(&told.chars().take(TOLD_LEN_MAX).collect::<String>());
        Self {
            kernel: text(self.kernel),
            trouble: self.trouble.into_iter().take(TROUBLE_MAX).map(text).collect(),
            ..self
        }
    }
}

/// What a guest says before it is frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezeReport {
    /// What its upper holds.
    pub tree: UpperDigest,
    /// Processes started through the guest that run.
    pub processes: u32,
    /// Whether every process stood still before the upper was looked at.
    pub still: bool,
}

/// The hypervisor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// QEMU's `microvm` machine: with the processor, or emulated.
    #[default]
    Qemu,
    /// Cloud Hypervisor: only with the processor.
    CloudHypervisor,
    /// Firecracker: only with the processor.
    Firecracker,
}

impl Engine {
    /// All of them, the default first.
    pub const ALL: [Engine; 3] = [Self::Qemu, Self::CloudHypervisor, Self::Firecracker];

    /// The word on every surface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Firecracker => "firecracker",
        }
    }

    /// Whether it can do without the processor's help.
    pub fn emulates(self) -> bool {
        self == Self::Qemu
    }
}

impl std::fmt::Display for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Engine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|engine| engine.name() == text)
            .ok_or_else(|| format!("there is no engine of that name: {names}"))
    }
}

/// How a directory of the host is seen live in a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// A device that passes each act on files to a program beside the hypervisor.
    Virtiofs,
}

impl Sharing {
    /// The word on every surface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtiofs => "virtiofs",
        }
    }
}

impl std::str::FromStr for Sharing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "virtiofs" => Ok(Self::Virtiofs),
            _ => Err("a directory is shared by: virtiofs".to_owned()),
        }
    }
}

/// A directory that a program beside the hypervisor shares with the machine, in the launcher's plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharePlan {
    /// What its device is called.
    pub tag: String,
    /// The directory, in the sharing program's own root.
    pub dir: PathBuf,
    /// Where the hypervisor finds the program.
    pub socket: PathBuf,
}

/// What holds the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor itself.
    Kvm,
    /// A program.
    Emulated,
}

impl Accelerator {
    /// The word on every surface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Emulated => "emulated",
        }
    }
}

/// Firecracker's own jailer, as far as a machine has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JailerPlan {
    /// It starts the hypervisor.
    Used {
        /// What it says of its version.
        version: String,
        /// Memory of the jail's root: the programs in it.
        bytes: u64,
        /// Most threads in the group that it makes for the hypervisor; none where the Body's groups are not its to divide.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        threads: Option<u32>,
    },
    /// It does not, because of this.
    Absent {
        /// Why.
        why: String,
    },
}

/// How a machine comes to life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmStart {
    /// Its kernel is started.
    Boot {
        /// Its kernel, in the machine's root.
        kernel: PathBuf,
        /// Its first file system.
        initrd: PathBuf,
        /// What the kernel is told.
        cmdline: String,
    },
    /// It goes on where it was frozen.
    Thaw {
        /// Its memory, in the machine's root.
        ram: PathBuf,
        /// Its processors and devices.
        state: PathBuf,
        /// What its guest said before it was frozen, to be found again.
        held: FreezeReport,
    },
}

/// A machine to be kept, in the launcher's plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPlan {
    /// What drives it.
    pub engine: Engine,
    /// The hypervisor, in the machine's root.
    pub program: PathBuf,
    /// Where it finds its firmware.
    pub firmware: PathBuf,
    /// How processors are run.
    pub accelerator: Accelerator,
    /// Memory.
    pub memory_bytes: u64,
    /// Processors.
    pub cpus: u32,
    /// The private upper, in the machine's root.
    pub upper: PathBuf,
    /// Read-only images, nearest first.
    pub images: Vec<PathBuf>,
    /// Directories of the host that it sees live.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<SharePlan>,
    /// The program that shares them, in the root at [`SHARES`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharer: Option<PathBuf>,
    /// Whether Firecracker's jailer starts it; of no meaning for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jailer: Option<JailerPlan>,
    /// How it begins.
    pub begin: VmStart,
    /// What its guest is told; time and randomness are added when that happens.
    pub welcome: GuestSetup,
    /// How long it may take until its guest answers.
    pub boot_ms_max: u64,
}

impl VmPlan {
    /// Whether Firecracker's jailer starts it.
    pub fn is_jailed(&self) -> bool {
        matches!(self.jailer, Some(JailerPlan::Used { .. }))
    }
}

/// How far a machine's clock may be off after it was set.
pub const CLOCK_OFFSET_MAX_MS: i64 = 500;

/// How far at least a guest's clock is off: it was read between what was asked and what was heard, less what the guest
/// spent before it looked.
pub fn clock_offset_ms(receipt: &GuestReceipt, sent_ns: u64, heard_ns: u64) -> i64 {
    let clock = i128::from(receipt.clock_ns);
    let (early, late) =
        (i128::from(sent_ns.saturating_add(receipt.spent_ns).min(heard_ns)), i128::from(heard_ns));
    let offset = if clock < early { clock - early } else { (clock - late).max(0) };
    (offset / 1_000_000).clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
}

/// How a machine came to life, for the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartReport {
    /// `boot` or `thaw`; `spare` where it was thawed before anybody asked for it.
    pub how: String,
    /// How far at least the guest's clock was from the host's after it was set, in milliseconds.
    pub clock_offset_ms: i64,
    /// From the start of the hypervisor to the guest's receipt.
    pub took_ms: u64,
    /// How it was put together by whoever started it: [`BOARD`].
    #[serde(default)]
    pub board: u32,
    /// What the guest proved.
    #[serde(flatten)]
    pub receipt: GuestReceipt,
}

/// Exit codes of the process that minds a machine, each with its meaning.
pub const EXITS: [(i32, &str); 5] = [
    (71, "its hypervisor ended or was killed"),
    (72, "its guest broke the rules of the line and was ended"),
    (73, "its machine stopped without a word: its kernel may have panicked"),
    (74, "its hypervisor could not be asked any more"),
    (75, "the program that shares a directory with it ended or was killed"),
];

/// Where the process that minds a machine is asked to freeze it: two descriptors are sent, for memory and for the
/// rest. It answers with one line of JSON; the next byte, or the end of the connection, lets the machine go on.
/// Whoever sends [`MEASURE`] instead is told in one line what the machine uses, and [`CONSOLE`] is answered with the last
/// lines of its console. One that waited for nobody in particular takes [`TAKE`] and a line of
/// JSON, a [`GuestConfig`], proves itself as that Body's, and answers with one line.
pub const CONTROL: &str = "vm.sock";
/// The byte that asks for a machine to be measured.
pub const MEASURE: u8 = b'm';
/// The byte that asks for the last lines of a machine's console.
pub const CONSOLE: u8 = b'c';
/// The byte that says whose a machine is from now on.
pub const TAKE: u8 = b't';

/// What a machine uses, as its hypervisor knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmMetrics {
    /// Processor time of the hypervisor, the machine's included.
    pub cpu_ms: u64,
    /// Memory that the hypervisor has in use, the machine's included.
    pub memory_bytes: u64,
    /// Memory that the machine has, where its hypervisor tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_bytes: Option<u64>,
    /// What went to and from its disks since it began, by what they are called.
    pub disks: BTreeMap<String, DiskTraffic>,
}

/// What went to and from a disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTraffic {
    /// How often it was read.
    pub reads: u64,
    /// How much.
    pub read_bytes: u64,
    /// How often it was written to.
    pub writes: u64,
    /// How much.
    pub written_bytes: u64,
}

/// Most disks that are told of.
const DISKS_MAX: usize = 64;

impl VmMetrics {
    /// The same, fit to be kept and shown: it comes from behind the walls.
    pub fn bounded(self) -> Self {
        let plain = |name: &String| name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let disks = self.disks.into_iter().filter(|(name, _)| plain(name)).take(DISKS_MAX).collect();
        Self { disks, ..self }
    }
}

/// What it answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControlReply {
    /// It stands still and is written down.
    Saved {
        /// What its guest said before.
        held: FreezeReport,
    },
    /// It is whose it was said to be.
    Taken {
        /// What it proved.
        revival: Box<StartReport>,
    },
    /// What it uses.
    Measured {
        /// As its hypervisor knows it.
        metrics: VmMetrics,
    },
    /// The last lines of its console.
    Console {
        /// The lines.
        lines: Vec<String>,
    },
    /// It goes on, because of this.
    Failed {
        /// Why.
        why: String,
    },
}

/// What `pal-launch image` is asked for: a read-only file system made of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOrder {
    /// The ids under which the tree is read: what they may not read does not get in.
    pub ids: crate::spec::Ids,
    /// The tree.
    pub source: ImageSource,
    /// The file to write, which belongs to those ids already.
    pub out: PathBuf,
    /// The program that writes it.
    pub program: PathBuf,
}

/// What an image is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageSource {
    /// A layer: owners, marks and all.
    Layer(PathBuf),
    /// Several, nearest first, each in a directory of its own.
    Pack(Vec<PathBuf>),
    /// What this host shows of itself: everything belongs to root.
    Host {
        /// Directories of the host, by their place in the image, which is the same.
        areas: Vec<String>,
        /// Links.
        links: Vec<(String, String)>,
        /// What is left out.
        hidden: Vec<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receipt() -> GuestReceipt {
        let tree = UpperDigest { hash: "0".repeat(64), entries: 1, whole: true };
        GuestReceipt {
            body: "b1".parse().unwrap(),
            generation: 1,
            clock_ns: 0,
            spent_ns: 0,
            reseeded: true,
            processes: 0,
            tree,
            kernel: "6.1".into(),
            trouble: Vec::new(),
        }
    }

    #[test]
    fn a_receipt_that_lies_is_short_and_plain() {
        let hostile = GuestReceipt {
            kernel: "\u{1b}]0;mine\u{7}".repeat(100_000),
            trouble: vec!["x\n".repeat(9000); 9000],
            ..receipt()
        };
        let tidy = hostile.bounded();
        assert!(tidy.kernel.len() < 4096 && !tidy.kernel.contains('\u{1b}'), "{}", tidy.kernel.len());
        assert!(
            tidy.trouble.len() == TROUBLE_MAX
                && tidy.trouble.iter().all(|told| told.len() < 4096 && !told.contains('\n'))
        );
        assert_eq!(receipt().bounded(), receipt(), "an honest one stays as it is");
    }

    #[test]
    fn what_is_measured_is_short_and_plain() {
        let mut metrics = VmMetrics { cpu_ms: 7, ..VmMetrics::default() };
        metrics.disks.insert("upper".into(), DiskTraffic { reads: 1, ..DiskTraffic::default() });
        assert_eq!(metrics.clone().bounded(), metrics, "an honest one stays as it is");
        metrics.disks.insert("\u{1b}[2J".into(), DiskTraffic::default());
        metrics.disks.extend((0..9000).map(|index| (format!("{index:0>40}"), DiskTraffic::default())));
        assert_eq!(metrics.bounded().disks.into_keys().collect::<Vec<_>>(), ["upper"]);
    }

    #[test]
    fn a_tree_is_told_by_a_hash_and_nothing_else() {
        let tree = |hash: &str| UpperDigest { hash: hash.to_owned(), entries: 0, whole: true };
        assert!(tree(&"af09".repeat(16)).is_sound());
        for lie in [String::new(), "0".repeat(65), "0".repeat(1 << 20), format!("{}\u{1b}", "0".repeat(63))] {
            assert!(!tree(&lie).is_sound());
        }
    }

    #[test]
    fn a_clock_is_off_by_no_more_than_can_be_shown() {
        let at = |clock_ns, spent_ns| GuestReceipt { clock_ns, spent_ns, ..receipt() };
        let ms = 1_000_000;
        assert_eq!(clock_offset_ms(&at(1000 * ms, 0), 990 * ms, 1010 * ms), 0, "between asked and heard");
        assert_eq!(clock_offset_ms(&at(1700 * ms, 0), 990 * ms, 1010 * ms), 690);
        assert_eq!(clock_offset_ms(&at(300 * ms, 0), 990 * ms, 1010 * ms), -690);
        assert_eq!(
            clock_offset_ms(&at(1000 * ms, u64::MAX), 990 * ms, 1010 * ms),
            -10,
            "what it spent is no excuse beyond what was heard"
        );
    }

    #[test]
    fn an_engine_has_one_name_everywhere() {
        for engine in Engine::ALL {
            assert_eq!(engine.name().parse(), Ok(engine));
            assert_eq!(serde_json::to_value(engine).unwrap(), engine.name());
        }
        assert!(
            "xen".parse::<Engine>().unwrap_err().contains("firecracker"),
            "what there is instead is said"
        );
    }
}
