//! Signals that are read from a descriptor instead of interrupting a thread.
//!
//! The runtime's own signal support runs a handler in any thread, which writes to a socket that the runtime then
//! reads until it is empty. Here one read is enough, and children inherit no handler that they must reset.
//!
//! Invariant: blocked signals are blocked for the calling thread and the threads that it starts, so [`Signals::take`]
//! must run before other threads exist. [`crate::spawn`] and the standard library give children an empty mask.

use std::{
    ffi::{c_int, c_long},
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use rustix::process::Signal;
use tokio::io::{Interest, unix::AsyncFd};

/// The length of a kernel signal set.
pub(crate) const MASK_LEN: c_long = 8;
const INFO_LEN: usize = size_of::<libc::signalfd_siginfo>();
/// Signals read at once: pending signals of one kind are merged, so there are few.
const AT_ONCE: usize = 4;

/// A set of signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalSet(u64);

impl SignalSet {
    /// A set of these signals.
    pub fn of(signals: &[Signal]) -> Self {
        Self(signals.iter().fold(0, |set, signal| set | bit(signal.as_raw())))
    }

    /// Adds a signal.
    pub fn and(self, signal: Signal) -> Self {
        Self(self.0 | bit(signal.as_raw()))
    }

    /// Whether two sets have a signal in common.
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

pub(crate) fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Changes the signal mask of the calling thread, and returns the old one.
pub(crate) fn set_mask(how: c_int, new: u64) -> u64 {
    let mut before: u64 = 0;
    let (new, old): (*const u64, *mut u64) = (&raw const new, &raw mut before);
    // SAFETY: both point to a kernel signal set of the length given; `old` may be written.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, c_long::from(how), new, old, MASK_LEN) };
    before
}

/// Runs a function while all signals are blocked for the calling thread and for children that it starts.
pub(crate) fn undisturbed<T>(act: impl FnOnce() -> T) -> T {
    let before = set_mask(libc::SIG_SETMASK, u64::MAX);
    let done = act();
    set_mask(libc::SIG_SETMASK, before);
    done
}

/// Blocked signals, read from a descriptor.
#[derive(Debug)]
pub struct Signals(AsyncFd<OwnedFd>);

impl Signals {
    /// Blocks the signals from now on; must be called within a runtime.
    pub fn take(set: SignalSet) -> io::Result<Self> {
        set_mask(libc::SIG_BLOCK, set.0);
        let wanted: *const u64 = &raw const set.0;
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set has the given length, and nothing is written.
        let made = unsafe { libc::syscall(libc::SYS_signalfd4, -1, wanted, MASK_LEN, flags) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created, so it has no other owner.
        let made = unsafe { OwnedFd::from_raw_fd(made as c_int) };
        crate::lazy_write_stream::watched(made, Interest::READABLE).map(Self)
    }

    /// Waits for the next signals.
    pub async fn next(&self) -> io::Result<SignalSet> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut infos = [0; AT_ONCE * INFO_LEN];
            let read = match rustix::io::read(self.0.get_ref(), &mut infos) {
                Ok(read) => read,
                Err(rustix::io::Errno::AGAIN) => 0,
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            if read < infos.len() {
                // The descriptor is empty: a signal that comes now makes it readable again.
                ready.clear_ready();
            }
            let number = |info: &[u8]| info.first_chunk().map_or(0, |number| u32::from_ne_bytes(*number));
            let came =
                infos[..read].chunks_exact(INFO_LEN).fold(0, |set, info| set | bit(number(info) as c_int));
            if came != 0 {
                return Ok(SignalSet(came));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends signals to the calling thread, which has them blocked.
    fn send(set: SignalSet) {
        let (process, thread) = (rustix::process::getpid(), rustix::thread::gettid());
        let signal = set.0.trailing_zeros() + 1;
        // SAFETY: takes numbers alone.
        unsafe { libc::syscall(libc::SYS_tgkill, process.as_raw_nonzero(), thread.as_raw_nonzero(), signal) };
    }

    #[test]
    fn what_comes_is_read_once_and_nothing_is_missed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (one, two) = (SignalSet::of(&[Signal::USR1]), SignalSet(bit(libc::SIGRTMIN())));
            let signals = Signals::take(SignalSet(one.0 | two.0)).unwrap();
            send(one);
            assert_eq!(signals.next().await.unwrap(), one);
            // More than one read returns: signals of this kind are not merged.
            for _ in 0..2 * AT_ONCE {
                send(two);
            }
            send(one);
            // The lower number comes first.
            assert_eq!(signals.next().await.unwrap(), SignalSet(one.0 | two.0));
            for _ in 0..2 {
                assert_eq!(signals.next().await.unwrap(), two);
            }
            let quiet = tokio::time::timeout(std::time::Duration::from_millis(20), signals.next()).await;
            assert!(quiet.is_err(), "{quiet:?} came although nothing was sent");
            send(one);
            assert_eq!(signals.next().await.unwrap(), one);
        });
    }
}
