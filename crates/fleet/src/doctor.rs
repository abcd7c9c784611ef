//! What this host can really do: tried, not guessed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use body::vm::{LastBoot, SetupRecord};
use proto::{
    Failure, Layer, Mechanism, MechanismStatus,
    vm::{Accelerator, Engine},
};
use serde::Serialize;
use sys::cgroup::CgroupMounts;

use crate::{Create, ExecRequest, Fleet, Force};

/// One thing that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// What.
    pub name: String,
    /// How far it works.
    pub state: MechanismStatus,
    /// What was seen.
    pub detail: String,
    /// The command that helps.
    pub fix: Option<String>,
}

/// One layer on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerCheck {
    /// Which.
    pub layer: Layer,
    /// Whether a Body can be started on it now.
    pub usable: bool,
    /// What it lacks.
    pub lacks: Vec<String>,
}

/// All that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// Each thing that was tried.
    pub findings: Vec<DoctorFinding>,
    /// Each layer.
    pub layers: Vec<LayerCheck>,
}

impl Fleet {
    /// Tries what a Body needs by making one, and looks at the rest of this host.
    pub async fn doctor(&self) -> Result<DoctorReport, Failure> {
        let mut findings = vec![namespaces()];
        let (body, usable) = try_body(self).await;
        findings.extend(body);
        findings.push(landlock());
        findings.extend(groups());
        findings.push(subordinate_ids());
        let machines = self.microvm_install().setup().ok();
        let booted = self.microvm_install().last_boot();
        findings.push(microvm(machines.as_ref(), booted.as_ref()));
        findings.push(kvm(machines.as_ref()));
        findings.extend(engines(machines.as_ref(), &self.settings()?));
        findings.push(sharing());
        findings.push(device("vsock", "/dev/vhost-vsock", "modprobe vhost_vsock"));
        findings.extend(TOOLS.iter().map(|(tool, purpose, package)| on_path(tool, purpose, package)));
        let machines = unproven(machines.as_ref(), booted.as_ref());
        Ok(DoctorReport { findings, layers: layers(usable, machines) })
    }
}

/// Makes a Body, runs a command in it, removes it.
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
    let mut exec = fleet.exec(view.id(), ExecRequest::new(["/bin/sh", "-c", "exit 0"])).await?;
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

/// What shares directories with machines.
fn sharing() -> DoctorFinding {
    let found = body::vm::share::find();
    DoctorFinding {
        name: body::vm::share::VIRTIOFSD.into(),
        state: if found.is_ok() { MechanismStatus::Enforced } else { MechanismStatus::Absent },
        detail: match found {
            Ok(path) => path.display().to_string(),
            Err(_) => "not installed; microVMs share no directory without it".to_owned(),
        },
        fix: body::vm::share::find().is_err().then(|| crate::vm::SHARE_TOOL.to_owned()),
    }
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

/// What `pal setup microvm` found by having the processor run a machine; before that, what can be seen from outside. A
/// device that opens proves nothing: some hosts let a machine be made that never runs.
fn kvm(setup: Option<&SetupRecord>) -> DoctorFinding {
    let name = "kvm".to_owned();
    if let Some(verdict) = setup.and_then(|setup| setup.verdict.as_ref()) {
        let (state, fix) = match verdict.accelerator {
            Accelerator::Kvm => (MechanismStatus::Enforced, None),
            Accelerator::Emulated => (
                MechanismStatus::Absent,
                Some("use a machine with (nested) virtualisation; microVMs are emulated without".to_owned()),
            ),
        };
        return DoctorFinding { name, state, detail: verdict.why.clone(), fix };
    }
    let opened = fs::File::options().read(true).write(true).open(proto::vm::KVM);
    let detail = match opened {
        Ok(_) => "/dev/kvm opens; whether it runs a machine is tried by `pal setup microvm`".to_owned(),
        Err(error) => format!("/dev/kvm: {error}; microVMs are emulated without"),
    };
    DoctorFinding { name, state: MechanismStatus::Absent, detail, fix: Some("pal setup microvm".to_owned()) }
}

/// Why microVMs cannot be used here, if they cannot: no boot was seen of what is set up.
fn unproven(setup: Option<&SetupRecord>, booted: Option<&LastBoot>) -> Option<&'static str> {
    match (setup, booted) {
        (None, _) => Some("it is not set up: pal setup microvm"),
        (Some(setup), Some(booted)) if booted.proves(setup) => None,
        _ => Some("what is set up was not seen to boot: pal setup microvm"),
    }
}

/// The boot that was last seen; what is installed proves nothing.
fn microvm(setup: Option<&SetupRecord>, booted: Option<&LastBoot>) -> DoctorFinding {
    let seen = booted.map(|boot| {
        format!(
            "the kernel {} booted at {} under {} ({}, {} ms)",
            boot.release,
            boot.at,
            boot.engine,
            boot.accelerator.name(),
            boot.took_ms
        )
    });
    let (state, detail) = match (setup, unproven(setup, booted)) {
        (None, _) => (MechanismStatus::Absent, "not set up".to_owned()),
        (Some(_), None) => (MechanismStatus::Enforced, seen.unwrap_or_default()),
        (Some(setup), Some(_)) => {
            let last =
                seen.map_or_else(|| "no boot was seen".to_owned(), |seen| format!("last seen: {seen}"));
            let detail = format!(
                "the kernel {} is set up and was not seen to boot with the QEMU that is installed; {last}",
                setup.kernel_source
            );
            (MechanismStatus::Absent, detail)
        }
    };
    let fix = (state != MechanismStatus::Enforced).then(|| "pal setup microvm".to_owned());
    DoctorFinding { name: "microvm".to_owned(), state, detail, fix }
}

/// Hypervisors besides QEMU: nobody needs them.
fn engines(setup: Option<&SetupRecord>, settings: &crate::Settings) -> Vec<DoctorFinding> {
    let finding = |(which, found, fix): (Engine, Result<String, String>, Option<String>)| {
        let (state, detail) = match found {
            Ok(version) => (MechanismStatus::Enforced, format!("machines run under it: {version}")),
            Err(lack) => (MechanismStatus::Absent, lack),
        };
        DoctorFinding { name: which.name().to_owned(), state, detail, fix }
    };
    crate::vm::engines::report(setup, settings).into_iter().map(finding).collect()
}

fn device(name: &str, path: &str, fix: &str) -> DoctorFinding {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => DoctorFinding {
            name: name.into(),
            state: MechanismStatus::Enforced,
            detail: format!("{path} opens"),
            fix: None,
        },
        Err(error) => DoctorFinding {
            name: name.into(),
            state: MechanismStatus::Absent,
            detail: format!("{path}: {error}"),
            fix: Some(fix.into()),
        },
    }
}

/// Tools of later use: name, what for, Debian's package.
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

fn layers(process: Result<(), String>, microvm_lacks: Option<&str>) -> Vec<LayerCheck> {
    let later =
        |layer| LayerCheck { layer, usable: false, lacks: vec!["this pal does not have it yet".to_owned()] };
    let lacks = process.as_ref().err().cloned().into_iter().collect();
    vec![
        LayerCheck { layer: Layer::Process, usable: process.is_ok(), lacks },
        later(Layer::Container),
        later(Layer::Wasm),
        LayerCheck {
            layer: Layer::Microvm,
            usable: microvm_lacks.is_none() && process.is_ok(),
            lacks: microvm_lacks.map(str::to_owned).into_iter().collect(),
        },
    ]
}
