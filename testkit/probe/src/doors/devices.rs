//! Device nodes: the host's hardware and kernel under other names.
//!
//! Absent on purpose: /dev/watchdog* (opening it starts it) and serial ports (opening one changes its
//! signals).

use std::os::unix::fs::FileTypeExt;

use super::{behind, open_both, open_read, settle};
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{c, call, open};
use crate::verdict::{ProbeOutcome, absent, broken, denied, judge, reached};

pub const PROBES: &[Probe] = &behind(
    "files",
    [
        Probe::host("mknod-char", "make a character device", |c| make_node(c, libc::S_IFCHR, 1, 11)),
        Probe::host("mknod-block", "make a block device", |c| make_node(c, libc::S_IFBLK, 7, 0)),
        Probe::host("dev-mem", "physical memory", open_read).at("/dev/mem"),
        Probe::host("dev-port", "I/O ports", open_read).at("/dev/port"),
        Probe::host("dev-kmsg", "the kernel's log", open_read).at("/dev/kmsg"),
        Probe::host("dev-kvm", "the hypervisor", open_both).at("/dev/kvm"),
        Probe::host("dev-fuse", "file systems in user space", open_both).at("/dev/fuse"),
        Probe::host("dev-net-tun", "network interfaces in user space", open_both).at("/dev/net/tun"),
        Probe::host("dev-vda", "the first virtio disk", open_read).at("/dev/vda"),
        Probe::host("dev-sda", "the first SCSI disk", open_read).at("/dev/sda"),
        Probe::host("dev-nvme", "the first NVMe disk", open_read).at("/dev/nvme0n1"),
        Probe::host("dev-any-block", "any block device in /dev", any_block).at("/dev"),
        Probe::host("dev-loop-control", "loop devices", open_both).at("/dev/loop-control"),
        Probe::host("dev-mapper", "the device mapper", open_both).at("/dev/mapper/control"),
        Probe::host("dev-btrfs-control", "btrfs devices", open_both).at("/dev/btrfs-control"),
        Probe::host("dev-userfaultfd", "page faults in user space", open_both).at("/dev/userfaultfd"),
        Probe::host("dev-vsock", "sockets to the hypervisor", open_read).at("/dev/vsock"),
        Probe::host("dev-vhost-vsock", "vsock for guests", open_both).at("/dev/vhost-vsock"),
        Probe::host("dev-vhost-net", "network for guests", open_both).at("/dev/vhost-net"),
        Probe::host("dev-uinput", "feign a keyboard", open_both).at("/dev/uinput"),
        Probe::host("dev-vcs", "the text on the host's screen", open_read).at("/dev/vcs"),
        Probe::host("dev-tty0", "the host's console", open_read).at("/dev/tty0"),
        Probe::host("dev-msr", "registers of the processor", open_read).at("/dev/cpu/0/msr"),
    ],
);

fn make_node(call: &ProbeCall<'_>, kind: libc::mode_t, major: u32, minor: u32) -> ProbeOutcome {
    settle((|| {
        let node = c(&call.scratch()?.join("node").to_string_lossy());
        let made = call!(
            libc::SYS_mknodat,
            libc::AT_FDCWD,
            node.as_ptr(),
            kind | 0o600,
            libc::makedev(major, minor)
        );
        Ok(judge("mknod", made, &[]))
    })())
}

/// Tries every entry of /dev instead of known names. Reads nothing.
fn any_block(_: &ProbeCall<'_>) -> ProbeOutcome {
    let Ok(entries) = std::fs::read_dir("/dev") else {
        return broken("no /dev");
    };
    let blocks: Vec<_> = entries
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_block_device()))
        .map(|e| e.path().to_string_lossy().into_owned())
        .collect();
    match blocks.iter().find(|path| open(path, libc::O_RDONLY).is_ok()) {
        Some(path) => reached(format!("opened {path}")),
        None if blocks.is_empty() => absent("no block device in /dev"),
        None => denied(format!("{} block devices, none can be opened", blocks.len())),
    }
}
