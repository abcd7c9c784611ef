//! Memory that goes back to the kernel while nobody has use for it.
//!
//! The kernel maps sixteen pages for each that is touched, so a program that has only started already counts most of its
//! file as its own, and one that gives its pages back and then goes on has many of them again at once.

use std::{
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
};

use libc::{c_int, c_long, c_void};

use crate::{signals, stack::Stack};

const PAGE_LEN: usize = 4096;
/// Most segments that a program of ours has.
const SEGMENTS_MAX: usize = 8;
/// Whoever asked is asleep by then.
static SOON: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Gives free heap pages back to the kernel.
pub fn trim_heap() {
    // SAFETY: malloc_trim takes the allocator's own locks and touches only free memory.
    unsafe { libc::malloc_trim(0) };
}

/// Unmaps this program's own code and constants; what is used again comes back from the page cache.
pub fn release_clean_pages() {
    clean_segments().release();
}

/// Where code and constants of this program are, as places and lengths.
#[derive(Debug, Clone, Copy)]
struct Segments([(usize, usize); SEGMENTS_MAX]);

impl Segments {
    fn release(&self) {
        for (from, len) in self.0.iter().filter(|(_, len)| *len > 0) {
            let how = c_long::from(libc::MADV_DONTNEED);
            // SAFETY: a segment of this program's file, mapped private and never writable, hence never changed: the next
            // access reads the same bytes from the file again.
            unsafe { libc::syscall(libc::SYS_madvise, *from, *len, how) };
        }
    }
}

fn clean_segments() -> Segments {
    let mut found = Segments([(0, 0); SEGMENTS_MAX]);
    // SAFETY: getauxval reads a vector that the kernel wrote at start.
    let headers = unsafe { libc::getauxval(libc::AT_PHDR) } as *const libc::Elf64_Phdr;
    // SAFETY: as above.
    let count = unsafe { libc::getauxval(libc::AT_PHNUM) } as usize;
    if headers.is_null() {
        return found;
    }
    // SAFETY: the kernel says that so many headers are there; they are part of the mapped, read-only image.
    let headers = unsafe { std::slice::from_raw_parts(headers, count) };
    // Only a program that was not relocated has its segments where its headers say.
    if headers.iter().any(|header| header.p_type == libc::PT_DYNAMIC) {
        return found;
    }
    let clean =
        |header: &&libc::Elf64_Phdr| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0;
    for (header, place) in headers.iter().filter(clean).zip(&mut found.0) {
        let from = header.p_vaddr as usize & !(PAGE_LEN - 1);
        *place = (from, (header.p_vaddr + header.p_memsz) as usize - from);
    }
    found
}

/// Not zero while somebody is at it; the kernel clears it when that thread has ended.
static BUSY: AtomicI32 = AtomicI32::new(0);
/// What that thread has.
static HAS: Mutex<Option<(Stack, Segments)>> = Mutex::new(None);

/// The same a little later, by a thread that does this and nothing else, when the caller is asleep in the kernel: a thread
/// of the standard library touches a dozen places of the program on its way out, and with each sixteen pages.
pub fn release_clean_pages_soon() -> io::Result<()> {
    let mut has = HAS.lock().unwrap_or_else(PoisonError::into_inner);
    if BUSY.load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    let (stack, segments) = match &mut *has {
        Some(has) => has,
        none => none.insert((Stack::new()?, clean_segments())),
    };
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_CHILD_CLEARTID;
    let segments: *mut Segments = segments;
    let none = std::ptr::null_mut::<c_void>();
    BUSY.store(1, Ordering::Release);
    // No signal is handled there: a handler would take what belongs to the caller's thread for its own.
    let made = signals::undisturbed(|| {
        // SAFETY: `release_soon` obeys what is said there. Its stack and what it reads are kept for ever, and nobody else
        // uses them before the kernel has cleared `BUSY`, which it does when the thread has left its stack.
        let made = unsafe {
            libc::clone(release_soon, stack.top(), flags, segments.cast(), none, none, BUSY.as_ptr())
        };
        if made < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    });
    if made.is_err() {
        BUSY.store(0, Ordering::Release);
    }
    made
}

/// What belongs to one thread alone is the caller's here, too, so this makes bare calls that succeed, and nothing else.
extern "C" fn release_soon(segments: *mut c_void) -> c_int {
    let soon: *const libc::timespec = &raw const SOON;
    // SAFETY: a time that is read, and no place for what would be left of it: nobody disturbs this thread.
    unsafe { libc::syscall(libc::SYS_nanosleep, soon, std::ptr::null_mut::<libc::timespec>()) };
    // SAFETY: `release_clean_pages_soon` passes what it keeps for ever.
    unsafe { &*segments.cast::<Segments>() }.release();
    0
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Waits until the thread has ended.
    fn over() {
        let deadline = Instant::now() + Duration::from_secs(10);
        while BUSY.load(Ordering::Acquire) != 0 {
            assert!(Instant::now() < deadline, "it goes on for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_thread_that_gives_pages_back_ends_and_can_be_had_again() {
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let before = threads();
        for _ in 0..3 {
            release_clean_pages_soon().unwrap();
            assert_ne!(BUSY.load(Ordering::Acquire), 0, "it has only begun");
            // Whoever asks again meanwhile asks for nothing more.
            release_clean_pages_soon().unwrap();
            over();
            // The kernel says so a moment before it is out of the list.
            let deadline = Instant::now() + Duration::from_secs(10);
            while threads() != before {
                assert!(Instant::now() < deadline, "{} threads, {before} before", threads());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
