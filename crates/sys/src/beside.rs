//! A process that works beside its parent on the same memory, for one short task.
//!
//! Why not fork: the copy costs the parent a twentieth of a millisecond, then a page fault for every page it writes to
//! again, and the child one for every page it so much as runs through.
//!
//! Invariant: the child has a stack of its own and touches nothing else of the memory but what it is given to read: it
//! makes system calls by `rustix`, which keeps no state, and neither allocates, locks, panics nor uses the C library,
//! whose `errno` is the parent's.
//! Invariant: stack and order live until the child is gone.
//! Trust: it stays in the caller's pid namespace, so nobody in a Body can name it.

use std::{
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    ptr,
};

use libc::{c_int, c_void};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    process::{Pid, WaitOptions},
    thread::{LinkNameSpaceType, UnshareFlags},
};

const STACK_LEN: usize = 64 * 1024;
const GUARD_LEN: usize = 4096;
/// Polite towards whoever is waited for.
const NICE: i32 = 5;

/// Makes a network namespace in the user namespace `users`, brings its loopback up, and sends it to whoever takes it
/// from the other end of `send`. Then writes `word` to where that is wanted.
pub fn make_network(
    users: BorrowedFd<'_>,
    send: BorrowedFd<'_>,
    word: Option<(BorrowedFd<'_>, u8)>,
) -> io::Result<Beside> {
    let word = word.map(|(to, word)| (to.as_raw_fd(), word));
    let order = Order { users: users.as_raw_fd(), send: send.as_raw_fd(), word };
    let stack = Stack::new(order)?;
    let flags = libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: `child` obeys the invariants above, on a stack that is unmapped only after the child is gone. It has a
    // copy of the table of descriptors, so those it is given stay open in it.
    let pid = unsafe { libc::clone(child, stack.top(), flags, stack.order().cast()) };
    match Pid::from_raw(pid).filter(|_| pid > 0) {
        Some(pid) => Ok(Beside { pid, stack: ManuallyDrop::new(stack) }),
        None => Err(io::Error::last_os_error()),
    }
}

/// A process that works beside the caller. Dropped without having been waited for, its stack stays mapped.
#[derive(Debug)]
pub struct Beside {
    pid: Pid,
    stack: ManuallyDrop<Stack>,
}

impl Beside {
    /// Its process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits for its end, and says how its task went.
    pub fn wait(self) -> io::Result<()> {
        let ended = loop {
            match rustix::process::waitpid(Some(self.pid), WaitOptions::empty()) {
                Err(Errno::INTR) => {}
                ended => break ended?,
            }
        };
        drop(ManuallyDrop::into_inner(self.stack));
        match ended.and_then(|(_, status)| status.exit_status()) {
            Some(0) => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Err(io::Error::other("it was killed")),
        }
    }
}

/// What the child reads.
#[derive(Debug, Clone, Copy)]
struct Order {
    users: RawFd,
    send: RawFd,
    word: Option<(RawFd, u8)>,
}

extern "C" fn child(order: *mut c_void) -> c_int {
    // SAFETY: an `Order` at the upper end of the stack this runs on, written before and by nobody since.
    let order = unsafe { *order.cast::<Order>() };
    match network(order) {
        Ok(()) => 0,
        Err(errno) => errno.raw_os_error(),
    }
}

fn network(order: Order) -> Result<(), Errno> {
    // SAFETY: the parent held both open when this process was made with a copy of its table.
    let users = unsafe { BorrowedFd::borrow_raw(order.users) };
    // SAFETY: as above.
    let send = unsafe { BorrowedFd::borrow_raw(order.send) };
    let _ = rustix::process::nice(NICE);
    rustix::thread::move_into_link_name_space(users, Some(LinkNameSpaceType::User))?;
    // SAFETY: only the namespace changes; descriptors and memory stay as they are.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
    crate::namespace::raise_loopback()?;
    let own = rustix::fs::open(c"/proc/self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    crate::fd::send(send, own.as_fd()).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    if let Some((to, word)) = order.word {
        // SAFETY: as above. Nobody may be there to hear it, and the signal for that is ignored or ends this process only.
        let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(to) }, &[word]);
    }
    Ok(())
}

/// A stack with a page below it that faults, and the order at its upper end.
#[derive(Debug)]
struct Stack {
    base: *mut c_void,
}

impl Stack {
    fn new(order: Order) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses aliases nothing.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), STACK_LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self { base };
        // SAFETY: the first page of the mapping just made, which nobody uses.
        if unsafe { libc::mprotect(base, GUARD_LEN, libc::PROT_NONE) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: within the mapping, aligned as its end is, and not the stack's, which begins below it.
        unsafe { stack.order().write(order) };
        Ok(stack)
    }

    fn order(&self) -> *mut Order {
        self.top().cast()
    }

    /// Where a stack that grows down begins: as the processor wants it aligned, with room for an order above.
    fn top(&self) -> *mut c_void {
        // SAFETY: within the mapping.
        unsafe { self.base.add(STACK_LEN - 64) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the whole mapping made in `new`; its only user, the child, is gone.
        unsafe { libc::munmap(self.base, STACK_LEN) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn how_it_went_is_told() {
        // Nobody may enter the user namespace it is in already.
        let users = File::open("/proc/self/ns/user").unwrap();
        let (_take, send) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let beside = make_network(users.as_fd(), send.as_fd(), None).unwrap();
        let pid = beside.pid();
        assert_eq!(beside.wait().unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert!(rustix::process::test_kill_process(pid).is_err(), "it is buried");
    }
}
