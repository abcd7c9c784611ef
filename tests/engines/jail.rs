//! Firecracker under its own jailer, inside the Body's boundary: the resulting processes, read from `/proc`.
//! If KVM does not work, the test sees the jailed Firecracker while it tries to boot.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use body::vm::HypervisorRecord;
use fleet::Setting;
use proto::{
    Failure, Kind,
    vm::{Engine, KVM, VmStart},
};
use testkit::{
    Bodies, body_test, explain,
    leaks::{self, HostProcess},
    skip::skip,
};

use crate::{
    contract::plan,
    real::{nothing_is_left, own_record, program},
    told::ask,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// The paths of both programs, if they are installed.
fn programs() -> Option<(PathBuf, PathBuf)> {
    let firecracker = program(Engine::Firecracker)?;
    let named = std::env::var_os("PAL_JAILER").map(PathBuf::from);
    let jailer = named.or_else(|| body::vm::jailer::find(&firecracker))?;
    Some((firecracker, jailer))
}

/// Tries to boot a microVM under Firecracker, in a thread of its own.
fn try_it(t: &Bodies, firecracker: PathBuf) -> JoinHandle<Result<HypervisorRecord, Failure>> {
    let fleet = t.second();
    std::thread::spawn(move || {
        fleet
            .microvms()
            .setup_engine(Engine::Firecracker, Some(firecracker), &mut |said: &str| eprintln!("{said}"))
    })
}

/// The hypervisor process of this test.
fn hypervisor() -> Option<HostProcess> {
    leaks::descendants().into_iter().find(|process| process.name == "firecracker")
}

/// Waits until the hypervisor is configured and was asked to boot.
fn booting(trying: &JoinHandle<Result<HypervisorRecord, Failure>>) -> HostProcess {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline && !trying.is_finished() {
        if let Some(found) = hypervisor().filter(|found| state(found.pid).as_deref() == Some("Running")) {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no jailed Firecracker was seen to be asked to boot: {:?}", leaks::descendants());
}

/// The state that it reports over the socket in its jail.
fn state(pid: i32) -> Option<String> {
    let socket = socket(pid);
    if !socket.exists() {
        return None;
    }
    let (status, said) =
        ask(&socket, &launch::ApiRequest { method: "GET", path: "/".into(), body: None }, "");
    assert_eq!(status, 200, "{said}");
    let told: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(told["id"], "palisade", "{said}");
    told["state"].as_str().map(str::to_owned)
}

fn socket(pid: i32) -> PathBuf {
    format!("/proc/{pid}/root/dev/shm/api.sock").into()
}

/// Sends all requests for a running microVM: metrics, pause, snapshot, resume.
fn can_be_measured_and_written_down(pid: i32) {
    let boot = VmStart::Boot { kernel: "/k".into(), initrd: "/i".into(), cmdline: String::new() };
    let asked = launch::requests(&plan(Engine::Firecracker, boot)).unwrap();
    let begun = asked
        .iter()
        .position(|one| one.body.as_ref().is_some_and(|body| body["action_type"] == "InstanceStart"));
    for request in &asked[begun.unwrap() + 1..] {
        let body = request.body.as_ref().map(ToString::to_string).unwrap_or_default();
        let (status, said) = ask(&socket(pid), request, &body);
        assert_eq!(status, 204, "{} {}: {said}", request.method, request.path);
    }
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let len = |file: &str| fs::metadata(root.join(file)).unwrap().len();
    assert_eq!(len("save/ram"), 512 << 20, "all of its memory");
    assert!(len("dev/shm/state") > 1000);
    let measured = fs::read_to_string(root.join("dev/shm/metrics")).unwrap();
    assert!(launch::traffic(Engine::Firecracker, &measured).contains_key("upper"), "{measured}");
}

/// A field of `/proc/PID/status`.
fn status(pid: i32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{name} is not in\n{text}"))
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

fn namespace(pid: i32, kind: &str) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap()
}

fn names(dir: &Path) -> BTreeSet<String> {
    leaks::entries(dir).into_iter().collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// The Body whose cgroups a process is in.
fn body_of(pid: i32) -> String {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let found = groups.lines().find_map(|line| line.split("/palisade-").nth(1));
    found
        .unwrap_or_else(|| panic!("it is in no group of a Body:\n{groups}"))
        .split('/')
        .next()
        .unwrap()
        .to_owned()
}

/// Checks that it is in the Body's cgroups and, if they can be divided, in one below.
fn is_in_a_group_of_its_own(pid: i32, minder: i32) {
    let body = body_of(minder);
    let groups = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let (its, minders) = (groups(pid), groups(minder));
    let own = format!("/palisade-{body}/firecracker/palisade");
    for (its, minders) in its.lines().zip(minders.lines()) {
        match its.strip_suffix(&own) {
            Some(hierarchy) => {
                assert!(hierarchy.ends_with(":pids:"), "{its}");
                let bound = fs::read_to_string(format!("/sys/fs/cgroup/pids{own}/pids.max")).unwrap();
                assert_eq!(bound.trim(), "18", "two processors and the rest");
            }
            None => assert_eq!(its, minders, "the Body's"),
        }
    }
    let divides = Path::new("/sys/fs/cgroup/pids/tasks").exists();
    assert_eq!(its.contains(&own), divides, "{its}");
    assert_eq!(namespace(pid, "cgroup") != namespace(minder, "cgroup"), divides);
}

/// Checks the restrictions of the jailer and of the Body's boundary.
fn is_jailed(jailed: &HostProcess) {
    let (pid, minder) = (jailed.pid, jailed.parent);
    let ids =
        |name: &str| status(pid, name).split(' ').map(|id| id.parse::<u32>().unwrap()).collect::<Vec<_>>();
    let minders: u32 = status(minder, "Uid").split(' ').next().unwrap().parse().unwrap();
    assert_ne!(minders, 0, "nobody here is the host's root");
    assert_eq!(ids("Uid"), [minders + 1000; 4], "an id of the Body, not its root");
    assert_eq!(ids("Gid")[0], ids("Uid")[0]);
    assert_eq!(status(pid, "Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status(pid, set), "0000000000000000", "{set}");
    }
    assert_eq!((status(pid, "NoNewPrivs"), status(pid, "Seccomp")), ("1".into(), "2".into()));
    let filters: u32 = status(pid, "Seccomp_filters").parse().unwrap();
    assert!(filters >= 2, "the Body's and the one that answers for devices: {filters}");
    for kind in ["user", "mnt", "pid"] {
        assert_ne!(namespace(pid, kind), namespace(minder, kind), "{kind}: its own, below the Body's");
    }
    for kind in ["net", "ipc", "uts"] {
        assert_eq!(namespace(pid, kind), namespace(minder, kind), "{kind}: the Body's");
    }
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        assert_ne!(namespace(pid, kind), fs::read_link(format!("/proc/self/ns/{kind}")).unwrap(), "{kind}");
    }
    assert_eq!(status(pid, "NSpid").split(' ').next_back(), Some("1"), "the first of its pid namespace");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert!(files.contains(" 4096 "), "{files}");
    is_in_a_group_of_its_own(pid, minder);
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let mut here = names(&root);
    here.retain(|name| !["lib", "lib64", "usr"].contains(&name.as_str()));
    let expected = ["boot", "dev", "disks", "firecracker", "firecracker.pid", "frozen", "run", "save", "vmm"];
    assert_eq!(here, set(&expected), "its root, and nothing of the Body's");
    assert_eq!(names(&root.join("dev")), set(&["kvm", "net", "shm", "urandom", "userfaultfd"]));
    assert!(fs::metadata(root.join("dev/net/tun")).unwrap().is_file(), "no device");
    assert!(fs::read_link(format!("/proc/{pid}/exe")).unwrap().ends_with("vmm/firecracker"));
}

#[body_test(except(process = "it tests microVMs", user = "only root can give the device to another id"))]
async fn firecracker_is_started_by_its_jailer_inside_the_walls(t: Bodies) {
    let Some((firecracker, jailer)) = programs() else { return skip("under a real jailer") };
    own_record(&t);
    t.fleet().settings().set(Setting::Jailer, jailer.to_str().unwrap()).unwrap();
    let trying = try_it(&t, firecracker);
    let jailed = booting(&trying);
    is_jailed(&jailed);
    can_be_measured_and_written_down(jailed.pid);
    let (body, minder) = (body_of(jailed.pid), jailed.parent);
    // The Body ends when its first process ends.
    leaks::kill(minder);
    let known = trying.join().unwrap().unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    eprintln!("{}: {}", known.version, known.verdict.unwrap().why);
    assert_eq!(hypervisor(), None, "it ended with the Body");
    assert_eq!(leaks::cgroups(&[body]), Vec::<String>::new());
    assert_eq!(leaks::entries(&t.data().join("bodies")), Vec::<String>::new());
    nothing_is_left(t.fleet());
}

#[body_test(except(process = "it tests microVMs", user = "only root can give the device to another id"))]
async fn a_jailer_that_fails_is_told_and_nothing_runs_without_it(t: Bodies) {
    if File::options().read(true).write(true).open(KVM).is_err() {
        return skip("with a KVM that makes machines");
    }
    own_record(&t);
    let [firecracker, jailer] = ["firecracker", "jailer"].map(|name| t.dir().join("programs").join(name));
    compile(&firecracker);
    fs::copy(&firecracker, &jailer).unwrap();
    let try_it = || try_it(&t, firecracker.clone()).join().unwrap();
    // It is found beside Firecracker, and fails in the way that the kernel would make it fail.
    let failure = try_it().unwrap_err();
    assert_eq!(failure.kind, Kind::Host, "{}", explain(&failure));
    assert!(explain(&failure).contains("Failed to create /dev/kvm"), "{}", explain(&failure));
    assert!(
        failure.hints.iter().any(|hint| hint.contains("pal config set microvm.jailer none")),
        "{}",
        explain(&failure)
    );
    // A program that is no jailer.
    t.fleet().settings().set(Setting::Jailer, "/bin/true").unwrap();
    let failure = try_it().unwrap_err();
    assert_eq!(failure.kind, Kind::Host, "{}", explain(&failure));
    assert!(failure.hints.iter().any(|hint| hint.contains("/releases")), "{}", explain(&failure));
    // The control: with that setting, Firecracker starts without a jailer.
    t.fleet().settings().set(Setting::Jailer, "none").unwrap();
    let why = try_it().unwrap().verdict.unwrap().why;
    assert!(why.contains("started without a jailer"), "{why}");
    nothing_is_left(t.fleet());
}

/// A static C program under both names: a script would need a shell in the hypervisor's root.
fn compile(program: &Path) {
    let source = program.with_extension("rs");
    let text = r#"
        fn main() {
            let words: Vec<String> = std::env::args().collect();
            let is_jailer = words[0].ends_with("jailer");
            if words.iter().any(|word| word == "--version") {
                return println!("{} v0.0.0", if is_jailer { "Jailer" } else { "Firecracker" });
            }
            let refusal = "Failed to create /dev/kvm via mknod inside the jail: Operation not permitted (os error 1)";
            eprintln!("{}", if is_jailer { refusal } else { "started without a jailer" });
            std::process::exit(1)
        }"#;
    fs::create_dir(program.parent().unwrap()).unwrap();
    fs::write(&source, text).unwrap();
    let built = Command::new("rustc")
        .args(["-C", "target-feature=+crt-static", "-C", "panic=abort", "-o"])
        .args([program, &source])
        .status();
    assert!(built.unwrap().success(), "rustc, which built this test, builds that");
}
