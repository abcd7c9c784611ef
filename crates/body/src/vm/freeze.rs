//! Freezing a machine that runs, from outside of its walls: who minds it is asked, over the socket in its directory.
//!
//! Trust: the answer comes from behind the walls. It is one line with a length and a deadline, parsed into a `proto` type.

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
/// A machine with much memory on a slow disk.
const PATIENCE: Duration = Duration::from_secs(300);
/// Who minds it reads what it is told at once, unless it is stopped.
const TELL_PATIENCE: Duration = Duration::from_secs(10);
/// A guest may take 20 s to freeze its processes, and a hypervisor some to pause.
const HOLD_PATIENCE: Duration = Duration::from_secs(60);
/// What was frozen is for every Body that is thawed from it, and never changes.
const FROZEN_MODE: u32 = 0o444;

/// Where a machine's memory and its processors and devices go: to be written once, and read by whoever is shown them.
#[derive(Debug)]
pub struct FreezeFiles {
    ram: File,
    state: File,
}

impl FreezeFiles {
    /// Makes them in a directory, as long as they are known to be.
    pub fn make(to: &Path, memory: u64) -> Result<Self, VmError> {
        let make = |name: &str| {
            let file = File::options().read(true).write(true).create_new(true).open(to.join(name));
            // Whoever is thawed from it has other ids, whatever umask this process has.
            file.and_then(|file| file.set_permissions(Permissions::from_mode(FROZEN_MODE)).map(|()| file))
                .step("make a file for the machine")
        };
        let files = Self { ram: make(RAM_FILE)?, state: make(STATE_FILE)? };
        files.ram.set_len(memory).step("make a file for the machine")?;
        Ok(files)
    }
}

/// The door of who minds the machine.
pub(super) fn connect_control(body: &Path) -> Result<UnixStream, VmError> {
    let dir = sys::fd::open_path(body).step("open the Body's directory")?;
    let socket = UnixStream::connect(sys::fd::path_of(dir.as_fd()).join(CONTROL));
    let socket = socket.step("reach who minds the machine")?;
    socket.set_write_timeout(Some(TELL_PATIENCE)).step("reach who minds the machine")?;
    Ok(socket)
}

/// One line of who minds a machine. The deadline is for all of it, however slowly it comes.
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

/// Whether the machine stood still until now: who minds it hangs up before it goes on unasked.
fn check_stopped(mut socket: &UnixStream) -> Result<(), VmError> {
    socket.set_nonblocking(true).step("hear of the machine")?;
    let heard = socket.read(&mut [0]);
    socket.set_nonblocking(false).step("hear of the machine")?;
    match heard {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        _ => Err(VmError::Freeze("its disk took too long to copy, and it had to go on".into())),
    }
}

/// Freezes the machine of the Body in `body` into files in the directory `to`, and lets it go on. `last` runs when memory
/// and disk are there, while the machine still stands.
pub fn freeze(
    body: &Path,
    to: &Path,
    files: FreezeFiles,
    last: impl FnOnce(FreezeReport),
) -> Result<(), VmError> {
    let socket = connect_control(body)?;
    for file in [files.ram, files.state] {
        sys::fd::send(socket.as_fd(), file.as_fd()).step("ask for the machine")?;
    }
    let line = read_reply(&socket, ANSWER_LEN_MAX, PATIENCE).step("hear of the machine")?;
    let answer: ControlReply =
        serde_json::from_slice(&line).map_err(|_| VmError::Freeze("who minds it gave no answer".into()))?;
    let held = match answer {
        ControlReply::Saved { held } if held.tree.is_sound() => held,
        ControlReply::Saved { .. } => {
            return Err(VmError::Freeze("its guest does not say what its files are".into()));
        }
        ControlReply::Measured { .. }
        | ControlReply::Taken { .. }
        | ControlReply::Held { .. }
        | ControlReply::Console { .. } => {
            return Err(VmError::Freeze("who minds it gave another answer".into()));
        }
        ControlReply::Failed { why } => {
            return Err(VmError::Freeze(proto::text::visible(&why.chars().take(400).collect::<String>())));
        }
    };
    // It stands still until this connection ends.
    disks::copy(&body.join(UPPER_FILE), &to.join(UPPER_FILE)).step("copy the machine's disk")?;
    let mode = Permissions::from_mode(FROZEN_MODE);
    fs::set_permissions(to.join(UPPER_FILE), mode).step("close what was frozen")?;
    check_stopped(&socket)?;
    last(held);
    // Whoever was just ended by that hears it no more.
    let _ = (&socket).write_all(b"\n");
    Ok(())
}

/// A microVM that stands still until this is dropped.
#[derive(Debug)]
pub struct HeldVm(UnixStream);

impl HeldVm {
    /// Has the microVM of the Body in `body` write everything to its disk, and stand still.
    pub fn hold(body: &Path) -> Result<Self, VmError> {
        let socket = connect_control(body)?;
        (&socket).write_all(&[HOLD]).step("ask for the machine")?;
        let line = read_reply(&socket, ANSWER_LEN_MAX, HOLD_PATIENCE).step("hear of the machine")?;
        match serde_json::from_slice(&line) {
            Ok(ControlReply::Held { .. }) => Ok(Self(socket)),
            Ok(ControlReply::Failed { why }) => {
                Err(VmError::Freeze(proto::text::visible(&why.chars().take(400).collect::<String>())))
            }
            _ => Err(VmError::Freeze("its VMM process gave another answer".into())),
        }
    }

    /// Whether it stood still until now.
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
        // Each byte comes in time, and all of them together do not.
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
