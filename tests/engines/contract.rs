//! The parts of Firecracker's and Cloud Hypervisor's APIs that Palisade uses: names, types, and required
//! fields.
//!
//! Copied by hand from the descriptions of Firecracker 1.16.1 (`src/firecracker/swagger/firecracker.yaml`)
//! and Cloud Hypervisor 53.0 (`vmm/src/api/openapi/cloud-hypervisor.yaml`). `published.rs` compares it with
//! those files if they are available.

use std::path::PathBuf;

use proto::{
    guest::GuestConfig,
    vm::{Accelerator, Engine, FreezeReport, GuestSetup, SharePlan, UpperDigest, VmPlan, VmStart},
};
use serde_json::Value;

/// The type of a value.
#[derive(Debug, Clone, Copy)]
pub enum ValueKind {
    Text,
    Whole,
    Truth,
    OneOf(&'static [&'static str]),
    Of(&'static ObjectShape),
    Many(&'static ObjectShape),
}

/// The fields of an object.
#[derive(Debug)]
pub struct ObjectShape {
    /// Its name in the description.
    pub name: &'static str,
    /// The required fields.
    pub required: &'static [&'static str],
    /// The fields that Palisade uses.
    pub fields: &'static [(&'static str, ValueKind)],
}

/// A request of an API: method, path, and the shape of its body.
pub type Operation = (&'static str, &'static str, Option<&'static ObjectShape>);

use ValueKind::{Many, Of, OneOf, Text, Truth, Whole};

static MACHINE: ObjectShape = ObjectShape {
    name: "MachineConfiguration",
    required: &["mem_size_mib", "vcpu_count"],
    fields: &[("mem_size_mib", Whole), ("vcpu_count", Whole), ("smt", Truth), ("track_dirty_pages", Truth)],
};
static BOOT: ObjectShape = ObjectShape {
    name: "BootSource",
    required: &["kernel_image_path"],
    fields: &[("kernel_image_path", Text), ("initrd_path", Text), ("boot_args", Text)],
};
static DRIVE: ObjectShape = ObjectShape {
    name: "Drive",
    required: &["drive_id", "is_root_device"],
    fields: &[
        ("drive_id", Text),
        ("path_on_host", Text),
        ("is_root_device", Truth),
        ("is_read_only", Truth),
        ("cache_type", OneOf(&["Unsafe", "Writeback"])),
        ("io_engine", OneOf(&["Sync", "Async"])),
    ],
};
static VSOCK: ObjectShape = ObjectShape {
    name: "Vsock",
    required: &["guest_cid", "uds_path"],
    fields: &[("guest_cid", Whole), ("uds_path", Text)],
};
static METRICS: ObjectShape =
    ObjectShape { name: "Metrics", required: &["metrics_path"], fields: &[("metrics_path", Text)] };
static ENTROPY: ObjectShape = ObjectShape { name: "EntropyDevice", required: &[], fields: &[] };
static ACTION: ObjectShape = ObjectShape {
    name: "InstanceActionInfo",
    required: &["action_type"],
    fields: &[("action_type", OneOf(&["FlushMetrics", "InstanceStart", "SendCtrlAltDel"]))],
};
static VM: ObjectShape =
    ObjectShape { name: "Vm", required: &["state"], fields: &[("state", OneOf(&["Paused", "Resumed"]))] };
static CREATE: ObjectShape = ObjectShape {
    name: "SnapshotCreateParams",
    required: &["mem_file_path", "snapshot_path"],
    fields: &[("mem_file_path", Text), ("snapshot_path", Text), ("snapshot_type", OneOf(&["Full", "Diff"]))],
};
static BACKEND: ObjectShape = ObjectShape {
    name: "MemoryBackend",
    required: &["backend_type", "backend_path"],
    fields: &[("backend_type", OneOf(&["File", "Uffd"])), ("backend_path", Text)],
};
static OVERRIDE: ObjectShape =
    ObjectShape { name: "VsockOverride", required: &["uds_path"], fields: &[("uds_path", Text)] };
static LOAD: ObjectShape = ObjectShape {
    name: "SnapshotLoadParams",
    required: &["snapshot_path"],
    fields: &[
        ("snapshot_path", Text),
        ("mem_backend", Of(&BACKEND)),
        ("track_dirty_pages", Truth),
        ("resume_vm", Truth),
        ("vsock_override", Of(&OVERRIDE)),
    ],
};

/// The requests of Firecracker.
pub static FIRECRACKER: &[Operation] = &[
    ("PUT", "/machine-config", Some(&MACHINE)),
    ("PUT", "/boot-source", Some(&BOOT)),
    ("PUT", "/drives/{drive_id}", Some(&DRIVE)),
    ("PUT", "/vsock", Some(&VSOCK)),
    ("PUT", "/entropy", Some(&ENTROPY)),
    ("PUT", "/metrics", Some(&METRICS)),
    ("PUT", "/actions", Some(&ACTION)),
    ("PATCH", "/vm", Some(&VM)),
    ("PUT", "/snapshot/create", Some(&CREATE)),
    ("PUT", "/snapshot/load", Some(&LOAD)),
];

static CPUS: ObjectShape = ObjectShape {
    name: "CpusConfig",
    required: &["boot_vcpus", "max_vcpus"],
    fields: &[("boot_vcpus", Whole), ("max_vcpus", Whole)],
};
static MEMORY: ObjectShape =
    ObjectShape { name: "MemoryConfig", required: &["size"], fields: &[("size", Whole), ("shared", Truth)] };
static FS: ObjectShape = ObjectShape {
    name: "FsConfig",
    required: &["num_queues", "queue_size", "socket", "tag"],
    fields: &[("tag", Text), ("socket", Text), ("num_queues", Whole), ("queue_size", Whole)],
};
static PAYLOAD: ObjectShape = ObjectShape {
    name: "PayloadConfig",
    required: &[],
    fields: &[("kernel", Text), ("initramfs", Text), ("cmdline", Text)],
};
static DISK: ObjectShape = ObjectShape {
    name: "DiskConfig",
    required: &[],
    fields: &[
        ("path", Text),
        ("readonly", Truth),
        ("serial", Text),
        ("image_type", OneOf(&["FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown"])),
    ],
};
static RNG: ObjectShape = ObjectShape { name: "RngConfig", required: &["src"], fields: &[("src", Text)] };
static MODES: ValueKind = OneOf(&["Off", "Pty", "Tty", "File", "Socket", "Null"]);
static SERIAL: ObjectShape =
    ObjectShape { name: "SerialConfig", required: &["mode"], fields: &[("mode", MODES)] };
static CONSOLE: ObjectShape =
    ObjectShape { name: "ConsoleConfig", required: &["mode"], fields: &[("mode", MODES)] };
static LINE: ObjectShape = ObjectShape {
    name: "VsockConfig",
    required: &["cid", "socket"],
    fields: &[("cid", Whole), ("socket", Text)],
};
static CONFIG: ObjectShape = ObjectShape {
    name: "VmConfig",
    required: &["payload"],
    fields: &[
        ("cpus", Of(&CPUS)),
        ("memory", Of(&MEMORY)),
        ("payload", Of(&PAYLOAD)),
        ("disks", Many(&DISK)),
        ("rng", Of(&RNG)),
        ("serial", Of(&SERIAL)),
        ("console", Of(&CONSOLE)),
        ("vsock", Of(&LINE)),
        ("fs", Many(&FS)),
    ],
};
static SNAPSHOT: ObjectShape =
    ObjectShape { name: "VmSnapshotConfig", required: &[], fields: &[("destination_url", Text)] };
static RESTORE: ObjectShape = ObjectShape {
    name: "RestoreConfig",
    required: &["source_url"],
    fields: &[("source_url", Text), ("prefault", Truth)],
};

/// The requests of Cloud Hypervisor, below `/api/v1`.
pub static CLOUD_HYPERVISOR: &[Operation] = &[
    ("PUT", "/vm.create", Some(&CONFIG)),
    ("PUT", "/vm.boot", None),
    ("GET", "/vm.counters", None),
    ("PUT", "/vm.pause", None),
    ("PUT", "/vm.snapshot", Some(&SNAPSHOT)),
    ("PUT", "/vm.resume", None),
    ("PUT", "/vm.restore", Some(&RESTORE)),
    ("PUT", "/vmm.shutdown", None),
];

/// Checks a value against a shape; the error names the first difference.
fn judge(shape: &ObjectShape, value: &Value) -> Result<(), String> {
    let object = value.as_object().ok_or_else(|| format!("{} is no object: {value}", shape.name))?;
    if let Some(missing) = shape.required.iter().find(|name| !object.contains_key(**name)) {
        return Err(format!("{}.{missing} must be said", shape.name));
    }
    object.iter().try_for_each(|(name, value)| {
        let (_, kind) = shape
            .fields
            .iter()
            .find(|(known, _)| known == name)
            .ok_or_else(|| format!("{} has no {name}", shape.name))?;
        let fits = match kind {
            Text => value.is_string(),
            Whole => value.is_u64(),
            Truth => value.is_boolean(),
            OneOf(words) => value.as_str().is_some_and(|word| words.contains(&word)),
            Of(shape) => return judge(shape, value),
            Many(shape) => {
                return value
                    .as_array()
                    .ok_or_else(|| format!("{name} is no list"))?
                    .iter()
                    .try_for_each(|one| judge(shape, one));
            }
        };
        if fits { Ok(()) } else { Err(format!("{}.{name} cannot be {value}", shape.name)) }
    })
}

fn find<'a>(operations: &'a [Operation], method: &str, path: &str) -> Option<&'a Operation> {
    let alike = |known: &str| {
        known == path
            || known
                .strip_suffix("{drive_id}")
                .is_some_and(|before| path.strip_prefix(before).is_some_and(|id| !id.contains('/')))
    };
    operations.iter().find(|(known_method, known_path, _)| *known_method == method && alike(known_path))
}

/// A plan of a microVM with two images.
pub fn plan(engine: Engine, begin: VmStart) -> VmPlan {
    let body = proto::BodyId::from_random([7; 12]);
    let config = GuestConfig {
        body,
        template: "host".into(),
        token: None,
        envs: Default::default(),
        user: "user".into(),
        workdir: None,
        ring_bytes: 0,
        forward: None,
    };
    VmPlan {
        engine,
        program: "/usr/bin/engine".into(),
        firmware: "/usr/share".into(),
        accelerator: Accelerator::Kvm,
        memory_bytes: 512 << 20,
        cpus: 3,
        upper: "/disks/upper.img".into(),
        images: vec!["/disks/image0".into(), "/disks/image1".into()],
        shares: Vec::new(),
        sharer: None,
        jailer: None,
        begin,
        welcome: GuestSetup {
            config,
            seeds: Vec::new(),
            images: Vec::new(),
            root_layers: Vec::new(),
            areas: Vec::new(),
            upper: "upper".into(),
            shares: Vec::new(),
            setuid: false,
            pids: 1,
            files: 1,
            shm_bytes: 1,
            machine_id: String::new(),
            now_ns: 0,
            entropy: String::new(),
            generation: 0,
        },
        boot_ms_max: 1,
    }
}

fn both_begins() -> [VmStart; 2] {
    [
        VmStart::Boot {
            kernel: PathBuf::from("/boot/vmlinux"),
            initrd: PathBuf::from("/boot/initrd"),
            cmdline: "quiet".into(),
        },
        VmStart::Thaw {
            ram: "/frozen/ram".into(),
            state: "/frozen/state".into(),
            held: FreezeReport { tree: UpperDigest::default(), processes: 0, still: true },
        },
    ]
}

/// Every request of a boot and of a restore.
fn asked(engine: Engine) -> Vec<launch::ApiRequest> {
    both_begins().into_iter().flat_map(|begin| launch::requests(&plan(engine, begin)).unwrap()).collect()
}

fn check(engine: Engine, operations: &[Operation], below: &str) {
    let asked = asked(engine);
    for request in &asked {
        let path = request
            .path
            .strip_prefix(below)
            .unwrap_or_else(|| panic!("{} is not below {below}", request.path));
        let (_, _, shape) = find(operations, request.method, path)
            .unwrap_or_else(|| panic!("{engine} takes no {} {path}", request.method));
        match (shape, &request.body) {
            (Some(shape), Some(body)) => {
                judge(shape, body).unwrap_or_else(|why| panic!("{engine}: {} {path}: {why}", request.method))
            }
            (None, None) => {}
            (shape, body) => panic!(
                "{engine}: {path}: {} a body, {body:?} is sent",
                if shape.is_some() { "takes" } else { "takes no" }
            ),
        }
    }
    let unused = operations.iter().filter(|(method, path, _)| {
        !asked.iter().any(|request| {
            find(&[(method, path, None)], request.method, &request.path[below.len()..]).is_some()
        })
    });
    assert_eq!(unused.count(), 0, "what is written down here and never asked");
}

#[test]
fn what_firecracker_is_asked_is_what_its_api_takes() {
    check(Engine::Firecracker, FIRECRACKER, "");
}

#[test]
fn what_cloud_hypervisor_is_asked_is_what_its_api_takes() {
    check(Engine::CloudHypervisor, CLOUD_HYPERVISOR, "/api/v1");
}

#[test]
fn a_shared_directory_is_a_device_on_memory_that_is_shared() {
    let [boot, _] = both_begins();
    let share =
        SharePlan { tag: "share0".into(), dir: "/shares/0".into(), socket: "/dev/shm/share0.sock".into() };
    let vm = VmPlan { shares: vec![share], ..plan(Engine::CloudHypervisor, boot) };
    let asked = launch::requests(&vm).unwrap();
    let config = asked.iter().find(|request| request.path.ends_with("/vm.create")).unwrap();
    let config = config.body.as_ref().unwrap();
    judge(&CONFIG, config).unwrap();
    assert_eq!(config["memory"]["shared"], true);
    let fs = serde_json::json!([
        { "tag": "share0", "socket": "/dev/shm/share0.sock", "num_queues": 1, "queue_size": 1024 }
    ]);
    assert_eq!(config["fs"], fs);
}

#[test]
fn what_an_api_does_not_take_is_found_out() {
    let wrong = |shape: &ObjectShape, value: Value| judge(shape, &value).unwrap_err();
    assert_eq!(wrong(&VM, serde_json::json!({ "state": "Stopped" })), "Vm.state cannot be \"Stopped\"");
    assert_eq!(wrong(&VM, serde_json::json!({})), "Vm.state must be said");
    assert_eq!(
        wrong(&BOOT, serde_json::json!({ "kernel_image_path": "k", "initramfs": "i" })),
        "BootSource has no initramfs"
    );
    assert_eq!(
        wrong(&LOAD, serde_json::json!({ "snapshot_path": "s", "mem_backend": { "backend_type": "File" } })),
        "MemoryBackend.backend_path must be said"
    );
    assert_eq!(
        wrong(&CONFIG, serde_json::json!({ "payload": {}, "disks": [{ "readonly": 1 }] })),
        "DiskConfig.readonly cannot be 1"
    );
}

#[test]
fn what_must_not_be_written_to_is_read_only_by_its_device_and_no_format_is_guessed() {
    for (engine, path, read_only) in
        [(Engine::Firecracker, "path_on_host", "is_read_only"), (Engine::CloudHypervisor, "path", "readonly")]
    {
        let bodies: Vec<Value> = asked(engine).into_iter().filter_map(|request| request.body).collect();
        let disks: Vec<&Value> = bodies
            .iter()
            .flat_map(|body| {
                body["disks"].as_array().into_iter().flatten().chain(body.get(path).map(|_| body))
            })
            .collect();
        let found: Vec<(&str, bool)> = disks
            .iter()
            .map(|disk| (disk[path].as_str().unwrap(), disk[read_only].as_bool().unwrap()))
            .collect();
        assert_eq!(
            found,
            [("/disks/upper.img", false), ("/disks/image0", true), ("/disks/image1", true)],
            "{engine}"
        );
        assert!(engine == Engine::Firecracker || disks.iter().all(|disk| disk["image_type"] == "Raw"));
        assert!(
            bodies.iter().all(|body| body.get("net").is_none() && body.get("iface_id").is_none()),
            "no network"
        );
    }
}
