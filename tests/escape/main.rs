//! Escapes: the probe tries every door from inside a Body. A control first shows that each door can be opened.
//!
//! Invariant: a probe that is neither denied nor in [`POLICY`] with a reason is an escape, and fails the
//! test.
//! Invariant: a control that reaches nothing is in [`UNSHOWN`] with a reason, or the host lacks the resource,
//! or only root can show it and the suite also runs as root.

use std::collections::BTreeMap;

use fleet::{Create, ExecRequest};
use proto::{MechanismStatus, Size};
use testkit::{
    Bodies, PROBE_INSIDE, body_test,
    doors::{Doors, GROUP},
    is_root,
    probe::{self, ProbeAnswer, ProbeControl, ProbeVerdict},
};

const MEMORY: u64 = 128 << 20;
const DISK: u64 = 64 << 20;
const PIDS: u32 = 128;
const FILES: u32 = 256;

/// The user that runs the probe.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    User,
    Root,
}

/// Doors that are open on purpose.
struct OpenDoors {
    probe: &'static str,
    /// For which users.
    when: fn(Subject) -> bool,
    why: &'static str,
}

const POLICY: &[OpenDoors] = &[OpenDoors {
    probe: "capabilities",
    when: |who| who == Subject::Root,
    why: "root of a Body keeps eight, over its own files and processes",
}];

/// Probes that do not run, because another test shows their limit.
const NOT_RUN: &[(&str, &str)] =
    &[("inodes", "a Body that is kept is ended for it; body::limits shows the bound")];

/// Controls that fail if the suite's own root lacks a capability.
struct MissingControls {
    probe: &'static str,
    /// The number of that capability.
    lacks: u32,
    why: &'static str,
}

const UNSHOWN: &[MissingControls] = &[
    MissingControls {
        probe: "oom-immunity",
        lacks: CAP_SYS_RESOURCE,
        why: "only who may use more than its share",
    },
    MissingControls {
        probe: "rlimit-memlock",
        lacks: CAP_SYS_RESOURCE,
        why: "only who may lift a limit can lift it for the control",
    },
    MissingControls {
        probe: "dev-vda",
        lacks: CAP_SYS_RESOURCE,
        why: "a machine that keeps this from its root keeps its disk from it, too",
    },
];
const CAP_SYS_RESOURCE: u32 = 24;

/// For each mechanism that the record calls enforced, probes that it denies.
const SHOWN: &[(&str, &[&str])] = &[
    ("private root", &["host-file", "host-canary-write", "host-tmp", "mountinfo"]),
    ("procfs", &["core-pattern", "proc-any-sysctl", "sysrq-trigger", "proc-kcore", "see-pid"]),
    ("sysfs", &["sys-any-writable", "sys-block", "sys-dmi"]),
    ("devices", &["dev-kmsg", "dev-any-block", "ptys"]),
    ("user namespace", &["uid-map", "gid-map"]),
    ("mount namespace", &["mounts-shared", "mounts-slave"]),
    ("pid namespace", &["kernel-threads", "see-comm", "signal-pid"]),
    ("network namespace", &["tcp-loopback", "udp-loopback", "unix-abstract", "interfaces", "route-outside"]),
    ("ipc namespace", &["sysv-shm", "sysv-sem", "sysv-msg", "posix-queue"]),
    ("uts namespace", &["hostname"]),
    ("cgroup namespace", &["cgroup-path"]),
    ("open files limit", &["open-files"]),
    ("capabilities", &["cap-sys-admin", "cap-net-admin", "cap-sys-ptrace", "cap-mknod"]),
    ("no new privileges", &["no-new-privs-unset"]),
    ("landlock", &["landlock-absent"]),
    ("seccomp", &["seccomp-absent", "bpf", "io-uring-setup", "keyctl", "unshare-user", "mount"]),
    ("own ids", &["uid-map", "gid-map"]),
    ("groups", &["host-group"]),
    ("memory limit", &["memory", "memfd"]),
    ("process limit", &["processes", "threads"]),
    ("disk limit", &["disk", "sparse-file"]),
];

/// Mechanisms that no probe can judge from inside, and the tests that do.
const SHOWN_ELSEWHERE: &[(&str, &str)] = &[
    ("cpu limit", "body::limits: a_twentieth_of_a_processor_is_no_more"),
    ("freezer", "body::life: a_paused_body_stands_still"),
    ("inode limit", "body::limits: a_body_makes_no_more_files_than_its_disk_allows"),
    ("time limit", "body::limits: a_body_ends_when_its_time_is_over"),
    ("output limit", "body::exec: a_hundred_megabytes_of_output_pass_in_little_memory"),
];

/// Doors that only root can open for an ordinary user.
const BY_ROOT: &[&str] = &[
    "posix-queue",
    "cgroup-path",
    "host-group",
    "inherited-cwd",
    "mountinfo",
    "mounts-shared",
    "mounts-slave",
    "rlimit-memlock",
    "locked-memory",
    "host-file-chroot",
    "setns-mnt-init",
    "setns-net-init",
    "setns-pid-init",
    "setns-ipc-init",
    "setns-uts-init",
    "setns-cgroup-init",
];

#[body_test(except(
    microvm = "the microVM has a kernel of its own, so a door that opens there opens nothing of the host; microvm::walls tests that boundary"
))]
async fn a_passing_body_holds_its_user(t: Bodies) {
    judge(&t, t.passing(), Subject::User).await;
}

#[body_test(except(
    user = "a user with only one id has no root in the Body; the account's test covers that",
    microvm = "the microVM has a kernel of its own, so a door that opens there opens nothing of the host; microvm::walls tests that boundary"
))]
async fn a_passing_body_holds_its_root(t: Bodies) {
    judge(&t, t.passing(), Subject::Root).await;
}

#[body_test(except(
    microvm = "the microVM has a kernel of its own, so a door that opens there opens nothing of the host; microvm::walls tests that boundary"
))]
async fn a_kept_body_holds_its_user(t: Bodies) {
    judge(&t, t.kept(), Subject::User).await;
}

#[body_test(except(
    user = "a user with only one id has no root in the Body; the account's test covers that",
    microvm = "the microVM has a kernel of its own, so a door that opens there opens nothing of the host; microvm::walls tests that boundary"
))]
async fn a_kept_body_holds_its_root(t: Bodies) {
    judge(&t, t.kept(), Subject::Root).await;
}

/// The Body of a user with subordinate ids, whose root is that user on the host.
#[body_test(except(
    root = "it tests the ids of an ordinary user",
    user = "it tests the ids of an account",
    microvm = "the microVM has a kernel of its own, so a door that opens there opens nothing of the host; microvm::walls tests that boundary"
))]
async fn a_body_of_an_account_holds_its_root(t: Bodies) {
    judge(&t, t.kept(), Subject::Root).await;
}

#[test]
fn as_an_account_with_subordinate_ids() {
    testkit::run_as_account("escape::a_body_of_an_account_holds_its_root::process");
}

/// Other Bodies, and Palisade's data about them, belong to the host, too.
#[body_test(except(
    microvm = "the microVM has a kernel of its own, so a door that opens there opens nothing of the host; microvm::walls tests that boundary"
))]
async fn a_body_sees_nothing_of_another_or_of_palisade(t: Bodies) {
    let other = t.make(t.kept()).await;
    let name = format!("other-{}", std::process::id());
    t.sh(
        other.id(),
        &format!("cp /bin/sleep ~/{name}; echo secret > ~/secret; (~/{name} 1000 >/dev/null 2>&1 &)"),
    )
    .await
    .ok();
    let canary = testkit::wait::until("the other's process runs", || {
        testkit::leaks::processes().into_iter().find(|process| process.name == name)
    })
    .await;
    let file = |path: std::path::PathBuf| vec![format!("secret={}", path.display())];
    for request in [t.passing(), t.kept()] {
        let body = t.make(t.with_probe(request)).await.spec.id;
        t.denied(&body, "host-directory", &[format!("hostdir={}", t.body_dir(other.id()).display())]).await;
        t.denied(&body, "host-directory", &[format!("hostdir={}", t.data().display())]).await;
        for path in [
            t.data().join("key"),
            t.data().join("events.db"),
            t.body_dir(other.id()).join("disk/upper/root/home/user/secret"),
        ] {
            t.denied(&body, "host-file", &file(path.clone())).await;
            t.denied(&body, "host-file-dotdot", &file(path)).await;
        }
        t.denied(
            &body,
            "unix-path",
            &[format!("unix_path={}", t.body_dir(other.id()).join("guest.sock").display())],
        )
        .await;
        t.denied(&body, "see-comm", &[format!("comm={name}")]).await;
        let pid = [format!("pid={}", canary.pid), format!("comm={name}")];
        for probe in ["see-pid", "signal-pid", "queue-signal-pid", "prlimit-pid"] {
            t.denied(&body, probe, &pid).await;
        }
    }
}

/// Groups open doors that an id alone does not. Without subordinate ids the kernel does not allow dropping
/// them; then the record says so.
#[body_test(except(
    root = "it is run with groups, below",
    user = "it is run with groups, below",
    microvm = "the microVM has a kernel of its own, so a door that opens there opens nothing of the host; microvm::walls tests that boundary"
))]
async fn the_callers_groups_are_not_the_bodys(t: Bodies) {
    for request in [t.passing(), t.kept()] {
        let view = t.make(t.with_probe(request)).await;
        let record = view.enforcement.mechanisms.iter().find(|mechanism| mechanism.name == "groups").unwrap();
        if view.spec.ids.has_root() {
            assert_eq!(record.state, MechanismStatus::Enforced, "{record:?}");
            t.denied(view.id(), "host-group", &[format!("gid={GROUP}")]).await;
        } else {
            assert!(
                record.state == MechanismStatus::Degraded
                    && record.reason.starts_with("processes inside keep 1 more of your groups"),
                "{record:?}"
            );
        }
    }
}

#[test]
fn groups_of_root() {
    testkit::user::run_with_groups(
        "escape::the_callers_groups_are_not_the_bodys::process",
        Some((0, 0)),
        &[GROUP],
    );
}

#[test]
fn groups_of_a_user() {
    testkit::user::run_with_groups("escape::the_callers_groups_are_not_the_bodys::process", None, &[GROUP]);
}

#[test]
fn groups_of_an_account() {
    let account = is_root().then(testkit::user::account);
    testkit::user::run_with_groups(
        "escape::the_callers_groups_are_not_the_bodys::process",
        account,
        &[GROUP],
    );
}

async fn judge(t: &Bodies, request: Create, who: Subject) {
    let doors = Doors::open(&t.data());
    let controls: BTreeMap<String, ProbeAnswer> =
        doors.control().into_iter().map(|report| (report.name.clone(), report)).collect();
    let mut request = t.with_probe(request);
    request.limits.memory = Some(Size(MEMORY));
    request.limits.disk = Some(Size(DISK));
    request.limits.pids = Some(PIDS);
    request.limits.files = Some(FILES);
    request.user = Some(if who == Subject::Root { "root" } else { "user" }.to_owned());
    let view = t.make(request).await;
    let ran = t.exec(view.id(), ExecRequest::new(doors.words(PROBE_INSIDE, MEMORY, DISK, PIDS, FILES))).await;
    let inside = probe::reports(&ran.stdout);
    assert_eq!(ran.code, 0, "{}", ran.complaint());
    let mut wrong = Vec::new();
    for listed in probe::list() {
        let name = listed.name.as_str();
        let Some(report) = inside.iter().find(|report| report.name == name) else {
            let known = NOT_RUN.iter().any(|(known, _)| *known == name);
            if !known && (is_root() || !BY_ROOT.contains(&name)) {
                wrong.push(format!("{name} was not run in the Body: it needs {:?}", listed.needs));
            }
            continue;
        };
        let open = POLICY.iter().find(|open| open.probe == name && (open.when)(who));
        match (report.verdict, open) {
            (ProbeVerdict::Denied, None) | (ProbeVerdict::Reached, Some(_)) => {}
            (ProbeVerdict::Denied, Some(open)) => {
                wrong.push(format!("{name} is closed, and the policy says it is open: {}", open.why))
            }
            (verdict, _) => {
                wrong.push(format!("{name} ({}): {verdict:?} in the Body: {}", listed.about, report.detail))
            }
        }
        wrong.extend(unshown(&listed.control, name, controls.get(name)));
    }
    wrong.extend(
        view.enforcement
            .mechanisms
            .iter()
            .filter(|mechanism| mechanism.state == MechanismStatus::Enforced)
            .filter_map(|mechanism| unproved(&mechanism.name, &inside)),
    );
    let shown = controls.values().filter(|report| report.verdict == ProbeVerdict::Reached).count();
    let least = if is_root() { 200 } else { 100 };
    assert!(shown >= least, "only {shown} doors were shown open");
    assert!(wrong.is_empty(), "{} of {} probes:\n  {}", wrong.len(), inside.len(), wrong.join("\n  "));
}

/// Why the probes do not prove a mechanism that the record calls enforced.
fn unproved(mechanism: &str, inside: &[ProbeAnswer]) -> Option<String> {
    if SHOWN_ELSEWHERE.iter().any(|(name, _)| *name == mechanism) {
        return None;
    }
    let Some((_, probes)) = SHOWN.iter().find(|(name, _)| *name == mechanism) else {
        return Some(format!("{mechanism} is in the record, and nothing shows that it holds"));
    };
    let denied = |name: &&str| {
        inside.iter().any(|report| report.name == **name && report.verdict == ProbeVerdict::Denied)
    };
    let not_run = |name: &&str| !is_root() && BY_ROOT.contains(name);
    let open: Vec<&&str> = probes.iter().filter(|name| !denied(name) && !not_run(name)).collect();
    (!open.is_empty()).then(|| format!("{mechanism} is in the record as enforced, but not denied: {open:?}"))
}

/// Whether this process has a capability.
fn holds(capability: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> capability & 1 == 1)
}

/// Why a control proves nothing.
fn unshown(control: &ProbeControl, name: &str, report: Option<&ProbeAnswer>) -> Option<String> {
    let excused = UNSHOWN
        .iter()
        .find(|known| known.probe == name && !holds(known.lacks))
        .inspect(|known| eprintln!("not shown: {name}: {}", known.why));
    let by_root = !is_root() && (*control == ProbeControl::Host || BY_ROOT.contains(&name));
    match report {
        Some(report) if report.verdict == ProbeVerdict::Reached => None,
        Some(report) if report.detail.starts_with("absent:") => None,
        _ if excused.is_some() || by_root || *control == ProbeControl::AbsentHere => None,
        Some(report) => {
            Some(format!("{name}: its door is not open on the host: {:?}: {}", report.verdict, report.detail))
        }
        None => Some(format!("{name}: its control was not run")),
    }
}
