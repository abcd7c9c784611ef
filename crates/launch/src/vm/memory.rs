//! Memory of a restored microVM: the file that it was restored from, and the pages that it has changed since.
//!
//! The hypervisor takes that memory for a shared mapping of a file, and so leaves it out when it saves the microVM;
//! in fact the mapping is private ([`sys::ptrace_mmap`]). The kernel reports which pages are private, and this module
//! reads those.
//!
//! Invariant: the written file is as long as the memory, and all its bytes come from these two sources.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
};

use rustix::process::Pid;
use sys::pagemap::PAGE_LEN;

/// Most bytes that are copied at once.
const RUN_LEN_MAX: u64 = 1 << 20;

/// Writes the private pages that a process has of the file `path`, which it has mapped whole, to `to`.
pub fn add_own_pages(process: Pid, path: &Path, len: u64, to: &File) -> io::Result<()> {
    let place = Path::new("/proc").join(process.as_raw_nonzero().to_string());
    let start = find(&fs::read_to_string(place.join("maps"))?, path, len)
        .ok_or_else(|| io::Error::other("the hypervisor has no private mapping of its memory file"))?;
    let (pages, memory) = (File::open(place.join("pagemap"))?, File::open(place.join("mem"))?);
    let mut run = PageCopy { memory: &memory, to, start, from: 0, to_end: 0, buffer: Vec::new() };
    sys::pagemap::own(&pages, start..start + len, |page| run.add(page - start))?;
    run.flush()
}

/// The address of a private mapping of the whole file.
fn find(maps: &str, path: &Path, len: u64) -> Option<u64> {
    maps.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (range, access, offset) = (words.next()?, words.next()?, words.next()?);
        let (from, to) = range.split_once('-')?;
        let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
        let fits = access.ends_with('p') && u64::from_str_radix(offset, 16).ok()? == 0 && to - from == len;
        (fits && words.nth(2).is_some_and(|name| Path::new(name) == path)).then_some(from)
    })
}

/// Copies consecutive pages at once.
struct PageCopy<'a> {
    memory: &'a File,
    to: &'a File,
    start: u64,
    from: u64,
    to_end: u64,
    buffer: Vec<u8>,
}

impl PageCopy<'_> {
    fn add(&mut self, place: u64) -> io::Result<()> {
        if place != self.to_end || self.to_end - self.from >= RUN_LEN_MAX {
            self.flush()?;
            self.from = place;
        }
        self.to_end = place + PAGE_LEN;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let len = usize::try_from(self.to_end - self.from).unwrap_or_default();
        self.buffer.resize(len, 0);
        self.memory.read_exact_at(&mut self.buffer, self.start + self.from)?;
        self.to.write_all_at(&self.buffer, self.from)?;
        self.from = self.to_end;
        Ok(())
    }
}

/// Copies QEMU's migration stream without memory, to its end.
pub fn pass(mut from: impl Read, mut state: &File, len_max: u64) -> io::Result<()> {
    let passed = io::copy(&mut (&mut from).take(len_max), &mut state)?;
    if passed == len_max {
        Err(io::Error::other("the hypervisor wrote more state than its devices can have"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_is_found_by_its_file_length_and_access() {
        let maps = "7f00-8f00 rw-p 00000000 00:01 7 /frozen/other\n\
                    10000-20000 rw-s 00000000 00:01 7 /frozen/ram\n\
                    30000-40000 rw-p 00001000 00:01 7 /frozen/ram\n\
                    50000-60000 rw-p 00000000 00:01 7                  /frozen/ram\n";
        assert_eq!(find(maps, Path::new("/frozen/ram"), 0x10000), Some(0x50000));
        assert_eq!(find(maps, Path::new("/frozen/ram"), 0x20000), None);
    }
}
