//! Examines what this host can do, by trying it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use body::driver::{Capabilities, DoctorFinding};
use proto::{Failure, Layer, Mechanism, MechanismStatus};
use serde::Serialize;
use sys::cgroup::CgroupMounts;

use crate::{Create, ExecRequest, Fleet, Force, blocking::run_blocking};

/// The state of one layer on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerCheck {
    /// The layer.
    pub layer: Layer,
    /// Whether `pal` can start a Body on this layer now.
    pub usable: bool,
    /// The reasons why the layer is not usable.
    pub lacks: Vec<String>,
    /// The capabilities of the layer's driver; `None` if this `pal` has no driver for it.
    pub capabilities: Option<Capabilities>,
}

/// The result of all checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// One finding for each check.
    pub findings: Vec<DoctorFinding>,
    /// The state of each layer.
    pub layers: Vec<LayerCheck>,
}

impl Fleet {
    /// Creates a Body to check what Bodies need, and examines the rest of the host.
    pub async fn doctor(&self) -> Result<DoctorReport, Failure> {
        let first = run_blocking(namespaces);
        let (body, usable) = try_body(self).await;
        let lost = run_blocking(|| lost_directories(self));
        let findings = std::iter::once(first).chain(body).chain(lost).collect();
        Ok(run_blocking(|| examine_host(&self.drivers, findings, &usable)))
    }
}

/// Directories that the host had when a Body or a snapshot was made, and has lost.
fn lost_directories(fleet: &Fleet) -> Vec<DoctorFinding> {
    let dirs = |name: &str| fs::read_dir(fleet.data.join(name)).into_iter().flatten().flatten();
    let bodies = dirs("bodies").map(|entry| entry.path().join("disk/upper/root"));
    let roots: Vec<PathBuf> =
        bodies.chain(dirs("snapshots").map(|entry| entry.path().join("root"))).collect();
    let lost = body::host::lost_directories(&roots).into_iter().map(weak);
    let detail =
        "the host had it when a Body or a snapshot was made, and has lost it: those start without it";
    lost.map(|found| DoctorFinding { detail: detail.to_owned(), ..found }).collect()
}

/// Adds the checks that need no Body.
fn examine_host(
    drivers: &crate::drivers::Drivers,
    mut findings: Vec<DoctorFinding>,
    usable: &Result<(), String>,
) -> DoctorReport {
    findings.push(landlock());
    findings.extend(groups());
    findings.push(subordinate_ids());
    let mut layers = Vec::new();
    for layer in Layer::ALL {
        let (capabilities, lacks) = match drivers.find(layer) {
            None => (None, Some("this pal does not have it yet".to_owned())),
            Some(driver) => {
                let examined = driver.examine();
                findings.extend(examined.findings);
                let capabilities = Some(driver.capabilities());
                (capabilities, examined.lacks.or_else(|| usable.as_ref().err().cloned()))
            }
        };
        let (usable, lacks) = (lacks.is_none(), lacks.into_iter().collect());
        layers.push(LayerCheck { layer, usable, lacks, capabilities });
    }
    findings.extend(TOOLS.iter().map(|(tool, purpose, package)| on_path(tool, purpose, package)));
    DoctorReport { findings, layers }
}

/// Creates a Body, runs a command in it and removes it.
async fn try_body(fleet: &Fleet) -> (Vec<DoctorFinding>, Result<(), String>) {
    let failed = |failure: &Failure| {
        let causes =
            std::iter::once(failure.to_string()).chain(failure.causes()).collect::<Vec<_>>().join(": ");
        let fix = failure.hints.iter().find(|hint| !hint.contains("pal doctor")).cloned();
        (
            vec![DoctorFinding {
                name: "process Body".into(),
                state: MechanismStatus::Absent,
                detail: causes.clone(),
                fix,
            }],
            Err(causes),
        )
    };
    let view = match fleet.create(Create::run()).await {
        Ok(view) => view,
        Err(failure) => return failed(&failure),
    };
    let ran = try_command(fleet, &view).await;
    let removed = fleet.remove(view.id(), Force::Yes).await;
    if let Err(failure) = ran.and(removed) {
        return failed(&failure);
    }
    let detail = "a Body was made, ran a command and was removed".to_owned();
    let mut findings = vec![DoctorFinding {
        name: "process Body".into(),
        state: MechanismStatus::Enforced,
        detail,
        fix: None,
    }];
    findings.extend(
        view.enforcement
            .mechanisms
            .into_iter()
            .filter(|held| held.state != MechanismStatus::Enforced)
            .map(weak),
    );
    (findings, Ok(()))
}

async fn try_command(fleet: &Fleet, view: &crate::BodyView) -> Result<(), Failure> {
    let mut exec = fleet.execs().start(view.id(), ExecRequest::new(["/bin/sh", "-c", "exit 0"])).await?;
    while exec.next().await?.is_some() {}
    exec.finish().await.map(drop)
}

fn weak(held: Mechanism) -> DoctorFinding {
    DoctorFinding { name: held.name, state: held.state, detail: held.reason, fix: None }
}

fn namespaces() -> DoctorFinding {
    let name = "user namespaces".to_owned();
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let blocked = [
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=65536"),
    ];
    let root = sys::caps::is_host_root();
    match blocked.iter().find(|(path, bad, _)| read(path).as_deref() == Some(bad)) {
        Some((path, bad, fix)) => {
            let state = if root && !path.contains("max_user") {
                MechanismStatus::Degraded
            } else {
                MechanismStatus::Absent
            };
            DoctorFinding {
                name,
                state,
                detail: format!("{path} is {bad}, which forbids them to ordinary users"),
                fix: Some((*fix).to_owned()),
            }
        }
        None => DoctorFinding {
            name,
            state: MechanismStatus::Enforced,
            detail: "no setting of this host forbids them".into(),
            fix: None,
        },
    }
}

fn landlock() -> DoctorFinding {
    let abi = sys::landlock::abi();
    let (state, fix) = match abi {
        0 => (MechanismStatus::Absent, Some("add `landlock` to the kernel's lsm= parameter".to_owned())),
        1..6 => (
            MechanismStatus::Degraded,
            Some("a kernel of 6.12 or newer scopes signals and abstract sockets too".to_owned()),
        ),
        _ => (MechanismStatus::Enforced, None),
    };
    DoctorFinding { name: "landlock".into(), state, detail: format!("ABI {abi}"), fix }
}

fn groups() -> Vec<DoctorFinding> {
    let mounts = CgroupMounts::find().unwrap_or_default();
    let wanted = ["memory", "pids", "cpu", "freezer"];
    let v1: Vec<&str> = wanted.into_iter().filter(|name| mounts.v1_of(name).is_some()).collect();
    let v2: Vec<String> =
        mounts.v2_controllers().into_iter().filter(|name| wanted.contains(&name.as_str())).collect();
    let finding = |name: &str, state, detail: String, fix: Option<&str>| DoctorFinding {
        name: name.into(),
        state,
        detail,
        fix: fix.map(str::to_owned),
    };
    let v1_state = if v1.len() == wanted.len() { MechanismStatus::Enforced } else { MechanismStatus::Absent };
    let v2_state = if v2.iter().any(|name| name == "memory") {
        MechanismStatus::Enforced
    } else {
        MechanismStatus::Absent
    };
    let say = |list: String| if list.is_empty() { "no controllers".to_owned() } else { list };
    vec![
        finding("cgroup v1", v1_state, say(v1.join(", ")), None),
        finding(
            "cgroup v2",
            v2_state,
            say(v2.join(", ")),
            (v2_state == MechanismStatus::Absent && v1_state == MechanismStatus::Absent)
                .then_some("boot with systemd.unified_cgroup_hierarchy=1"),
        ),
    ]
}

fn subordinate_ids() -> DoctorFinding {
    let name = "subordinate ids".to_owned();
    if sys::caps::is_host_root() {
        return DoctorFinding {
            name,
            state: MechanismStatus::Enforced,
            detail: "root maps ids of its own choice".into(),
            fix: None,
        };
    }
    match find_tool("newuidmap") {
        Some(_) => DoctorFinding {
            name,
            state: MechanismStatus::Enforced,
            detail: "newuidmap is installed; /etc/subuid decides".into(),
            fix: None,
        },
        None => DoctorFinding {
            name,
            state: MechanismStatus::Absent,
            detail: "newuidmap is not installed, so a Body of yours has no root inside".into(),
            fix: Some("apt-get install uidmap".into()),
        },
    }
}

/// Optional tools: name, purpose, Debian package.
const TOOLS: [(&str, &str, &str); 4] = [
    ("git", "workspaces", "git"),
    ("qemu-system-x86_64", "microVMs", "qemu-system-x86"),
    ("mkfs.erofs", "images of layers for microVMs", "erofs-utils"),
    ("mmdebstrap", "templates made from Debian's packages", "mmdebstrap"),
];

fn on_path(tool: &str, purpose: &str, package: &str) -> DoctorFinding {
    match find_tool(tool) {
        Some(path) => DoctorFinding {
            name: tool.into(),
            state: MechanismStatus::Enforced,
            detail: format!("{}, for {purpose}", path.display()),
            fix: None,
        },
        None => DoctorFinding {
            name: tool.into(),
            state: MechanismStatus::Absent,
            detail: format!("not found; needed for {purpose}"),
            fix: Some(format!("apt-get install {package}")),
        },
    }
}

fn find_tool(name: &str) -> Option<PathBuf> {
    const DIRS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    DIRS.iter().map(|dir| Path::new(dir).join(name)).find(|path| path.is_file())
}
