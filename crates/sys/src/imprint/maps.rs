//! What a process has in its memory, as the kernel tells it, and which pages of that are its own.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::{
    Area, Origin, PAGE_LEN,
    calls::{BASE, END},
};

const MAPS_LEN_MAX: u64 = 4 << 20;
/// One entry for each page, of eight bytes.
const ENTRY_LEN: usize = 8;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// A page of a file, or one that is shared.
const OF_FILE: u64 = 1 << 61;
/// Pages that are looked at at once.
const ENTRIES_MAX: u64 = 8192;
/// What every process has at the same place, and nobody can move.
const FIXED: &str = "[vsyscall]";
/// Names of areas that are plain memory.
const PLAIN: [&str; 2] = ["[heap]", "[stack]"];
/// Names of areas that the kernel puts into every process.
const OF_KERNEL: &str = "[v";

/// The parts of a process's memory, and where its heap ends.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Maps {
    pub areas: Vec<Area>,
    pub heap_end: u64,
}

impl Maps {
    pub(super) fn read(place: &Path) -> io::Result<Self> {
        Self::parse(&crate::fd::read_small(&place.join("maps"), MAPS_LEN_MAX)?)
    }

    fn parse(text: &str) -> io::Result<Self> {
        let mut maps = Self::default();
        for line in text.lines().filter(|line| !is_program(line)) {
            let (area, name) = parse_line(line).ok_or_else(|| cannot(&format!("unknown memory: {line}")))?;
            if name == "[heap]" {
                maps.heap_end = area.to;
            }
            if name != FIXED {
                maps.areas.push(area);
            }
        }
        Ok(maps)
    }
}

/// Whether that is what every process has that was taken up again: it is there anew the next time.
fn is_program(line: &str) -> bool {
    let from = line.split_once('-').and_then(|(from, _)| u64::from_str_radix(from, 16).ok());
    from.is_some_and(|from| (BASE..END).contains(&from))
}

/// One line of `maps`, such as `7f00-7f10 r-xp 00001000 fe:00 7  /usr/lib/libc.so.6`.
fn parse_line(line: &str) -> Option<(Area, &str)> {
    let mut rest = line;
    let mut word = || {
        let (word, after) = rest.split_once(' ')?;
        rest = after.trim_start();
        Some(word)
    };
    let (range, access, offset, _device) = (word()?, word()?, word()?, word()?);
    // The last word may be missing, and the name may have spaces.
    let name = rest.split_once(' ').map_or("", |(_, name)| name.trim_start());
    let (from, to) = range.split_once('-')?;
    let of = match name {
        "" => Origin::Nothing,
        name if PLAIN.contains(&name) => Origin::Nothing,
        name if name.starts_with(OF_KERNEL) => Origin::Kernel(name.to_owned()),
        // A name of something that has none, or of a file that is gone.
        name if !name.starts_with('/') || name.ends_with(" (deleted)") => return None,
        name => Origin::File(PathBuf::from(name), u64::from_str_radix(offset, 16).ok()?),
    };
    let mut bits = 0;
    for (letter, bit) in [('r', libc::PROT_READ), ('w', libc::PROT_WRITE), ('x', libc::PROT_EXEC)] {
        bits |= if access.contains(letter) { bit } else { 0 };
    }
    let area = Area {
        from: u64::from_str_radix(from, 16).ok()?,
        to: u64::from_str_radix(to, 16).ok()?,
        access: bits,
        of,
    };
    // What is shared is shared to be written to; who only reads it sees the same in a view of its own.
    (access.ends_with('p') || bits & libc::PROT_WRITE == 0).then_some((area, name))
}

/// Calls `found` with each page of an area that is its process's own, in their order.
pub(super) fn own_pages(pagemap: &File, area: &Area, mut found: impl FnMut(u64)) -> io::Result<()> {
    let mut entries = vec![0; ENTRIES_MAX as usize * ENTRY_LEN];
    let mut at = area.from;
    while at < area.to {
        let count = ((area.to - at) / PAGE_LEN).min(ENTRIES_MAX);
        let bytes = &mut entries[..count as usize * ENTRY_LEN];
        pagemap.read_exact_at(bytes, at / PAGE_LEN * ENTRY_LEN as u64)?;
        for entry in bytes.chunks_exact(ENTRY_LEN) {
            let entry = entry.try_into().map_or(0, u64::from_ne_bytes);
            if entry & SWAPPED != 0 || entry & PRESENT != 0 && entry & OF_FILE == 0 {
                found(at);
            }
            at += PAGE_LEN;
        }
    }
    Ok(())
}

pub(super) fn cannot(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(from: u64, to: u64, access: i32, of: Origin) -> Area {
        Area { from, to, access, of }
    }

    #[test]
    fn memory_is_told_by_what_it_shows() {
        let text = "5000-6000 r-xp 00001000 fe:00 7                          /usr/bin/a name\n\
                    6000-7000 rw-p 00000000 00:00 0                          [heap]\n\
                    7000-8000 ---p 00000000 00:00 0 \n\
                    9000-a000 r--s 00000000 fe:00 7                          /usr/lib/cache\n\
                    100000000000-100000001000 r-xp 00000000 00:01 24         /memfd:palisade (deleted)\n\
                    7fff00000000-7fff00001000 rw-p 00000000 00:00 0          [stack]\n\
                    7fff00002000-7fff00003000 r--p 00000000 00:00 0          [vvar]\n\
                    ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]\n";
        let file = |path: &str, at| Origin::File(path.into(), at);
        let expected = vec![
            area(0x5000, 0x6000, libc::PROT_READ | libc::PROT_EXEC, file("/usr/bin/a name", 0x1000)),
            area(0x6000, 0x7000, libc::PROT_READ | libc::PROT_WRITE, Origin::Nothing),
            area(0x7000, 0x8000, libc::PROT_NONE, Origin::Nothing),
            area(0x9000, 0xa000, libc::PROT_READ, file("/usr/lib/cache", 0)),
            area(0x7fff_0000_0000, 0x7fff_0000_1000, libc::PROT_READ | libc::PROT_WRITE, Origin::Nothing),
            area(0x7fff_0000_2000, 0x7fff_0000_3000, libc::PROT_READ, Origin::Kernel("[vvar]".into())),
        ];
        let maps = Maps::parse(text).unwrap();
        assert_eq!(maps, Maps { areas: expected, heap_end: 0x7000 });
    }

    #[test]
    fn memory_that_cannot_be_given_back_is_refused() {
        for line in [
            "5000-6000 rw-s 00000000 fe:00 7 /shared/with/others",
            "5000-6000 rw-p 00000000 fe:00 7 /tmp/gone (deleted)",
            "5000-6000 rw-p 00000000 00:0e 7 anon_inode:[io_uring]",
            "5000-6000",
        ] {
            assert_eq!(Maps::parse(line).unwrap_err().kind(), io::ErrorKind::Unsupported, "{line}");
        }
    }
}
