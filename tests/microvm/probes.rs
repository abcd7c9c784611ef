//! The probe of the escape suite in a microVM: it reaches resources of the microVM only, never the host's.
//!
//! The probe first shows on the host that each door of the host is open there. A probe that reaches something
//! inside and is not in [`OWN`] with a reason is an escape, and fails the test.

use std::collections::BTreeMap;

use fleet::{Create, ExecRequest};
use proto::Size;
use testkit::{
    Bodies, PROBE_INSIDE, body_test,
    doors::Doors,
    is_root,
    probe::{self, ProbeAnswer, ProbeVerdict},
};

const MEMORY: u64 = 256 << 20;
const DISK: u64 = 64 << 20;
const PIDS: u32 = 128;
const FILES: u32 = 256;

/// Probes that reach something inside, and why it does not belong to the host.
const OWN: &[(&[&str], &str)] = &[
    (
        &[
            "mknod-char",
            "mknod-block",
            "dev-mem",
            "dev-kmsg",
            "dev-vda",
            "dev-any-block",
            "dev-userfaultfd",
            "dev-vcs",
            "dev-tty0",
            "iopl",
            "ioperm",
        ],
        "devices of the machine: its own memory, its private disk, images that the device keeps read-only",
    ),
    (
        &[
            "core-pattern",
            "proc-modprobe",
            "proc-hostname",
            "proc-sysrq",
            "proc-panic-on-oom",
            "proc-any-sysctl",
            "sysrq-trigger",
            "proc-kcore",
            "proc-kmsg",
            "proc-keys",
            "proc-key-users",
            "proc-timer-list",
            "proc-kallsyms",
            "proc-iomem",
            "proc-vmallocinfo",
            "proc-slabinfo",
            "proc-pagetypeinfo",
            "proc-kpageflags",
            "proc-mtrr",
            "proc-acpi",
            "proc-bus",
            "proc-irq",
            "proc-fs",
            "sys-firmware",
            "sys-power",
            "sys-any-writable",
            "sys-block",
            "cgroup-write",
            "oom-immunity",
            "syslog",
            "cgroup-path",
        ],
        "what its own kernel tells of itself and lets be set",
    ),
    (
        &[
            "open-by-handle",
            "name-to-handle",
            "mount-proc",
            "mount-sysfs",
            "mount-tmpfs",
            "mount-overlay",
            "mount-cgroup",
            "mount-cgroup2",
            "mount-devpts",
            "mount-mqueue",
            "mount-debugfs",
            "mount-bind",
            "swapon",
            "swapoff",
            "mount",
            "umount",
            "pivot-root",
            "chroot",
            "fsopen",
            "open-tree",
            "move-mount",
            "mount-setattr",
            "acct",
            "quotactl",
        ],
        "a mount in the machine shows the machine",
    ),
    (
        &[
            "exe-of-init",
            "exe-of-self",
            "mem-of-init",
            "kernel-threads",
            "ptrace-init",
            "vm-read-init",
            "vm-write-init",
            "pidfd-getfd-init",
            "setns-mnt-init",
            "setns-net-init",
            "setns-pid-init",
            "setns-ipc-init",
            "setns-uts-init",
            "setns-cgroup-init",
            "fanotify-init",
        ],
        "the machine's first process is the guest, and its program is in the machine's memory",
    ),
    (
        &[
            "setns",
            "unshare-user",
            "clone-user",
            "clone3-user",
            "unshare-mnt",
            "unshare-net",
            "unshare-pid",
            "unshare-ipc",
            "unshare-uts",
            "unshare-cgroup",
            "unshare-time",
        ],
        "namespaces of its own kernel",
    ),
    (
        &[
            "socket-raw",
            "socket-raw6",
            "socket-packet",
            "socket-xdp",
            "socket-any-family",
            "netlink-uevent",
            "netlink-connector",
            "netlink-generic",
            "netlink-sock-diag",
        ],
        "sockets of its own kernel, which has no network device",
    ),
    (
        &[
            "no-new-privs-unset",
            "seccomp-absent",
            "landlock-absent",
            "capabilities",
            "cap-dac-read-search",
            "cap-net-admin",
            "cap-net-raw",
            "cap-sys-module",
            "cap-sys-rawio",
            "cap-sys-ptrace",
            "cap-sys-admin",
            "cap-sys-boot",
            "cap-sys-time",
            "cap-mknod",
            "cap-bpf",
            "uid-map",
            "gid-map",
        ],
        "rights over its own kernel: root in it is root of the machine, and no wall stands inside",
    ),
    (
        &["rlimit-fsize", "nice", "realtime", "io-realtime", "locked-memory", "sparse-file"],
        "bounded by the machine: it has so much memory, one disk and its share of the processor",
    ),
    (
        &[
            "set-hostname",
            "keyctl",
            "add-key",
            "request-key",
            "bpf",
            "perf-event-open",
            "userfaultfd",
            "io-uring-setup",
            "fanotify-content",
            "kexec-load",
            "kexec-file-load",
            "init-module",
            "finit-module",
            "delete-module",
            "reboot",
            "settimeofday",
            "clock-settime",
            "adjtimex",
            "modify-ldt",
            "personality",
            "vmsplice",
            "vhangup",
            "tiocsti",
            "abi-int80",
            "move-pages",
            "mbind",
            "migrate-pages",
            "kcmp",
            "process-madvise",
        ],
        "calls that its own kernel answers, for the machine alone",
    ),
];

/// How many doors must be open on the host and closed inside, if root runs the suite.
const LEAST_OF_USER: usize = 150;
const LEAST_OF_ROOT: usize = 60;

/// Probes that do not run.
const NOT_RUN: &[(&str, &str)] = &[("inodes", "thousands of files, emulated; body::limits shows the bound")];

#[body_test(except(process = "the suite `escape` asks more of that layer"))]
async fn what_is_reached_inside_is_the_machines_own(t: Bodies) {
    let doors = Doors::open(&t.data());
    let controls: BTreeMap<String, ProbeAnswer> =
        doors.control().into_iter().map(|report| (report.name.clone(), report)).collect();
    let mut request: Create = t.with_probe(t.kept());
    request.limits.memory = Some(Size(MEMORY));
    request.limits.disk = Some(Size(DISK));
    request.limits.pids = Some(PIDS);
    request.limits.files = Some(FILES);
    let body = t.make(request).await.spec.id;
    for (user, least) in [("user", LEAST_OF_USER), ("root", LEAST_OF_ROOT)] {
        let ran = t
            .exec(
                &body,
                ExecRequest {
                    user: Some(user.into()),
                    ..ExecRequest::new(doors.words(PROBE_INSIDE, MEMORY, DISK, PIDS, FILES))
                },
            )
            .await;
        assert_eq!(ran.code, 0, "{}", ran.complaint());
        judge(user, &probe::reports(&ran.stdout), &controls, least);
    }
}

/// Checks that only the microVM's own resources are reached, and that enough doors were open on the host.
fn judge(user: &str, inside: &[ProbeAnswer], controls: &BTreeMap<String, ProbeAnswer>, least: usize) {
    let mut wrong = Vec::new();
    for listed in probe::list() {
        let name = listed.name.as_str();
        let own = OWN.iter().find(|(known, _)| known.contains(&name));
        match inside.iter().find(|report| report.name == name).map(|report| (report.verdict, &report.detail))
        {
            Some((ProbeVerdict::Denied, _)) => {}
            Some((ProbeVerdict::Reached, _)) if own.is_some() => {}
            Some((verdict, detail)) => wrong.push(format!(
                "{name} ({}, control {:?}): {verdict:?} in the machine: {detail}",
                listed.about, listed.control
            )),
            None if NOT_RUN.iter().any(|(known, _)| *known == name) || !is_root() => {}
            None => wrong.push(format!("{name} was not run in the machine: it needs {:?}", listed.needs)),
        }
    }
    let denied = |report: &&ProbeAnswer| {
        inside.iter().any(|found| found.name == report.name && found.verdict == ProbeVerdict::Denied)
    };
    let shown =
        controls.values().filter(|report| report.verdict == ProbeVerdict::Reached).filter(denied).count();
    assert!(
        wrong.is_empty(),
        "as {user}, {} of {} probes:\n  {}",
        wrong.len(),
        inside.len(),
        wrong.join("\n  ")
    );
    assert!(
        !is_root() || shown >= least,
        "as {user}, only {shown} doors were shown open on the host and closed in the machine"
    );
}
