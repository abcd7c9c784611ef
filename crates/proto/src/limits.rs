//! Resource limits of a Body. Every limit has a default, so no Body is unlimited.

use serde::{Deserialize, Serialize};

use crate::Size;

/// The limits of one Body.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory of all processes together, page cache and tmpfs included.
    pub memory: Size,
    /// CPU time, in thousandths of one CPU.
    pub cpu_milli: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Bytes that the Body may write to its private upper.
    pub disk: Size,
    /// Files and directories that the Body may create in its private upper.
    pub inodes: u64,
    /// Open files of one process.
    pub files: u32,
    /// Wall-clock limit from the Body's start; none for no limit.
    pub wall_ms: Option<u64>,
    /// How much output of one exec the log keeps; an attached client still receives the rest.
    pub output: Size,
}

/// Why this host refuses limits.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LimitError {
    /// The value is too small for a Body to run.
    #[error("{name} of {asked} is too small: at least {min} is needed")]
    TooSmall {
        /// The name of the limit.
        name: &'static str,
        /// The requested value.
        asked: String,
        /// The smallest allowed value.
        min: String,
    },
    /// The host has less.
    #[error("{name} of {asked} is more than this host has ({max})")]
    TooLarge {
        /// The name of the limit.
        name: &'static str,
        /// The requested value.
        asked: String,
        /// The host's capacity.
        max: String,
    },
    /// The disk limit has too little room for so many inodes.
    #[error("{asked} inodes are too many for a disk of {disk}: at most {max} fit")]
    MoreThanDisk {
        /// The requested value.
        asked: String,
        /// The disk limit.
        disk: String,
        /// The largest allowed value.
        max: u64,
    },
}

/// The host's resources, as the caller measured them.
#[derive(Debug, Clone, Copy)]
pub struct HostCapacity {
    /// Physical memory.
    pub memory: Size,
    /// Number of CPUs.
    pub cpus: u32,
    /// Size of the file system that holds the data directory.
    pub disk: Size,
}

/// The smallest memory with which the guest and a shell still run.
pub const MEMORY_MIN: Size = Size::mib(8);
/// The smallest size of an upper.
pub const DISK_MIN: Size = Size::mib(1);
/// The fewest processes: the guest itself and one command.
pub const PIDS_MIN: u32 = 4;
/// The largest `pid_max` on 64 bit.
pub const PIDS_MAX: u32 = 4_194_304;
/// The fewest open files: those of the guest, and of a few commands at once.
pub const FILES_MIN: u32 = 64;
/// The default of `fs.nr_open`.
pub const FILES_MAX: u32 = 1_048_576;

/// The smallest default inode limit, for a Body with little disk.
pub const INODES_DEFAULT_MIN: u64 = 4096;
/// The fewest inodes with which the launcher can create a Body.
pub const INODES_MIN: u64 = 64;

impl Limits {
    /// The default inode limit: one for each 16 KiB of the disk limit.
    pub fn inodes_of(disk: Size) -> u64 {
        (disk.0 / 1024 / 16).max(INODES_DEFAULT_MIN)
    }

    /// The largest allowed inode limit: one for each KiB of the disk limit, so that inodes leave room for
    /// contents.
    fn inodes_max(disk: Size) -> u64 {
        (disk.0 / 1024).max(INODES_DEFAULT_MIN)
    }

    /// The default limits: half of the host's memory, all of its CPUs.
    pub fn default_on(host: HostCapacity) -> Self {
        let disk = Size((host.memory.0 / 4).max(DISK_MIN.0));
        Self {
            memory: Size((host.memory.0 / 2).max(MEMORY_MIN.0)),
            cpu_milli: host.cpus * 1000,
            pids: 4096,
            disk,
            inodes: Self::inodes_of(disk),
            files: 65_536,
            wall_ms: None,
            output: Size::mib(16),
        }
    }

    /// Refuses limits that cannot work on this host.
    pub fn check(&self, host: HostCapacity) -> Result<(), LimitError> {
        let cpus = |milli: u32| format!("{}.{:03}", milli / 1000, milli % 1000);
        at_least("memory", self.memory, MEMORY_MIN, |v| v.to_string())?;
        at_most("memory", self.memory, host.memory, |v| v.to_string())?;
        at_least("disk", self.disk, DISK_MIN, |v| v.to_string())?;
        at_most("disk", self.disk, host.disk, |v| v.to_string())?;
        at_least("cpus", self.cpu_milli, 10, cpus)?;
        at_most("cpus", self.cpu_milli, host.cpus * 1000, cpus)?;
        at_least("pids", self.pids, PIDS_MIN, |v| v.to_string())?;
        at_most("pids", self.pids, PIDS_MAX, |v| v.to_string())?;
        at_least("open files", self.files, FILES_MIN, |v| v.to_string())?;
        at_most("open files", self.files, FILES_MAX, |v| v.to_string())?;
        at_least("inodes", self.inodes, INODES_MIN, |v| v.to_string())?;
        if self.inodes > Self::inodes_max(self.disk) {
            let (asked, max) = (self.inodes.to_string(), Self::inodes_max(self.disk));
            return Err(LimitError::MoreThanDisk { asked, disk: self.disk.to_string(), max });
        }
        match self.wall_ms {
            Some(ms) => at_least("timeout", ms, 1, |v| format!("{v} ms")),
            None => Ok(()),
        }
    }
}

fn at_least<T: PartialOrd>(
    name: &'static str,
    asked: T,
    min: T,
    show: impl Fn(T) -> String,
) -> Result<(), LimitError> {
    if asked >= min {
        return Ok(());
    }
    Err(LimitError::TooSmall { name, asked: show(asked), min: show(min) })
}

fn at_most<T: PartialOrd>(
    name: &'static str,
    asked: T,
    max: T,
    show: impl Fn(T) -> String,
) -> Result<(), LimitError> {
    if asked <= max {
        return Ok(());
    }
    Err(LimitError::TooLarge { name, asked: show(asked), max: show(max) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: HostCapacity = HostCapacity { memory: Size::gib(8), cpus: 2, disk: Size::gib(100) };

    #[test]
    fn the_defaults_fit_the_host_they_were_made_for() {
        assert_eq!(Limits::default_on(HOST).check(HOST), Ok(()));
    }

    #[test]
    fn the_inode_limit_follows_the_disk_limit() {
        let cases = [
            (Size::mib(1), 4096),
            (Size::mib(64), 4096),
            (Size::mib(128), 8192),
            (Size::gib(1), 65_536),
            (Size::gib(16), 1 << 20),
        ];
        for (disk, inodes) in cases {
            assert_eq!(Limits::inodes_of(disk), inodes, "{disk}");
            let limits = Limits { disk, inodes, ..Limits::default_on(HOST) };
            assert_eq!(limits.check(HOST), Ok(()), "{disk}");
        }
    }

    #[test]
    fn impossible_limits_are_refused_with_the_bound_they_miss() {
        let base = Limits::default_on(HOST);
        let bad = [
            Limits { memory: Size(0), ..base.clone() },
            Limits { memory: Size::gib(9), ..base.clone() },
            Limits { cpu_milli: 0, ..base.clone() },
            Limits { cpu_milli: 2001, ..base.clone() },
            Limits { pids: 0, ..base.clone() },
            Limits { disk: Size(0), ..base.clone() },
            Limits { wall_ms: Some(0), ..base.clone() },
            Limits { inodes: 63, ..base.clone() },
            Limits { inodes: base.disk.0 / 1024 + 1, ..base.clone() },
        ];
        for limits in bad {
            assert!(limits.check(HOST).is_err(), "{limits:?}");
        }
    }
}
