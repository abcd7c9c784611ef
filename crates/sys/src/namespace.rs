//! Namespaces: forking into new ones, id maps, host name, loopback.

use std::{
    fmt::Write as _,
    io,
    os::fd::{AsRawFd, BorrowedFd},
    path::Path,
};

pub use rustix::process::Pid;
use rustix::{
    ioctl::{Opcode, Setter},
    net::{AddressFamily, SocketFlags, SocketType},
};

/// The namespaces that a Body's first process is forked into. Two more come later: a cgroup namespace, which needs
/// the cgroup first, and the network namespace ([`unshare_network`]), which takes longer to create than all others
/// together.
pub const FORKED: i32 =
    libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;

/// `libc` defines it in a type that is too narrow.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A user namespace.
pub const USER: i32 = libc::CLONE_NEWUSER;

/// A mount namespace; with a user namespace, whose root may mount in it.
pub const MOUNTS: i32 = libc::CLONE_NEWNS;

/// Parent and child share one table of descriptors until one of them calls [`own_descriptors`].
pub const SHARE_DESCRIPTORS: i32 = libc::CLONE_FILES;

/// Gives the caller its own copy of the descriptor table.
pub fn own_descriptors() -> io::Result<()> {
    unshare(libc::CLONE_FILES)
}

/// The side of a fork.
#[derive(Debug)]
pub enum ForkResult {
    /// The parent; it gets the child's pid.
    Parent(Pid),
    /// The child.
    Child,
}

/// Forks into new namespaces and, if one is given, straight into a v2 cgroup.
///
/// Fails unless the caller has a single thread: the child continues with ordinary code, and a lock that another
/// thread held would stay locked in its copy of memory.
pub fn fork_into(namespaces: i32, cgroup: Option<BorrowedFd<'_>>) -> io::Result<ForkResult> {
    if !crate::proc::is_only_thread()? {
        return Err(io::Error::other("only a process with one thread may fork into namespaces"));
    }
    // SAFETY: clone_args is plain data for which zeroes mean "nothing asked for".
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = namespaces as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: one thread, no stack given, so this is fork(2) with namespaces; parent and child both go on from here
    // on their own copy of memory. The structure outlives the call and its size is passed along.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of::<libc::clone_args>()) };
    match i32::try_from(pid) {
        Ok(0) => Ok(ForkResult::Child),
        Ok(pid) if pid > 0 => {
            Pid::from_raw(pid).map(ForkResult::Parent).ok_or_else(|| io::ErrorKind::Other.into())
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Forks without namespaces, for a caller whose seccomp filter refuses `clone3`. Fails unless the caller has a single
/// thread.
pub fn fork() -> io::Result<ForkResult> {
    if !crate::proc::is_only_thread()? {
        return Err(io::Error::other("only a process with one thread may fork"));
    }
    // SAFETY: one thread, so no lock in the child's copy of memory is held by another thread.
    match unsafe { libc::fork() } {
        0 => Ok(ForkResult::Child),
        pid if pid > 0 => {
            Pid::from_raw(pid).map(ForkResult::Parent).ok_or_else(|| io::ErrorKind::Other.into())
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Moves the caller into a new cgroup namespace, rooted at its current cgroup.
pub fn unshare_cgroup() -> io::Result<()> {
    unshare(libc::CLONE_NEWCGROUP)
}

/// Moves the caller into a new network namespace.
pub fn unshare_network() -> io::Result<()> {
    unshare(libc::CLONE_NEWNET)
}

/// Moves the caller into a user namespace, in which it then has every capability.
pub fn enter_users(namespace: BorrowedFd<'_>) -> io::Result<()> {
    enter(namespace, libc::CLONE_NEWUSER)
}

/// Moves the caller into a network namespace.
pub fn enter_network(namespace: BorrowedFd<'_>) -> io::Result<()> {
    enter(namespace, libc::CLONE_NEWNET)
}

fn enter(namespace: BorrowedFd<'_>, kind: i32) -> io::Result<()> {
    // SAFETY: setns takes a descriptor, which is open, and the kind it must be of.
    if unsafe { libc::setns(namespace.as_raw_fd(), kind) } < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn unshare(flags: i32) -> io::Result<()> {
    // SAFETY: unshare takes flags only; callers are single-threaded, as user namespaces demand of them.
    if unsafe { libc::unshare(flags) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// One line of an id map.
#[derive(Debug, Clone, Copy)]
pub struct IdMapLine {
    /// First id inside.
    pub inside: u32,
    /// First id outside.
    pub outside: u32,
    /// How many ids.
    pub count: u32,
}

/// Formats an id map as the kernel reads it.
pub fn map_text(lines: &[IdMapLine]) -> String {
    lines.iter().fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "{} {} {}", line.inside, line.outside, line.count);
        text
    })
}

/// Writes the id maps of a process in a new user namespace.
///
/// Without privileges, only the caller's own id can be mapped, and only after setgroups is denied.
pub fn write_maps(pid: Pid, users: &[IdMapLine], groups: &[IdMapLine], privileged: bool) -> io::Result<()> {
    let dir = format!("/proc/{}", pid.as_raw_nonzero());
    let write = |name: &str, text: &str| crate::fd::write_kernel(&Path::new(&dir).join(name), text);
    if !privileged {
        write("setgroups", "deny")?;
    }
    write("uid_map", &map_text(users))?;
    write("gid_map", &map_text(groups))
}

/// Changes all ids of the caller for good, and drops supplementary groups on request.
pub fn become_ids(user: u32, group: u32, drop_groups: bool) -> io::Result<()> {
    // Raw calls, because libc's change all threads by signals, and callers have a single one.
    if drop_groups {
        // SAFETY: an empty list is never read through the pointer.
        check(unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) })?;
    }
    // SAFETY: takes three numbers.
    check(unsafe { libc::syscall(libc::SYS_setresgid, group, group, group) })?;
    // SAFETY: takes three numbers.
    check(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) })
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Brings the loopback interface of the caller's network namespace up.
pub fn loopback_up() -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    // SAFETY: ifreq is plain data for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo\0") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: SIOCSIFFLAGS reads an ifreq, and nothing else.
    let raise = unsafe { Setter::<{ libc::SIOCSIFFLAGS as Opcode }, libc::ifreq>::new(request) };
    // SAFETY: as above.
    Ok(unsafe { rustix::ioctl::ioctl(&socket, raise) }?)
}
