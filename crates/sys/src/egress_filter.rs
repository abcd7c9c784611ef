//! The system calls of `pal-egress`: Internet sockets, reading files, memory, waiting; no others.
//!
//! It opens its listening socket, its spool and its timers before the filter is installed. Every other call returns
//! `EPERM`.
//!
//! Invariant: descriptors come from its supervisor only. It receives them on standard input, which it can neither close
//! nor put another socket in the place of.

use std::io;

use crate::seccomp::{ArgumentRule, SeccompFilter, SyscallGroup, Tables};

pub(crate) const TABLES: Tables =
    Tables { allowed: ALLOWED, refused: &[], judged: JUDGED, others: libc::EPERM };

#[rustfmt::skip]
const ALLOWED: &[SyscallGroup] = &[
    SyscallGroup { why: "read and write what is open", calls: &[
        libc::SYS_read, libc::SYS_readv, libc::SYS_write, libc::SYS_writev, libc::SYS_lseek, libc::SYS_fdatasync,
        libc::SYS_fstat, libc::SYS_statx, libc::SYS_newfstatat,
    ]},
    SyscallGroup { why: "sockets, once `socket` let their family; no message with a descriptor goes out", calls: &[
        libc::SYS_accept4, libc::SYS_bind, libc::SYS_connect, libc::SYS_sendto, libc::SYS_recvfrom, libc::SYS_shutdown,
        libc::SYS_getsockopt, libc::SYS_setsockopt, libc::SYS_getsockname, libc::SYS_getpeername,
    ]},
    SyscallGroup { why: "waiting", calls: &[
        libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_ppoll, libc::SYS_futex,
        libc::SYS_clock_gettime, libc::SYS_clock_nanosleep, libc::SYS_nanosleep, libc::SYS_sched_yield,
        libc::SYS_restart_syscall,
    ]},
    SyscallGroup { why: "memory of one's own", calls: &[
        libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_brk, libc::SYS_getrandom,
    ]},
    SyscallGroup { why: "signals to oneself, and the end", calls: &[
        libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
        libc::SYS_getpid, libc::SYS_gettid, libc::SYS_exit, libc::SYS_exit_group,
    ]},
    #[cfg(target_arch = "x86_64")]
    SyscallGroup { why: "the older spellings of the above", calls: &[libc::SYS_epoll_wait, libc::SYS_poll] },
];

const JUDGED: &[(libc::c_long, ArgumentRule)] = &[
    (libc::SYS_close, ArgumentRule::NoStandardInput),
    (libc::SYS_recvmsg, ArgumentRule::StandardInput),
    (libc::SYS_fcntl, ArgumentRule::ReadFlags),
    (libc::SYS_socket, ArgumentRule::InternetFamily),
    (libc::SYS_openat, ArgumentRule::ReadOnlyOpen),
    (libc::SYS_mmap, ArgumentRule::NoExecutable),
    (libc::SYS_mprotect, ArgumentRule::NoExecutable),
];

/// Installs the filter for the caller; it cannot be removed.
pub fn install() -> io::Result<()> {
    SeccompFilter::of(&TABLES).install()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::tests::passes;

    #[test]
    fn it_reads_and_connects_and_does_nothing_else() {
        let socket = |family: i32| passes(&TABLES, libc::SYS_socket, [family as u32, 1, 0]);
        assert!(socket(libc::AF_INET) && socket(libc::AF_INET6));
        for family in [libc::AF_UNIX, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_VSOCK] {
            assert!(!socket(family), "family {family}");
        }
        let open = |flags: i32| passes(&TABLES, libc::SYS_openat, [0, 0, flags as u32]);
        assert!(open(libc::O_RDONLY | libc::O_CLOEXEC));
        for flags in [
            libc::O_WRONLY,
            libc::O_RDWR,
            libc::O_CREAT,
            libc::O_TRUNC,
            libc::O_APPEND,
            libc::O_TMPFILE | libc::O_RDWR,
        ] {
            assert!(!open(flags), "flags {flags:#x}");
        }
        for call in [libc::SYS_mmap, libc::SYS_mprotect] {
            assert!(passes(&TABLES, call, [0, 0, (libc::PROT_READ | libc::PROT_WRITE) as u32]));
            assert!(!passes(&TABLES, call, [0, 0, (libc::PROT_READ | libc::PROT_EXEC) as u32]));
        }
        let fd = |call, fd: u32| passes(&TABLES, call, [fd, 0, 0]);
        assert!(
            fd(libc::SYS_recvmsg, 0) && !fd(libc::SYS_recvmsg, 3),
            "descriptors come from the supervisor"
        );
        assert!(fd(libc::SYS_close, 3) && !fd(libc::SYS_close, 0), "and from no socket in its place");
        let fcntl = |command: i32| passes(&TABLES, libc::SYS_fcntl, [3, command as u32, 0]);
        assert!(fcntl(libc::F_GETFL) && !fcntl(libc::F_DUPFD) && !fcntl(libc::F_DUPFD_CLOEXEC));
        assert!(!fcntl(libc::F_SETFL) && !fcntl(libc::F_SETOWN));
        for call in [
            libc::SYS_dup,
            libc::SYS_dup3,
            libc::SYS_close_range,
            libc::SYS_recvmmsg,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_kill,
            libc::SYS_ptrace,
            libc::SYS_sendmsg,
            libc::SYS_listen,
            libc::SYS_openat2,
            libc::SYS_unlinkat,
            libc::SYS_renameat2,
            libc::SYS_mkdirat,
            libc::SYS_ftruncate,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_io_uring_setup,
            libc::SYS_pidfd_getfd,
        ] {
            assert!(!passes(&TABLES, call, [0; 3]), "call {call}");
        }
    }
}
