//! Files that run with the rights of their owner: a program may be kept from ever making one.
//!
//! Who acts on files of the host for somebody else does so under ids that may be a person's. A setuid file that was made
//! so would lend those ids to everybody on the host who can reach it.

use std::io;

use libc::{c_long, sock_filter};

use crate::{
    bpf::{self, ANSWER, ARCHITECTURE, ARGUMENTS, EQUAL, LOAD, NATIVE, NUMBER, step},
    seccomp::SYS_FCHMODAT2,
};

/// The bits that lend an owner's or a group's rights.
const LENDING: u32 = libc::S_ISUID | libc::S_ISGID;
const HAS_BITS: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
/// Numbers from here on are x32's.
const X32: u32 = 0x4000_0000;

/// Calls that take a mode, and which of their arguments that is.
#[rustfmt::skip]
const MODES: &[(c_long, u32)] = &[
    (libc::SYS_fchmod, 1), (libc::SYS_fchmodat, 2), (SYS_FCHMODAT2, 2),
    (libc::SYS_mkdirat, 2), (libc::SYS_mknodat, 2), (libc::SYS_openat, 3),
    #[cfg(target_arch = "x86_64")] (libc::SYS_chmod, 1),
    #[cfg(target_arch = "x86_64")] (libc::SYS_mkdir, 1),
    #[cfg(target_arch = "x86_64")] (libc::SYS_mknod, 1),
    #[cfg(target_arch = "x86_64")] (libc::SYS_open, 2),
    #[cfg(target_arch = "x86_64")] (libc::SYS_creat, 1),
];
/// Calls whose mode cannot be seen.
const UNSEEN: &[c_long] = &[libc::SYS_openat2, libc::SYS_io_uring_setup];

/// From here on this process, and what it executes, makes no file and no directory that lends its owner's rights: it is
/// refused with `EPERM`. The caller has promised never to gain privileges, or may do this without.
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
    for call in UNSEEN {
        steps.extend([step(EQUAL, 0, 1, *call as u32), refuse(libc::ENOSYS)]);
    }
    for (call, argument) in MODES {
        steps.extend([
            step(EQUAL, 0, 4, *call as u32),
            // The low half of the argument.
            step(LOAD, 0, 0, ARGUMENTS + 8 * argument),
            step(HAS_BITS, 0, 1, LENDING),
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
        // A filter is a thread's own until it is told otherwise.
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
