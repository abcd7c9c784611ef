//! The memory of a machine that was thawed: what it was thawed from, and the pages that it has made its own since.
//!
//! Its hypervisor takes that memory for shared with a file and leaves it alone when the machine is frozen; what it
//! really has is a private view ([`sys::ptrace_mmap`]). The kernel tells which pages are private, and those are read here.
//!
//! Invariant: what is written is as long as the memory, and nothing of it comes from anywhere but the two.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
};

use rustix::process::Pid;
use sys::pagemap::PAGE_LEN;

/// Pages that are copied at once.
const RUN_LEN_MAX: u64 = 1 << 20;

/// Writes the pages that a process has made its own of the file `path`, which it has mapped whole, into `to`.
pub fn add_own_pages(process: Pid, path: &Path, len: u64, to: &File) -> io::Result<()> {
    let place = Path::new("/proc").join(process.as_raw_nonzero().to_string());
    let start = find(&fs::read_to_string(place.join("maps"))?, path, len)
        .ok_or_else(|| io::Error::other("its memory is not where it was put"))?;
    let (pages, memory) = (File::open(place.join("pagemap"))?, File::open(place.join("mem"))?);
    let mut run = PageCopy { memory: &memory, to, start, from: 0, to_end: 0, buffer: Vec::new() };
    sys::pagemap::own(&pages, start..start + len, |page| run.add(page - start))?;
    run.flush()
}

/// Where a whole private view of a file is.
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

/// Pages that follow each other are copied at once.
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

/// What QEMU writes when it leaves the memory out, to its end.
pub fn pass(mut from: impl Read, mut state: &File, len_max: u64) -> io::Result<()> {
    let passed = io::copy(&mut (&mut from).take(len_max), &mut state)?;
    if passed == len_max {
        Err(io::Error::other("the hypervisor wrote more than devices can have"))
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
