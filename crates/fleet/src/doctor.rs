//! What this host can really do: tried, not guessed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use body::vm::Setup;
use proto::{
    Failure, Layer, Mechanism, State,
    vm::{Accelerator, Engine},
};
use serde::Serialize;
use sys::cgroup::Mounts;

use crate::{Create, ExecRequest, Fleet, Force};

/// One thing that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What.
    pub name: String,
    /// How far it works.
    pub state: State,
    /// What was seen.
    pub detail: String,
    /// The command that helps.
    pub fix: Option<String>,
}

/// One layer on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerReport {
    /// Which.
    pub layer: Layer,
    /// Whether a Body can be started on it now.
    pub usable: bool,
    /// What it lacks.
    pub lacks: Vec<String>,
}

/// All that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Doctor {
    /// Each thing that was tried.
    pub findings: Vec<Finding>,
    /// Each layer.
    pub layers: Vec<LayerReport>,
}

impl Fleet {
    /// Tries what a Body needs by making one, and looks at the rest of this host.
    pub async fn doctor(&self) -> Result<Doctor, Failure> {
        let mut findings = vec![namespaces()];
        let (body, usable) = self.try_body().await;
        findings.extend(body);
        findings.push(landlock());
        findings.extend(groups());
        findings.push(subordinate_ids());
        let machines = self.ground().setup().ok();
        findings.push(microvm(machines.as_ref()));
        findings.push(kvm(machines.as_ref()));
        findings.extend(engines(machines.as_ref(), &self.settings()?));
        findings.push(sharing());
        findings.push(device("vsock", "/dev/vhost-vsock", "modprobe vhost_vsock"));
        findings.extend(TOOLS.iter().map(|(tool, purpose, package)| on_path(tool, purpose, package)));
        Ok(Doctor { findings, layers: layers(usable, machines.is_some()) })
    }

    /// Makes a Body, runs a command in it, removes it.
    async fn try_body(&self) -> (Vec<Finding>, Result<(), String>) {
        let failed = |failure: &Failure| {
            let causes =
                std::iter::once(failure.to_string()).chain(failure.causes()).collect::<Vec<_>>().join(": ");
            let fix = failure.hints.iter().find(|hint| !hint.contains("pal doctor")).cloned();
            (
                vec![Finding {
                    name: "process Body".into(),
                    state: State::Absent,
                    detail: causes.clone(),
                    fix,
                }],
                Err(causes),
            )
        };
        let view = match self.create(Create::run()).await {
            Ok(view) => view,
            Err(failure) => return failed(&failure),
        };
        let ran = self.try_command(&view).await;
        let removed = self.remove(view.id(), Force::Yes).await;
        if let Err(failure) = ran.and(removed) {
            return failed(&failure);
        }
        let detail = "a Body was made, ran a command and was removed".to_owned();
        let mut findings =
            vec![Finding { name: "process Body".into(), state: State::Enforced, detail, fix: None }];
        findings.extend(
            view.enforcement.mechanisms.into_iter().filter(|held| held.state != State::Enforced).map(weak),
        );
        (findings, Ok(()))
    }

    async fn try_command(&self, view: &crate::View) -> Result<(), Failure> {
        let mut exec = self.exec(view.id(), ExecRequest::new(["/bin/sh", "-c", "exit 0"])).await?;
        while exec.next().await?.is_some() {}
        exec.finish().await.map(drop)
    }
}

fn weak(held: Mechanism) -> Finding {
    Finding { name: held.name, state: held.state, detail: held.reason, fix: None }
}

fn namespaces() -> Finding {
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
            let state = if root && !path.contains("max_user") { State::Degraded } else { State::Absent };
            Finding {
                name,
                state,
                detail: format!("{path} is {bad}, which forbids them to ordinary users"),
                fix: Some((*fix).to_owned()),
            }
        }
        None => Finding {
            name,
            state: State::Enforced,
            detail: "no setting of this host forbids them".into(),
            fix: None,
        },
    }
}

fn landlock() -> Finding {
    let abi = sys::landlock::abi();
    let (state, fix) = match abi {
        0 => (State::Absent, Some("add `landlock` to the kernel's lsm= parameter".to_owned())),
        1..6 => (
            State::Degraded,
            Some("a kernel of 6.12 or newer scopes signals and abstract sockets too".to_owned()),
        ),
        _ => (State::Enforced, None),
    };
    Finding { name: "landlock".into(), state, detail: format!("ABI {abi}"), fix }
}

fn groups() -> Vec<Finding> {
    let mounts = Mounts::find().unwrap_or_default();
    let wanted = ["memory", "pids", "cpu", "freezer"];
    let v1: Vec<&str> = wanted.into_iter().filter(|name| mounts.v1_of(name).is_some()).collect();
    let v2: Vec<String> =
        mounts.v2_controllers().into_iter().filter(|name| wanted.contains(&name.as_str())).collect();
    let finding = |name: &str, state, detail: String, fix: Option<&str>| Finding {
        name: name.into(),
        state,
        detail,
        fix: fix.map(str::to_owned),
    };
    let v1_state = if v1.len() == wanted.len() { State::Enforced } else { State::Absent };
    let v2_state = if v2.iter().any(|name| name == "memory") { State::Enforced } else { State::Absent };
    let say = |list: String| if list.is_empty() { "no controllers".to_owned() } else { list };
    vec![
        finding("cgroup v1", v1_state, say(v1.join(", ")), None),
        finding(
            "cgroup v2",
            v2_state,
            say(v2.join(", ")),
            (v2_state == State::Absent && v1_state == State::Absent)
                .then_some("boot with systemd.unified_cgroup_hierarchy=1"),
        ),
    ]
}

/// What shares directories with machines.
fn sharing() -> Finding {
    let found = body::vm::share::find();
    Finding {
        name: body::vm::share::VIRTIOFSD.into(),
        state: if found.is_ok() { State::Enforced } else { State::Absent },
        detail: match found {
            Ok(path) => path.display().to_string(),
            Err(_) => "not installed; microVMs share no directory without it".to_owned(),
        },
        fix: body::vm::share::find().is_err().then(|| crate::vm::SHARE_TOOL.to_owned()),
    }
}

fn subordinate_ids() -> Finding {
    let name = "subordinate ids".to_owned();
    if sys::caps::is_host_root() {
        return Finding {
            name,
            state: State::Enforced,
            detail: "root maps ids of its own choice".into(),
            fix: None,
        };
    }
    match find_tool("newuidmap") {
        Some(_) => Finding {
            name,
            state: State::Enforced,
            detail: "newuidmap is installed; /etc/subuid decides".into(),
            fix: None,
        },
        None => Finding {
            name,
            state: State::Absent,
            detail: "newuidmap is not installed, so a Body of yours has no root inside".into(),
            fix: Some("apt-get install uidmap".into()),
        },
    }
}

/// What `pal setup microvm` found by having the processor run a machine; before that, what can be seen from outside. A
/// device that opens proves nothing: some hosts let a machine be made that never runs.
fn kvm(setup: Option<&Setup>) -> Finding {
    let name = "kvm".to_owned();
    if let Some(verdict) = setup.and_then(|setup| setup.verdict.as_ref()) {
        let (state, fix) = match verdict.accelerator {
            Accelerator::Kvm => (State::Enforced, None),
            Accelerator::Emulated => (
                State::Absent,
                Some("use a machine with (nested) virtualisation; microVMs are emulated without".to_owned()),
            ),
        };
        return Finding { name, state, detail: verdict.why.clone(), fix };
    }
    let opened = fs::File::options().read(true).write(true).open(proto::vm::KVM);
    let detail = match opened {
        Ok(_) => "/dev/kvm opens; whether it runs a machine is tried by `pal setup microvm`".to_owned(),
        Err(error) => format!("/dev/kvm: {error}; microVMs are emulated without"),
    };
    Finding { name, state: State::Absent, detail, fix: Some("pal setup microvm".to_owned()) }
}

fn microvm(setup: Option<&Setup>) -> Finding {
    let name = "microvm".to_owned();
    match setup {
        Some(setup) => Finding {
            name,
            state: State::Enforced,
            detail: format!("set up with the kernel {}", setup.kernel_source),
            fix: None,
        },
        None => Finding {
            name,
            state: State::Absent,
            detail: "not set up".into(),
            fix: Some("pal setup microvm".into()),
        },
    }
}

/// Hypervisors besides QEMU: nobody needs them.
fn engines(setup: Option<&Setup>, settings: &crate::Settings) -> Vec<Finding> {
    let finding = |(which, found, fix): (Engine, Result<String, String>, Option<String>)| {
        let (state, detail) = match found {
            Ok(version) => (State::Enforced, format!("machines run under it: {version}")),
            Err(lack) => (State::Absent, lack),
        };
        Finding { name: which.name().to_owned(), state, detail, fix }
    };
    crate::vm::engines::report(setup, settings).into_iter().map(finding).collect()
}

fn device(name: &str, path: &str, fix: &str) -> Finding {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => {
            Finding { name: name.into(), state: State::Enforced, detail: format!("{path} opens"), fix: None }
        }
        Err(error) => Finding {
            name: name.into(),
            state: State::Absent,
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

fn on_path(tool: &str, purpose: &str, package: &str) -> Finding {
    match find_tool(tool) {
        Some(path) => Finding {
            name: tool.into(),
            state: State::Enforced,
            detail: format!("{}, for {purpose}", path.display()),
            fix: None,
        },
        None => Finding {
            name: tool.into(),
            state: State::Absent,
            detail: format!("not found; needed for {purpose}"),
            fix: Some(format!("apt-get install {package}")),
        },
    }
}

fn find_tool(name: &str) -> Option<PathBuf> {
    const DIRS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    DIRS.iter().map(|dir| Path::new(dir).join(name)).find(|path| path.is_file())
}

fn layers(process: Result<(), String>, machines: bool) -> Vec<LayerReport> {
    let later =
        |layer| LayerReport { layer, usable: false, lacks: vec!["this pal does not have it yet".to_owned()] };
    let lacks = process.as_ref().err().cloned().into_iter().collect();
    vec![
        LayerReport { layer: Layer::Process, usable: process.is_ok(), lacks },
        later(Layer::Container),
        later(Layer::Wasm),
        LayerReport {
            layer: Layer::Microvm,
            usable: machines && process.is_ok(),
            lacks: if machines { Vec::new() } else { vec!["it is not set up: pal setup microvm".to_owned()] },
        },
    ]
}
