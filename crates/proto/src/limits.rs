//! How much a Body may use. Every limit has a default: a Body without bounds does not exist.

use serde::{Deserialize, Serialize};

use crate::Size;

/// The limits of one Body.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory of all processes together, page cache and tmpfs included.
    pub memory: Size,
    /// Processor time, in thousandths of one processor.
    pub cpu_milli: u32,
    /// Processes and threads.
    pub pids: u32,
    /// What the Body may write to its private upper.
    pub disk: Size,
    /// Files and directories the Body may make in its private upper.
    pub inodes: u64,
    /// Open files of one process.
    pub files: u32,
    /// How long the Body may live, from its start; none means until it is stopped.
    pub wall_ms: Option<u64>,
    /// How much output of one exec is kept for the log; the rest still reaches whoever is watching.
    pub output: Size,
}

/// Why limits make no sense on this host.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LimitError {
    /// Below what a Body needs to run at all.
    #[error("{name} of {asked} is too small: at least {min} is needed")]
    TooSmall {
        /// Which limit.
        name: &'static str,
        /// What was asked for.
        asked: String,
        /// The least that works.
        min: String,
    },
    /// More than there is.
    #[error("{name} of {asked} is more than this host has ({max})")]
    TooLarge {
        /// Which limit.
        name: &'static str,
        /// What was asked for.
        asked: String,
        /// What the host has.
        max: String,
    },
    /// More inodes than the disk has room for.
    #[error("{asked} inodes are too many for a disk of {disk}: at most {max} fit")]
    MoreThanDisk {
        /// What was asked for.
        asked: String,
        /// The disk limit.
        disk: String,
        /// The most that fit.
        max: u64,
    },
}

/// What this host has to give; the caller measured it.
#[derive(Debug, Clone, Copy)]
pub struct HostCapacity {
    /// Physical memory.
    pub memory: Size,
    /// Processors.
    pub cpus: u32,
    /// Size of the file system that holds the data directory.
    pub disk: Size,
}

/// The least memory with which the guest and a shell still run.
pub const MEMORY_MIN: Size = Size::mib(8);
/// The least room for an upper.
pub const DISK_MIN: Size = Size::mib(1);
/// The guest itself, and one command.
pub const PIDS_MIN: u32 = 4;
/// What `pid_max` can be at most on 64 bit.
pub const PIDS_MAX: u32 = 4_194_304;
/// The guest's own, and what a few commands at once need.
pub const FILES_MIN: u32 = 64;
/// What `fs.nr_open` is, where nobody raised it.
pub const FILES_MAX: u32 = 1_048_576;

/// What a Body with little disk may make all the same.
pub const INODES_DEFAULT_MIN: u64 = 4096;
/// The least with which a Body can be put together.
pub const INODES_MIN: u64 = 64;

impl Limits {
    /// The inode limit of a Body that asks for none: one for each 16 KiB of its disk.
    pub fn inodes_of(disk: Size) -> u64 {
        (disk.0 / 1024 / 16).max(INODES_DEFAULT_MIN)
    }

    /// The most that can be asked for: one for each KiB of the disk, so that their own records leave room for contents.
    fn inodes_max(disk: Size) -> u64 {
        (disk.0 / 1024).max(INODES_DEFAULT_MIN)
    }

    /// What a Body gets when nothing is asked for: half the host's memory, all its processors.
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

    /// Refuses what cannot work here.
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
