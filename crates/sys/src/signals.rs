//! Signals that are read, instead of interrupting whoever they come to.
//!
//! Why not the runtime's own: there a handler runs on top of whatever its thread is doing and writes to a socket, which the
//! runtime then reads until it is empty. Here it is one read, and children have no handler to be rid of.
//!
//! Invariant: what is taken is held back from the thread that takes it and from threads that it starts, so it is to be
//! taken before there are others. Children are given an empty mask by [`crate::spawn`], and by the standard library.

use std::{
    ffi::{c_int, c_long},
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use rustix::process::Signal;
use tokio::io::{Interest, unix::AsyncFd};

/// How long a set is, as the kernel has it.
pub(crate) const MASK_LEN: c_long = 8;
const INFO_LEN: usize = size_of::<libc::signalfd_siginfo>();
/// How many are read at once: those that come while others wait to be read are one, so there are few.
const AT_ONCE: usize = 4;

/// A set of signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalSet(u64);

impl SignalSet {
    /// Of these.
    pub fn of(signals: &[Signal]) -> Self {
        Self(signals.iter().fold(0, |set, signal| set | bit(signal.as_raw())))
    }

    /// These, and one more.
    pub fn and(self, signal: Signal) -> Self {
        Self(self.0 | bit(signal.as_raw()))
    }

    /// Whether the two have one in common.
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

pub(crate) fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Changes what is held back from the calling thread, and gives what was before.
pub(crate) fn set_mask(how: c_int, new: u64) -> u64 {
    let mut before: u64 = 0;
    let (new, old): (*const u64, *mut u64) = (&raw const new, &raw mut before);
    // SAFETY: both point to a kernel signal set of the length given; `old` may be written.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, c_long::from(how), new, old, MASK_LEN) };
    before
}

/// Does something while no signal comes to the calling thread, nor to whomever it makes meanwhile.
pub(crate) fn undisturbed<T>(act: impl FnOnce() -> T) -> T {
    let before = set_mask(libc::SIG_SETMASK, u64::MAX);
    let done = act();
    set_mask(libc::SIG_SETMASK, before);
    done
}

/// Signals that were taken.
#[derive(Debug)]
pub struct Signals(AsyncFd<OwnedFd>);

impl Signals {
    /// Takes them from now on; to be called within a runtime.
    pub fn take(set: SignalSet) -> io::Result<Self> {
        set_mask(libc::SIG_BLOCK, set.0);
        let wanted: *const u64 = &raw const set.0;
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set is as long as is said, and nothing is written.
        let made = unsafe { libc::syscall(libc::SYS_signalfd4, -1, wanted, MASK_LEN, flags) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, and owned by nobody yet.
        let made = unsafe { OwnedFd::from_raw_fd(made as c_int) };
        crate::lazy_write_stream::watched(made, Interest::READABLE).map(Self)
    }

    /// Those that came next.
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
                // None is left: one that comes now is told of anew.
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

    /// To the calling thread, which has them held back.
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
            // More than are read at once: a signal of this kind is one each time it is sent.
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
