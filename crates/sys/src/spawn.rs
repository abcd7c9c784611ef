//! Starts a process with given credentials and descriptors, and helpers that its parent needs.
//!
//! It does not use fork, because copying page tables costs more the more memory the caller has. The child here
//! borrows the caller's memory until its exec (`CLONE_VM | CLONE_VFORK`), so a start costs the same in a guest of any
//! size, and an error of the child is available as soon as the call returns.
//!
//! Invariant: between clone and exec the child makes raw system calls on data prepared before; it neither allocates,
//! locks, panics nor returns into the caller's frames.
//! Invariant: the child's signals stay blocked until its handlers are reset, so no handler of the caller ever runs in
//! it.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    sync::atomic::{AtomicI32, AtomicU64, Ordering},
};

use libc::{c_int, c_long, c_void};

use crate::{
    signals::{MASK_LEN, bit, set_mask, undisturbed},
    stack::GuardedStack,
};

/// The ids of the child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildCredentials {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
}

/// Whether the child has a controlling terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControllingTerminal {
    /// It has none.
    None,
    /// Its standard input becomes that terminal.
    Stdin,
}

/// The process to start. The child always leads a session and a process group of its own.
#[derive(Debug)]
pub struct SpawnCommand<'a> {
    /// The file to execute; no search is done.
    pub program: &'a CStr,
    /// Its arguments, its own name first.
    pub args: &'a [CString],
    /// Its environment, `NAME=value`.
    pub envs: &'a [CString],
    /// Its working directory.
    pub cwd: &'a CStr,
    /// Its ids; those of the caller if `None`.
    pub credentials: Option<&'a ChildCredentials>,
    /// Its standard input.
    pub stdin: BorrowedFd<'a>,
    /// Its standard output.
    pub stdout: BorrowedFd<'a>,
    /// Its standard error.
    pub stderr: BorrowedFd<'a>,
    /// Its controlling terminal.
    pub terminal: ControllingTerminal,
}

/// The step at which a start failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStep {
    /// Cloning the child.
    Clone,
    /// Creating a session.
    Session,
    /// Making the terminal the controlling one.
    Terminal,
    /// Installing standard input, output and error.
    Descriptors,
    /// Changing to the user's ids.
    Credentials,
    /// Entering the directory.
    Directory,
    /// Executing the program.
    Exec,
}

/// The reason why a process was not started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a process at step {step:?}")]
pub struct SpawnError {
    /// The failed step.
    pub step: SpawnStep,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

const FD_FIRST: c_int = 3;
const SIGNAL_MAX: c_int = 64;
/// A kernel `sigaction` of zeros is the default action; no architecture has a longer one.
const SIGACTION_DEFAULT: [u64; 8] = [0; 8];

/// A bit for each signal whose action in the caller may not be the default; all are set until [`look_at_signals`]
/// ran.
static UNUSUAL: AtomicU64 = AtomicU64::new(u64::MAX);

/// Starts a process and returns its pid after its exec.
///
/// # Errors
/// Exactly the kernel's error and its step; no child is left then.
pub fn spawn(command: &SpawnCommand<'_>) -> Result<u32, SpawnError> {
    let at = |step| move |source| SpawnError { step, source };
    let descriptors = [command.stdin, command.stdout, command.stderr];
    let held = descriptors.map(above_standard);
    let [stdin, stdout, stderr] = held;
    let held = [
        stdin.map_err(at(SpawnStep::Descriptors))?,
        stdout.map_err(at(SpawnStep::Descriptors))?,
        stderr.map_err(at(SpawnStep::Descriptors))?,
    ];
    let args = pointers(command.args);
    let envs = pointers(command.envs);
    let order = SpawnOrder {
        program: command.program.as_ptr(),
        args: args.as_ptr(),
        envs: envs.as_ptr(),
        cwd: command.cwd.as_ptr(),
        credentials: command.credentials.map_or(ptr::null(), ptr::from_ref),
        descriptors: [0, 1, 2]
            .map(|n: usize| held[n].as_ref().map_or(descriptors[n].as_raw_fd(), AsRawFd::as_raw_fd)),
        terminal: command.terminal,
        failed_step: AtomicI32::new(0),
        failed_errno: AtomicI32::new(0),
    };
    let stack = GuardedStack::take().map_err(at(SpawnStep::Clone))?;
    let started = start(&order, &stack);
    stack.give_back();
    let pid = started.map_err(at(SpawnStep::Clone))?;
    match order.failed_step.load(Ordering::Acquire) {
        0 => Ok(pid.unsigned_abs()),
        step => {
            reap(pid);
            let source = io::Error::from_raw_os_error(order.failed_errno.load(Ordering::Acquire));
            Err(SpawnError { step: step_of(step), source })
        }
    }
}

/// Finds the signals whose action is not the default, so that a child resets only those: resetting all of them takes
/// 20 µs.
///
/// Must be called again after another action was set.
pub fn look_at_signals() {
    let unusual = (1..=SIGNAL_MAX).filter(|signal| {
        let mut action = SIGACTION_DEFAULT;
        let place: *mut u64 = action.as_mut_ptr();
        // The handler is the first word, and zero is the default.
        call(libc::SYS_rt_sigaction, [(*signal).into(), 0, place as c_long, MASK_LEN]).is_err()
            || action[0] != 0
    });
    UNUSUAL.store(unusual.fold(0, |set, signal| set | bit(signal)), Ordering::Release);
}

/// Sends a signal to every process that the caller may signal, except itself; signal `0` only checks whether there is
/// one.
///
/// # Errors
/// `ESRCH` if there is no such process.
pub fn signal_everyone(signal: i32) -> io::Result<()> {
    // SAFETY: kill touches no memory of this process.
    if unsafe { libc::kill(-1, signal) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Keeps the memory of a process with few threads small: all threads share one heap, and freed memory goes back
/// early.
pub fn keep_heap_small() {
    // SAFETY: mallopt only sets parameters of the allocator; called before other threads run.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    // SAFETY: as above.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, 128 * 1024) };
    // SAFETY: as above. Pieces of streams (32 KiB to 256 KiB) stay on the heap: a map and unmap for each is slow.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 1024 * 1024) };
}

/// Returns free heap pages to the kernel.
pub fn trim_heap() {
    // SAFETY: malloc_trim takes the allocator's own locks and touches only free memory.
    unsafe { libc::malloc_trim(0) };
}

/// Everything that the child reads, prepared before it exists, and the two words of its result.
struct SpawnOrder {
    program: *const libc::c_char,
    args: *const *const libc::c_char,
    envs: *const *const libc::c_char,
    cwd: *const libc::c_char,
    credentials: *const ChildCredentials,
    descriptors: [RawFd; 3],
    terminal: ControllingTerminal,
    failed_step: AtomicI32,
    failed_errno: AtomicI32,
}

fn start(order: &SpawnOrder, stack: &GuardedStack) -> io::Result<c_int> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let order: *const SpawnOrder = order;
    undisturbed(|| {
        // SAFETY: `child` obeys the invariants above. CLONE_VFORK suspends this thread until the child has executed or
        // exited, so `order`, what it points to and `stack` outlive the child's use of them.
        let pid = unsafe { libc::clone(child, stack.top(), flags, order.cast_mut().cast()) };
        if pid < 0 { Err(io::Error::last_os_error()) } else { Ok(pid) }
    })
}

extern "C" fn child(order: *mut c_void) -> c_int {
    // SAFETY: `start` passes a pointer to an `SpawnOrder` that lives until this child has executed or exited.
    let order: &SpawnOrder = unsafe { &*order.cast::<SpawnOrder>() };
    let (step, errno) = become_program(order);
    order.failed_errno.store(errno, Ordering::Release);
    order.failed_step.store(step as c_int + 1, Ordering::Release);
    // SAFETY: ends the child without running anything of the caller's.
    unsafe { libc::_exit(127) }
}

/// Returns only on failure.
fn become_program(order: &SpawnOrder) -> (SpawnStep, c_int) {
    match try_to_become(order) {
        Err(failed) => failed,
        Ok(()) => (SpawnStep::Exec, libc::ENOEXEC),
    }
}

fn try_to_become(order: &SpawnOrder) -> Result<(), (SpawnStep, c_int)> {
    let at = |step| move |errno| (step, errno);
    let unusual = UNUSUAL.load(Ordering::Acquire);
    for signal in (1..=SIGNAL_MAX).filter(|signal| unusual & bit(*signal) != 0) {
        let action: *const u64 = SIGACTION_DEFAULT.as_ptr();
        // The two signals that cannot be set return EINVAL, which can be ignored.
        let _ = call(libc::SYS_rt_sigaction, [signal.into(), action as c_long, 0, MASK_LEN]);
    }
    call(libc::SYS_setsid, [0; 4]).map_err(at(SpawnStep::Session))?;
    for (target, fd) in order.descriptors.iter().enumerate() {
        call(libc::SYS_dup3, [c_long::from(*fd), target as c_long, 0, 0])
            .map_err(at(SpawnStep::Descriptors))?;
    }
    call(libc::SYS_close_range, [c_long::from(FD_FIRST), c_long::from(c_int::MAX), 0, 0])
        .map_err(at(SpawnStep::Descriptors))?;
    if order.terminal == ControllingTerminal::Stdin {
        call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as c_long, 0, 0]).map_err(at(SpawnStep::Terminal))?;
    }
    take_credentials(order).map_err(at(SpawnStep::Credentials))?;
    call(libc::SYS_chdir, [order.cwd as c_long, 0, 0, 0]).map_err(at(SpawnStep::Directory))?;
    set_mask(libc::SIG_SETMASK, 0);
    let exec = [order.program as c_long, order.args as c_long, order.envs as c_long, 0];
    call(libc::SYS_execve, exec).map_err(at(SpawnStep::Exec))
}

fn take_credentials(order: &SpawnOrder) -> Result<(), c_int> {
    if order.credentials.is_null() {
        return Ok(());
    }
    // SAFETY: not null, and made by `spawn` from a reference that outlives the child.
    let who = unsafe { &*order.credentials };
    // Raw calls: the C library's would signal the caller's other threads, which this child does not have.
    call(libc::SYS_setgroups, [who.groups.len() as c_long, who.groups.as_ptr() as c_long, 0, 0])?;
    let (uid, gid) = (c_long::from(who.uid), c_long::from(who.gid));
    call(libc::SYS_setresgid, [gid, gid, gid, 0])?;
    call(libc::SYS_setresuid, [uid, uid, uid, 0])
}

/// One raw system call. Private: every caller passes numbers, or pointers into the `SpawnOrder` or its own frame.
fn call(number: c_long, args: [c_long; 4]) -> Result<(), c_int> {
    // SAFETY: errno is that of the suspended parent's thread, whose memory the child borrows; no code reads it
    // meanwhile. The callers above pass arguments valid for their calls; the one that writes to memory passes its own.
    let answer = unsafe { libc::syscall(number, args[0], args[1], args[2], args[3]) };
    if answer >= 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL))
}

fn reap(pid: c_int) {
    let mut status = 0;
    // SAFETY: waits for our own child, which has exited; `status` may be written.
    while unsafe { libc::waitpid(pid, &raw mut status, 0) } < 0 {
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            break;
        }
    }
}

/// A duplicate above the standard descriptors if `fd` is one of them, so that no `dup3` overwrites a source.
fn above_standard(fd: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    if fd.as_raw_fd() >= FD_FIRST {
        return Ok(None);
    }
    rustix::io::fcntl_dupfd_cloexec(fd, FD_FIRST).map(Some).map_err(Into::into)
}

fn pointers(texts: &[CString]) -> Vec<*const libc::c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

fn step_of(number: c_int) -> SpawnStep {
    const STEPS: [SpawnStep; 7] = [
        SpawnStep::Clone,
        SpawnStep::Session,
        SpawnStep::Terminal,
        SpawnStep::Descriptors,
        SpawnStep::Credentials,
        SpawnStep::Directory,
        SpawnStep::Exec,
    ];
    let index = usize::try_from(number - 1).unwrap_or(0);
    STEPS.get(index).copied().unwrap_or(SpawnStep::Clone)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read, os::fd::AsFd};

    use super::*;

    fn c(text: &str) -> CString {
        CString::new(text).unwrap()
    }

    fn run(program: &str, args: &[&str], cwd: &str) -> Result<(u32, String), SpawnError> {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = File::open("/dev/null").unwrap();
        let args: Vec<CString> = args.iter().map(|arg| c(arg)).collect();
        let pid = spawn(&SpawnCommand {
            program: &c(program),
            args: &args,
            envs: &[c("A=b")],
            cwd: &c(cwd),
            credentials: None,
            stdin: null.as_fd(),
            stdout: writer.as_fd(),
            stderr: writer.as_fd(),
            terminal: ControllingTerminal::None,
        })?;
        drop(writer);
        let mut output = String::new();
        File::from(reader).read_to_string(&mut output).unwrap();
        reap(c_int::try_from(pid).unwrap());
        Ok((pid, output))
    }

    #[test]
    fn a_child_leads_its_session_and_inherits_nothing() {
        // SIGPIPE is ignored in every Rust program; the child must not inherit that.
        let script = "echo $A $PWD; ls /proc/self/fd | wc -l; cut -d' ' -f1,5,6 /proc/$$/stat; exec grep -E 'Sig(Blk|Ign)' /proc/self/status";
        let (pid, output) = run("/bin/sh", &["sh", "-c", script], "/usr").unwrap();
        let zeros = "0".repeat(16);
        assert_eq!(output, format!("b /usr\n4\n{pid} {pid} {pid}\nSigBlk:\t{zeros}\nSigIgn:\t{zeros}\n"));
    }

    #[test]
    fn a_child_has_no_action_of_its_parents_that_was_looked_at() {
        extern "C" fn nothing(_: c_int) {}
        let handler = nothing as extern "C" fn(c_int) as libc::sighandler_t;
        for (signal, action) in [(libc::SIGUSR1, libc::SIG_IGN), (libc::SIGUSR2, handler)] {
            // SAFETY: no other test code uses these two signals; a handler that does nothing may run at any time.
            unsafe { libc::signal(signal, action) };
        }
        look_at_signals();
        let unusual = UNUSUAL.load(Ordering::Acquire);
        for (signal, is_unusual) in
            [(libc::SIGUSR1, true), (libc::SIGUSR2, true), (libc::SIGPIPE, true), (libc::SIGWINCH, false)]
        {
            assert_eq!(unusual & bit(signal) != 0, is_unusual, "{signal}");
        }
        let (_, output) = run("/bin/grep", &["grep", "SigIgn", "/proc/self/status"], "/").unwrap();
        assert_eq!(output, format!("SigIgn:\t{}\n", "0".repeat(16)));
        // Positive control: an action that was not looked at is inherited.
        UNUSUAL.store(0, Ordering::Release);
        let (_, output) = run("/bin/grep", &["grep", "SigIgn", "/proc/self/status"], "/").unwrap();
        assert_ne!(output, format!("SigIgn:\t{}\n", "0".repeat(16)));
        UNUSUAL.store(u64::MAX, Ordering::Release);
    }

    #[test]
    fn errors_are_those_of_the_kernel_and_leave_no_child() {
        let fail = |program: &str, cwd: &str| {
            let error = run(program, &["x"], cwd).unwrap_err();
            (error.step, error.source.raw_os_error().unwrap())
        };
        assert_eq!(fail("/no/such", "/"), (SpawnStep::Exec, libc::ENOENT));
        assert_eq!(fail("/etc", "/"), (SpawnStep::Exec, libc::EACCES));
        assert_eq!(fail("/bin/sh", "/no/such"), (SpawnStep::Directory, libc::ENOENT));
    }
}
