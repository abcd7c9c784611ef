//! The process of a hypervisor in a file: its pages, then what else it is, and at the end how long that is.
//!
//! Trust: the file was written by who minds another machine, behind that one's walls. What it says is done behind the walls
//! of this one, where the hypervisor could do all of it by itself.

use std::{
    fs::File,
    io,
    os::{
        fd::{OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    path::Path,
};

use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use sys::imprint::Apart;

/// What else it is, at most.
const REST_LEN_MAX: u64 = 4 << 20;
const LEN_LEN: u64 = 8;
/// Where it complains.
const COMPLAINTS: RawFd = 2;

/// The numbers under which a hypervisor has its ends of the line and of its monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends {
    /// The line to its guest.
    pub line: RawFd,
    /// Its monitor.
    pub monitor: RawFd,
}

/// What stands behind the pages.
#[derive(Debug, Serialize, Deserialize)]
struct Rest {
    ends: Ends,
    process: sys::imprint::Imprint,
}

/// A hypervisor that was written down.
pub struct Imprint {
    /// See [`Ends`].
    pub ends: Ends,
    process: sys::imprint::Imprint,
    file: File,
}

/// Writes a hypervisor down, without the memory of its machine.
pub fn write(process: Pid, ends: Ends, apart: &Apart<'_>, to: &File) -> io::Result<()> {
    let written = sys::imprint::Imprint::take(process, apart, to).and_then(|process| {
        let at = process.pages_len();
        let rest = serde_json::to_vec(&Rest { ends, process })?;
        to.write_all_at(&rest, at)?;
        to.write_all_at(&(rest.len() as u64).to_le_bytes(), at + rest.len() as u64)
    });
    // A part of one is of no use to anybody.
    written.inspect_err(|_| drop(to.set_len(0)))
}

impl Imprint {
    /// Reads one; an empty file has none.
    pub fn read(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let cut =
            || io::Error::new(io::ErrorKind::UnexpectedEof, "the hypervisor was not written down whole");
        let end = file.metadata()?.len().checked_sub(LEN_LEN).ok_or_else(cut)?;
        let mut len = [0; LEN_LEN as usize];
        file.read_exact_at(&mut len, end)?;
        let len = u64::from_le_bytes(len);
        let at = end.checked_sub(len).filter(|_| len <= REST_LEN_MAX).ok_or_else(cut)?;
        let mut rest = vec![0; len as usize];
        file.read_exact_at(&mut rest, at)?;
        let Rest { ends, process } = serde_json::from_slice(&rest)?;
        if process.pages_len() == at { Ok(Self { ends, process, file }) } else { Err(cut()) }
    }

    /// Has it go on, with new ends. `first` is what the process does before.
    pub fn revive(
        self,
        line: OwnedFd,
        monitor: OwnedFd,
        complaints: OwnedFd,
        first: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<Pid> {
        let Ends { line: line_at, monitor: monitor_at } = self.ends;
        let given = vec![(line_at, line), (monitor_at, monitor), (COMPLAINTS, complaints)];
        self.process.revive(&self.file, given, first)
    }
}
