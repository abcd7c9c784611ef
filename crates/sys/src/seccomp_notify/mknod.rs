//! Devices that a program insists on making, and that are there already: it is told that it made them.
//!
//! Nobody may make a device in a user namespace but the host's own, whatever it is root of. A program that begins by
//! making its devices could do nothing at all there, though somebody else has put them in place.
//!
//! Invariant: no device is ever made: a call that asks for one is answered, and not done.

use std::io;

use libc::{c_long, sock_filter};

use crate::bpf::{self, ANSWER, ARCHITECTURE, ARGUMENTS, EQUAL, LOAD, NATIVE, NUMBER, step};

const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Calls that make files of any kind, and which of their arguments says the kind.
#[rustfmt::skip]
const MAKING: &[(c_long, u32)] = &[
    (libc::SYS_mknodat, 2),
    #[cfg(target_arch = "x86_64")] (libc::SYS_mknod, 1),
];

/// From here on this process, and what it executes, is told that a character device was made whenever it asks for one.
/// The caller has promised never to gain privileges, or may do this without.
pub fn emulate_mknod() -> io::Result<()> {
    let mut program = program();
    if bpf::install(&mut program, 0) < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn program() -> Vec<sock_filter> {
    let mut steps = vec![
        step(LOAD, 0, 0, ARCHITECTURE),
        step(EQUAL, 1, 0, NATIVE),
        step(ANSWER, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        step(LOAD, 0, 0, NUMBER),
    ];
    for (call, argument) in MAKING {
        steps.extend([
            step(EQUAL, 0, 5, *call as u32),
            // The low half of the argument.
            step(LOAD, 0, 0, ARGUMENTS + 8 * argument),
            step(AND, 0, 0, libc::S_IFMT),
            step(EQUAL, 0, 1, libc::S_IFCHR),
            // An error of none: the call was made, and returned nothing but success.
            step(ANSWER, 0, 0, libc::SECCOMP_RET_ERRNO),
            step(ANSWER, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
    }
    steps.push(step(ANSWER, 0, 0, libc::SECCOMP_RET_ALLOW));
    steps
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, makedev};

    use super::*;

    #[test]
    fn a_device_is_told_to_be_made_and_is_not() {
        let dir = std::env::temp_dir().join(format!("pal-devices-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (device, pipe) = (dir.join("device"), dir.join("pipe"));
        // A filter is a thread's own until it is told otherwise.
        std::thread::scope(|scope| {
            let told = scope.spawn(|| {
                crate::caps::no_new_privileges().unwrap();
                emulate_mknod().unwrap();
                let make = |path, kind| {
                    rustix::fs::mknodat(CWD, path, kind, Mode::RUSR | Mode::WUSR, makedev(1, 3)).is_ok()
                };
                [make(&device, FileType::CharacterDevice), make(&pipe, FileType::Fifo)]
            });
            assert_eq!(told.join().unwrap(), [true, true]);
        });
        assert!(!device.exists(), "it was said, and not done");
        assert!(pipe.exists(), "what is no device is made");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
