//! Messages between the host and the guest of a microVM, and the launcher's plan for one.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{guest::GuestConfig, launch::SeedEntry, spec::Access};

/// The name of the virtio-serial port that carries the channel.
pub const PORT: &str = "palisade";
/// The KVM device.
pub const KVM: &str = "/dev/kvm";
/// The serial number of the block device with the private upper.
pub const UPPER: &str = "upper";
/// A file at the root of an image that packs several layers: it holds their number. Each layer is in a
/// directory named by its position, topmost first. A single layer that contains such a file confuses only the
/// Bodies of its own author.
pub const PACK: &str = ".palisade-layers";
/// Most layers of a microVM: the limit of options in one overlay mount of its kernel.
pub const LAYERS_MAX: usize = 200;
/// The vsock port on which a guest waits for its host.
pub const LINE_PORT: u32 = 1024;
/// The root directory of virtiofsd, in the hypervisor's root.
pub const SHARES: &str = "/run";
/// The directory of the programs for Firecracker's jail, in the hypervisor's root. Firecracker shares no
/// directories, so the two never meet.
pub const JAIL_TOOLS: &str = "/run";
/// The directory of the egress proxy's socket, in the root of the VMM process.
pub const EGRESS_INSIDE: &str = "/egress";
/// The directory in which the jail is made.
pub const JAIL: &str = "/tmp";
/// The program name in a jail: the launcher, under the name that the jailer requires.
pub const JAILED: &str = "firecracker";
/// The kernel's random device.
pub const URANDOM: &str = "/dev/urandom";
/// A kernel parameter that only the guest reads: the channel is a vsock.
pub const LINE_WORD: &str = "palisade.line=vsock";
/// The end of a module's file name, before `.ko`, if the guest may continue although the kernel refuses the
/// module.
pub const OPTIONAL_MODULE: &str = ".optional";
/// The prefix of the console line on which the guest reports why it gives up.
pub const GUEST_SAYS: &str = "pal-guest: ";

/// The version of the virtual hardware. It grows whenever the CPU or the devices of microVMs change, because
/// a snapshot of other hardware cannot be restored.
pub const BOARD: u32 = 4;

/// The first message to a guest after boot or restore: its identity and settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSetup {
    /// The configuration that every guest gets.
    pub config: GuestConfig,
    /// Entries to create in its upper; a restored guest ignores them.
    pub seeds: Vec<SeedEntry>,
    /// The read-only block devices below its upper, topmost first: their serial numbers, or kernel names under
    /// Firecracker, which has no serial numbers.
    pub images: Vec<String>,
    /// The layers in these images that make the root, nearest first; all of them where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub root_layers: Vec<usize>,
    /// Directories of the root that are mounts of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub areas: Vec<GuestArea>,
    /// The block device with its upper, named in the same way.
    #[serde(default = "upper")]
    pub upper: String,
    /// Directories of the host that it mounts through virtiofs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<SharedDir>,
    /// Whether setuid programs of its root work.
    pub setuid: bool,
    /// Limit of processes and threads.
    pub pids: u32,
    /// Limit of open files of one process.
    pub files: u64,
    /// Size of `/dev/shm`.
    pub shm_bytes: u64,
    /// Its `/etc/machine-id`.
    pub machine_id: String,
    /// The host's time, in nanoseconds since 1970.
    pub now_ns: u64,
    /// Random bytes for this microVM only: 64 bytes in hexadecimal.
    pub entropy: String,
    /// How often this microVM was restored before.
    pub generation: u64,
}

/// A shared directory, as the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDir {
    /// The tag of its virtiofs device.
    pub tag: String,
    /// The mount point.
    pub target: PathBuf,
    /// Whether the guest mounts it read-only; the host enforces that in any case.
    pub access: Access,
}

/// A directory of a microVM's root with an overlay mount of its own: a repository, or a home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestArea {
    /// Its place in the root, without a leading `/`.
    pub at: String,
    /// The id inside that owns it.
    pub owner: u32,
    /// Read-only directories below it, nearest first.
    pub lowers: Vec<GuestLower>,
}

impl GuestArea {
    /// The directory of its writes on the writable disk.
    pub fn upper_dir(&self) -> String {
        format!("{AREAS}/{}", crate::launch::area_dir(&self.at))
    }
}

/// A read-only directory below an area.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestLower {
    /// The layer, counted through all images.
    pub layer: usize,
    /// The directory in that layer; empty for all of it.
    pub dir: String,
}

/// The directory of the root's writes on the writable disk of a microVM.
pub const ROOT_UPPER: &str = "upper";
/// The directory of the writes of all areas on that disk.
pub const AREAS: &str = "areas";

fn upper() -> String {
    UPPER.to_owned()
}

/// The begin of the line in [`GuestReceipt::trouble`] that tells why [`GuestReceipt::transparent`] is false.
pub const NOT_TRANSPARENT: &str = "cannot redirect connections";

/// The guest's receipt, with which it proves that it applied its setup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestReceipt {
    /// The Body of the guest.
    pub body: crate::BodyId,
    /// The generation from its setup.
    pub generation: u64,
    /// The guest's clock when it sent this, in nanoseconds since 1970.
    pub clock_ns: u64,
    /// The time since it received its setup.
    pub spent_ns: u64,
    /// Whether its kernel has mixed in the random bytes.
    pub reseeded: bool,
    /// Processes started through the guest that still run.
    pub processes: u32,
    /// A digest of its upper: names, kinds, modes, owners, sizes and times.
    pub tree: UpperDigest,
    /// The release of its kernel.
    pub kernel: String,
    /// Steps that failed, as text.
    #[serde(default)]
    pub trouble: Vec<String>,
    /// Whether its kernel redirects all connections of programs to the egress proxy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub transparent: bool,
}

/// A digest of an upper.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpperDigest {
    /// SHA-256 over its entries.
    pub hash: String,
    /// How many entries it covers.
    pub entries: u64,
    /// Whether it covers all entries.
    pub whole: bool,
}

impl UpperDigest {
    /// Whether it is well-formed; a guest may send anything.
    pub fn is_sound(&self) -> bool {
        self.hash.len() == 64 && self.hash.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

/// Longest kernel release, and longest error text, from a guest.
const TOLD_LEN_MAX: usize = 200;
/// Most error texts from a guest.
const TROUBLE_MAX: usize = 16;

impl GuestReceipt {
    /// Cuts and escapes the texts of a hostile guest, so that the receipt can be stored and shown.
    pub fn bounded(self) -> Self {
        let text = |told: String| crate::text::visible(&told.chars().take(TOLD_LEN_MAX).collect::<String>());
        Self {
            kernel: text(self.kernel),
            trouble: self.trouble.into_iter().take(TROUBLE_MAX).map(text).collect(),
            ..self
        }
    }
}

/// The guest's report before a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezeReport {
    /// A digest of its upper.
    pub tree: UpperDigest,
    /// Processes started through the guest that still run.
    pub processes: u32,
    /// Whether every process was frozen before the upper was read.
    pub still: bool,
}

/// The hypervisor of a microVM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// QEMU's machine type `microvm`: with KVM, or emulated.
    #[default]
    Qemu,
    /// Cloud Hypervisor: only with KVM.
    CloudHypervisor,
    /// Firecracker: only with KVM.
    Firecracker,
}

impl Engine {
    /// All engines, the default first.
    pub const ALL: [Engine; 3] = [Self::Qemu, Self::CloudHypervisor, Self::Firecracker];

    /// The word for it in every output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Firecracker => "firecracker",
        }
    }

    /// Whether it can run without KVM.
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
            .ok_or_else(|| format!("unknown engine; the engines are {names}"))
    }
}

/// How a microVM shares a directory with the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// virtiofs: a device that passes file operations to virtiofsd on the host.
    Virtiofs,
}

impl Sharing {
    /// The word for it in every output.
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

/// A directory that virtiofsd shares with the microVM, in the launcher's plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharePlan {
    /// The tag of its virtiofs device.
    pub tag: String,
    /// The directory, in virtiofsd's own root.
    pub dir: PathBuf,
    /// The socket between the hypervisor and virtiofsd.
    pub socket: PathBuf,
}

/// How the CPUs of a microVM run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// By KVM.
    Kvm,
    /// By software emulation.
    Emulated,
}

impl Accelerator {
    /// The word for it in every output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Emulated => "emulated",
        }
    }
}

/// Whether Firecracker's jailer starts the hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JailerPlan {
    /// It does.
    Used {
        /// The jailer's version.
        version: String,
        /// Size of the tmpfs that holds the jail's root.
        bytes: u64,
        /// Thread limit of the cgroup that the jailer makes; none if it may not divide the Body's cgroups.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        threads: Option<u32>,
    },
    /// It does not.
    Absent {
        /// The reason.
        why: String,
    },
}

/// How a microVM starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmStart {
    /// It boots a kernel.
    Boot {
        /// The kernel image, in the hypervisor's root.
        kernel: PathBuf,
        /// The initramfs.
        initrd: PathBuf,
        /// The kernel command line.
        cmdline: String,
    },
    /// It is restored from a snapshot.
    Thaw {
        /// Its memory file, in the hypervisor's root.
        ram: PathBuf,
        /// The state of its CPUs and devices.
        state: PathBuf,
        /// The guest's report before the snapshot; the restored guest must report the same.
        held: FreezeReport,
    },
}

/// A microVM, in the launcher's plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPlan {
    /// The hypervisor.
    pub engine: Engine,
    /// The hypervisor's program, in its root.
    pub program: PathBuf,
    /// The directory of its firmware.
    pub firmware: PathBuf,
    /// How its CPUs run.
    pub accelerator: Accelerator,
    /// Memory.
    pub memory_bytes: u64,
    /// Number of CPUs.
    pub cpus: u32,
    /// The image of the private upper, in the hypervisor's root.
    pub upper: PathBuf,
    /// Read-only images, topmost first.
    pub images: Vec<PathBuf>,
    /// Directories that it shares with the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<SharePlan>,
    /// The virtiofsd program, in the root at [`SHARES`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharer: Option<PathBuf>,
    /// Whether Firecracker's jailer starts it; none for other hypervisors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jailer: Option<JailerPlan>,
    /// How it starts.
    pub begin: VmStart,
    /// The setup of its guest; the VMM process adds time and random bytes when it sends it.
    pub welcome: GuestSetup,
    /// How long the guest may take to answer.
    pub boot_ms_max: u64,
}

impl VmPlan {
    /// Whether Firecracker's jailer starts it.
    pub fn is_jailed(&self) -> bool {
        matches!(self.jailer, Some(JailerPlan::Used { .. }))
    }
}

/// Largest allowed offset of a guest's clock after it was set.
pub const CLOCK_OFFSET_MAX_MS: i64 = 500;

/// The smallest possible offset of the guest's clock: the guest read it between the host's request and the
/// receipt, after the time that it spent on the setup.
pub fn clock_offset_ms(receipt: &GuestReceipt, sent_ns: u64, heard_ns: u64) -> i64 {
    let clock = i128::from(receipt.clock_ns);
    let (early, late) =
        (i128::from(sent_ns.saturating_add(receipt.spent_ns).min(heard_ns)), i128::from(heard_ns));
    let offset = if clock < early { clock - early } else { (clock - late).max(0) };
    (offset / 1_000_000).clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
}

/// How a microVM started, for events and `pal inspect`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartReport {
    /// `boot` or `thaw` (restored); `spare` if it came from the pool.
    pub how: String,
    /// The smallest possible offset of the guest's clock after it was set, in milliseconds.
    pub clock_offset_ms: i64,
    /// Time from the start of the hypervisor to the guest's receipt.
    pub took_ms: u64,
    /// The version of the virtual hardware when it started: [`BOARD`].
    #[serde(default)]
    pub board: u32,
    /// The guest's receipt.
    #[serde(flatten)]
    pub receipt: GuestReceipt,
}

/// Exit codes of the VMM process, each with its meaning.
pub const EXITS: [(i32, &str); 5] = [
    (71, "its hypervisor ended or was killed"),
    (72, "its guest broke the protocol of the channel, so the supervisor ended it"),
    (73, "its microVM stopped unexpectedly: its kernel may have panicked"),
    (74, "its hypervisor no longer answered"),
    (75, "its virtiofsd ended or was killed"),
];

/// The control socket of the VMM process. A client that sends two descriptors, for memory and device state,
/// gets a snapshot written to them; the answer is one line of JSON, and the next byte or the end of the
/// connection resumes the microVM. [`MEASURE`] returns the resource use in one line, [`CONSOLE`] the last
/// lines of the console. [`TAKE`] and a line of JSON, a [`GuestConfig`], assign a pooled microVM to a Body;
/// the answer has the guest's receipt.
pub const CONTROL: &str = "vm.sock";
/// The request for the resource use of a microVM.
pub const MEASURE: u8 = b'm';
/// The request for the last lines of a microVM's console.
pub const CONSOLE: u8 = b'c';
/// The request that assigns a pooled microVM to a Body.
pub const TAKE: u8 = b't';
/// The byte that has a microVM stand still, with everything it wrote on its disk, until the next byte or the end of the
/// connection.
pub const HOLD: u8 = b'h';

/// The resource use of a microVM, as its hypervisor reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmMetrics {
    /// CPU time of the hypervisor, including the guest's.
    pub cpu_ms: u64,
    /// Memory in use by the hypervisor, including the guest's.
    pub memory_bytes: u64,
    /// Memory of the guest, if the hypervisor reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_bytes: Option<u64>,
    /// Traffic of its disks since its start, by serial number.
    pub disks: BTreeMap<String, DiskTraffic>,
}

/// Traffic of a disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTraffic {
    /// Number of reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Number of writes.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// Most disks in a report.
const DISKS_MAX: usize = 64;

impl VmMetrics {
    /// Cuts and escapes the report, because a hostile guest may control the hypervisor.
    pub fn bounded(self) -> Self {
        let plain = |name: &String| name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let disks = self.disks.into_iter().filter(|(name, _)| plain(name)).take(DISKS_MAX).collect();
        Self { disks, ..self }
    }
}

/// An answer of the VMM process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControlReply {
    /// The snapshot is written, and the microVM is paused.
    Saved {
        /// The guest's report before the snapshot.
        held: FreezeReport,
    },
    /// The microVM belongs to the Body now.
    Taken {
        /// How it started, with the guest's receipt.
        revival: Box<StartReport>,
    },
    /// The resource use.
    Measured {
        /// As the hypervisor reports it.
        metrics: VmMetrics,
    },
    /// The microVM stands still.
    Held {
        /// Whether its guest wrote everything to the disk before.
        synced: bool,
    },
    /// The last lines of the console.
    Console {
        /// The lines.
        lines: Vec<String>,
    },
    /// The request failed; the microVM goes on.
    Failed {
        /// The error message.
        why: String,
    },
}

/// A request to `pal-launch image`: make a read-only file system image of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOrder {
    /// The ids under which the tree is read; files that they cannot read are left out.
    pub ids: crate::spec::Ids,
    /// The tree.
    pub source: ImageSource,
    /// The file to write, which these ids own already.
    pub out: PathBuf,
    /// The program that writes the image (mkfs.erofs).
    pub program: PathBuf,
}

/// The source of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageSource {
    /// A layer, with its owners and overlayfs attributes.
    Layer(PathBuf),
    /// Several layers, topmost first, each in a directory of its own.
    Pack(Vec<PathBuf>),
    /// The host's own system directories; every file belongs to root.
    Host {
        /// Directories of the host; the image has the same paths.
        areas: Vec<String>,
        /// Symbolic links: path and target.
        links: Vec<(String, String)>,
        /// Paths that are left out.
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
            transparent: false,
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
