//! The primitives of every probe: a raw system call, a file, a child.

use std::ffi::CString;
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The kernel's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// The result of one system call.
pub type SyscallResult = Result<i64, Errno>;

/// `call!(number, arguments…)`: a raw system call; integers and pointers are passed as they are.
macro_rules! call {
    ($number:expr $(, $argument:expr)* $(,)?) => { $crate::sys::raw($number, &[$($crate::sys::SyscallArg::word($argument)),*]) };
}
pub(crate) use call;

/// A value that fits into an argument register.
pub trait SyscallArg {
    fn word(self) -> usize;
}

macro_rules! words {
    ($($kind:ty)*) => { $(impl SyscallArg for $kind {
        fn word(self) -> usize {
            self as usize
        }
    })* };
}
// Signed numbers keep their sign: -1 fills the register.
words!(i32 i64 u32 u64 usize);

impl<T> SyscallArg for *const T {
    fn word(self) -> usize {
        self.expose_provenance()
    }
}

impl<T> SyscallArg for *mut T {
    fn word(self) -> usize {
        self.expose_provenance()
    }
}

/// One system call, without any wrapper.
///
/// Not a safe interface in general. Inside this program every caller passes numbers, or pointers to buffers
/// that outlive the call and are as long as the call is told, and no caller changes this process's mappings.
pub fn raw(number: libc::c_long, arguments: &[usize]) -> SyscallResult {
    let mut six = [0usize; 6];
    for (slot, argument) in six.iter_mut().zip(arguments) {
        *slot = *argument;
    }
    let [a, b, c, d, e, f] = six;
    // SAFETY: see above; the kernel checks each pointer and answers EFAULT for a bad one.
    let answer = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if answer == -1 { Err(Errno::last()) } else { Ok(answer) }
}

/// A path or name as a C string. A text with a NUL names nothing, so it becomes the empty name.
pub fn c(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

/// Opens a file; never as a controlling terminal, never blocking, never inherited.
pub fn open(path: &str, flags: i32) -> Result<OwnedFd, Errno> {
    let path = c(path);
    let flags = flags | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
    call!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o600).map(own)
}

/// Takes ownership of a descriptor that a call just returned.
pub fn own(fd: i64) -> OwnedFd {
    // SAFETY: the kernel gave this descriptor to us a moment ago, and nobody else has its number.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}

/// A pipe: the end to read, the end to write.
pub fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let mut ends = [0i32; 2];
    call!(libc::SYS_pipe2, ends.as_mut_ptr(), libc::O_CLOEXEC)?;
    let [read, write] = ends;
    Ok((own(read.into()), own(write.into())))
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildEnd {
    Exit(i32),
    Signal(i32),
}

/// The side of a fork.
pub enum ForkSide {
    Child,
    Parent(i32),
}

/// Forks. This program has one thread, so the child may do whatever the parent may.
pub fn fork() -> Result<ForkSide, Errno> {
    // SAFETY: single-threaded, so no lock is held by a thread that the child lacks.
    match unsafe { libc::fork() } {
        -1 => Err(Errno::last()),
        0 => Ok(ForkSide::Child),
        pid => Ok(ForkSide::Parent(pid)),
    }
}

/// Ends this process at once, without destructors.
pub fn leave(status: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(status) }
}

/// Waits for one child and reaps it.
pub fn reap(pid: i32) -> Result<ChildEnd, Errno> {
    let mut status = 0;
    loop {
        // SAFETY: `status` outlives the call.
        match unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) } {
            -1 if Errno::last() == Errno(libc::EINTR) => {}
            -1 => return Err(Errno::last()),
            _ if libc::WIFSIGNALED(status) => return Ok(ChildEnd::Signal(libc::WTERMSIG(status))),
            _ => return Ok(ChildEnd::Exit(libc::WEXITSTATUS(status))),
        }
    }
}

/// Runs `work` in a child of its own, so that what it changes or dies of stays there.
pub fn in_child(work: impl FnOnce() -> i32) -> Result<ChildEnd, Errno> {
    match fork()? {
        ForkSide::Child => {
            die_with_parent();
            leave(work())
        }
        ForkSide::Parent(pid) => reap(pid),
    }
}

/// Asks the kernel to end this process when its parent ends.
pub fn die_with_parent() {
    // A sandbox that refuses this only delays the cleanup.
    let _ = call!(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
}

/// `prctl` with one argument.
pub fn prctl(option: i32, argument: usize) -> SyscallResult {
    call!(libc::SYS_prctl, option, argument, 0, 0, 0)
}

/// The soft and hard limit of one resource.
pub fn rlimit(resource: libc::__rlimit_resource_t) -> Result<libc::rlimit64, Errno> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    let none = std::ptr::null::<u8>();
    call!(libc::SYS_prlimit64, 0, resource, none, &raw mut limit).map(|_| limit)
}

/// Raises the soft limit to the hard one.
pub fn lift(resource: libc::__rlimit_resource_t) {
    if let Ok(limit) = rlimit(resource) {
        let lifted = libc::rlimit64 { rlim_cur: limit.rlim_max, rlim_max: limit.rlim_max };
        // If it may not be raised, the probe reaches the soft limit and reports that.
        let _ = call!(libc::SYS_prlimit64, 0, resource, &raw const lifted, std::ptr::null::<u8>());
    }
}

impl Errno {
    /// The errno of the last call that failed.
    pub fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(0))
    }
}

macro_rules! names {
    ($value:expr; $($name:ident)*) => {
        match $value { $(libc::$name => Some(stringify!($name)),)* _ => None }
    };
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = names!(self.0; EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES
            EFAULT ENOTBLK EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG ENOSPC
            ESPIPE EROFS EMLINK EPIPE EDOM ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS ENOTEMPTY ELOOP ENOMSG EIDRM
            ENODATA EPROTO EBADMSG EOVERFLOW EUSERS ENOTSOCK EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT ESOCKTNOSUPPORT
            EOPNOTSUPP EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN ENETUNREACH ECONNRESET ENOBUFS EISCONN ENOTCONN
            ETIMEDOUT ECONNREFUSED EHOSTUNREACH EALREADY EINPROGRESS ESTALE EDQUOT ENOKEY EKEYEXPIRED EKEYREVOKED);
        match name {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}
