//! New mounts: a new procfs, sysfs or overlay would undo the masks of a sandbox.
//!
//! Each probe tries in a mount namespace of its own, then in a full set of nested namespaces, then in place,
//! so that on an open host nothing stays mounted.

use super::{behind, settle};
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{self, ChildEnd, Errno, SyscallResult, c, call};
use crate::verdict::{DoorState, ProbeOutcome, judge};

pub const PROBES: &[Probe] = &behind(
    "procfs",
    [
        Probe::host("mount-proc", "mount a fresh procfs", |c| fresh(c, "proc", "")),
        Probe::host("mount-sysfs", "mount a fresh sysfs", |c| fresh(c, "sysfs", "")),
        Probe::host("mount-tmpfs", "mount a fresh tmpfs", |c| fresh(c, "tmpfs", "")),
        Probe::host("mount-overlay", "mount an overlay", |c| fresh(c, "overlay", "lowerdir=/usr:/etc")),
        Probe::host("mount-cgroup", "mount a hierarchy of control groups", |c| {
            fresh(c, "cgroup", "none,name=probe")
        }),
        Probe::host("mount-cgroup2", "mount the unified hierarchy", |c| fresh(c, "cgroup2", "")),
        Probe::host("mount-devpts", "mount fresh terminals", |c| fresh(c, "devpts", "newinstance")),
        Probe::host("mount-mqueue", "mount message queues", |c| fresh(c, "mqueue", "")),
        Probe::host("mount-debugfs", "mount the kernel's debug files", |c| fresh(c, "debugfs", "")),
        Probe::host("mount-bind", "mount a directory elsewhere", |c| fresh(c, "", "")),
    ],
);

const NESTED: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

fn fresh(call: &ProbeCall<'_>, kind: &str, data: &str) -> ProbeOutcome {
    settle((|| {
        let target = call.scratch()?.to_string_lossy().into_owned();
        let own = in_namespaces(libc::CLONE_NEWNS, &target, kind, data);
        if own.verdict == DoorState::Reached {
            return Ok(own);
        }
        let nested = in_namespaces(NESTED, &target, kind, data);
        if nested.verdict == DoorState::Reached {
            return Ok(nested);
        }
        let mut place = judge("mount in place", mount(&target, kind, data), &[]);
        let _ = call!(libc::SYS_umount2, c(&target).as_ptr(), libc::MNT_DETACH);
        place.detail = format!("{}; {}; {}", own.detail, nested.detail, place.detail);
        Ok(place)
    })())
}

/// Mounts in a child with its own namespaces; the mount ends with it.
fn in_namespaces(flags: i32, target: &str, kind: &str, data: &str) -> ProbeOutcome {
    let way = if flags == NESTED { "nested namespaces" } else { "own mount namespace" };
    let (uid, gid) = (call!(libc::SYS_geteuid).unwrap_or(0), call!(libc::SYS_getegid).unwrap_or(0));
    let ended = sys::in_child(|| {
        if let Err(Errno(number)) = call!(libc::SYS_unshare, flags) {
            return number;
        }
        if flags == NESTED {
            become_root(uid, gid);
        }
        // A new pid namespace begins with the next child, and procfs shows the namespace of its mounter.
        let inner = sys::in_child(|| private(target, kind, data).err().map_or(0, |Errno(number)| number));
        match inner {
            Ok(ChildEnd::Exit(number)) => number,
            _ => libc::EPERM,
        }
    });
    match ended {
        Ok(ChildEnd::Exit(0)) => judge(&format!("mount in {way}"), Ok(0), &[]),
        Ok(ChildEnd::Exit(number)) => judge(way, Err(Errno(number)), &[]),
        Ok(ChildEnd::Signal(number)) => crate::verdict::denied(format!("{way}: killed by signal {number}")),
        Err(error) => judge("fork", Err(error), &[]),
    }
}

fn become_root(uid: i64, gid: i64) {
    // Without a map the mount runs as nobody, and the errno shows that.
    let _ = std::fs::write("/proc/self/setgroups", "deny");
    let _ = std::fs::write("/proc/self/uid_map", format!("0 {uid} 1"));
    let _ = std::fs::write("/proc/self/gid_map", format!("0 {gid} 1"));
}

fn private(target: &str, kind: &str, data: &str) -> SyscallResult {
    let root = c("/");
    call!(libc::SYS_mount, 0, root.as_ptr(), 0, libc::MS_REC | libc::MS_PRIVATE, 0)?;
    mount(target, kind, data)
}

fn mount(target: &str, kind: &str, data: &str) -> SyscallResult {
    let (source, target, data) = (c(if kind.is_empty() { "/" } else { "probe" }), c(target), c(data));
    let flags = if kind.is_empty() { libc::MS_BIND | libc::MS_REC } else { 0 };
    let kind = c(kind);
    call!(libc::SYS_mount, source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr())
}
