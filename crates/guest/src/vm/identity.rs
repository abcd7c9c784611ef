//! The identity of a microVM: its name, clock and randomness. The host sends it at boot and again after each restore.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    time::Instant,
};

use proto::vm::GuestSetup;
use rustix::{
    fs::{AtFlags, Mode, OFlags},
    time::{ClockId, Timespec},
};

use super::GuestMachine;

/// The result of taking on an identity.
#[derive(Debug, Default)]
pub struct IdentityReport {
    /// Whether the kernel was reseeded with the randomness that the host sent.
    pub reseeded: bool,
    /// Descriptions of steps that failed.
    pub trouble: Vec<String>,
}

/// Takes on an identity. The message was read at `since`; the clock is corrected for the time since then.
pub fn take(welcome: &GuestSetup, since: Instant) -> IdentityReport {
    let mut taken = IdentityReport::default();
    let mut note = |what: &str, done: io::Result<()>| {
        if let Err(error) = &done {
            taken.trouble.push(format!("cannot {what}: {error}"));
        }
        done.is_ok()
    };
    note("set the clock", set_clock(welcome.now_ns.saturating_add(since.elapsed().as_nanos() as u64)));
    let reseeded = note("take randomness", reseed(&welcome.entropy));
    let body = welcome.config.body.as_str();
    note("set the host name", rustix::system::sethostname(body.as_bytes()).map_err(io::Error::from));
    taken.reseeded = reseeded;
    taken
}

/// Paths of the identity files, from the root.
const NAMES: [&str; 3] = ["etc/hostname", "etc/machine-id", "etc/hosts"];

/// Whether a path is one of the identity files.
pub fn names(place: Option<&str>) -> bool {
    place.is_some_and(|place| NAMES.contains(&place))
}

fn texts(welcome: &GuestSetup) -> [(&'static str, String); 3] {
    let body = welcome.config.body.as_str();
    let [hostname, machine_id, hosts] = NAMES;
    [
        (hostname, format!("{body}\n")),
        (machine_id, format!("{}\n", welcome.machine_id)),
        (hosts, format!("127.0.0.1 localhost {body}\n::1 localhost\n")),
    ]
}

/// Writes the identity files below the Body's upper, in place, so that the overlay shows them at once.
pub fn write_names(below: BorrowedFd<'_>, welcome: &GuestSetup) -> io::Result<()> {
    texts(welcome).iter().try_for_each(|(place, text)| {
        let file = rustix::fs::openat(
            below,
            *place,
            OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o644),
        )?;
        rustix::io::pwrite(&file, text.as_bytes(), 0)?;
        if rustix::fs::fstat(&file)?.st_size as usize > text.len() {
            rustix::fs::ftruncate(&file, text.len() as u64)?;
        }
        Ok(())
    })
}

/// Rewrites the identity files after a restore, including copies that the Body made in its upper.
pub fn rename(machine: &GuestMachine, welcome: &GuestSetup) -> Vec<String> {
    let mut trouble: Vec<String> = write_names(machine.names.as_fd(), welcome)
        .err()
        .map(|error| format!("cannot write the microVM's identity files: {error}"))
        .into_iter()
        .collect();
    for (place, text) in texts(welcome) {
        if rustix::fs::statat(&machine.upper, place, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            let path = Path::new("/").join(place);
            trouble.extend(
                replace(&path, &text).err().map(|error| format!("cannot write {}: {error}", path.display())),
            );
        }
    }
    trouble
}

/// Replaces a file of the Body. A symbolic link at that path is not followed.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let part = path.with_extension("palisade");
    let _ = fs::remove_file(&part);
    let mut file = fs::File::options().write(true).create_new(true).open(&part)?;
    io::Write::write_all(&mut file, text.as_bytes())?;
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    fs::rename(&part, path)
}

/// Sets the clock, in nanoseconds since 1970.
pub fn set_clock(now_ns: u64) -> io::Result<()> {
    let time = Timespec { tv_sec: (now_ns / 1_000_000_000) as i64, tv_nsec: (now_ns % 1_000_000_000) as i64 };
    Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
}

/// The current time, in nanoseconds since 1970.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Realtime);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

fn reseed(hex: &str) -> io::Result<()> {
    let digit = |byte: u8| char::from(byte).to_digit(16).unwrap_or(0) as u8;
    let bytes: Vec<u8> =
        hex.as_bytes().chunks_exact(2).map(|two| digit(two[0]) << 4 | digit(two[1])).collect();
    if bytes.len() < 32 {
        return Err(io::Error::other("less than 32 bytes were sent"));
    }
    sys::random::feed(&bytes)
}
