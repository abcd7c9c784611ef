//! The lock that allows one server for each data directory, and lets other processes find it.
//!
//! A server holds `serve.lock` as long as it runs, and writes its address there. The kernel releases the lock
//! when the process ends, however it ends, so the file's contents are valid only while the lock is held.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::{Duration, Instant},
};

use proto::{Failure, Kind};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

const FILE: &str = "serve.lock";
const FILE_LEN_MAX: u64 = 4096;
const GHOST_PATIENCE: Duration = Duration::from_secs(5);
const GHOST_PAUSE: Duration = Duration::from_millis(10);

/// A running server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningServer {
    /// The address that it listens on.
    pub address: SocketAddr,
    /// Its pid.
    pub pid: u32,
}

/// The lock on a data directory for its server.
#[derive(Debug)]
pub struct ServerLock(File);

/// Finds the running server of a data directory, if there is one.
pub fn standing(data: &Path) -> Option<RunningServer> {
    let file = File::open(data.join(FILE)).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => read(&file),
        _ => None,
    }
}

fn read(mut file: &File) -> Option<RunningServer> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(FILE_LEN_MAX).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

impl ServerLock {
    /// Takes the lock; if another server has it, the error names that server.
    pub fn take(data: &Path) -> Result<Self, Failure> {
        let cannot = |error: io::Error| {
            Failure::new(Kind::Host, "cannot lock the data directory for the server").because(error)
        };
        let path = data.join(FILE);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(cannot)?;
        let patience = Instant::now() + GHOST_PATIENCE;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                // A child that a killed server was about to start may briefly hold the inherited lock.
                Err(rustix::io::Errno::WOULDBLOCK) if is_ghost(&file) && Instant::now() < patience => {
                    std::thread::sleep(GHOST_PAUSE)
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(taken(data, &file)),
                Err(errno) => return Err(cannot(errno.into())),
            }
        }
    }

    /// Writes the address of the server to the lock file.
    pub fn tell(&mut self, address: SocketAddr) -> io::Result<()> {
        let text = serde_json::to_vec(&RunningServer { address, pid: std::process::id() })?;
        self.0.rewind()?;
        self.0.set_len(0)?;
        self.0.write_all(&text)
    }
}

/// Whether the server named in the lock file no longer runs.
fn is_ghost(file: &File) -> bool {
    read(file).is_some_and(|said| !Path::new(&format!("/proc/{}", said.pid)).exists())
}

fn taken(data: &Path, file: &File) -> Failure {
    let place = read(file)
        .map(|other| format!(" (pid {}, at http://{})", other.pid, other.address))
        .unwrap_or_default();
    Failure::new(
        Kind::Conflict,
        format!("a server already serves the data directory {}{place}", data.display()),
    )
    .hint("use that one, stop it, or serve another directory: --data DIR")
}
