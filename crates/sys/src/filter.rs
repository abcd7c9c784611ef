//! The system calls a Body may make: a filter as data, each group with its reason.
//!
//! Three verdicts, three filters, the kernel takes the strictest and, of equals, the one installed last:
//! 1. what [`ALLOWED`] names passes, and everything unknown answers `ENOSYS`, so that libraries fall back;
//! 2. what [`REFUSED`] names answers `EPERM`: a program hears "no", not "never heard of it";
//! 3. socket families beyond Unix, IPv4, IPv6 and route netlink answer `EAFNOSUPPORT`.
//!
//! A call of a foreign architecture (32 bit) kills the process; x32 calls are unknown numbers, so `ENOSYS`.
//!
//! Invariant: no call is in both tables (`tables_do_not_overlap`).

use std::io;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen::{Dword, Qword}, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// A group of calls and why it is where it is.
pub struct Group {
    /// The reason, for readers and for `SECURITY.md`.
    pub why: &'static str,
    /// The calls.
    pub calls: &'static [c_long],
}

// Not in `libc` for every target yet; cachestat has one number everywhere.
const SYS_CACHESTAT: c_long = 451;
#[cfg(target_arch = "x86_64")]
const SYS_IO_PGETEVENTS: c_long = 333;
#[cfg(target_arch = "aarch64")]
const SYS_IO_PGETEVENTS: c_long = 292;

/// New namespaces of any kind: nested user namespaces are the largest attack surface an unprivileged process has.
const NAMESPACE_FLAGS: u64 = 0x7E02_0080;

/// Calls that pass whatever their arguments are.
pub const ALLOWED: &[Group] = &[
    Group { why: "read and write what is open", calls: &[
        libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
        libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_lseek, libc::SYS_close,
        libc::SYS_close_range, libc::SYS_dup, libc::SYS_dup3, libc::SYS_fcntl, libc::SYS_flock, libc::SYS_fsync,
        libc::SYS_fdatasync, libc::SYS_sync_file_range, libc::SYS_sync, libc::SYS_syncfs, libc::SYS_ftruncate,
        libc::SYS_truncate, libc::SYS_fallocate, libc::SYS_fadvise64, libc::SYS_readahead, libc::SYS_sendfile,
        libc::SYS_splice, libc::SYS_tee, libc::SYS_vmsplice, libc::SYS_copy_file_range, libc::SYS_pipe2,
        SYS_CACHESTAT,
    ]},
    Group { why: "files and directories, as permissions and Landlock let", calls: &[
        libc::SYS_openat, libc::SYS_openat2, libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_newfstatat,
        libc::SYS_fstat, libc::SYS_statx, libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_getdents64, libc::SYS_getcwd,
        libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_mkdirat, libc::SYS_mknodat, libc::SYS_unlinkat, libc::SYS_renameat,
        libc::SYS_renameat2, libc::SYS_linkat, libc::SYS_symlinkat, libc::SYS_readlinkat, libc::SYS_fchmod,
        libc::SYS_fchmodat, libc::SYS_fchmodat2, libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_utimensat,
        libc::SYS_umask, libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr,
        libc::SYS_lgetxattr, libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr,
        libc::SYS_removexattr, libc::SYS_lremovexattr, libc::SYS_fremovexattr, libc::SYS_inotify_init1,
        libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch,
    ]},
    Group { why: "memory of one's own", calls: &[
        libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_madvise, libc::SYS_brk,
        libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock, libc::SYS_mlockall, libc::SYS_munlockall, libc::SYS_mincore,
        libc::SYS_msync, libc::SYS_memfd_create, libc::SYS_memfd_secret, libc::SYS_membarrier, libc::SYS_pkey_alloc,
        libc::SYS_pkey_free, libc::SYS_pkey_mprotect, libc::SYS_remap_file_pages, libc::SYS_get_mempolicy, libc::SYS_mseal,
    ]},
    Group { why: "processes and threads of the Body; its pid namespace shows no others", calls: &[
        libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4, libc::SYS_waitid,
        libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_getpid, libc::SYS_getppid, libc::SYS_gettid,
        libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getsid, libc::SYS_setsid, libc::SYS_pidfd_open,
        libc::SYS_pidfd_send_signal, libc::SYS_set_tid_address, libc::SYS_set_robust_list, libc::SYS_get_robust_list,
        libc::SYS_rseq, libc::SYS_futex, libc::SYS_futex_waitv, libc::SYS_prctl, libc::SYS_ptrace,
        libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_process_mrelease,
    ]},
    Group { why: "ids the Body maps, and filters that only ever take away", calls: &[
        libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid, libc::SYS_getresuid,
        libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid,
        libc::SYS_setregid, libc::SYS_setresuid, libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid,
        libc::SYS_setgroups, libc::SYS_capget, libc::SYS_capset, libc::SYS_seccomp, libc::SYS_landlock_create_ruleset,
        libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self,
    ]},
    Group { why: "signals", calls: &[
        libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending,
        libc::SYS_rt_sigsuspend, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_sigaltstack, libc::SYS_signalfd4, libc::SYS_restart_syscall,
    ]},
    Group { why: "time, to read and to wait for; never to set", calls: &[
        libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep, libc::SYS_nanosleep,
        libc::SYS_gettimeofday, libc::SYS_getitimer, libc::SYS_setitimer, libc::SYS_timer_create, libc::SYS_timer_settime,
        libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete, libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime, libc::SYS_times,
    ]},
    Group { why: "waiting for many things", calls: &[
        libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_io_setup, libc::SYS_io_submit, libc::SYS_io_getevents,
        SYS_IO_PGETEVENTS, libc::SYS_io_cancel, libc::SYS_io_destroy,
    ]},
    Group { why: "sockets, once `socket` let their family", calls: &[
        libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4, libc::SYS_connect, libc::SYS_sendto,
        libc::SYS_recvfrom, libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_sendmmsg, libc::SYS_recvmmsg,
        libc::SYS_getsockopt, libc::SYS_setsockopt, libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_shutdown,
    ]},
    Group { why: "System V and POSIX objects of the Body's own IPC namespace", calls: &[
        libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
        libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv, libc::SYS_msgctl,
        libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive, libc::SYS_mq_notify,
        libc::SYS_mq_getsetattr,
    ]},
    Group { why: "scheduling within what cgroups and limits give", calls: &[
        libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_sched_setaffinity, libc::SYS_sched_getparam,
        libc::SYS_sched_setparam, libc::SYS_sched_getscheduler, libc::SYS_sched_setscheduler, libc::SYS_sched_getattr,
        libc::SYS_sched_setattr, libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
        libc::SYS_sched_rr_get_interval, libc::SYS_getpriority, libc::SYS_setpriority, libc::SYS_ioprio_get,
        libc::SYS_ioprio_set, libc::SYS_getcpu,
    ]},
    Group { why: "limits, names and usage, to read or to lower", calls: &[
        libc::SYS_getrlimit, libc::SYS_setrlimit, libc::SYS_prlimit64, libc::SYS_getrusage, libc::SYS_sysinfo,
        libc::SYS_uname, libc::SYS_getrandom,
    ]},
    #[cfg(target_arch = "x86_64")]
    Group { why: "the older spellings of the above", calls: &[
        libc::SYS_open, libc::SYS_creat, libc::SYS_access, libc::SYS_stat, libc::SYS_lstat, libc::SYS_getdents,
        libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_mknod, libc::SYS_unlink, libc::SYS_rename, libc::SYS_link,
        libc::SYS_symlink, libc::SYS_readlink, libc::SYS_chmod, libc::SYS_chown, libc::SYS_lchown, libc::SYS_utime,
        libc::SYS_utimes, libc::SYS_futimesat, libc::SYS_dup2, libc::SYS_pipe, libc::SYS_poll, libc::SYS_select,
        libc::SYS_epoll_create, libc::SYS_epoll_wait, libc::SYS_eventfd, libc::SYS_signalfd, libc::SYS_inotify_init,
        libc::SYS_fork, libc::SYS_vfork, libc::SYS_getpgrp, libc::SYS_pause, libc::SYS_alarm, libc::SYS_time,
        libc::SYS_arch_prctl,
    ]},
];

/// Calls that are refused whatever their arguments are.
pub const REFUSED: &[Group] = &[
    Group { why: "mounts: the Body's view of files is not its own to change", calls: &[
        libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_chroot, libc::SYS_fsopen, libc::SYS_fsconfig,
        libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_open_tree, libc::SYS_move_mount, libc::SYS_mount_setattr,
        libc::SYS_quotactl, libc::SYS_quotactl_fd,
    ]},
    Group { why: "namespaces: nested ones open most of the kernel's privileged code to anybody", calls: &[
        libc::SYS_unshare, libc::SYS_setns,
    ]},
    Group { why: "the kernel itself: code, time, power, swap, accounting, logs", calls: &[
        libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_init_module, libc::SYS_finit_module,
        libc::SYS_delete_module, libc::SYS_reboot, libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct,
        libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_clock_adjtime, libc::SYS_adjtimex, libc::SYS_syslog,
        libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_vhangup,
    ]},
    Group { why: "programmable kernel surfaces with a long history of escapes", calls: &[
        libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_userfaultfd, libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter, libc::SYS_io_uring_register,
    ]},
    Group { why: "keyrings know nothing of namespaces", calls: &[
        libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key,
    ]},
    Group { why: "files by handle ignore every path check", calls: &[
        libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at, libc::SYS_fanotify_init, libc::SYS_fanotify_mark,
    ]},
    Group { why: "other processes' descriptors and memory placement", calls: &[
        libc::SYS_pidfd_getfd, libc::SYS_kcmp, libc::SYS_process_madvise, libc::SYS_move_pages, libc::SYS_migrate_pages,
        libc::SYS_mbind, libc::SYS_set_mempolicy, libc::SYS_set_mempolicy_home_node,
    ]},
    #[cfg(target_arch = "x86_64")]
    Group { why: "hardware, and calls that only old programs and exploits make", calls: &[
        libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt, libc::SYS_lookup_dcookie, libc::SYS__sysctl,
        libc::SYS_uselib, libc::SYS_ustat, libc::SYS_sysfs, libc::SYS_nfsservctl,
    ]},
];

/// Terminal ioctls that type into somebody else's terminal.
const TYPING_IOCTLS: [u64; 2] = [libc::TIOCSTI, libc::TIOCLINUX];
/// `personality` for "tell me", Linux, and its two harmless variants.
const PERSONALITIES: [u64; 5] = [0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];
const FAMILIES: [u64; 4] = [libc::AF_UNIX as u64, libc::AF_INET as u64, libc::AF_INET6 as u64, libc::AF_NETLINK as u64];
const NETLINK_ROUTE: u64 = 0;

/// The compiled filter.
pub struct Filter(Vec<BpfProgram>);

impl Filter {
    /// Compiles the tables for this machine.
    pub fn compile() -> io::Result<Self> {
        let programs = [allowed(), refused(), families()].into_iter().collect::<Result<Vec<_>, _>>();
        programs.map(Self).map_err(io::Error::other)
    }

    /// Puts the filter on the caller and its children, for good.
    pub fn install(&self) -> io::Result<()> {
        self.0.iter().try_for_each(|program| seccompiler::apply_filter(program)).map_err(io::Error::other)
    }
}

type Built = Result<BpfProgram, seccompiler::BackendError>;
type Rules = Vec<(c_long, Vec<SeccompRule>)>;

fn allowed() -> Built {
    let mut rules = any_arguments(ALLOWED);
    let no_namespaces = condition(0, Qword, SeccompCmpOp::MaskedEq(NAMESPACE_FLAGS), 0)?;
    rules.push((libc::SYS_clone, vec![SeccompRule::new(vec![no_namespaces])?]));
    let not_typing = TYPING_IOCTLS.iter().map(|cmd| condition(1, Dword, SeccompCmpOp::Ne, *cmd)).collect::<Result<_, _>>()?;
    rules.push((libc::SYS_ioctl, vec![SeccompRule::new(not_typing)?]));
    let one_of = PERSONALITIES.iter().map(|value| SeccompRule::new(vec![condition(0, Dword, SeccompCmpOp::Eq, *value)?]));
    rules.push((libc::SYS_personality, one_of.collect::<Result<_, _>>()?));
    // Families are judged by the third filter, which knows the right errno.
    rules.push((libc::SYS_socket, vec![]));
    rules.push((libc::SYS_socketpair, vec![]));
    build(rules, SeccompAction::Errno(libc::ENOSYS as u32), SeccompAction::Allow)
}

fn refused() -> Built {
    let mut rules = any_arguments(REFUSED);
    let namespaces = (0..64).map(|bit| 1u64 << bit).filter(|bit| NAMESPACE_FLAGS & bit != 0);
    let any_of = namespaces.map(|bit| SeccompRule::new(vec![condition(0, Qword, SeccompCmpOp::MaskedEq(bit), bit)?]));
    rules.push((libc::SYS_clone, any_of.collect::<Result<_, _>>()?));
    let typing = TYPING_IOCTLS.iter().map(|cmd| SeccompRule::new(vec![condition(1, Dword, SeccompCmpOp::Eq, *cmd)?]));
    rules.push((libc::SYS_ioctl, typing.collect::<Result<_, _>>()?));
    build(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32))
}

fn families() -> Built {
    let none_of = FAMILIES.iter().map(|family| condition(0, Dword, SeccompCmpOp::Ne, *family));
    let foreign = SeccompRule::new(none_of.collect::<Result<_, _>>()?)?;
    let netlink = vec![
        condition(0, Dword, SeccompCmpOp::Eq, libc::AF_NETLINK as u64)?,
        condition(2, Dword, SeccompCmpOp::Ne, NETLINK_ROUTE)?,
    ];
    let not_unix = SeccompRule::new(vec![condition(0, Dword, SeccompCmpOp::Ne, libc::AF_UNIX as u64)?])?;
    let rules = vec![
        (libc::SYS_socket, vec![foreign, SeccompRule::new(netlink)?]),
        (libc::SYS_socketpair, vec![not_unix]),
    ];
    build(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EAFNOSUPPORT as u32))
}

fn any_arguments(groups: &[Group]) -> Rules {
    groups.iter().flat_map(|group| group.calls).map(|call| (*call, Vec::new())).collect()
}

fn condition(
    argument: u8,
    width: seccompiler::SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, width, operator, value)
}

fn build(rules: Rules, otherwise: SeccompAction, matched: SeccompAction) -> Built {
    let arch = if cfg!(target_arch = "aarch64") { TargetArch::aarch64 } else { TargetArch::x86_64 };
    SeccompFilter::new(rules.into_iter().collect(), otherwise, matched, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_do_not_overlap() {
        let flat = |groups: &[Group]| groups.iter().flat_map(|group| group.calls.to_vec()).collect::<Vec<_>>();
        let (allowed, refused) = (flat(ALLOWED), flat(REFUSED));
        assert!(allowed.iter().all(|call| !refused.contains(call)));
        let mut unique = allowed.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), allowed.len());
        assert!([ALLOWED, REFUSED].concat_reasons().all(|why| !why.is_empty()));
    }

    trait Reasons {
        fn concat_reasons(&self) -> impl Iterator<Item = &'static str>;
    }

    impl Reasons for [&[Group]; 2] {
        fn concat_reasons(&self) -> impl Iterator<Item = &'static str> {
            self.iter().flat_map(|groups| groups.iter().map(|group| group.why))
        }
    }

    #[test]
    fn every_new_namespace_flag_is_in_the_mask() {
        let flags = [
            libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWPID, libc::CLONE_NEWNET, libc::CLONE_NEWIPC,
            libc::CLONE_NEWUTS, libc::CLONE_NEWCGROUP, 0x80,
        ];
        assert_eq!(flags.iter().fold(0, |mask, flag| mask | *flag as u64), NAMESPACE_FLAGS);
    }

    #[test]
    fn the_filter_compiles_within_the_kernels_limit() {
        assert!(Filter::compile().unwrap().0.iter().all(|program| program.len() < 4096));
    }
}
