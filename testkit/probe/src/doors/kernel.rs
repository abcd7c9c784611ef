//! The kernel's interface: calls that a Body does not need, capabilities, other ways to make system calls.
//!
//! Invariant: every call here either affects this process alone, or has arguments that fail after the
//! permission check and before any effect. Each entry lists the errnos that only a permitted caller gets.

use std::os::fd::AsRawFd;

use super::behind;
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{self, ChildEnd, Errno, SyscallResult, c, call, open, prctl};
use crate::verdict::{ProbeOutcome, absent, broken, denied, judge, judge_more, reached};

use libc::{EBADF, EFAULT, EINVAL, ENODEV, ENOENT, ENOEXEC, ENOKEY};

pub const PROBES: &[Probe] = &behind(
    "kernel",
    [
        // Keys are created only in the keyring of this process, which ends with it.
        Probe::user("keyctl", "keyrings", |_| judge("keyctl", call!(libc::SYS_keyctl, 0, -4, 0), &[ENOKEY])),
        Probe::user("add-key", "add a key", |_| judge("add_key", own_key(), &[libc::EDQUOT])),
        Probe::user("request-key", "ask for a key", |_| {
            let (kind, name) = (c("user"), c("probe-no-such-key"));
            judge("request_key", call!(libc::SYS_request_key, kind.as_ptr(), name.as_ptr(), 0, 0), &[ENOKEY])
        }),
        Probe::host("bpf", "create a BPF map", |_| {
            let mut attributes = [0u32; 32];
            attributes[..4].copy_from_slice(&[2, 4, 4, 1]);
            judge("bpf", call!(libc::SYS_bpf, 0, attributes.as_mut_ptr(), 72), &[])
        }),
        Probe::host("perf-event-open", "performance counters", |_| {
            // PERF_TYPE_SOFTWARE, of 64 bytes, disabled, without kernel and hypervisor.
            let mut attributes = [0u32; 32];
            attributes[..2].copy_from_slice(&[1, 64]);
            attributes[10] = 0b110_0001;
            judge(
                "perf_event_open",
                call!(libc::SYS_perf_event_open, attributes.as_mut_ptr(), 0, -1, -1, 0),
                &[],
            )
        }),
        Probe::user("userfaultfd", "page faults in user space", |_| {
            judge("userfaultfd", call!(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1), &[])
        }),
        Probe::user("io-uring-setup", "io_uring", |_| {
            let mut parameters = [0u8; 120];
            judge("io_uring_setup", call!(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()), &[])
        }),
        Probe::user("fanotify-init", "watch files", |_| {
            judge("fanotify_init", call!(libc::SYS_fanotify_init, 0x201, 0), &[])
        }),
        Probe::host("fanotify-content", "decide on others' opening of files", |_| {
            judge("fanotify_init", call!(libc::SYS_fanotify_init, 5, 0), &[])
        }),
        // More segments than allowed, and flags that do not exist.
        Probe::host("kexec-load", "load another kernel", |_| {
            judge("kexec_load", call!(libc::SYS_kexec_load, 0, 9999, 0, 0xffff), &[EINVAL])
        }),
        Probe::host("kexec-file-load", "load another kernel from a file", |_| {
            judge("kexec_file_load", call!(libc::SYS_kexec_file_load, -1, -1, 0, 0, 0xffff), &[EINVAL, EBADF])
        }),
        Probe::host("init-module", "load a module (of no bytes)", |_| {
            judge("init_module", call!(libc::SYS_init_module, 0, 0, c("").as_ptr()), &[ENOEXEC, EFAULT])
        }),
        Probe::host("finit-module", "load a module (from no file)", |_| {
            judge("finit_module", call!(libc::SYS_finit_module, -1, c("").as_ptr(), 0), &[EBADF])
        }),
        Probe::host("delete-module", "unload a module (that does not exist)", |_| {
            judge("delete_module", call!(libc::SYS_delete_module, c("probe_no_such").as_ptr(), 0), &[ENOENT])
        }),
        // The magic numbers are wrong, which is checked right after the capability.
        Probe::host("reboot", "reboot (with wrong magic numbers)", |_| {
            judge("reboot", call!(libc::SYS_reboot, 0x0bad_0bad, 0x0bad_0bad, 0, 0), &[EINVAL])
        }),
        Probe::host("swapon", "add swap (from no file)", |_| {
            judge("swapon", call!(libc::SYS_swapon, c("/probe-no-such").as_ptr(), 0), &[ENOENT])
        }),
        Probe::host("swapoff", "remove swap (that does not exist)", |_| {
            judge("swapoff", call!(libc::SYS_swapoff, c("/probe-no-such").as_ptr()), &[ENOENT])
        }),
        Probe::host("mount", "mount (an unknown file system)", |_| {
            let (root, kind) = (c("/"), c("probe-no-such"));
            judge("mount", call!(libc::SYS_mount, 0, root.as_ptr(), kind.as_ptr(), 0, 0), &[ENODEV])
        }),
        Probe::host("umount", "unmount (what is no mount)", umount),
        Probe::host("pivot-root", "change the root (to nowhere)", |_| {
            judge("pivot_root", call!(libc::SYS_pivot_root, c("").as_ptr(), c("").as_ptr()), &[ENOENT])
        }),
        Probe::host("chroot", "change the root (to what it is)", |_| {
            judge("chroot", call!(libc::SYS_chroot, c("/").as_ptr()), &[])
        }),
        Probe::host("fsopen", "the new mount interface", |_| {
            judge("fsopen", call!(libc::SYS_fsopen, c("probe-no-such").as_ptr(), 0), &[ENODEV])
        }),
        Probe::host("open-tree", "clone a tree of mounts", |_| {
            // OPEN_TREE_CLONE and recursive: locked mounts cannot be cloned without the mounts that cover
            // them.
            let flags = libc::O_CLOEXEC | libc::AT_RECURSIVE | 1;
            judge("open_tree", call!(libc::SYS_open_tree, libc::AT_FDCWD, c("/").as_ptr(), flags), &[EINVAL])
        }),
        Probe::host("move-mount", "move a mount (from nowhere)", |_| {
            let none = c("");
            judge(
                "move_mount",
                call!(libc::SYS_move_mount, -1, none.as_ptr(), -1, none.as_ptr(), 0),
                &[ENOENT, EBADF],
            )
        }),
        Probe::host("mount-setattr", "change mounts (by nothing)", |_| {
            let attributes = [0u64; 4];
            let none = c("");
            judge(
                "mount_setattr",
                call!(libc::SYS_mount_setattr, -1, none.as_ptr(), 0, attributes.as_ptr(), 32),
                &[],
            )
        }),
        Probe::host("acct", "process accounting (to no file)", |_| {
            judge("acct", call!(libc::SYS_acct, c("/probe-no-such").as_ptr()), &[ENOENT])
        }),
        // A time zone of 70 days, refused after the permission check; no time is given.
        Probe::host("settimeofday", "set the clock (to an impossible zone)", |_| {
            let zone = [99_999i32, 0];
            judge("settimeofday", call!(libc::SYS_settimeofday, 0, zone.as_ptr()), &[EINVAL])
        }),
        Probe::host("clock-settime", "set the clock (to before the machine booted)", clock_settime),
        // A tick of length zero, refused after the permission check.
        Probe::host("adjtimex", "adjust the clock (by an impossible tick)", |_| {
            // struct timex, whose first word selects the value to set: ADJ_TICK.
            let mut timex = [0u64; 32];
            timex[0] = 0x4000;
            judge("adjtimex", call!(libc::SYS_adjtimex, timex.as_mut_ptr()), &[EINVAL])
        }),
        Probe::host("nfsservctl", "a call that was removed", |_| x86_only(|| call!(180, 0, 0, 0), &[EINVAL])),
        Probe::host("lookup-dcookie", "a call that was removed", |_| {
            judge("lookup_dcookie", call!(libc::SYS_lookup_dcookie, 0, 0, 0), &[EINVAL, EFAULT])
        }),
        Probe::user("quotactl", "disk quotas (of no disk)", |_| {
            // Q_GETINFO of user quotas.
            judge("quotactl", call!(libc::SYS_quotactl, 0x8000_0500_u32, 0, 0, 0), &[ENODEV])
        }),
        Probe::host("iopl", "I/O privilege", |_| x86_only(|| call!(172, 3), &[])),
        Probe::host("ioperm", "I/O ports", |_| x86_only(|| call!(173, 0x80, 1, 1), &[])),
        Probe::user("modify-ldt", "segments of one's own", |_| {
            let mut table = [0u8; 16];
            x86_only(|| call!(154, 0, table.as_mut_ptr(), table.len()), &[])
        }),
        Probe::user("personality", "odd personalities", |_| {
            // MMAP_PAGE_ZERO | ADDR_COMPAT_LAYOUT | READ_IMPLIES_EXEC, for this child only.
            judge("personality", call!(libc::SYS_personality, 0x0070_0000), &[])
        }),
        Probe::user("vmsplice", "map pages into a pipe", vmsplice),
        Probe::host("vhangup", "hang up a terminal (of a session that has none)", |_| {
            in_new_session(|| call!(libc::SYS_vhangup))
        }),
        Probe::host("syslog", "read the kernel's log", |_| {
            let mut buffer = [0u8; 64];
            judge("syslog", call!(libc::SYS_syslog, 3, buffer.as_mut_ptr(), buffer.len()), &[])
        }),
        Probe::host("tiocsti", "type into a terminal (of one's own)", |_| {
            in_new_session(|| {
                let (_master, slave) = pty()?;
                call!(libc::SYS_ioctl, slave.as_raw_fd(), libc::TIOCSCTTY, 0)?;
                call!(libc::SYS_ioctl, slave.as_raw_fd(), libc::TIOCSTI, c("x").as_ptr())
            })
        }),
        Probe::user("abi-int80", "32-bit calls", int80),
        Probe::user("abi-x32", "x32 calls", |_| x86_only(|| call!(libc::SYS_getpid | 0x4000_0000), &[])),
        Probe::user("move-pages", "move pages between nodes (none)", |_| {
            judge("move_pages", call!(libc::SYS_move_pages, 0, 0, 0, 0, 0, 0), &[])
        }),
        Probe::user("mbind", "bind memory to a node (as it is)", |_| {
            judge("mbind", call!(libc::SYS_mbind, 0, 0, 0, 0, 0, 0), &[])
        }),
        Probe::user("migrate-pages", "move a process between nodes (to none)", |_| {
            let none = [0u64; 1];
            let asked = call!(libc::SYS_migrate_pages, 0, 8, none.as_ptr(), none.as_ptr());
            judge("migrate_pages", asked, &[EINVAL])
        }),
        Probe::user("kcmp", "compare kernel objects", |_| {
            let own = std::process::id();
            judge("kcmp", call!(libc::SYS_kcmp, own, own, 1, 0, 0), &[EBADF])
        }),
        Probe::user("process-madvise", "advise on the memory of another (of nobody)", |_| {
            judge("process_madvise", call!(libc::SYS_process_madvise, -1, 0, 0, 20, 0), &[EBADF])
        }),
        Probe::user("memfd-secret", "memory that the host cannot read", |_| {
            judge("memfd_secret", call!(libc::SYS_memfd_secret, 0), &[])
        }),
        Probe::user("no-new-privs-unset", "a setuid program would gain rights", |_| {
            match prctl(libc::PR_GET_NO_NEW_PRIVS, 0) {
                Ok(0) => reached("no_new_privs is not set"),
                Ok(_) => denied("no_new_privs is set"),
                Err(error) => broken(format!("prctl: {error}")),
            }
        }),
        Probe::user("seccomp-absent", "no filter of system calls", seccomp_absent),
        Probe::user("landlock-absent", "no Landlock domain", landlock_absent),
        Probe::host("capabilities", "any capability is held", capabilities),
        Probe::user("cap-dac-read-search", "bounding set: read every file", |_| bounding(2)),
        Probe::user("cap-net-admin", "bounding set: configure the network", |_| bounding(12)),
        Probe::user("cap-net-raw", "bounding set: raw sockets", |_| bounding(13)),
        Probe::user("cap-sys-module", "bounding set: load modules", |_| bounding(16)),
        Probe::user("cap-sys-rawio", "bounding set: hardware", |_| bounding(17)),
        Probe::user("cap-sys-ptrace", "bounding set: trace anybody", |_| bounding(19)),
        Probe::user("cap-sys-admin", "bounding set: nearly everything", |_| bounding(21)),
        Probe::user("cap-sys-boot", "bounding set: reboot", |_| bounding(22)),
        Probe::user("cap-sys-time", "bounding set: set the clock", |_| bounding(25)),
        Probe::user("cap-mknod", "bounding set: make devices", |_| bounding(27)),
        Probe::user("cap-bpf", "bounding set: load BPF programs", |_| bounding(39)),
        Probe::door(
            "core-pipe",
            "a crash here starts a program of the host (its core_pattern is a pipe)",
            core_pipe,
        ),
    ],
);

fn own_key() -> SyscallResult {
    let (kind, name) = (c("user"), c("probe"));
    // -2 is the keyring of this process.
    call!(libc::SYS_add_key, kind.as_ptr(), name.as_ptr(), c("x").as_ptr(), 1, -2)
}

/// Adds one key to this process, so that a list of keys is not empty.
pub fn add_own_key() {
    // If the kernel refuses, the list stays empty, and the probe reports that.
    let _ = own_key();
}

/// A directory of procfs is never a mount point, and the kernel checks that after the permission.
fn umount(_: &ProbeCall<'_>) -> ProbeOutcome {
    let path = "/proc/self/task";
    if std::fs::metadata(path).is_err() {
        return broken(format!("no {path} to try it on"));
    }
    judge("umount2", call!(libc::SYS_umount2, c(path).as_ptr(), libc::UMOUNT_NOFOLLOW), &[EINVAL])
}

/// Since Linux 4.3 the wall clock cannot be set to before the boot; the kernel checks that after the
/// permission.
fn clock_settime(_: &ProbeCall<'_>) -> ProbeOutcome {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let major: u32 = release.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    if major < 5 {
        return broken("only safe to try on Linux 5 or later");
    }
    let epoch = [0i64; 2];
    judge("clock_settime", call!(libc::SYS_clock_settime, libc::CLOCK_REALTIME, epoch.as_ptr()), &[EINVAL])
}

fn x86_only(act: impl FnOnce() -> SyscallResult, past: &[i32]) -> ProbeOutcome {
    if cfg!(target_arch = "x86_64") { judge("call", act(), past) } else { absent("only on x86-64") }
}

fn vmsplice(_: &ProbeCall<'_>) -> ProbeOutcome {
    let (_read, write) = match sys::pipe() {
        Ok(ends) => ends,
        Err(error) => return broken(format!("pipe: {error}")),
    };
    let byte = [0u8; 1];
    let vector = [byte.as_ptr() as usize, 1];
    judge("vmsplice", call!(libc::SYS_vmsplice, write.as_raw_fd(), vector.as_ptr(), 1, 0), &[])
}

/// Runs in a child that leads a session of its own and so has no terminal.
fn in_new_session(act: impl FnOnce() -> SyscallResult) -> ProbeOutcome {
    const NO_SESSION: i32 = 250;
    let ended = sys::in_child(|| {
        // The leader of a session gets SIGHUP when its terminal closes, before it can report.
        // SAFETY: sets the disposition to a constant of the kernel.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
        match call!(libc::SYS_setsid) {
            Err(_) => NO_SESSION,
            Ok(_) => act().err().map_or(0, |Errno(number)| number),
        }
    });
    match ended {
        Ok(ChildEnd::Exit(0)) => reached("call succeeded"),
        Ok(ChildEnd::Exit(NO_SESSION)) => broken("setsid failed"),
        // A kernel without legacy_tiocsti returns EIO.
        Ok(ChildEnd::Exit(number)) => judge_more("call", Err(Errno(number)), &[], &[libc::EIO]),
        Ok(ChildEnd::Signal(number @ (libc::SIGSYS | libc::SIGKILL))) => {
            denied(format!("killed by signal {number}"))
        }
        end => broken(format!("{end:?}")),
    }
}

/// A terminal of this process.
fn pty() -> Result<(std::os::fd::OwnedFd, std::os::fd::OwnedFd), Errno> {
    let master = open("/dev/ptmx", libc::O_RDWR)?;
    let unlocked = 0i32;
    call!(libc::SYS_ioctl, master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked)?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    let slave = call!(libc::SYS_ioctl, master.as_raw_fd(), libc::TIOCGPTPEER, flags).map(sys::own)?;
    Ok((master, slave))
}

/// Kernels without the 32-bit entry raise SIGSEGV for the instruction.
fn int80(_: &ProbeCall<'_>) -> ProbeOutcome {
    #[cfg(target_arch = "x86_64")]
    {
        match sys::in_child(|| if getpid32() == i64::from(std::process::id()) { 0 } else { 1 }) {
            Ok(ChildEnd::Exit(0)) => reached("getpid by int 0x80 answered"),
            Ok(ChildEnd::Exit(_)) => denied("getpid by int 0x80 did not answer"),
            Ok(ChildEnd::Signal(number)) => denied(format!("killed by signal {number}")),
            Err(error) => broken(format!("fork: {error}")),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    absent("only on x86-64")
}

#[cfg(target_arch = "x86_64")]
fn getpid32() -> i64 {
    let answer: i64;
    // SAFETY: getpid (20 in the 32-bit table) touches no memory; the entry may clear r8 to r11, so they are given up.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("rax") 20i64 => answer,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    answer
}

fn status_field(key: &str) -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':')).map(|v| v.trim().to_owned())
}

fn seccomp_absent(_: &ProbeCall<'_>) -> ProbeOutcome {
    match status_field("Seccomp").as_deref() {
        Some("0") => reached("mode 0: no filter"),
        Some(mode) => denied(format!("mode {mode}")),
        None => match prctl(libc::PR_GET_SECCOMP, 0) {
            Ok(0) => reached("mode 0: no filter"),
            Ok(mode) => denied(format!("mode {mode}")),
            Err(error) => broken(format!("prctl: {error}")),
        },
    }
}

/// A process can have at most 16 Landlock layers. If it can add all 16, it had none.
fn landlock_absent(_: &ProbeCall<'_>) -> ProbeOutcome {
    const LAYERS_MAX: usize = 16;
    let handled = [1u64 << 6]; // LANDLOCK_ACCESS_FS_MAKE_CHAR
    let ruleset = match call!(libc::SYS_landlock_create_ruleset, handled.as_ptr(), 8, 0).map(sys::own) {
        Ok(ruleset) => ruleset,
        Err(Errno(libc::EOPNOTSUPP)) => return reached("this kernel has Landlock switched off"),
        Err(error) => return broken(format!("cannot tell: landlock_create_ruleset: {error}")),
    };
    if let Err(error) = call!(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
        return broken(format!("cannot tell: no_new_privs: {error}"));
    }
    let add = |_: &usize| call!(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0).is_ok();
    match (0..=LAYERS_MAX).take_while(add).count() {
        0 => broken("cannot tell: landlock_restrict_self is refused"),
        LAYERS_MAX => reached("all 16 layers were free"),
        free if free > LAYERS_MAX => broken("more layers than this probe knows"),
        free => denied(format!("{} of 16 layers are in use", LAYERS_MAX - free)),
    }
}

fn capabilities(_: &ProbeCall<'_>) -> ProbeOutcome {
    const SETS: &[&str] = &["CapInh", "CapPrm", "CapEff", "CapAmb"];
    let held: Vec<_> = SETS.iter().filter_map(|set| Some((*set, status_field(set)?))).collect();
    if held.len() != SETS.len() {
        return broken("no capabilities in /proc/self/status");
    }
    match held.iter().find(|(_, mask)| mask.bytes().any(|b| b != b'0')) {
        Some((set, mask)) => reached(format!("{set} {mask}")),
        None => denied("none is held"),
    }
}

fn bounding(capability: usize) -> ProbeOutcome {
    match prctl(libc::PR_CAPBSET_READ, capability) {
        Ok(0) => denied("not in the bounding set"),
        Ok(_) => reached("in the bounding set"),
        Err(Errno(EINVAL)) => absent("this kernel has no such capability"),
        Err(error) => broken(format!("prctl: {error}")),
    }
}

/// The kernel starts a core pipe even if core files are limited to 0; only an undumpable process has none.
fn core_pipe(_: &ProbeCall<'_>) -> ProbeOutcome {
    let Ok(pattern) = std::fs::read_to_string("/proc/sys/kernel/core_pattern") else {
        return denied("core_pattern cannot be read");
    };
    match (pattern.starts_with('|'), prctl(libc::PR_GET_DUMPABLE, 0)) {
        (false, _) => absent("the pattern is a file name"),
        (true, Ok(0)) => denied("a pipe, but this process is not dumpable"),
        (true, _) => reached("a pipe, and this process is dumpable"),
    }
}
