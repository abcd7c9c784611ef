//! Memory that a short process will need, taken from the kernel in one piece instead of page by page.

use std::hint::black_box;

/// Lets the allocator's heap and this thread's stack have so many bytes more without a page fault each, and the heap
/// keep what it has. Only a saving of time: where the kernel cannot do it, nothing happens.
///
/// For a process with one thread.
pub fn take_ahead(heap: usize, stack: usize) {
    let tune = |what, bytes| {
        // SAFETY: mallopt only sets parameters of the allocator; there is one thread.
        unsafe { libc::mallopt(what, i32::try_from(bytes).unwrap_or(i32::MAX)) }
    };
    // Else so large a block would be a mapping of its own, and the end of the heap be given back with it.
    tune(libc::M_MMAP_THRESHOLD, 2 * heap);
    tune(libc::M_TRIM_THRESHOLD, 2 * heap);
    let block = black_box(Vec::<u8>::with_capacity(heap));
    let begin = block.as_ptr() as usize;
    drop(block);
    // SAFETY: asks where the heap ends, and changes nothing.
    let end = unsafe { libc::sbrk(0) } as usize;
    if begin < end {
        populate(begin, heap.min(end - begin));
    }
    let here = black_box(0u8);
    let top = &raw const here as usize;
    populate(top.saturating_sub(stack), stack);
}

/// Fills what is mapped of a range; what is there stays as it is.
fn populate(begin: usize, len: usize) {
    // SAFETY: asks for a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let begin = begin & !(page - 1);
    // SAFETY: populating changes no contents; a range that is not mapped is an error, and ignored.
    unsafe { libc::madvise(begin as *mut libc::c_void, len, libc::MADV_POPULATE_WRITE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_populated_is_there_before_it_is_used() {
        let page = 4096;
        let room = Vec::<u8>::with_capacity(1 << 20);
        let begin = (room.as_ptr() as usize).next_multiple_of(page);
        let there = |at: usize| {
            let mut state = 0u8;
            // SAFETY: one page within the block, and room for the state of one.
            let asked = unsafe { libc::mincore(at as *mut libc::c_void, page, &raw mut state) };
            asked == 0 && state & 1 == 1
        };
        let middle = begin + (1 << 19);
        assert!(!there(middle));
        populate(middle + 1, 16 * page);
        assert!((0..16).all(|nth| there(middle + nth * page)));
        assert!(!there(middle + 32 * page));
    }
}
