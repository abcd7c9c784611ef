//! The lock of a dependency key: two requests for the same dependencies install them once.
//!
//! Invariant: a process holds at most one such lock, so no two wait for each other; the kernel releases the lock of a
//! process that was killed.

use std::{fs::File, io, path::Path, time::Duration};

use proto::{Failure, Kind};
use rustix::{fs::FlockOperation, io::Errno};

use super::{Progress, ProgressLine};

/// The directory of the locks, in the data directory.
const DIR: &str = "prepare";
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Waits until no other request installs the dependencies of this key, and keeps others from it until the file is
/// closed.
pub(super) async fn lock_key(data: &Path, key: &str, say: Progress<'_>) -> Result<File, Failure> {
    let cannot = |error: io::Error| {
        Failure::new(Kind::Host, "cannot lock the dependencies of the repository")
            .because(error)
            .hint("make room: pal gc")
    };
    let dir = data.join(DIR);
    std::fs::create_dir_all(&dir).map_err(cannot)?;
    // One of 256 files, so that they need no removal; two keys that share one only wait a little longer.
    let file = File::create(dir.join(format!("{:.2}.lock", key))).map_err(cannot)?;
    let mut told = false;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(errno) => return Err(cannot(errno.into())),
        }
        if !told {
            say(ProgressLine::Activity("waiting for another `pal`, which is installing the dependencies"));
            told = true;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
