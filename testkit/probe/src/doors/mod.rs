//! The doors, one file each, and the helpers that several of them share.

mod devices;
mod files;
mod identity;
mod kernel;
mod limits;
mod mounts;
mod network;
mod processes;
mod procfs;

use crate::catalog::{Probe, ProbeCall};
use crate::sys::{Errno, call, open};
use crate::verdict::{ProbeOutcome, absent, denied, judge, judge_more, reached};

/// Every table of probes.
pub const TABLES: &[&[Probe]] = &[
    files::PROBES,
    devices::PROBES,
    procfs::PROBES,
    mounts::PROBES,
    processes::PROBES,
    network::PROBES,
    kernel::PROBES,
    limits::PROBES,
    identity::PROBES,
];

/// Puts a whole table behind one door.
const fn behind<const N: usize>(door: &'static str, mut table: [Probe; N]) -> [Probe; N] {
    let mut index = 0;
    while index < N {
        table[index].door = door;
        index += 1;
    }
    table
}

/// Opens the target for reading and reads nothing. A file masked by `/dev/null` opens, and is empty.
fn open_read(call: &ProbeCall<'_>) -> ProbeOutcome {
    let opened = open(call.target, libc::O_RDONLY);
    if opened.is_ok() && is_null(call.target) {
        return denied("opens, but is /dev/null");
    }
    let opened = opened.map(|_| 0);
    judge_more("open for reading", opened, &[libc::EBUSY], &[libc::ENOMEDIUM])
}

fn is_null(path: &str) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).is_ok_and(|found| found.rdev() == libc::makedev(1, 3))
}

/// Opens the target for writing and writes nothing.
fn open_write(call: &ProbeCall<'_>) -> ProbeOutcome {
    judge("open for writing", open(call.target, libc::O_WRONLY).map(|_| 0), &[libc::EBUSY])
}

/// Opens the target for reading and writing, as a device is used.
fn open_both(call: &ProbeCall<'_>) -> ProbeOutcome {
    judge("open for reading and writing", open(call.target, libc::O_RDWR).map(|_| 0), &[libc::EBUSY])
}

/// Reads the beginning of the target; a masked file is empty.
fn read_some(call: &ProbeCall<'_>) -> ProbeOutcome {
    match head(call.target) {
        Ok(0) => denied("opens, but is empty"),
        Ok(count) => reached(format!("read {count} bytes")),
        Err(error) => judge_more("read", Err(error), &[], &[libc::EIO, libc::EINVAL]),
    }
}

/// How many of the first bytes of a file can be read. The probe does not report the bytes themselves.
fn head(path: &str) -> Result<i64, Errno> {
    let file = open(path, libc::O_RDONLY)?;
    let mut buffer = [0u8; 64];
    call!(libc::SYS_read, std::os::fd::AsRawFd::as_raw_fd(&file), buffer.as_mut_ptr(), buffer.len())
}

/// Lists the target; a masked directory is empty.
fn list_some(call: &ProbeCall<'_>) -> ProbeOutcome {
    listable(call.target)
}

fn listable(path: &str) -> ProbeOutcome {
    match std::fs::read_dir(path).map(Iterator::count) {
        Ok(0) => absent("the directory is empty"),
        Ok(count) => reached(format!("{count} entries seen")),
        Err(error) => judge("list", Err(error.into()), &[]),
    }
}

/// The names of the entries of a directory; none if it cannot be read.
fn names(path: &str) -> Vec<String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Turns the early returns of a probe (`?`) into its outcome.
fn settle(outcome: Result<ProbeOutcome, ProbeOutcome>) -> ProbeOutcome {
    outcome.unwrap_or_else(|early| early)
}
