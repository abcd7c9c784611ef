//! Freezing a machine that runs, from outside of its walls: who minds it is asked, over the socket in its directory.
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

use proto::vm::{Answer, CONTROL, Held};

use super::{
    Step, VmError, disks,
    plan::{RAM_FILE, STATE_FILE, UPPER_FILE},
};

const ANSWER_LEN_MAX: u64 = 1 << 20;
/// A machine with much memory on a slow disk.
const PATIENCE: Duration = Duration::from_secs(300);

/// Freezes the machine of the Body in `body` into the directory `to`, does something with that while the machine still
/// stands, and lets it go on.
pub fn freeze(body: &Path, to: &Path, last: impl FnOnce(Held)) -> Result<(), VmError> {
    let dir = sys::fd::open_path(body).step("open the Body's directory")?;
    let socket = UnixStream::connect(sys::fd::path_of(dir.as_fd()).join(CONTROL))
        .step("reach who minds the machine")?;
    socket.set_read_timeout(Some(PATIENCE)).step("wait for the machine")?;
    for name in [RAM_FILE, STATE_FILE] {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(to.join(name))
            .step("make a file for the machine")?;
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
        Answer::Measured { .. } => return Err(VmError::Freeze("who minds it gave another answer".into())),
        Answer::Failed { why } => {
            return Err(VmError::Freeze(proto::text::visible(&why.chars().take(400).collect::<String>())));
        }
    };
    // It stands still until this connection ends.
    disks::copy(&body.join(UPPER_FILE), &to.join(UPPER_FILE)).step("copy the machine's disk")?;
    for name in [RAM_FILE, STATE_FILE, UPPER_FILE] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o444);
        fs::set_permissions(to.join(name), mode).step("close what was frozen")?;
    }
    last(held);
    let _ = (&socket).write_all(b"\n");
    Ok(())
}
