//! The stack of a child that borrows its parent's memory.

use std::{
    io, ptr,
    sync::{Mutex, PoisonError},
};

use libc::c_void;

const STACK_LEN: usize = 64 * 1024;
const GUARD_LEN: usize = 4096;

/// A stack with a guard page below it, for such a child.
#[derive(Debug)]
pub struct GuardedStack {
    base: *mut c_void,
}

// SAFETY: it owns its mapping, which belongs to no thread.
unsafe impl Send for GuardedStack {}

/// A used stack that is free again: mapping and unmapping one for each start takes 10 µs.
static SPARE: Mutex<Option<GuardedStack>> = Mutex::new(None);

impl GuardedStack {
    /// Takes a free stack; the caller gives it back.
    pub fn take() -> io::Result<Self> {
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).take();
        spare.map_or_else(Self::new, Ok)
    }

    /// Gives a stack back after the child has executed or exited.
    pub fn give_back(self) {
        *SPARE.lock().unwrap_or_else(PoisonError::into_inner) = Some(self);
    }

    /// Maps a new stack.
    pub fn new() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses aliases nothing.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), STACK_LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self { base };
        // SAFETY: the first page of the mapping just made, which is not in use.
        if unsafe { libc::mprotect(base, GUARD_LEN, libc::PROT_NONE) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stack)
    }

    /// The top of the stack, which grows down.
    pub fn top(&self) -> *mut c_void {
        // SAFETY: one past the end of the mapping, where a stack that grows down begins.
        unsafe { self.base.add(STACK_LEN) }
    }
}

impl Drop for GuardedStack {
    fn drop(&mut self) {
        // SAFETY: the whole mapping made in `new`; the owner drops it only after the child has executed or exited.
        unsafe { libc::munmap(self.base, STACK_LEN) };
    }
}
