//! Emulates `mknod` for a program that insists on creating device nodes that exist already.
//!
//! Only root of the initial user namespace may create device nodes. A program that begins by creating its devices
//! would fail in a user namespace, though the devices were mounted for it.
//!
//! Invariant: no device node is ever created: the filter answers the call without running it.

use std::io;

use libc::{c_long, sock_filter};

use crate::bpf::{self, ANSWER, ARCHITECTURE, ARGUMENTS, EQUAL, LOAD, NATIVE, NUMBER, step};

const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Calls that create files of any type, and the index of the argument with the type.
#[rustfmt::skip]
const CREATING_CALLS: &[(c_long, u32)] = &[
    (libc::SYS_mknodat, 2),
    #[cfg(target_arch = "x86_64")] (libc::SYS_mknod, 1),
];

/// From here on, creating a character device does nothing and reports success to this process and everything that it
/// executes. The caller must have set `no_new_privs`, or have the capability to do without.
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
    for (call, argument) in CREATING_CALLS {
        steps.extend([
            step(EQUAL, 0, 5, *call as u32),
            // The low half of the argument.
            step(LOAD, 0, 0, ARGUMENTS + 8 * argument),
            step(AND, 0, 0, libc::S_IFMT),
            step(EQUAL, 0, 1, libc::S_IFCHR),
            // Error number 0: the call returns success without being run.
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
        // A filter applies to the thread that installs it.
        std::thread::scope(|scope| {
            let results = scope.spawn(|| {
                crate::caps::no_new_privileges().unwrap();
                emulate_mknod().unwrap();
                let make = |path, kind| {
                    rustix::fs::mknodat(CWD, path, kind, Mode::RUSR | Mode::WUSR, makedev(1, 3)).is_ok()
                };
                [make(&device, FileType::CharacterDevice), make(&pipe, FileType::Fifo)]
            });
            assert_eq!(results.join().unwrap(), [true, true]);
        });
        assert!(!device.exists(), "the call was answered and not run");
        assert!(pipe.exists(), "a FIFO is created as usual");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
