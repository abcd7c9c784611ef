//! Identity: data that reveals the host of a Body.

use std::os::unix::fs::MetadataExt;

use super::behind;
use crate::catalog::{Probe, ProbeCall};
use crate::sys::call;
use crate::verdict::{ProbeOutcome, absent, broken, denied, judge, reached};

pub const PROBES: &[Probe] = &behind(
    "identity",
    [
        Probe::host("uid-map", "the host's uid 0 is mapped in", |_| maps_zero(MetadataExt::uid)),
        Probe::host("gid-map", "the host's gid 0 is mapped in", |_| maps_zero(MetadataExt::gid)),
        Probe::door("hostname", "the host's name", |c| same("/proc/sys/kernel/hostname", c.arg("hostname")))
            .needs(&["hostname"]),
        Probe::door("machine-id", "the host's machine id", |c| same("/etc/machine-id", c.arg("machine_id")))
            .needs(&["machine_id"]),
        Probe::door("boot-id", "the boot id of the host, or of a sibling", |c| {
            same("/proc/sys/kernel/random/boot_id", c.arg("boot_id"))
        })
        .needs(&["boot_id"]),
        Probe::door(
            "cgroup-path",
            "the host's path to this control group (the test puts it into one)",
            cgroup_path,
        ),
        Probe::door("mountinfo", "a path of the host in the table of mounts", mountinfo)
            .needs(&["mountinfo"]),
        Probe::door("environment", "a variable of the host", environment).needs(&["env"]),
        Probe::door("host-group", "a supplementary group of the host", host_group).needs(&["gid"]),
        Probe::door("umask", "new files may be changed by everybody (the test sets umask 0)", umask),
    ],
);

/// The files of procfs belong to the kernel's own id 0, and to nobody (65534) if that is not mapped. The maps
/// are no help: in nested user namespaces they show the parent's ids only.
fn maps_zero(id: impl Fn(&std::fs::Metadata) -> u32) -> ProbeOutcome {
    match std::fs::metadata("/proc/version") {
        Ok(file) if id(&file) == 65534 => denied("the owner of /proc/version is not mapped"),
        Ok(file) => reached(format!("the owner of /proc/version is {} here", id(&file))),
        Err(error) => broken(format!("stat /proc/version: {error}")),
    }
}

fn same(path: &str, host: &str) -> ProbeOutcome {
    match std::fs::read_to_string(path) {
        Ok(here) if here.trim() == host => reached("the same"),
        Ok(_) => denied("another"),
        Err(error) => judge("read", Err(error.into()), &[]),
    }
}

/// Lines of `hierarchy:controllers:path`; in a cgroup namespace of its own every path is the root.
fn cgroup_path(_: &ProbeCall<'_>) -> ProbeOutcome {
    let Ok(table) = std::fs::read_to_string("/proc/self/cgroup") else {
        return absent("no /proc/self/cgroup");
    };
    match table.lines().filter_map(|l| l.splitn(3, ':').nth(2)).find(|path| *path != "/") {
        Some(path) => reached(path),
        None => denied("every path is /"),
    }
}

fn mountinfo(call: &ProbeCall<'_>) -> ProbeOutcome {
    let Ok(table) = std::fs::read_to_string("/proc/self/mountinfo") else {
        return broken("no /proc/self/mountinfo");
    };
    match table.lines().find(|l| l.contains(call.arg("mountinfo"))) {
        Some(line) => reached(line),
        None => denied(format!("not in {} lines", table.lines().count())),
    }
}

/// Reports only whether it exists, never its contents.
fn environment(call: &ProbeCall<'_>) -> ProbeOutcome {
    let name = call.arg("env");
    if std::env::var_os(name).is_some() {
        reached(format!("{name} is set"))
    } else {
        denied(format!("{name} is not set"))
    }
}

/// 65534 is an unmapped group of the host that the process still has.
fn host_group(call: &ProbeCall<'_>) -> ProbeOutcome {
    let wanted = match call.number::<u32>("gid") {
        Ok(gid) => gid,
        Err(outcome) => return outcome,
    };
    let mut groups = [0u32; 1024];
    match call!(libc::SYS_getgroups, groups.len(), groups.as_mut_ptr()) {
        Ok(count) => {
            let mut held = groups.iter().take(usize::try_from(count).unwrap_or(0));
            match held.find(|g| **g == wanted || **g == 65534) {
                Some(gid) => reached(format!("holds group {gid}")),
                None => denied(format!("{count} groups, none of the host")),
            }
        }
        Err(error) => broken(format!("getgroups: {error}")),
    }
}

fn umask(_: &ProbeCall<'_>) -> ProbeOutcome {
    match call!(libc::SYS_umask, 0o022) {
        Ok(mask) if mask & 0o002 == 0 => reached(format!("umask {mask:03o}")),
        Ok(mask) => denied(format!("umask {mask:03o}")),
        Err(error) => broken(format!("umask: {error}")),
    }
}
