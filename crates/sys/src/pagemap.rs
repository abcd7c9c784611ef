//! Private pages of a process, as the kernel reports them to a process that may trace it.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

/// The length of a page.
pub const PAGE_LEN: u64 = 4096;
/// Each page has one entry of eight bytes.
const ENTRY_LEN: usize = 8;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// A page of a file, or a shared one.
const OF_FILE: u64 = 1 << 61;
/// Entries that are read at once.
const ENTRIES_MAX: u64 = 4096;

/// Calls `found` with the address of each private page of a process (no file backs it, and no other process shares
/// it), in ascending order. `pagemap` is the process's file of that name.
pub fn own(
    pagemap: &File,
    addresses: Range<u64>,
    mut found: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut entries = vec![0; ENTRIES_MAX as usize * ENTRY_LEN];
    let mut at = addresses.start;
    while at < addresses.end {
        let count = ((addresses.end - at) / PAGE_LEN).min(ENTRIES_MAX);
        let bytes = &mut entries[..count as usize * ENTRY_LEN];
        pagemap.read_exact_at(bytes, at / PAGE_LEN * ENTRY_LEN as u64)?;
        for entry in bytes.chunks_exact(ENTRY_LEN) {
            let entry = entry.try_into().map_or(0, u64::from_ne_bytes);
            if entry & SWAPPED != 0 || entry & PRESENT != 0 && entry & OF_FILE == 0 {
                found(at)?;
            }
            at += PAGE_LEN;
        }
        if count == 0 {
            return Err(io::Error::other("the pagemap ends within the range"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_its_own_when_it_was_written_to() {
        const PAGES: usize = 4;
        let len = PAGES * PAGE_LEN as usize;
        let (access, how) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let file = File::from(rustix::fs::memfd_create("view", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&vec![1; len], 0).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        // SAFETY: a new mapping, to which no other pointer exists.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), len, access, how, fd, 0) };
        let at = |page: usize| (place as usize + page * PAGE_LEN as usize) as *mut u8;
        // SAFETY: within the mapping.
        unsafe { at(1).write_volatile(2) };
        // SAFETY: as above; who only reads has it of the file.
        let read = unsafe { at(2).read_volatile() };
        let (start, mut found) = (place as u64, Vec::new());
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        own(&pagemap, start..start + len as u64, |page| {
            found.push((page - start) / PAGE_LEN);
            Ok(())
        })
        .unwrap();
        assert_eq!((read, found), (1, vec![1]));
        assert!(own(&pagemap, start..start + 5000, |_| Ok(())).is_err(), "half a page is none");
        // SAFETY: it was mapped here and is not used any more.
        unsafe { libc::munmap(place, len) };
    }
}
