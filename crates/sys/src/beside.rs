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
};

use libc::{c_int, c_void};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    process::{Pid, WaitOptions},
    thread::{CpuSet, LinkNameSpaceType, UnshareFlags},
};

use crate::stack::Stack;

/// Polite towards whoever is waited for.
const NICE: i32 = 5;

/// Makes a network namespace in the user namespace `users`, brings its loopback up, and sends it to whoever takes it
/// from the other end of `send`. Then writes `word` to where that is wanted. `place` is where it works.
pub fn make_network(
    users: BorrowedFd<'_>,
    send: BorrowedFd<'_>,
    word: Option<(BorrowedFd<'_>, u8)>,
    place: Option<CpuSet>,
) -> io::Result<Beside> {
    let word = word.map(|(to, word)| (to.as_raw_fd(), word));
    let order = Order { users: users.as_raw_fd(), send: send.as_raw_fd(), word, place };
    let stack = Stack::new()?;
    let top = upper_end(&stack);
    // SAFETY: within the mapping, aligned as its end is, and not the stack's, which begins below it.
    unsafe { top.write(order) };
    let flags = libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: `child` obeys the invariants above, on a stack that is unmapped only after the child is gone. It has a
    // copy of the table of descriptors, so those it is given stay open in it.
    let pid = unsafe { libc::clone(child, top.cast(), flags, top.cast()) };
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
    place: Option<CpuSet>,
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
    // Its parent says so, too, but may have been made to wait for it before.
    if let Some(place) = order.place {
        let _ = rustix::thread::sched_setaffinity(None, &place);
    }
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

/// Room for an order above a stack, and the stack as the processor wants it aligned.
const ORDER_LEN: usize = 256;
const _: () = assert!(size_of::<Order>() <= ORDER_LEN);

/// Where both of them begin: the order upwards, the stack down.
fn upper_end(stack: &Stack) -> *mut Order {
    // SAFETY: within the mapping, which is longer than that.
    unsafe { stack.top().sub(ORDER_LEN) }.cast()
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
        let beside = make_network(users.as_fd(), send.as_fd(), None, None).unwrap();
        let pid = beside.pid();
        assert_eq!(beside.wait().unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert!(rustix::process::test_kill_process(pid).is_err(), "it is buried");
    }
}
