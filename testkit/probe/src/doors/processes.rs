//! Processes, namespaces and System V and POSIX objects of the host.

use super::{behind, names};
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{self, ChildEnd, Errno, SyscallResult, call, open};
use crate::verdict::{ProbeOutcome, absent, broken, denied, judge, judge_more, reached};

const INIT: &[&str] = &["init"];
const PID: &[&str] = &["pid"];

pub const PROBES: &[Probe] = &behind(
    "processes",
    [
        Probe::host(
            "kernel-threads",
            "see kernel threads, which only the host's pid namespace has",
            kernel_threads,
        ),
        Probe::door("see-pid", "see a process of the host in /proc (comm= tells it from a namesake)", |c| {
            judge("stat", stat(&format!("/proc/{}/stat", c.arg("pid"))), &[]).of_the_named(c)
        })
        .needs(PID),
        Probe::door("see-comm", "see a process of the host by its name", see_comm).needs(&["comm"]),
        Probe::door("signal-pid", "may signal it (signal 0, which only asks)", |c| {
            on_pid(c, |pid| call!(libc::SYS_kill, pid, 0))
        })
        .needs(PID),
        Probe::door("queue-signal-pid", "may open a pidfd to it and signal it", |c| {
            on_pid(c, |pid| {
                let fd = call!(libc::SYS_pidfd_open, pid, 0).map(sys::own)?;
                call!(libc::SYS_pidfd_send_signal, std::os::fd::AsRawFd::as_raw_fd(&fd), 0, 0, 0)
            })
        })
        .needs(PID),
        Probe::door("prlimit-pid", "read its limits", |c| {
            let mut limit = [0u64; 2];
            on_pid(c, |pid| call!(libc::SYS_prlimit64, pid, libc::RLIMIT_NOFILE, 0, limit.as_mut_ptr()))
        })
        .needs(PID),
        Probe::door("ptrace-init", "trace INIT (seized, never stopped, let go at once)", |c| {
            on_init(c, |pid| call!(libc::SYS_ptrace, libc::PTRACE_SEIZE, pid, 0, 0), &[])
        })
        .needs(INIT),
        Probe::door("vm-read-init", "read the memory of INIT (at an address where nothing is)", |c| {
            on_init(c, |pid| vm(libc::SYS_process_vm_readv, pid), &[libc::EFAULT])
        })
        .needs(INIT),
        Probe::door("vm-write-init", "write the memory of INIT (at an address where nothing is)", |c| {
            on_init(c, |pid| vm(libc::SYS_process_vm_writev, pid), &[libc::EFAULT])
        })
        .needs(INIT),
        Probe::door("pidfd-getfd-init", "take a descriptor from INIT", |c| {
            on_init(c, take_descriptor, &[libc::EBADF])
        })
        .needs(INIT),
        Probe::door("setns-mnt-init", "enter the mount namespace of INIT", |c| enter(c, "mnt")).needs(INIT),
        Probe::door("setns-net-init", "enter the network namespace of INIT", |c| enter(c, "net")).needs(INIT),
        Probe::door("setns-pid-init", "enter the pid namespace of INIT", |c| enter(c, "pid")).needs(INIT),
        Probe::door("setns-ipc-init", "enter the IPC namespace of INIT", |c| enter(c, "ipc")).needs(INIT),
        Probe::door("setns-uts-init", "enter the UTS namespace of INIT", |c| enter(c, "uts")).needs(INIT),
        Probe::door("setns-cgroup-init", "enter the cgroup namespace of INIT", |c| enter(c, "cgroup"))
            .needs(INIT),
        // A process cannot enter its own user namespace again, and the kernel returns EINVAL before it checks
        // rights.
        Probe::user("setns", "the call itself is let through", |_| {
            judge("setns", call!(libc::SYS_setns, -1, 0), &[libc::EBADF])
        }),
        Probe::user("unshare-user", "nest a user namespace", |_| unshare(libc::CLONE_NEWUSER)),
        Probe::user("clone-user", "nest a user namespace with clone", clone_user),
        Probe::user("clone3-user", "nest a user namespace with clone3", clone3_user),
        Probe::host("unshare-mnt", "nest a mount namespace", |_| unshare(libc::CLONE_NEWNS)),
        Probe::host("unshare-net", "nest a network namespace", |_| unshare(libc::CLONE_NEWNET)),
        Probe::host("unshare-pid", "nest a pid namespace", |_| unshare(libc::CLONE_NEWPID)),
        Probe::host("unshare-ipc", "nest an IPC namespace", |_| unshare(libc::CLONE_NEWIPC)),
        Probe::host("unshare-uts", "nest a UTS namespace", |_| unshare(libc::CLONE_NEWUTS)),
        Probe::host("unshare-cgroup", "nest a cgroup namespace", |_| unshare(libc::CLONE_NEWCGROUP)),
        Probe::host("unshare-time", "nest a time namespace", |_| unshare(0x80)),
        Probe::host("set-hostname", "set the host name to what it is", set_hostname),
        Probe::door("sysv-shm", "the host's System V shared memory", |c| {
            sysv(c, "shm_key", libc::SYS_shmget)
        })
        .needs(&["shm_key"]),
        Probe::door("sysv-sem", "the host's System V semaphores", |c| sysv(c, "sem_key", libc::SYS_semget))
            .needs(&["sem_key"]),
        Probe::door("sysv-msg", "the host's System V queues", |c| sysv(c, "msg_key", libc::SYS_msgget))
            .needs(&["msg_key"]),
        Probe::door("posix-queue", "the host's POSIX message queue", |c| {
            let name = sys::c(c.arg("mq").trim_start_matches('/'));
            judge("mq_open", call!(libc::SYS_mq_open, name.as_ptr(), libc::O_RDONLY, 0, 0), &[])
        })
        .needs(&["mq"]),
        Probe::door("posix-shm", "the host's POSIX shared memory", |c| {
            judge("open", open(&format!("/dev/shm/{}", c.arg("shm_name")), libc::O_RDONLY).map(|_| 0), &[])
        })
        .needs(&["shm_name"]),
    ],
);

fn stat(path: &str) -> SyscallResult {
    std::fs::metadata(path).map(|_| 0).map_err(Errno::from)
}

fn kernel_threads(_: &ProbeCall<'_>) -> ProbeOutcome {
    match std::fs::read_to_string("/proc/2/comm") {
        Ok(name) if name.trim() == "kthreadd" => reached("process 2 is kthreadd"),
        Ok(name) => denied(format!("process 2 is {}", name.trim())),
        Err(_) if stat("/proc/self/stat").is_err() => absent("no /proc"),
        Err(error) => denied(format!("process 2: {}", Errno::from(error))),
    }
}

impl ProbeOutcome {
    /// The pid may belong to another process in this pid namespace; only the name identifies it.
    fn of_the_named(self, call: &ProbeCall<'_>) -> Self {
        let Some(wanted) = call.args.get("comm") else { return self };
        match std::fs::read_to_string(format!("/proc/{}/comm", call.arg("pid"))) {
            Ok(name) if name.trim() != wanted => denied(format!("that number is {} here", name.trim())),
            _ => self,
        }
    }
}

fn see_comm(call: &ProbeCall<'_>) -> ProbeOutcome {
    let seen = names("/proc").into_iter().filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let found: Vec<_> = seen.map(|pid| (std::fs::read_to_string(format!("/proc/{pid}/comm")), pid)).collect();
    match found.iter().find(|(name, _)| name.as_deref().is_ok_and(|n| n.trim() == call.arg("comm"))) {
        Some((_, pid)) => reached(format!("it is process {pid} here")),
        None if found.is_empty() => absent("no /proc, or an empty one"),
        None => denied(format!("{} processes, none of that name", found.len())),
    }
}

fn on_pid(call: &ProbeCall<'_>, act: impl FnOnce(i32) -> SyscallResult) -> ProbeOutcome {
    match call.number("pid") {
        Ok(pid) => judge_more("asked", act(pid), &[], &[libc::ESRCH]).of_the_named(call),
        Err(outcome) => outcome,
    }
}

fn on_init(call: &ProbeCall<'_>, act: impl FnOnce(i32) -> SyscallResult, past: &[i32]) -> ProbeOutcome {
    match call.number("init") {
        Ok(pid) => judge("asked", act(pid), past).missing_is_broken(),
        Err(outcome) => outcome,
    }
}

impl ProbeOutcome {
    /// The caller names INIT, so it must exist.
    fn missing_is_broken(self) -> Self {
        if self.detail.contains("ESRCH") { broken("there is no such process") } else { self }
    }
}

fn vm(number: libc::c_long, pid: i32) -> SyscallResult {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(0x1000), iov_len: 1 };
    call!(number, pid, &raw const local, 1, &raw const remote, 1, 0)
}

fn take_descriptor(pid: i32) -> SyscallResult {
    let fd = call!(libc::SYS_pidfd_open, pid, 0).map(sys::own)?;
    call!(libc::SYS_pidfd_getfd, std::os::fd::AsRawFd::as_raw_fd(&fd), 0, 0)
}

fn enter(call: &ProbeCall<'_>, kind: &str) -> ProbeOutcome {
    let namespace = match open(&format!("/proc/{}/ns/{kind}", call.arg("init")), libc::O_RDONLY) {
        Ok(namespace) => namespace,
        Err(error) => return judge("open", Err(error), &[]),
    };
    judge("setns", call!(libc::SYS_setns, std::os::fd::AsRawFd::as_raw_fd(&namespace), 0), &[])
}

/// ENOSPC and EUSERS are the errors of a limit of zero namespaces.
const FULL: &[i32] = &[libc::ENOSPC, libc::EUSERS];

fn unshare(flags: i32) -> ProbeOutcome {
    judge_more("unshare", call!(libc::SYS_unshare, flags), &[libc::EINVAL], FULL).unknown_is_absent()
}

impl ProbeOutcome {
    /// EINVAL here means a kernel without this kind of namespace.
    fn unknown_is_absent(self) -> Self {
        if self.detail.contains("EINVAL") { absent("this kernel has no such namespace") } else { self }
    }
}

fn clone_user(_: &ProbeCall<'_>) -> ProbeOutcome {
    cloned("clone", || call!(libc::SYS_clone, libc::CLONE_NEWUSER | libc::SIGCHLD, 0, 0, 0, 0))
}

fn clone3_user(_: &ProbeCall<'_>) -> ProbeOutcome {
    let mut arguments = [0u64; 8];
    arguments[0] = libc::CLONE_NEWUSER as u64;
    arguments[4] = libc::SIGCHLD as u64;
    cloned("clone3", || call!(libc::SYS_clone3, arguments.as_ptr(), size_of_val(&arguments)))
}

/// The new process ends at once; its existence is the answer.
fn cloned(what: &str, make: impl FnOnce() -> SyscallResult) -> ProbeOutcome {
    match make() {
        Ok(0) => sys::leave(0),
        Ok(pid) => match sys::reap(i32::try_from(pid).unwrap_or(-1)) {
            Ok(ChildEnd::Exit(0)) => reached(format!("{what} succeeded")),
            end => broken(format!("{what} made a child that ended oddly: {end:?}")),
        },
        Err(error) => judge_more(what, Err(error), &[], FULL),
    }
}

fn set_hostname(_: &ProbeCall<'_>) -> ProbeOutcome {
    let mut name = [0u8; 64];
    // SAFETY: the buffer is as long as the call is told.
    if unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) } != 0 {
        return broken("gethostname failed");
    }
    let length = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    judge("sethostname", call!(libc::SYS_sethostname, name.as_ptr(), length), &[])
}

fn sysv(call: &ProbeCall<'_>, key: &str, number: libc::c_long) -> ProbeOutcome {
    match call.number::<i32>(key) {
        // shmget and semget have a size before the flags, msgget has none; all are zero.
        Ok(key) => judge("get", call!(number, key, 0, 0), &[]),
        Err(outcome) => outcome,
    }
}
