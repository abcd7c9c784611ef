//! Looking at a process that stands still.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use libc::{c_long, c_void};
use rustix::process::Pid;

use super::{
    Area, Descriptor, Imprint, Mark, Origin, Piece, Thread, What,
    frame::{REGISTERS, VECTORS_ASKED_FOR, VECTORS_LEN_MAX, VECTORS_LEN_MIN, VECTORS_MARK_AT},
    maps::{Maps, cannot},
};
use crate::{
    fd::read_small,
    pages::{self, PAGE_LEN, Page},
};

const FACTS_LEN_MAX: u64 = 64 << 10;
const NAME_LEN_MAX: u64 = 64;
/// A process with more threads is none of ours.
const THREADS_MAX: usize = 256;
/// How often threads are looked for again that were made meanwhile.
const LOOKS_MAX: usize = 16;
/// Pages between two that are its own, up to which they become one piece: a few more bytes cost less than another mapping.
const GAP_MAX: u64 = 4 * PAGE_LEN;
const PIECE_LEN_MAX: u64 = 4 << 20;
const NT_PRSTATUS: usize = 1;
const NT_X86_XSTATE: usize = 0x202;
/// Where the kernel says which vectors are in use.
const VECTORS_USED_AT: usize = 512;
/// The C library keeps a thread's number so far below the list of its locks.
const NUMBER_BEFORE_LOCKS: u64 = 16;
/// Where the numbers of `/proc/PID/stat` are that tell of places, counted after the name.
const PLACES_IN_STAT: [usize; 10] = [23, 24, 42, 43, 44, 25, 45, 46, 47, 48];
/// Where among them the end of the heap belongs.
const HEAP_END_PLACE: usize = 5;

/// Files that are not like others in the memory of a process.
#[derive(Debug, Clone, Copy)]
pub struct Apart<'a> {
    /// Pages that it has made its own of this one are left out: somebody else writes them down.
    pub elsewhere: &'a Path,
    /// What is shown of this one is its own: it was taken up from there.
    pub before: &'a Path,
    /// Whoever takes it up has others under these names.
    pub anew: &'a [PathBuf],
}

/// What the kernel adds to the name of a file that has none any more.
const NAMELESS: &str = " (deleted)";

impl Apart<'_> {
    /// The name of a file in memory that can be taken up again.
    pub(super) fn shown<'n>(&self, name: &'n str) -> Option<&'n str> {
        let stripped = name.strip_suffix(NAMELESS);
        // Its name is not needed, only what it shows.
        let known = stripped.filter(|name| [self.elsewhere, self.before].contains(&Path::new(name)));
        known.or(stripped.is_none().then_some(name))
    }

    /// The name of a file that can be opened again.
    fn opened<'n>(&self, name: &'n str) -> Option<&'n str> {
        let stripped = name.strip_suffix(NAMELESS);
        let known = stripped.filter(|name| {
            Path::new(name) == self.elsewhere || self.anew.iter().any(|path| path == Path::new(name))
        });
        known.or(stripped.is_none().then_some(name))
    }
}

impl Imprint {
    /// Writes down a child, or another process that the caller may trace: its pages into a file, the rest as the answer.
    ///
    /// It stands still meanwhile, and goes on as if nothing had been.
    pub fn take(process: Pid, apart: &Apart<'_>, pages: &File) -> io::Result<Self> {
        let place = Path::new("/proc").join(process.as_raw_nonzero().to_string());
        let held = Held::all(process, &place)?;
        let status = read_small(&place.join("status"), FACTS_LEN_MAX)?;
        if field(&status, "x86_Thread_features:").is_some_and(|features| features.contains("shstk")) {
            return Err(cannot("it has a second stack that cannot be given back"));
        }
        let ignored = field(&status, "SigIgn:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
        let maps = Maps::read(&place, apart)?;
        let memory = File::open(place.join("mem"))?;
        let threads = held
            .threads
            .iter()
            .map(|(thread, _)| look_at(*thread, &place, &memory))
            .collect::<io::Result<Vec<_>>>()?;
        let Own { mut pieces, guards } = Own::find(&place, &maps, apart)?;
        let pages_len = write_pages(&mut pieces, &memory, pages)?;
        Ok(Self {
            threads,
            pieces,
            guards,
            pages_len,
            descriptors: descriptors(&place, apart)?,
            ignored: ignored.ok_or_else(|| cannot("it does not say which signals it ignores"))?,
            places: places(&place, &maps)?,
            files: marks(&maps.areas, apart)?,
            areas: joined(maps.areas, apart),
        })
    }
}

/// Threads that stand still for as long as this is there, each with the signal that was on its way to it.
struct Held {
    first: i32,
    threads: Vec<(i32, i32)>,
}

impl Held {
    fn all(process: Pid, place: &Path) -> io::Result<Self> {
        let mut held = Self { first: process.as_raw_nonzero().get(), threads: Vec::new() };
        for _ in 0..LOOKS_MAX {
            let mut more = false;
            for entry in fs::read_dir(place.join("task"))? {
                let thread = entry?.file_name().to_str().and_then(|name| name.parse().ok());
                let thread: i32 = thread.ok_or_else(|| cannot("a thread has no number"))?;
                if held.threads.iter().any(|(known, _)| *known == thread) {
                    continue;
                }
                match held.hold(thread) {
                    Ok(()) => more = true,
                    // One that was about to end has ended; any other must not be left out.
                    Err(_) if has_ended(place, thread) => held.let_go_of_last(thread),
                    Err(error) => return Err(error),
                }
            }
            if !more {
                let first = held.first;
                held.threads.sort_unstable_by_key(|(thread, _)| (*thread != first, *thread));
                return Ok(held);
            }
            if held.threads.len() > THREADS_MAX {
                break;
            }
        }
        Err(cannot("it makes threads without end"))
    }

    fn hold(&mut self, thread: i32) -> io::Result<()> {
        trace(libc::PTRACE_SEIZE, thread, 0, 0)?;
        self.threads.push((thread, 0));
        trace(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
        let why = crate::trace::wait_stopped(thread)?;
        if let Some((_, signal)) = self.threads.last_mut()
            && why >> 8 == 0
        {
            *signal = why;
        }
        Ok(())
    }

    fn let_go_of_last(&mut self, thread: i32) {
        if let Some((thread, signal)) = self.threads.pop_if(|(last, _)| *last == thread) {
            self.let_go(thread, signal);
        }
    }

    fn let_go(&self, thread: i32, signal: i32) {
        let gone = trace(libc::PTRACE_DETACH, thread, 0, signal as usize).is_err();
        if gone && thread != self.first {
            // One that has ended is there until its tracer has noticed, and its process with it.
            // SAFETY: looks for the end of a thread that this one traces, and wants to know nothing of it.
            unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) };
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        while let Some((thread, signal)) = self.threads.pop() {
            self.let_go(thread, signal);
        }
    }
}

/// Whether a thread is gone, or about to be.
fn has_ended(place: &Path, thread: i32) -> bool {
    let stat = read_small(&place.join("task").join(thread.to_string()).join("stat"), FACTS_LEN_MAX);
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

fn trace(what: libc::c_uint, thread: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: each request made here writes at most to what `data` or `address` points to, which outlives the call.
    let done = unsafe { libc::ptrace(what, thread, address, data) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn look_at(thread: i32, place: &Path, memory: &File) -> io::Result<Thread> {
    let name = read_small(&place.join("task").join(thread.to_string()).join("comm"), NAME_LEN_MAX)?;
    let mut registers = vec![0_u64; REGISTERS];
    let read = register_set(thread, NT_PRSTATUS, registers.as_mut_ptr().cast(), REGISTERS * 8)?;
    let mut vectors = vec![0_u8; VECTORS_LEN_MAX];
    let len = register_set(thread, NT_X86_XSTATE, vectors.as_mut_ptr().cast(), VECTORS_LEN_MAX)?;
    if read != REGISTERS * 8 || len < VECTORS_LEN_MIN {
        return Err(cannot("its registers are others than those known here"));
    }
    let whole = vectors_len(&vectors);
    if whole > len || word(&vectors, VECTORS_USED_AT) & VECTORS_ASKED_FOR != 0 {
        return Err(cannot("its registers are others than those known here"));
    }
    vectors.truncate(whole);
    let mut mask = 0_u64;
    trace(libc::PTRACE_GETSIGMASK, thread, 8, &raw mut mask as usize)?;
    let locks = locks(thread)?;
    let number_at = locks - NUMBER_BEFORE_LOCKS;
    let mut number = [0; 4];
    memory.read_exact_at(&mut number, number_at)?;
    if i32::from_ne_bytes(number) != thread {
        return Err(cannot("its C library keeps a thread's number at another place"));
    }
    let name = name.trim_end().to_owned();
    Ok(Thread { name, registers, vectors, mask, restartable: restartable(thread)?, locks, number_at })
}

fn register_set(thread: i32, which: usize, to: *mut c_void, len: usize) -> io::Result<usize> {
    let mut place = libc::iovec { iov_base: to, iov_len: len };
    trace(libc::PTRACE_GETREGSET, thread, which, &raw mut place as usize)?;
    Ok(place.iov_len)
}

/// How long the vectors of a thread are that it has without asking, which the processor tells.
fn vectors_len(vectors: &[u8]) -> usize {
    let mask = word(vectors, VECTORS_MARK_AT) & !VECTORS_ASKED_FOR;
    let parts = (2..63).filter(|part| mask & 1 << part != 0);
    let ends = parts.map(|part| {
        let told = core::arch::x86_64::__cpuid_count(0xd, part);
        told.ebx as usize + told.eax as usize
    });
    ends.max().unwrap_or(0).max(VECTORS_LEN_MIN)
}

fn word(vectors: &[u8], at: usize) -> u64 {
    vectors[at..][..8].try_into().map_or(0, u64::from_ne_bytes)
}

fn locks(thread: i32) -> io::Result<u64> {
    let (mut head, mut len) = (0_u64, 0_usize);
    let number = c_long::from(thread);
    // SAFETY: the kernel writes an address and a length to places that may be written.
    let done = unsafe { libc::syscall(libc::SYS_get_robust_list, number, &raw mut head, &raw mut len) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    if head < PAGE_LEN { Err(cannot("it has no list of locks")) } else { Ok(head) }
}

fn restartable(thread: i32) -> io::Result<Option<(u64, u32, u32)>> {
    // SAFETY: plain data for which zeroes are valid.
    let mut told: libc::ptrace_rseq_configuration = unsafe { std::mem::zeroed() };
    let len = size_of::<libc::ptrace_rseq_configuration>();
    trace(libc::PTRACE_GET_RSEQ_CONFIGURATION, thread, len, &raw mut told as usize)?;
    let there = told.rseq_abi_pointer != 0;
    Ok(there.then_some((told.rseq_abi_pointer, told.rseq_abi_size, told.signature)))
}

/// What a line of `status` says.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn places(place: &Path, maps: &Maps) -> io::Result<[u64; 11]> {
    let stat = read_small(&place.join("stat"), FACTS_LEN_MAX)?;
    let unknown = || cannot("it does not say where its memory is");
    let (_, after) = stat.rsplit_once(')').ok_or_else(unknown)?;
    let words: Vec<&str> = after.split_ascii_whitespace().collect();
    let mut told = Vec::new();
    for index in PLACES_IN_STAT {
        told.push(words.get(index).and_then(|word| word.parse().ok()).ok_or_else(unknown)?);
    }
    told.insert(HEAP_END_PLACE, maps.heap_end.max(told[HEAP_END_PLACE - 1]));
    told.try_into().map_err(|_| unknown())
}

/// What its files were like.
fn marks(areas: &[Area], apart: &Apart<'_>) -> io::Result<Vec<Mark>> {
    let mut marks: Vec<Mark> = Vec::new();
    for area in areas {
        if let Origin::File(path, _) = &area.of
            && path != apart.elsewhere
            && path != apart.before
            && !marks.iter().any(|mark| mark.path == *path)
        {
            marks.push(Mark::of(path, &fs::metadata(path)?));
        }
    }
    Ok(marks)
}

/// What is its own of its memory.
#[derive(Default)]
struct Own {
    pieces: Vec<Piece>,
    guards: Vec<(u64, u64)>,
}

impl Own {
    fn find(place: &Path, maps: &Maps, apart: &Apart<'_>) -> io::Result<Self> {
        let pagemap = File::open(place.join("pagemap"))?;
        let mut own = Self::default();
        let mut before: Option<&Area> = None;
        // Pieces before this one are of another part of memory.
        let mut first = 0;
        for area in &maps.areas {
            if !before.is_some_and(|before| before.to == area.from && alike(before, area, apart)) {
                first = own.pieces.len();
            }
            before = Some(area);
            match &area.of {
                Origin::File(path, _) if path == apart.before => own.add(first, area, area.from, area.to),
                Origin::File(path, _) if path == apart.elsewhere => {}
                Origin::Nothing if area.access == libc::PROT_NONE || maps.wiped.contains(&area.from) => {}
                Origin::Nothing | Origin::File(..) => {
                    pages::own(&pagemap, area.from..area.to, |page, what| {
                        match what {
                            Page::Own => own.add(first, area, page, page + PAGE_LEN),
                            Page::Guard => {
                                own.guards.push((page, page + PAGE_LEN));
                                first = own.pieces.len();
                            }
                        }
                        Ok(())
                    })?;
                }
                Origin::Kernel(_) => {}
            }
        }
        Ok(own)
    }

    /// Adds pages to the last piece, unless that is before `first` or too far away.
    fn add(&mut self, first: usize, area: &Area, from: u64, to: u64) {
        match self.pieces.get_mut(first..).and_then(<[Piece]>::last_mut) {
            Some(last) if from - last.to <= GAP_MAX => last.to = to,
            _ => self.pieces.push(Piece { from, to, access: area.access, at: 0 }),
        }
    }
}

/// Whether two parts of memory are one, but for what is in them.
fn alike(one: &Area, other: &Area, apart: &Apart<'_>) -> bool {
    let plain = |area: &Area| match &area.of {
        Origin::Nothing => true,
        Origin::File(path, _) => path == apart.before,
        Origin::Kernel(_) => false,
    };
    one.access == other.access && plain(one) && plain(other)
}

/// Parts of memory that follow each other and are alike become one.
fn joined(areas: Vec<Area>, apart: &Apart<'_>) -> Vec<Area> {
    let mut joined: Vec<Area> = Vec::new();
    for mut area in areas {
        if matches!(&area.of, Origin::File(path, _) if path == apart.before) {
            area.of = Origin::Nothing;
        }
        match joined.last_mut() {
            Some(last) if last.to == area.from && alike(last, &area, apart) => last.to = area.to,
            _ => joined.push(area),
        }
    }
    joined
}

/// Writes them one after the other, and gives how long that is.
fn write_pages(pieces: &mut [Piece], memory: &File, pages: &File) -> io::Result<u64> {
    let (mut at, mut buffer) = (0, Vec::new());
    for piece in pieces {
        piece.at = at;
        let mut from = piece.from;
        while from < piece.to {
            let len = (piece.to - from).min(PIECE_LEN_MAX);
            buffer.resize(len as usize, 0);
            memory.read_exact_at(&mut buffer, from)?;
            pages.write_all_at(&buffer, at)?;
            from += len;
            at += len;
        }
    }
    Ok(at)
}

fn descriptors(place: &Path, apart: &Apart<'_>) -> io::Result<Vec<Descriptor>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(place.join("fd"))? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        let number = number.ok_or_else(|| cannot("a descriptor has no number"))?;
        let facts = read_small(&place.join("fdinfo").join(number.to_string()), FACTS_LEN_MAX)?;
        let flags = field(&facts, "flags:").and_then(|flags| i32::from_str_radix(flags, 8).ok());
        let flags = flags.ok_or_else(|| cannot("a descriptor has no flags"))?;
        found.insert(
            number,
            Descriptor { number, flags, what: what(&fs::read_link(entry.path())?, &facts, apart)? },
        );
    }
    Ok(found.into_values().collect())
}

/// What is open, by its name and what the kernel knows of it.
fn what(name: &Path, facts: &str, apart: &Apart<'_>) -> io::Result<What> {
    let number = |what: &str, radix| {
        let told = field(facts, what).and_then(|told| u64::from_str_radix(told, radix).ok());
        told.ok_or_else(|| cannot("a descriptor does not say what it is"))
    };
    let text = name.to_str().unwrap_or_default();
    match text {
        "anon_inode:[eventfd]" if field(facts, "eventfd-semaphore:") == Some("1") => {
            Err(cannot("it counts down by ones"))
        }
        "anon_inode:[eventfd]" => match u32::try_from(number("eventfd-count:", 16)?) {
            Ok(count) => Ok(What::Event(count)),
            Err(_) => Err(cannot("it has counted too far")),
        },
        "anon_inode:[signalfd]" => Ok(What::Signals(number("sigmask:", 16)?)),
        "anon_inode:[eventpoll]" => {
            let watched = facts.lines().filter(|line| line.starts_with("tfd:")).map(watched);
            Ok(What::Poll(
                watched.collect::<Option<_>>().ok_or_else(|| cannot("it waits for something unknown"))?,
            ))
        }
        text if text.starts_with("socket:") || text.starts_with("pipe:") => Ok(What::End),
        text => match apart.opened(text).filter(|name| name.starts_with('/')) {
            Some(name) => Ok(What::File(PathBuf::from(name), number("pos:", 10)?)),
            None => Err(cannot(&format!("it has something open that cannot be opened again: {text}"))),
        },
    }
}

/// Such as `tfd:        4 events:       19 data:                4  pos:0 ino:6 sdev:c`.
fn watched(line: &str) -> Option<(i32, u32, u64)> {
    let mut words = line.split_ascii_whitespace();
    let mut after = |name: &str| {
        words.find(|word| *word == name)?;
        words.next()
    };
    Some((
        after("tfd:")?.parse().ok()?,
        u32::from_str_radix(after("events:")?, 16).ok()?,
        u64::from_str_radix(after("data:")?, 16).ok()?,
    ))
}
