//! Freezing a machine that runs, from outside of its walls: who minds it is asked, over the socket in its directory.
//!
//! Its fork may be started meanwhile: it has the same files, which are empty then, and waits for a word before it looks.
//!
//! Trust: the answer comes from behind the walls. It is one line with a length and a deadline, parsed into a `proto` type.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::AsFd,
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    path::Path,
    time::Duration,
};

use proto::vm::{Answer, CONTROL, GO, Held};

use super::{
    Step, VmError, disks,
    plan::{RAM_FILE, STATE_FILE, UPPER_FILE},
};

const ANSWER_LEN_MAX: u64 = 1 << 20;
/// A machine with much memory on a slow disk.
const PATIENCE: Duration = Duration::from_secs(300);

/// Where a machine's memory and its processors and devices go: to be written once, and read by whoever is shown them.
#[derive(Debug)]
pub struct Files {
    ram: File,
    state: File,
}

impl Files {
    /// Makes them in a directory, as long as they are known to be.
    pub fn make(to: &Path, memory: u64) -> Result<Self, VmError> {
        let make = |name: &str| {
            File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o444)
                .open(to.join(name))
                .step("make a file for the machine")
        };
        let files = Self { ram: make(RAM_FILE)?, state: make(STATE_FILE)? };
        files.ram.set_len(memory).step("make a file for the machine")?;
        Ok(files)
    }
}

/// Tells the machine of the Body in `body`, which waits, that what it is to be thawed from is there.
pub fn go(body: &Path, held: &Held) -> Result<(), VmError> {
    let mut words = vec![GO];
    words.extend(serde_json::to_vec(held).map_err(std::io::Error::from).step("tell the machine")?);
    words.push(b'\n');
    reach(body)?.write_all(&words).step("tell the machine")
}

/// The door of who minds the machine.
pub(super) fn reach(body: &Path) -> Result<UnixStream, VmError> {
    let dir = sys::fd::open_path(body).step("open the Body's directory")?;
    UnixStream::connect(sys::fd::path_of(dir.as_fd()).join(CONTROL)).step("reach who minds the machine")
}

/// Freezes the machine of the Body in `body` into files in the directory `to`, and lets it go on. While it stands something
/// is done as soon as its memory is written down, and something when its disk is copied, too.
pub fn freeze<T>(
    body: &Path,
    to: &Path,
    files: Files,
    first: impl FnOnce(Held) -> T,
    last: impl FnOnce(T),
) -> Result<(), VmError> {
    let socket = reach(body)?;
    socket.set_read_timeout(Some(PATIENCE)).step("wait for the machine")?;
    for file in [files.ram, files.state] {
        sys::fd::send(socket.as_fd(), file.as_fd()).step("ask for the machine")?;
    }
    let mut line = String::new();
    BufReader::new((&socket).take(ANSWER_LEN_MAX)).read_line(&mut line).step("hear of the machine")?;
    let answer: Answer =
        serde_json::from_str(&line).map_err(|_| VmError::Freeze("who minds it gave no answer".into()))?;
    let held = match answer {
        Answer::Saved { held } if held.tree.is_sound() => held,
        Answer::Saved { .. } => {
            return Err(VmError::Freeze("its guest does not say what its files are".into()));
        }
        Answer::Measured { .. } | Answer::Taken { .. } => {
            return Err(VmError::Freeze("who minds it gave another answer".into()));
        }
        Answer::Failed { why } => {
            return Err(VmError::Freeze(proto::text::visible(&why.chars().take(400).collect::<String>())));
        }
    };
    // It stands still until this connection ends.
    let done = first(held);
    disks::copy(&body.join(UPPER_FILE), &to.join(UPPER_FILE)).step("copy the machine's disk")?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o444);
    fs::set_permissions(to.join(UPPER_FILE), mode).step("close what was frozen")?;
    last(done);
    let _ = (&socket).write_all(b"\n");
    Ok(())
}
