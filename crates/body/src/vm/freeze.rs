//! Takes a snapshot of a running microVM: asks its VMM process over the control socket in the Body's
//! directory.
//!
//! Trust: the reply comes from a process inside the sandbox boundary. It is one line with a length limit and
//! a deadline, parsed into a `proto` type.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    os::{
        fd::AsFd,
        unix::{fs::PermissionsExt, net::UnixStream},
    },
    path::Path,
    time::{Duration, Instant},
};

use proto::vm::{CONTROL, ControlReply, FreezeReport, HOLD};

use super::{
    VmError, VmStepExt, disks,
    plan::{RAM_FILE, STATE_FILE, UPPER_FILE},
};

const ANSWER_LEN_MAX: usize = 1 << 20;
/// Enough for a microVM with much memory on a slow disk.
const PATIENCE: Duration = Duration::from_secs(300);
/// The VMM process reads requests at once, unless it is stopped.
const TELL_PATIENCE: Duration = Duration::from_secs(10);
/// A guest may take 20 s to freeze its processes, and a hypervisor needs some time to pause.
const HOLD_PATIENCE: Duration = Duration::from_secs(60);
/// A snapshot is read by every Body that is restored from it, and never changes.
const FROZEN_MODE: u32 = 0o444;

/// The files for a microVM's memory and for its CPU and device state: written once, then read-only.
#[derive(Debug)]
pub struct FreezeFiles {
    ram: File,
    state: File,
}

impl FreezeFiles {
    /// Creates them in a directory; the length of the memory file is known.
    pub fn make(to: &Path, memory: u64) -> Result<Self, VmError> {
        let make = |name: &str| {
            let file = File::options().read(true).write(true).create_new(true).open(to.join(name));
            // A Body that is restored from it has other ids, so the mode must not depend on this process'
            // umask.
            file.and_then(|file| file.set_permissions(Permissions::from_mode(FROZEN_MODE)).map(|()| file))
                .step("create the snapshot's files")
        };
        let files = Self { ram: make(RAM_FILE)?, state: make(STATE_FILE)? };
        files.ram.set_len(memory).step("create the snapshot's files")?;
        Ok(files)
    }
}

/// Connects to the control socket of the microVM's VMM process.
pub(super) fn connect_control(body: &Path) -> Result<UnixStream, VmError> {
    let dir = sys::fd::open_path(body).step("open the Body's directory")?;
    let socket = UnixStream::connect(sys::fd::path_of(dir.as_fd()).join(CONTROL));
    let socket = socket.step("connect to the VMM process")?;
    socket.set_write_timeout(Some(TELL_PATIENCE)).step("connect to the VMM process")?;
    Ok(socket)
}

/// Reads one line from the VMM process. The deadline covers the whole line, however slowly it arrives.
pub(super) fn read_reply(mut socket: &UnixStream, len_max: usize, patience: Duration) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + patience;
    let (mut line, mut piece) = (Vec::new(), [0; 4096]);
    while line.last() != Some(&b'\n') {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut piece) {
            Ok(0) => break,
            Ok(len) if line.len() + len > len_max => return Err(io::ErrorKind::FileTooLarge.into()),
            Ok(len) => line.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(line)
}

/// Checks that the microVM was frozen until now: the VMM process closes the connection before it resumes on
/// its own.
fn check_stopped(mut socket: &UnixStream) -> Result<(), VmError> {
    socket.set_nonblocking(true).step("check on the VMM process")?;
    let heard = socket.read(&mut [0]);
    socket.set_nonblocking(false).step("check on the VMM process")?;
    match heard {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        _ => Err(VmError::Freeze("copying its disk took too long, and it was resumed".into())),
    }
}

/// Takes a snapshot of the microVM in the directory `body` into files in the directory `to`, and resumes it.
/// `last` runs when memory and disk are saved, while the microVM is still frozen.
pub fn freeze(
    body: &Path,
    to: &Path,
    files: FreezeFiles,
    last: impl FnOnce(FreezeReport),
) -> Result<(), VmError> {
    let socket = connect_control(body)?;
    for file in [files.ram, files.state] {
        sys::fd::send(socket.as_fd(), file.as_fd()).step("ask the VMM process for a snapshot")?;
    }
    let line = read_reply(&socket, ANSWER_LEN_MAX, PATIENCE).step("read the reply of the VMM process")?;
    let answer: ControlReply = serde_json::from_slice(&line)
        .map_err(|_| VmError::Freeze("its VMM process sent an invalid reply".into()))?;
    let held = match answer {
        ControlReply::Saved { held } if held.tree.is_sound() => held,
        ControlReply::Saved { .. } => {
            return Err(VmError::Freeze("its guest did not report the state of its files".into()));
        }
        ControlReply::Measured { .. }
        | ControlReply::Taken { .. }
        | ControlReply::Held { .. }
        | ControlReply::Console { .. } => {
            return Err(VmError::Freeze("its VMM process sent an unexpected reply".into()));
        }
        ControlReply::Failed { why } => {
            return Err(VmError::Freeze(proto::text::visible(&why.chars().take(400).collect::<String>())));
        }
    };
    // The microVM is frozen until this connection ends.
    disks::copy(&body.join(UPPER_FILE), &to.join(UPPER_FILE)).step("copy the microVM's disk")?;
    let mode = Permissions::from_mode(FROZEN_MODE);
    fs::set_permissions(to.join(UPPER_FILE), mode).step("make the snapshot read-only")?;
    check_stopped(&socket)?;
    last(held);
    // If `last` has just ended the VMM process, it no longer reads this.
    let _ = (&socket).write_all(b"\n");
    Ok(())
}

/// A microVM that is frozen until this is dropped.
#[derive(Debug)]
pub struct HeldVm(UnixStream);

impl HeldVm {
    /// Makes the microVM of the Body in `body` write everything to its disk, and freezes it.
    pub fn hold(body: &Path) -> Result<Self, VmError> {
        let socket = connect_control(body)?;
        (&socket).write_all(&[HOLD]).step("ask the VMM process to freeze the microVM")?;
        let line =
            read_reply(&socket, ANSWER_LEN_MAX, HOLD_PATIENCE).step("read the reply of the VMM process")?;
        match serde_json::from_slice(&line) {
            Ok(ControlReply::Held { .. }) => Ok(Self(socket)),
            Ok(ControlReply::Failed { why }) => {
                Err(VmError::Freeze(proto::text::visible(&why.chars().take(400).collect::<String>())))
            }
            _ => Err(VmError::Freeze("its VMM process sent an unexpected reply".into())),
        }
    }

    /// Checks that the microVM was frozen until now.
    pub fn check(&self) -> Result<(), VmError> {
        check_stopped(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_length_and_a_deadline() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"word\n").unwrap();
        assert_eq!(read_reply(&ours, 5, Duration::from_secs(5)).unwrap(), b"word\n");
        theirs.write_all(b"longer\n").unwrap();
        assert_eq!(
            read_reply(&ours, 5, Duration::from_secs(5)).unwrap_err().kind(),
            io::ErrorKind::FileTooLarge
        );
        // Each byte arrives before the deadline, but all of them together do not.
        let dripping = std::thread::spawn(move || {
            while theirs.write_all(b".").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let heard = read_reply(&ours, 1 << 20, Duration::from_millis(200));
        assert_eq!(heard.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(ours);
        dripping.join().unwrap();
    }

    #[test]
    fn who_goes_on_unasked_is_noticed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        check_stopped(&ours).unwrap();
        drop(theirs);
        assert!(check_stopped(&ours).is_err());
    }
}
