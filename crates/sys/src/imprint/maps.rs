//! What a process has in its memory, as the kernel tells it.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::{
    Apart, Area, Origin,
    calls::{BASE, END},
};

const MAPS_LEN_MAX: u64 = 4 << 20;
/// What every process has at the same place, and nobody can move.
const FIXED: &str = "[vsyscall]";
/// Marks of memory that a child would not have, or that may be gone at any time.
const WIPED: [&str; 2] = ["wf", "dp"];
/// Names of areas that are plain memory.
const PLAIN: [&str; 2] = ["[heap]", "[stack]"];
/// Names of areas that the kernel puts into every process.
const OF_KERNEL: &str = "[v";

/// The parts of a process's memory, and where its heap ends.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Maps {
    pub areas: Vec<Area>,
    pub heap_end: u64,
    /// Where parts begin whose contents are for no other process: random numbers to come, in most cases.
    pub wiped: Vec<u64>,
}

impl Maps {
    pub(super) fn read(place: &Path, apart: &Apart<'_>) -> io::Result<Self> {
        Self::parse(&crate::fd::read_small(&place.join("smaps"), MAPS_LEN_MAX)?, apart)
    }

    fn parse(text: &str, apart: &Apart<'_>) -> io::Result<Self> {
        let mut maps = Self::default();
        let mut of_program = false;
        for line in text.lines() {
            if let Some((name, value)) = fact(line) {
                let wiped = name == "VmFlags" && value.split(' ').any(|flag| WIPED.contains(&flag));
                maps.wiped.extend(maps.areas.last().filter(|_| wiped && !of_program).map(|area| area.from));
                continue;
            }
            of_program = is_program(line);
            if of_program {
                continue;
            }
            let (area, name) =
                parse_line(line, apart).ok_or_else(|| cannot(&format!("unknown memory: {line}")))?;
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

/// A line that says something of the part before it, such as `VmFlags: rd wr mr mw me ac`.
fn fact(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line.split_once(':')?;
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_').then_some((name, value.trim()))
}

/// Whether that is what every process has that was taken up again: it is there anew the next time.
fn is_program(line: &str) -> bool {
    let from = line.split_once('-').and_then(|(from, _)| u64::from_str_radix(from, 16).ok());
    from.is_some_and(|from| (BASE..END).contains(&from))
}

/// One line of `maps`, such as `7f00-7f10 r-xp 00001000 fe:00 7  /usr/lib/libc.so.6`.
fn parse_line<'l>(line: &'l str, apart: &Apart<'_>) -> Option<(Area, &'l str)> {
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
        name => {
            let file = apart.shown(name).filter(|name| name.starts_with('/'))?;
            Origin::File(PathBuf::from(file), u64::from_str_radix(offset, 16).ok()?)
        }
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

pub(super) fn cannot(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apart() -> Apart<'static> {
        Apart { elsewhere: Path::new("/frozen/ram"), before: Path::new("/frozen/imprint"), anew: &[] }
    }

    #[test]
    fn what_is_written_down_elsewhere_needs_no_name_any_more() {
        for name in ["/frozen/ram", "/frozen/imprint"] {
            let maps =
                Maps::parse(&format!("5000-6000 rw-p 00000000 fe:00 7 {name} (deleted)"), &apart()).unwrap();
            assert_eq!(maps.areas[0].of, Origin::File(name.into(), 0));
        }
    }

    fn area(from: u64, to: u64, access: i32, of: Origin) -> Area {
        Area { from, to, access, of }
    }

    #[test]
    fn memory_is_told_by_what_it_shows() {
        let text = "5000-6000 r-xp 00001000 fe:00 7                          /usr/bin/a name\n\
                    VmFlags: rd ex mr mw me\n\
                    6000-7000 rw-p 00000000 00:00 0                          [heap]\n\
                    Pss_Anon:              4 kB\n\
                    VmFlags: rd wr mr mw me ac wf\n\
                    7000-8000 ---p 00000000 00:00 0 \n\
                    9000-a000 r--s 00000000 fe:00 7                          /usr/lib/cache\n\
                    100000000000-100000001000 r-xp 00000000 00:01 24         /memfd:palisade (deleted)\n\
                    VmFlags: rd ex wf\n\
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
        let maps = Maps::parse(text, &apart()).unwrap();
        assert_eq!(maps, Maps { areas: expected, heap_end: 0x7000, wiped: vec![0x6000] });
    }

    #[test]
    fn memory_that_cannot_be_given_back_is_refused() {
        for line in [
            "5000-6000 rw-s 00000000 fe:00 7 /shared/with/others",
            "5000-6000 rw-p 00000000 fe:00 7 /tmp/gone (deleted)",
            "5000-6000 rw-p 00000000 00:0e 7 anon_inode:[io_uring]",
            "5000-6000",
        ] {
            assert_eq!(Maps::parse(line, &apart()).unwrap_err().kind(), io::ErrorKind::Unsupported, "{line}");
        }
    }
}
