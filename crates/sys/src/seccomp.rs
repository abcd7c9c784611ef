//! The system calls that a Body may make: a filter as data, each group with its reason.
//!
//! The filter gives one of four verdicts:
//! - calls in [`ALLOWED`] pass, some only with harmless arguments ([`ArgumentRule`]);
//! - calls in [`REFUSED`] return `EPERM`, so that a program sees a refusal and not a missing call;
//! - unknown calls, those of x32 included, return `ENOSYS`, so that libraries fall back;
//! - a call of a foreign architecture (32 bit) kills the process.
//!
//! We have our own compiler because `seccompiler` turns these tables into a chain of some 1,900 instructions, which
//! the kernel walks for each system call when the filter is installed: 1.2 ms for every Body. A search tree over the
//! numbers has 300 instructions and costs a tenth of that.
//!
//! Invariant: no call is in two tables (`tables_do_not_overlap`).

use std::io;

use libc::{c_long, sock_filter};

/// A group of calls, and why it is in its table.
pub struct SyscallGroup {
    /// The reason, for readers and for `SECURITY.md`.
    pub why: &'static str,
    /// The calls.
    pub calls: &'static [c_long],
}

// `libc` does not have these for every target yet; they have one number on all of them.
const SYS_CACHESTAT: c_long = 451;
pub(crate) const SYS_FCHMODAT2: c_long = 452;
#[cfg(target_arch = "x86_64")]
const SYS_IO_PGETEVENTS: c_long = 333;
#[cfg(target_arch = "aarch64")]
const SYS_IO_PGETEVENTS: c_long = 292;

/// Flags for new namespaces: nested user namespaces are the largest attack surface of an unprivileged process.
const NAMESPACE_FLAGS: u64 = 0x7E02_0080;

/// Calls that pass with any arguments.
#[rustfmt::skip]
pub const ALLOWED: &[SyscallGroup] = &[
    SyscallGroup { why: "read and write what is open", calls: &[
        libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
        libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_lseek, libc::SYS_close,
        libc::SYS_close_range, libc::SYS_dup, libc::SYS_dup3, libc::SYS_fcntl, libc::SYS_flock, libc::SYS_fsync,
        libc::SYS_fdatasync, libc::SYS_sync_file_range, libc::SYS_sync, libc::SYS_syncfs, libc::SYS_ftruncate,
        libc::SYS_truncate, libc::SYS_fallocate, libc::SYS_fadvise64, libc::SYS_readahead, libc::SYS_sendfile,
        libc::SYS_splice, libc::SYS_tee, libc::SYS_copy_file_range, libc::SYS_pipe2,
        SYS_CACHESTAT,
    ]},
    SyscallGroup { why: "files and directories, as permissions and Landlock let", calls: &[
        libc::SYS_openat, libc::SYS_openat2, libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_newfstatat,
        libc::SYS_fstat, libc::SYS_statx, libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_getdents64, libc::SYS_getcwd,
        libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_mkdirat, libc::SYS_mknodat, libc::SYS_unlinkat, libc::SYS_renameat,
        libc::SYS_renameat2, libc::SYS_linkat, libc::SYS_symlinkat, libc::SYS_readlinkat, libc::SYS_fchmod,
        libc::SYS_fchmodat, SYS_FCHMODAT2, libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_utimensat,
        libc::SYS_umask, libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr,
        libc::SYS_lgetxattr, libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr,
        libc::SYS_removexattr, libc::SYS_lremovexattr, libc::SYS_fremovexattr, libc::SYS_inotify_init1,
        libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch,
    ]},
    SyscallGroup { why: "memory of one's own", calls: &[
        libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_madvise, libc::SYS_brk,
        libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock, libc::SYS_mlockall, libc::SYS_munlockall, libc::SYS_mincore,
        libc::SYS_msync, libc::SYS_memfd_create, libc::SYS_membarrier, libc::SYS_pkey_alloc,
        libc::SYS_pkey_free, libc::SYS_pkey_mprotect, libc::SYS_remap_file_pages, libc::SYS_get_mempolicy, libc::SYS_mseal,
    ]},
    SyscallGroup { why: "processes and threads of the Body; its pid namespace shows no others", calls: &[
        libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4, libc::SYS_waitid,
        libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_getpid, libc::SYS_getppid, libc::SYS_gettid,
        libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getsid, libc::SYS_setsid, libc::SYS_pidfd_open,
        libc::SYS_pidfd_send_signal, libc::SYS_set_tid_address, libc::SYS_set_robust_list, libc::SYS_get_robust_list,
        libc::SYS_rseq, libc::SYS_futex, libc::SYS_futex_waitv, libc::SYS_prctl, libc::SYS_ptrace,
        libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_process_mrelease,
    ]},
    SyscallGroup { why: "ids the Body maps, and filters that only ever take away", calls: &[
        libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid, libc::SYS_getresuid,
        libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid,
        libc::SYS_setregid, libc::SYS_setresuid, libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid,
        libc::SYS_setgroups, libc::SYS_capget, libc::SYS_capset, libc::SYS_seccomp, libc::SYS_landlock_create_ruleset,
        libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self,
    ]},
    SyscallGroup { why: "signals", calls: &[
        libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending,
        libc::SYS_rt_sigsuspend, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_sigaltstack, libc::SYS_signalfd4, libc::SYS_restart_syscall,
    ]},
    SyscallGroup { why: "time, to read and to wait for; never to set", calls: &[
        libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep, libc::SYS_nanosleep,
        libc::SYS_gettimeofday, libc::SYS_getitimer, libc::SYS_setitimer, libc::SYS_timer_create, libc::SYS_timer_settime,
        libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete, libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime, libc::SYS_times,
    ]},
    SyscallGroup { why: "waiting for many things", calls: &[
        libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_io_setup, libc::SYS_io_submit, libc::SYS_io_getevents,
        SYS_IO_PGETEVENTS, libc::SYS_io_cancel, libc::SYS_io_destroy,
    ]},
    SyscallGroup { why: "sockets, once `socket` let their family", calls: &[
        libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4, libc::SYS_connect, libc::SYS_sendto,
        libc::SYS_recvfrom, libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_sendmmsg, libc::SYS_recvmmsg,
        libc::SYS_getsockopt, libc::SYS_setsockopt, libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_shutdown,
    ]},
    SyscallGroup { why: "System V and POSIX objects of the Body's own IPC namespace", calls: &[
        libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
        libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv, libc::SYS_msgctl,
        libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive, libc::SYS_mq_notify,
        libc::SYS_mq_getsetattr,
    ]},
    SyscallGroup { why: "scheduling within what cgroups and limits give", calls: &[
        libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_sched_setaffinity, libc::SYS_sched_getparam,
        libc::SYS_sched_setparam, libc::SYS_sched_getscheduler, libc::SYS_sched_setscheduler, libc::SYS_sched_getattr,
        libc::SYS_sched_setattr, libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
        libc::SYS_sched_rr_get_interval, libc::SYS_getpriority, libc::SYS_setpriority, libc::SYS_ioprio_get,
        libc::SYS_ioprio_set, libc::SYS_getcpu,
    ]},
    SyscallGroup { why: "limits, names and usage, to read or to lower", calls: &[
        libc::SYS_getrlimit, libc::SYS_setrlimit, libc::SYS_prlimit64, libc::SYS_getrusage, libc::SYS_sysinfo,
        libc::SYS_uname, libc::SYS_getrandom,
    ]},
    #[cfg(target_arch = "x86_64")]
    SyscallGroup { why: "the older spellings of the above", calls: &[
        libc::SYS_open, libc::SYS_creat, libc::SYS_access, libc::SYS_stat, libc::SYS_lstat, libc::SYS_getdents,
        libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_mknod, libc::SYS_unlink, libc::SYS_rename, libc::SYS_link,
        libc::SYS_symlink, libc::SYS_readlink, libc::SYS_chmod, libc::SYS_chown, libc::SYS_lchown, libc::SYS_utime,
        libc::SYS_utimes, libc::SYS_futimesat, libc::SYS_dup2, libc::SYS_pipe, libc::SYS_poll, libc::SYS_select,
        libc::SYS_epoll_create, libc::SYS_epoll_wait, libc::SYS_eventfd, libc::SYS_signalfd, libc::SYS_inotify_init,
        libc::SYS_fork, libc::SYS_vfork, libc::SYS_getpgrp, libc::SYS_pause, libc::SYS_alarm, libc::SYS_time,
        libc::SYS_arch_prctl,
    ]},
];

/// Calls that are refused with any arguments.
#[rustfmt::skip]
pub const REFUSED: &[SyscallGroup] = &[
    SyscallGroup { why: "mounts: the Body's view of files is not its own to change", calls: &[
        libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_chroot, libc::SYS_fsopen, libc::SYS_fsconfig,
        libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_open_tree, libc::SYS_move_mount, libc::SYS_mount_setattr,
        libc::SYS_quotactl, libc::SYS_quotactl_fd,
    ]},
    SyscallGroup { why: "namespaces: nested ones open most of the kernel's privileged code to every process", calls: &[
        libc::SYS_unshare, libc::SYS_setns,
    ]},
    SyscallGroup { why: "the kernel itself: code, time, power, swap, accounting, logs", calls: &[
        libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_init_module, libc::SYS_finit_module,
        libc::SYS_delete_module, libc::SYS_reboot, libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct,
        libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_clock_adjtime, libc::SYS_adjtimex, libc::SYS_syslog,
        libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_vhangup,
    ]},
    SyscallGroup { why: "programmable kernel surfaces with a long history of escapes", calls: &[
        libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_userfaultfd, libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter, libc::SYS_io_uring_register,
    ]},
    SyscallGroup { why: "memory shared with the kernel's pipes, or hidden from it", calls: &[
        libc::SYS_vmsplice, libc::SYS_memfd_secret,
    ]},
    SyscallGroup { why: "keyrings know nothing of namespaces", calls: &[
        libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key,
    ]},
    SyscallGroup { why: "files by handle ignore every path check", calls: &[
        libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at, libc::SYS_fanotify_init, libc::SYS_fanotify_mark,
    ]},
    SyscallGroup { why: "other processes' descriptors and memory placement", calls: &[
        libc::SYS_pidfd_getfd, libc::SYS_kcmp, libc::SYS_process_madvise, libc::SYS_move_pages, libc::SYS_migrate_pages,
        libc::SYS_mbind, libc::SYS_set_mempolicy, libc::SYS_set_mempolicy_home_node,
    ]},
    #[cfg(target_arch = "x86_64")]
    SyscallGroup { why: "hardware, and calls that only old programs and exploits make", calls: &[
        libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt, libc::SYS_lookup_dcookie, libc::SYS__sysctl,
        libc::SYS_uselib, libc::SYS_ustat, libc::SYS_sysfs, libc::SYS_nfsservctl,
    ]},
];

/// Calls whose arguments decide.
const JUDGED: &[(c_long, ArgumentRule)] = &[
    (libc::SYS_clone, ArgumentRule::NoNamespaces),
    (libc::SYS_ioctl, ArgumentRule::NoTyping),
    (libc::SYS_personality, ArgumentRule::PlainPersonality),
    (libc::SYS_socket, ArgumentRule::KnownFamily),
    (libc::SYS_socketpair, ArgumentRule::UnixPair),
];

const STDIN: u32 = 0;

/// Rules for arguments. `clone3` hides its flags behind a pointer, so it is treated as unknown, and libraries use
/// `clone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArgumentRule {
    /// No flag asks for a new namespace.
    NoNamespaces,
    /// No input is inserted into another process's terminal (`TIOCSTI`, `TIOCLINUX`).
    NoTyping,
    /// Querying the personality, Linux, and its two harmless variants.
    PlainPersonality,
    /// Unix, IPv4, IPv6, and netlink for routes only; others return `EAFNOSUPPORT`.
    KnownFamily,
    /// Unix sockets.
    UnixPair,
    /// IPv4 and IPv6 sockets.
    InternetFamily,
    /// A file is opened for reading, and not created.
    ReadOnlyOpen,
    /// Memory that is not executable.
    NoExecutable,
    /// Of standard input only.
    StandardInput,
    /// Of any descriptor but standard input.
    NoStandardInput,
    /// The flags of a descriptor are read.
    ReadFlags,
}

/// The calls of one kind of process, and the verdicts on them.
pub(crate) struct Tables {
    /// Calls that pass with any arguments.
    pub allowed: &'static [SyscallGroup],
    /// Calls that return `EPERM` with any arguments.
    pub refused: &'static [SyscallGroup],
    /// Calls whose arguments decide.
    pub judged: &'static [(c_long, ArgumentRule)],
    /// The error for all others.
    pub others: i32,
}

/// The calls of a Body.
const BODY: Tables = Tables { allowed: ALLOWED, refused: REFUSED, judged: JUDGED, others: libc::ENOSYS };

const TYPING_IOCTLS: [u32; 2] = [libc::TIOCSTI as u32, libc::TIOCLINUX as u32];
const PERSONALITIES: [u32; 5] = [0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];
const FAMILIES: [u32; 3] = [libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32];
const NETLINK_ROUTE: u32 = 0;
const WRITING_FLAGS: u32 =
    (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND) as u32;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;
/// Higher numbers are x32 calls, or no calls at all.
const NUMBERS_MAX: u32 = 1023;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

const fn errno(code: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | code as u32
}

/// The compiled filter.
pub struct SeccompFilter(Vec<sock_filter>);

impl SeccompFilter {
    /// Compiles the tables of a Body for this architecture.
    pub fn compile() -> Self {
        Self::of(&BODY)
    }

    /// Compiles other tables.
    pub(crate) fn of(tables: &Tables) -> Self {
        let mut program = vec![load(4), jump_if_equal(ARCHITECTURE, 1, 0), answer(KILL), load(0)];
        program.extend(search(&runs(tables)));
        Self(program)
    }

    /// Installs the filter for the caller and its children; it cannot be removed.
    pub fn install(&self) -> io::Result<()> {
        let len = self.0.len().try_into().map_err(io::Error::other)?;
        let program = libc::sock_fprog { len, filter: self.0.as_ptr().cast_mut() };
        let set = libc::SECCOMP_SET_MODE_FILTER;
        // SAFETY: the kernel reads `len` instructions behind the pointer, which live until the call returns.
        let done = unsafe { libc::syscall(libc::SYS_seccomp, set, 0, &program) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The verdict on a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FilterAction {
    Answer(u32),
    Judge(ArgumentRule),
}

/// Groups the call numbers into ranges with one verdict, each given by its start.
fn runs(tables: &Tables) -> Vec<(u32, FilterAction)> {
    let mut table = vec![FilterAction::Answer(errno(tables.others)); NUMBERS_MAX as usize + 1];
    let mut put = |call: c_long, verdict| {
        if let Some(place) = usize::try_from(call).ok().and_then(|number| table.get_mut(number)) {
            *place = verdict;
        }
    };
    let flat = |groups: &'static [SyscallGroup]| groups.iter().flat_map(|group| group.calls);
    flat(tables.allowed).for_each(|call| put(*call, FilterAction::Answer(ALLOW)));
    flat(tables.refused).for_each(|call| put(*call, FilterAction::Answer(errno(libc::EPERM))));
    tables.judged.iter().for_each(|(call, arguments)| put(*call, FilterAction::Judge(*arguments)));
    let mut runs: Vec<(u32, FilterAction)> = Vec::new();
    for (number, verdict) in table.into_iter().enumerate() {
        if runs.last().is_none_or(|(_, last)| *last != verdict) {
            runs.push((number as u32, verdict));
        }
    }
    runs
}

/// A binary search over the ranges: each node compares "this number or higher".
fn search(runs: &[(u32, FilterAction)]) -> Vec<sock_filter> {
    let [(_, verdict)] = runs else {
        let (low, high) = runs.split_at(runs.len() / 2);
        let below = search(low);
        let mut node = vec![jump_if_at_least(high[0].0, below.len())];
        node.extend(below);
        node.extend(search(high));
        return node;
    };
    match verdict {
        FilterAction::Answer(with) => vec![answer(*with)],
        FilterAction::Judge(arguments) => judge(*arguments),
    }
}

fn judge(arguments: ArgumentRule) -> Vec<sock_filter> {
    let refused = errno(libc::EPERM);
    let unknown_family = errno(libc::EAFNOSUPPORT);
    match arguments {
        ArgumentRule::NoNamespaces => none_of(0, NAMESPACE_FLAGS as u32),
        ArgumentRule::ReadOnlyOpen => none_of(2, WRITING_FLAGS),
        ArgumentRule::NoExecutable => none_of(2, libc::PROT_EXEC as u32),
        ArgumentRule::StandardInput => one_of(0, &[STDIN], ALLOW, vec![answer(refused)]),
        ArgumentRule::NoStandardInput => one_of(0, &[STDIN], refused, vec![answer(ALLOW)]),
        ArgumentRule::ReadFlags => one_of(1, &[libc::F_GETFL as u32], ALLOW, vec![answer(refused)]),
        ArgumentRule::InternetFamily => one_of(0, &FAMILIES[1..], ALLOW, vec![answer(unknown_family)]),
        ArgumentRule::NoTyping => one_of(1, &TYPING_IOCTLS, refused, vec![answer(ALLOW)]),
        ArgumentRule::PlainPersonality => one_of(0, &PERSONALITIES, ALLOW, vec![answer(refused)]),
        ArgumentRule::UnixPair => one_of(0, &FAMILIES[..1], ALLOW, vec![answer(unknown_family)]),
        ArgumentRule::KnownFamily => {
            let mut netlink = vec![jump_if_equal(libc::AF_NETLINK as u32, 0, 3), load(argument(2))];
            netlink.extend([jump_if_equal(NETLINK_ROUTE, 0, 1), answer(ALLOW), answer(unknown_family)]);
            one_of(0, &FAMILIES, ALLOW, netlink)
        }
    }
}

/// Refuses if an argument has one of these bits.
fn none_of(index: u32, bits: u32) -> Vec<sock_filter> {
    let any_of = instruction(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, bits, 0, 1);
    vec![load(argument(index)), any_of, answer(errno(libc::EPERM)), answer(ALLOW)]
}

/// Returns a verdict if an argument is one of these values; continues otherwise.
fn one_of(index: u32, values: &[u32], with: u32, otherwise: Vec<sock_filter>) -> Vec<sock_filter> {
    let mut code = vec![load(argument(index))];
    for value in values {
        code.extend([jump_if_equal(*value, 0, 1), answer(with)]);
    }
    code.extend(otherwise);
    code
}

/// The offset of the lower half of an argument in `seccomp_data` (little endian).
fn argument(index: u32) -> u32 {
    16 + 8 * index
}

fn load(offset: u32) -> sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

fn answer(with: u32) -> sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, with, 0, 0)
}

fn jump_if_equal(value: u32, then: u8, otherwise: u8) -> sock_filter {
    instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, then, otherwise)
}

/// Jumps over `skipped` instructions; the tables stay far below the 255 that a jump can reach (tested).
fn jump_if_at_least(value: u32, skipped: usize) -> sock_filter {
    instruction(
        libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K,
        value,
        u8::try_from(skipped).unwrap_or(u8::MAX),
        0,
    )
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Interprets a filter as the kernel would.
    fn run(arch: u32, number: u32, arguments: [u32; 3]) -> u32 {
        answer_of(&BODY, arch, number, arguments)
    }

    fn answer_of(tables: &Tables, arch: u32, number: u32, arguments: [u32; 3]) -> u32 {
        let program = SeccompFilter::of(tables).0;
        let (mut at, mut held) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            let jump = |yes: bool| usize::from(if yes { step.jt } else { step.jf });
            match u32::from(step.code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    held = match step.k {
                        0 => number,
                        4 => arch,
                        offset => arguments[(offset as usize - 16) / 8],
                    }
                }
                code if code == libc::BPF_RET | libc::BPF_K => return step.k,
                code if code == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => at += jump(held == step.k),
                code if code == libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K => at += jump(held >= step.k),
                code if code == libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K => {
                    at += jump(held & step.k != 0)
                }
                code => panic!("unknown instruction {code:#x}"),
            }
        }
    }

    /// Whether a filter of these tables lets a call through.
    pub(crate) fn passes(tables: &Tables, call: c_long, arguments: [u32; 3]) -> bool {
        answer_of(tables, ARCHITECTURE, call as u32, arguments) == ALLOW
    }

    fn check(call: c_long, arguments: [u32; 3], expected: u32) {
        assert_eq!(run(ARCHITECTURE, call as u32, arguments), expected, "call {call} with {arguments:x?}");
    }

    #[test]
    fn every_call_gets_the_answer_of_its_table() {
        let named =
            |groups: &[SyscallGroup], number| groups.iter().any(|group| group.calls.contains(&number));
        for number in (0..2048).filter(|number| JUDGED.iter().all(|(call, _)| call != number)) {
            let expected = match number {
                number if named(ALLOWED, number) => ALLOW,
                number if named(REFUSED, number) => errno(libc::EPERM),
                _ => errno(libc::ENOSYS),
            };
            check(number, [0; 3], expected);
        }
        assert_eq!(run(0x4000_0003, 0, [0; 3]), KILL, "32 bit");
        assert_eq!(run(ARCHITECTURE, 0x4000_0000, [0; 3]), errno(libc::ENOSYS), "x32");
    }

    #[test]
    fn arguments_decide_where_they_should() {
        let (refused, unknown) = (errno(libc::EPERM), errno(libc::EAFNOSUPPORT));
        check(libc::SYS_clone, [libc::SIGCHLD as u32, 0, 0], ALLOW);
        for bit in (0..32).filter(|bit| NAMESPACE_FLAGS & (1 << bit) != 0) {
            check(libc::SYS_clone, [1 << bit, 0, 0], refused);
        }
        check(libc::SYS_clone3, [0; 3], errno(libc::ENOSYS));
        check(libc::SYS_ioctl, [0, libc::TIOCGWINSZ as u32, 0], ALLOW);
        TYPING_IOCTLS.iter().for_each(|cmd| check(libc::SYS_ioctl, [0, *cmd, 0], refused));
        PERSONALITIES.iter().for_each(|value| check(libc::SYS_personality, [*value, 0, 0], ALLOW));
        check(libc::SYS_personality, [0x0040_0000, 0, 0], refused);
        FAMILIES.iter().for_each(|family| check(libc::SYS_socket, [*family, 1, 0], ALLOW));
        check(libc::SYS_socket, [libc::AF_NETLINK as u32, 3, 0], ALLOW);
        check(libc::SYS_socket, [libc::AF_NETLINK as u32, 3, 9], unknown);
        for family in [libc::AF_ALG, libc::AF_PACKET, libc::AF_VSOCK, libc::AF_BLUETOOTH] {
            check(libc::SYS_socket, [family as u32, 1, 0], unknown);
        }
        check(libc::SYS_socketpair, [libc::AF_UNIX as u32, 1, 0], ALLOW);
        check(libc::SYS_socketpair, [libc::AF_INET as u32, 1, 0], unknown);
    }

    #[test]
    fn no_jump_is_longer_than_the_kernel_can() {
        fn fits(runs: &[(u32, FilterAction)]) -> bool {
            let (low, high) = runs.split_at(runs.len() / 2);
            runs.len() < 2 || search(low).len() <= 255 && fits(low) && fits(high)
        }
        assert!(fits(&runs(&BODY)) && fits(&runs(&crate::egress_filter::TABLES)));
    }

    #[test]
    fn tables_do_not_overlap() {
        let flat = |groups: &[SyscallGroup]| {
            groups.iter().flat_map(|group| group.calls.to_vec()).collect::<Vec<_>>()
        };
        let (allowed, refused) = (flat(ALLOWED), flat(REFUSED));
        assert!(allowed.iter().all(|call| !refused.contains(call)));
        let mut unique = allowed.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), allowed.len());
        assert!([ALLOWED, REFUSED].concat_reasons().all(|why| !why.is_empty()));
    }

    trait GroupReasons {
        fn concat_reasons(&self) -> impl Iterator<Item = &'static str>;
    }

    impl GroupReasons for [&[SyscallGroup]; 2] {
        fn concat_reasons(&self) -> impl Iterator<Item = &'static str> {
            self.iter().flat_map(|groups| groups.iter().map(|group| group.why))
        }
    }

    #[test]
    fn every_new_namespace_flag_is_in_the_mask() {
        let flags = [
            libc::CLONE_NEWUSER,
            libc::CLONE_NEWNS,
            libc::CLONE_NEWPID,
            libc::CLONE_NEWNET,
            libc::CLONE_NEWIPC,
            libc::CLONE_NEWUTS,
            libc::CLONE_NEWCGROUP,
            0x80,
        ];
        assert_eq!(flags.iter().fold(0, |mask, flag| mask | *flag as u64), NAMESPACE_FLAGS);
    }
}
