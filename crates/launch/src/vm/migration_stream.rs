//! Extracts the memory from QEMU's migration stream into a file of its own, page by page, so that many microVMs can
//! be restored from it at once, each with a private mapping of the same pages.
//!
//! The rest keeps QEMU's own format, as if the memory had been left out of it (`x-ignore-shared`): a header,
//! sections, and page records in the section `ram`. Only that section is parsed here; everything after it is passed
//! on.
//!
//! Trust: the guest may have taken over the writer. Lengths and offsets are checked; nothing is written beyond the
//! length of the file.

use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write},
    os::unix::fs::FileExt,
};

/// The name of the memory block that is extracted.
const MEMORY: &[u8] = b"ram";
const PAGE_LEN: usize = 4096;
/// Most bytes before the section.
const PREFACE_LEN_MAX: usize = 16 << 10;
/// Name, instance 0 and version 4 of the section.
const SECTION: &[u8] = b"\x03ram\0\0\0\0\0\0\0\x04";
const BLOCKS_MAX: usize = 64;
const RUN_LEN_MAX: usize = 1 << 20;
/// Most bytes that are passed on: device state and small memory blocks.
pub const REST_LEN_MAX: u64 = 256 << 20;

const PART: u8 = 2;
const END: u8 = 3;
const FOOTER: u8 = 0x7e;
const ZERO: u64 = 0x02;
const MEM_SIZE: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const CONTINUE: u64 = 0x20;
const FLAGS: u64 = PAGE_LEN as u64 - 1;

/// Reads the hypervisor's stream to its end.
pub fn split(from: impl Read, ram: &File, ram_len: u64, rest: impl Write) -> io::Result<()> {
    ram.set_len(ram_len)?;
    let from = BufReader::with_capacity(1 << 20, from);
    let mut splitter = StreamSplitter {
        from,
        rest: BufWriter::with_capacity(1 << 16, rest),
        run: PageRun { file: ram, len_max: ram_len, at: 0, bytes: Vec::new(), end: 0 },
        of_memory: false,
    };
    let section = splitter.preface()?;
    splitter.setup()?;
    splitter.footer(section)?;
    loop {
        let kind = splitter.byte()?;
        if !matches!(kind, PART | END) {
            return Err(wrong("an unexpected section"));
        }
        if splitter.number_32()? != section {
            return Err(wrong("a section of another name"));
        }
        splitter.pages()?;
        splitter.footer(section)?;
        if kind == END {
            break;
        }
    }
    splitter.run.flush()?;
    let passed = io::copy(&mut (&mut splitter.from).take(REST_LEN_MAX), &mut splitter.rest)?;
    if passed == REST_LEN_MAX {
        return Err(wrong("more state than its devices can have"));
    }
    splitter.rest.flush()
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the hypervisor wrote {what}"))
}

struct StreamSplitter<'a, R: Read, W: Write> {
    from: BufReader<R>,
    rest: BufWriter<W>,
    run: PageRun<'a>,
    /// Whether the previous page belonged to the memory: a record that continues may do so in the next section.
    of_memory: bool,
}

impl<R: Read, W: Write> StreamSplitter<'_, R, W> {
    /// Reads bytes and passes them on.
    fn pass<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let bytes = self.take()?;
        self.rest.write_all(&bytes)?;
        Ok(bytes)
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn byte(&mut self) -> io::Result<u8> {
        self.pass::<1>().map(|bytes| bytes[0])
    }

    fn number_32(&mut self) -> io::Result<u32> {
        self.pass().map(u32::from_be_bytes)
    }

    fn name(&mut self, len: u8) -> io::Result<Vec<u8>> {
        let mut name = vec![0; len.into()];
        self.from.read_exact(&mut name)?;
        Ok(name)
    }

    /// Passes on everything before the section; returns the section's number.
    fn preface(&mut self) -> io::Result<u32> {
        let mut seen: Vec<u8> = Vec::new();
        while !seen.ends_with(SECTION) {
            if seen.len() >= PREFACE_LEN_MAX {
                return Err(wrong("no `ram` section"));
            }
            seen.push(self.byte()?);
        }
        let at = seen.len() - SECTION.len();
        let number =
            at.checked_sub(4).and_then(|from| seen.get(from..at)).and_then(|bytes| bytes.try_into().ok());
        number.map(u32::from_be_bytes).ok_or_else(|| wrong("no `ram` section"))
    }

    /// Parses the list of memory blocks.
    fn setup(&mut self) -> io::Result<()> {
        let total = u64::from_be_bytes(self.pass()?);
        if total & FLAGS != MEM_SIZE {
            return Err(wrong("no list of memory blocks"));
        }
        let mut left = total & !FLAGS;
        for _ in 0..BLOCKS_MAX {
            if left == 0 {
                break;
            }
            let len = self.byte()?;
            let name = self.name(len)?;
            self.rest.write_all(&name)?;
            let size = u64::from_be_bytes(self.pass()?);
            let _place = u64::from_be_bytes(self.pass()?);
            if name == MEMORY && size > self.run.len_max {
                return Err(wrong("more memory than the microVM has"));
            }
            left = left.checked_sub(size).ok_or_else(|| wrong("memory blocks that do not add up"))?;
        }
        match u64::from_be_bytes(self.pass()?) {
            EOS if left == 0 => Ok(()),
            _ => Err(wrong("too many memory blocks")),
        }
    }

    fn footer(&mut self, section: u32) -> io::Result<()> {
        match (self.byte()?, self.number_32()?) {
            (FOOTER, number) if number == section => Ok(()),
            _ => Err(wrong("a section without an end")),
        }
    }

    /// Parses page records up to the end of the section.
    fn pages(&mut self) -> io::Result<()> {
        let mut page = [0; PAGE_LEN];
        loop {
            let head = u64::from_be_bytes(self.take()?);
            let (place, flags) = (head & !FLAGS, head & FLAGS);
            if flags == EOS {
                return self.rest.write_all(&head.to_be_bytes());
            }
            let mut named = Vec::new();
            if flags & CONTINUE == 0 {
                let [len] = self.take()?;
                let name = self.name(len)?;
                self.of_memory = name == MEMORY;
                named.push(len);
                named.extend_from_slice(&name);
            }
            if !self.of_memory {
                self.rest.write_all(&head.to_be_bytes())?;
                self.rest.write_all(&named)?;
            }
            match flags & !CONTINUE {
                ZERO if self.of_memory => {
                    let _fill: [u8; 1] = self.take()?;
                    self.run.zero(place)?;
                }
                PAGE if self.of_memory => {
                    self.from.read_exact(&mut page)?;
                    self.run.page(place, &page)?;
                }
                ZERO => drop(self.pass::<1>()?),
                PAGE => drop(self.pass::<PAGE_LEN>()?),
                _ => return Err(wrong("a page record of unknown type")),
            }
        }
    }
}

/// Writes consecutive pages at once.
struct PageRun<'a> {
    file: &'a File,
    len_max: u64,
    at: u64,
    bytes: Vec<u8>,
    /// The offset after the last page that was written.
    end: u64,
}

impl PageRun<'_> {
    fn page(&mut self, place: u64, page: &[u8; PAGE_LEN]) -> io::Result<()> {
        self.check(place)?;
        if place != self.at + self.bytes.len() as u64 || self.bytes.len() >= RUN_LEN_MAX {
            self.flush()?;
            self.at = place;
        }
        self.bytes.extend_from_slice(page);
        self.end = self.end.max(place + PAGE_LEN as u64);
        Ok(())
    }

    /// Records a zero page. Unwritten parts of the file are zeros; a page that was sent before has to be cleared.
    fn zero(&mut self, place: u64) -> io::Result<()> {
        self.check(place)?;
        if place < self.end {
            self.flush()?;
            self.file.write_all_at(&[0; PAGE_LEN], place)?;
        }
        Ok(())
    }

    fn check(&self, place: u64) -> io::Result<()> {
        let fits = place.checked_add(PAGE_LEN as u64).is_some_and(|end| end <= self.len_max);
        if fits { Ok(()) } else { Err(wrong("a page outside of the memory")) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.bytes, self.at)?;
        self.bytes.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: u64 = 3 * PAGE_LEN as u64;

    fn stream(pages: &[u8]) -> Vec<u8> {
        let mut bytes = b"QEVM\0\0\0\x03\x07\0\0\0\x07microvm\x01\0\0\0\x02".to_vec();
        bytes.extend_from_slice(SECTION);
        bytes.extend_from_slice(&(TOTAL | MEM_SIZE).to_be_bytes());
        for (name, size) in [(&b"ram"[..], 2 * PAGE_LEN as u64), (b"rom", PAGE_LEN as u64)] {
            bytes.push(name.len() as u8);
            bytes.extend_from_slice(name);
            bytes.extend_from_slice(&size.to_be_bytes());
            bytes.extend_from_slice(&0u64.to_be_bytes());
        }
        bytes.extend_from_slice(&EOS.to_be_bytes());
        bytes.extend_from_slice(&[FOOTER, 0, 0, 0, 2, END, 0, 0, 0, 2]);
        bytes.extend_from_slice(pages);
        bytes.extend_from_slice(&EOS.to_be_bytes());
        bytes.extend_from_slice(&[FOOTER, 0, 0, 0, 2]);
        bytes.extend_from_slice(b"devices");
        bytes
    }

    fn record(place: u64, flags: u64, name: Option<&[u8]>, fill: &[u8]) -> Vec<u8> {
        let mut bytes = (place | flags).to_be_bytes().to_vec();
        if let Some(name) = name {
            bytes.push(name.len() as u8);
            bytes.extend_from_slice(name);
        }
        bytes.extend_from_slice(fill);
        bytes
    }

    fn run(bytes: &[u8], tag: &str) -> (io::Result<()>, Vec<u8>, Vec<u8>) {
        let path = std::env::temp_dir().join(format!("pal-split-{tag}-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let mut rest = Vec::new();
        let done = split(bytes, &file, 2 * PAGE_LEN as u64, &mut rest);
        let ram = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        (done, ram, rest)
    }

    #[test]
    fn memory_goes_to_its_file_and_the_rest_stays_as_it_was() {
        let mut pages = record(PAGE_LEN as u64, PAGE, Some(b"ram"), &[7; PAGE_LEN]);
        pages.extend(record(0, ZERO | CONTINUE, None, &[0]));
        let rom = record(0, PAGE, Some(b"rom"), &[9; PAGE_LEN]);
        pages.extend(&rom);
        let (done, ram, rest) = run(&stream(&pages), "good");
        done.unwrap();
        assert!(
            ram[..PAGE_LEN].iter().all(|byte| *byte == 0) && ram[PAGE_LEN..].iter().all(|byte| *byte == 7)
        );
        assert!(rest == stream(&rom), "all but the memory's pages");
    }

    #[test]
    fn what_lies_is_refused() {
        let cases = [
            ("outside", stream(&record(TOTAL, PAGE, Some(b"ram"), &[7; PAGE_LEN]))),
            ("kind", stream(&record(0, 0x40, Some(b"ram"), &[7; PAGE_LEN]))),
            ("cut", stream(&record(0, PAGE, Some(b"ram"), &[7; 9]))),
            ("empty", Vec::new()),
            ("noise", vec![0x5a; 64 << 10]),
        ];
        for (name, bytes) in cases {
            assert!(run(&bytes, name).0.is_err(), "{name}");
        }
        let whole = stream(&record(0, PAGE, Some(b"ram"), &[7; PAGE_LEN]));
        assert!(run(&whole, "whole").0.is_ok());
    }
}
