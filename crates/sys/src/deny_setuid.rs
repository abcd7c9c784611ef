//! A seccomp filter that keeps a program from creating setuid and setgid files.
//!
//! A program that acts on host files for a Body does so with ids that may belong to a person. A setuid file created
//! that way would give those ids to every user of the host who can reach it.

use std::io;

use libc::{c_long, sock_filter};

use crate::{
    bpf::{self, ANSWER, ARCHITECTURE, ARGUMENTS, EQUAL, LOAD, NATIVE, NUMBER, step},
    seccomp::SYS_FCHMODAT2,
};

/// The bits that give the rights of a file's owner or group.
const SETID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;
const HAS_BITS: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
/// Call numbers from here on belong to x32.
const X32: u32 = 0x4000_0000;

/// Calls that take a mode, and the index of that argument.
#[rustfmt::skip]
const MODE_CALLS: &[(c_long, u32)] = &[
    (libc::SYS_fchmod, 1), (libc::SYS_fchmodat, 2), (SYS_FCHMODAT2, 2),
    (libc::SYS_mkdirat, 2), (libc::SYS_mknodat, 2), (libc::SYS_openat, 3),
    #[cfg(target_arch = "x86_64")] (libc::SYS_chmod, 1),
    #[cfg(target_arch = "x86_64")] (libc::SYS_mkdir, 1),
    #[cfg(target_arch = "x86_64")] (libc::SYS_mknod, 1),
    #[cfg(target_arch = "x86_64")] (libc::SYS_open, 2),
    #[cfg(target_arch = "x86_64")] (libc::SYS_creat, 1),
];
/// Calls whose mode a filter cannot see.
const HIDDEN_MODE_CALLS: &[c_long] = &[libc::SYS_openat2, libc::SYS_io_uring_setup];

/// From here on the kernel refuses this process, and everything that it executes, with `EPERM` when it creates a
/// setuid or setgid file or directory. The caller must have set `no_new_privs`, or have the capability to do without.
pub fn deny_setuid_bits() -> io::Result<()> {
    let mut program = program();
    if bpf::install(&mut program, 0) < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn program() -> Vec<sock_filter> {
    let refuse = |errno: i32| step(ANSWER, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32);
    let mut steps = vec![
        step(LOAD, 0, 0, ARCHITECTURE),
        step(EQUAL, 1, 0, NATIVE),
        step(ANSWER, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        step(LOAD, 0, 0, NUMBER),
        step(AT_LEAST, 0, 1, X32),
        refuse(libc::ENOSYS),
    ];
    for call in HIDDEN_MODE_CALLS {
        steps.extend([step(EQUAL, 0, 1, *call as u32), refuse(libc::ENOSYS)]);
    }
    for (call, argument) in MODE_CALLS {
        steps.extend([
            step(EQUAL, 0, 4, *call as u32),
            // The low half of the argument.
            step(LOAD, 0, 0, ARGUMENTS + 8 * argument),
            step(HAS_BITS, 0, 1, SETID_BITS),
            refuse(libc::EPERM),
            step(ANSWER, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
    }
    steps.push(step(ANSWER, 0, 0, libc::SECCOMP_RET_ALLOW));
    steps
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{File, Permissions},
        os::unix::fs::{OpenOptionsExt, PermissionsExt},
    };

    use super::*;

    #[test]
    fn no_file_lends_its_owners_rights() {
        let dir = std::env::temp_dir().join(format!("pal-modes-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (file, made) = (dir.join("file"), dir.join("made"));
        std::fs::write(&file, "").unwrap();
        let act = |mode: u32| {
            let _ = std::fs::remove_file(&made);
            let opened = File::options().write(true).create_new(true).mode(mode).open(&made).is_ok();
            (opened, std::fs::set_permissions(&file, Permissions::from_mode(mode)).is_ok())
        };
        // A filter applies to the thread that installs it.
        std::thread::scope(|scope| {
            let held = scope.spawn(|| {
                let before = [0o4755, 0o2755, 0o755].map(act);
                crate::caps::no_new_privileges().unwrap();
                deny_setuid_bits().unwrap();
                (before, [0o4755, 0o2755, 0o755].map(act))
            });
            let (before, after) = held.join().unwrap();
            assert_eq!(before, [(true, true); 3], "the control: without it all of that is done");
            assert_eq!(after, [(false, false), (false, false), (true, true)]);
        });
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
