//! /proc and /sys: the kernel's own files.

use super::{behind, list_some, listable, names, open_read, open_write, read_some};
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{Errno, c, call, open};
use crate::verdict::{ProbeOutcome, absent, broken, denied, judge, reached};

pub const PROBES: &[Probe] = &behind(
    "procfs",
    [
        Probe::host("core-pattern", "name the host's core-dump helper", open_write)
            .at("/proc/sys/kernel/core_pattern"),
        Probe::host("proc-modprobe", "name the host's module loader", open_write)
            .at("/proc/sys/kernel/modprobe"),
        Probe::host("proc-hotplug", "name the host's hotplug helper", open_write)
            .at("/proc/sys/kernel/hotplug"),
        Probe::host("proc-hostname", "set the host name", open_write).at("/proc/sys/kernel/hostname"),
        Probe::host("proc-sysrq", "configure SysRq", open_write).at("/proc/sys/kernel/sysrq"),
        Probe::host("proc-panic-on-oom", "have the host panic", open_write).at("/proc/sys/vm/panic_on_oom"),
        Probe::host("proc-any-sysctl", "any sysctl may be written", |_| any_writable("/proc/sys"))
            .at("/proc/sys"),
        Probe::host("binfmt-register", "register an interpreter for everybody", open_write)
            .at("/proc/sys/fs/binfmt_misc/register"),
        Probe::host("sysrq-trigger", "press SysRq", open_write).at("/proc/sysrq-trigger"),
        Probe::host("proc-kcore", "the kernel's memory", read_some).at("/proc/kcore"),
        Probe::host("proc-kmsg", "the kernel's log", open_read).at("/proc/kmsg"),
        Probe::user("proc-keys", "keys", keys).at("/proc/keys"),
        Probe::user("proc-key-users", "owners of keys", key_users).at("/proc/key-users"),
        Probe::host("proc-timer-list", "timers of the host", read_some).at("/proc/timer_list"),
        Probe::host("proc-sched-debug", "the scheduler's state", read_some).at("/proc/sched_debug"),
        Probe::host("proc-kallsyms", "addresses of kernel symbols", |_| addresses("/proc/kallsyms"))
            .at("/proc/kallsyms"),
        Probe::host("proc-iomem", "physical addresses", |_| addresses("/proc/iomem")).at("/proc/iomem"),
        Probe::host("proc-vmallocinfo", "the kernel's allocations", read_some).at("/proc/vmallocinfo"),
        Probe::host("proc-slabinfo", "the kernel's caches", read_some).at("/proc/slabinfo"),
        Probe::host("proc-pagetypeinfo", "the kernel's pages", read_some).at("/proc/pagetypeinfo"),
        Probe::host("proc-kpageflags", "flags of physical pages", open_read).at("/proc/kpageflags"),
        Probe::host("proc-mtrr", "memory type registers", open_write).at("/proc/mtrr"),
        Probe::user("proc-latency-stats", "waits of the host's processes", read_some)
            .at("/proc/latency_stats"),
        Probe::user("proc-acpi", "firmware tables", list_some).at("/proc/acpi"),
        Probe::user("proc-scsi", "SCSI hosts", list_some).at("/proc/scsi"),
        Probe::user("proc-asound", "sound cards", list_some).at("/proc/asound"),
        Probe::host("proc-bus", "configure a bus", |_| any_writable("/proc/bus")).at("/proc/bus"),
        Probe::host("proc-irq", "configure interrupts", |_| any_writable("/proc/irq")).at("/proc/irq"),
        Probe::host("proc-fs", "configure a file system", |_| any_writable("/proc/fs")).at("/proc/fs"),
        Probe::user("sys-firmware", "firmware tables", list_some).at("/sys/firmware"),
        Probe::host("sys-debug", "the kernel's debug files", list_some).at("/sys/kernel/debug"),
        Probe::host("sys-tracing", "the kernel's trace files", list_some).at("/sys/kernel/tracing"),
        Probe::host("sys-security", "files of the security modules", list_some).at("/sys/kernel/security"),
        Probe::host("sys-power", "suspend the host", open_write).at("/sys/power/state"),
        Probe::host("sys-uevent-helper", "name the host's uevent helper", open_write)
            .at("/sys/kernel/uevent_helper"),
        Probe::host("sys-any-writable", "any file of /sys may be written", sysfs_writable).at("/sys"),
        Probe::user("sys-block", "disks of the host", |_| listable("/sys/block")).at("/sys/block"),
        Probe::user("sys-dmi", "serial numbers and models", list_some).at("/sys/class/dmi/id"),
        Probe::host("cgroup-write", "move processes between control groups", |_| cgroup("cgroup.procs"))
            .at("/sys/fs/cgroup"),
        Probe::host("cgroup-release-agent", "name a helper that the host runs", |_| cgroup("release_agent"))
            .at("/sys/fs/cgroup"),
        Probe::host("cgroup-notify-on-release", "ask for that helper", |_| cgroup("notify_on_release"))
            .at("/sys/fs/cgroup"),
        Probe::door(
            "environ-of-init",
            "a variable in the environment of INIT (only its name is looked for)",
            environ,
        )
        .needs(&["init", "env"]),
        Probe::door("mem-of-init", "open the memory of INIT", |c| {
            judge("open", open(&format!("/proc/{}/mem", c.arg("init")), libc::O_RDWR).map(|_| 0), &[])
        })
        .needs(&["init"]),
        Probe::host("oom-immunity", "be the last one the host kills for memory", oom_immunity)
            .at("/proc/self/oom_score_adj"),
    ],
);

/// The kernel lists keys only to permitted callers, so an empty list is tried once more with a key of our
/// own.
fn keys(call: &ProbeCall<'_>) -> ProbeOutcome {
    let first = read_some(call);
    if first.detail != "opens, but is empty" {
        return first;
    }
    super::kernel::add_own_key();
    read_some(call)
}

fn key_users(call: &ProbeCall<'_>) -> ProbeOutcome {
    keys(call)
}

/// Whether a table shows addresses, or zeros instead.
fn addresses(path: &str) -> ProbeOutcome {
    let mut buffer = vec![0u8; 64 * 1024];
    let read = open(path, libc::O_RDONLY).and_then(|f| {
        call!(libc::SYS_read, std::os::fd::AsRawFd::as_raw_fd(&f), buffer.as_mut_ptr(), buffer.len())
    });
    let count = match read {
        Ok(0) => return denied("opens, but is empty"),
        Ok(count) => usize::try_from(count).unwrap_or(0),
        Err(error) => return judge("read", Err(error), &[]),
    };
    let text = String::from_utf8_lossy(buffer.get(..count).unwrap_or_default()).into_owned();
    let shown = |line: &str| {
        line.trim().bytes().take_while(|b| *b != b' ').any(|b| b.is_ascii_hexdigit() && b != b'0')
    };
    if text.lines().any(shown) { reached("addresses are shown") } else { denied("every address is zero") }
}

/// Whether any file below may be written. The kernel answers without opening anything.
fn any_writable(top: &str) -> ProbeOutcome {
    let (mut waiting, mut files) = (vec![top.to_owned()], 0usize);
    if let Err(error) = std::fs::read_dir(top) {
        return judge("list", Err(error.into()), &[]);
    }
    while let Some(directory) = waiting.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path().to_string_lossy().into_owned();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => waiting.push(path),
                Ok(kind) if kind.is_file() => {
                    files += 1;
                    if may_write(&path) {
                        return reached(format!("{path} may be written"));
                    }
                }
                _ => {}
            }
        }
        if files > 100_000 {
            return broken("more than 100000 files and none may be written so far");
        }
    }
    if files == 0 { absent("no file there") } else { denied(format!("none of {files} files may be written")) }
}

/// Sysctls of a namespace, and one whose mode promises more than it allows. Writing them is no escape.
const OF_A_NAMESPACE: &[&str] = &[
    "/proc/sys/net/",
    "/proc/sys/user/",
    "/proc/sys/fs/mqueue/",
    "/proc/sys/kernel/auto_msgmni",
    "/proc/sys/kernel/domainname",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/msg",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/sys/kernel/pid_max",
    "/proc/sys/kernel/sem",
    "/proc/sys/kernel/shm",
];

fn may_write(path: &str) -> bool {
    if OF_A_NAMESPACE.iter().any(|start| path.starts_with(start)) {
        return false;
    }
    let path = c(path);
    // faccessat2 with the effective ids; older kernels and filters return ENOSYS, then the probe uses the
    // real ids.
    match call!(libc::SYS_faccessat2, libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) {
        Err(Errno(libc::ENOSYS)) => {
            call!(libc::SYS_faccessat, libc::AT_FDCWD, path.as_ptr(), libc::W_OK).is_ok()
        }
        asked => asked.is_ok(),
    }
}

fn sysfs_writable(_: &ProbeCall<'_>) -> ProbeOutcome {
    any_writable("/sys")
}

/// Searches for a control file in the mounted hierarchies: the unified one, or one directory for each
/// controller.
fn cgroup(file: &str) -> ProbeOutcome {
    let top = "/sys/fs/cgroup".to_owned();
    let mut places = vec![top.clone()];
    places.extend(names(&top).into_iter().map(|n| format!("{top}/{n}")));
    let tried: Vec<_> =
        places.iter().map(|p| open(&format!("{p}/{file}"), libc::O_WRONLY).map(|_| 0)).collect();
    let refused = |t: &&crate::sys::SyscallResult| !matches!(t, Err(Errno(libc::ENOENT | libc::ENOTDIR)));
    match tried.iter().find(|t| t.is_ok()).or_else(|| tried.iter().find(refused)) {
        Some(tried) => judge(&format!("open {file} for writing"), *tried, &[]),
        None => absent(format_args!("no {file}")),
    }
}

fn environ(call: &ProbeCall<'_>) -> ProbeOutcome {
    let variables = match std::fs::read(format!("/proc/{}/environ", call.arg("init"))) {
        Ok(variables) => variables,
        Err(error) => return judge("read", Err(error.into()), &[]),
    };
    let wanted = format!("{}=", call.arg("env"));
    if variables.split(|b| *b == 0).any(|v| v.starts_with(wanted.as_bytes())) {
        return reached(format!("{} is there", call.arg("env")));
    }
    denied(format!("{} is not there", call.arg("env")))
}

fn oom_immunity(_: &ProbeCall<'_>) -> ProbeOutcome {
    let written = std::fs::write("/proc/self/oom_score_adj", "-1000").map(|()| 0).map_err(Errno::from);
    judge("write -1000", written, &[])
}
