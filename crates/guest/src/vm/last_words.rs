//! Writes the reason why a microVM gives up on its console, which the host reads.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Write},
};

use proto::vm::GUEST_SAYS;
use rustix::fs::{Mode, OFlags};

/// Most kernel warnings that are repeated on the console.
const WARNINGS_MAX: usize = 12;
/// The log level of a warning. The kernel writes messages of lower (more severe) levels on the console itself.
const WARNING: u32 = 4;
const RECORD_LEN_MAX: usize = 8192;

/// Writes the kernel's warnings and then the reason, and waits until all of it was written.
pub fn say(why: &io::Error) {
    let mut console = io::stderr();
    for warning in read_warnings().unwrap_or_default() {
        let _ = writeln!(console, "{warning}");
    }
    let _ = writeln!(console, "{GUEST_SAYS}{why}");
    let _ = rustix::termios::tcdrain(&console);
}

/// Reads the last warnings in the kernel log.
fn read_warnings() -> io::Result<VecDeque<String>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut log = File::from(rustix::fs::open("/dev/kmsg", flags, Mode::empty())?);
    let mut warnings = VecDeque::new();
    let mut record = [0; RECORD_LEN_MAX];
    loop {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(len) => {
                let text = String::from_utf8_lossy(&record[..len]).into_owned();
                warnings.extend(read_warning(&text).map(str::to_owned));
                if warnings.len() > WARNINGS_MAX {
                    warnings.pop_front();
                }
            }
            // Some records were overwritten meanwhile.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            // The end of the log.
            Err(_) => break,
        }
    }
    Ok(warnings)
}

/// The message of a record such as `4,278,1039224,-;virtio: Unknown symbol x`, if it is a warning.
fn read_warning(record: &str) -> Option<&str> {
    let (header, message) = record.split_once(';')?;
    let priority: u32 = header.split(',').next()?.parse().ok()?;
    // The lower three bits are the level. Lines after the first hold fields for programs.
    (priority & 7 == WARNING).then(|| message.lines().next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_warnings_are_repeated() {
        assert_eq!(
            read_warning("4,278,1039224,-;virtio: Unknown symbol x (err -2)\n DEVICE=+x\n"),
            Some("virtio: Unknown symbol x (err -2)")
        );
        assert_eq!(read_warning("6,1,0,-;Linux version 6.1"), None);
        assert_eq!(read_warning("3,1,0,-;it is on the console already"), None);
        assert_eq!(read_warning("12,1,0,-;a program wrote this"), Some("a program wrote this"));
        assert_eq!(read_warning("nothing"), None);
    }
}
