//! Making a child that becomes a process that was written down.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
};

use libc::{c_int, c_long};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags},
    process::{Pid, Signal, WaitOptions},
};

use super::{
    Apart, Area, Imprint, Mark, Origin, What,
    calls::{ASIDE, BASE, END, List, NOTE, program},
    frame::{FS_BASE, REGISTERS, VECTORS_LEN_MAX, VECTORS_LEN_MIN},
    maps::{Maps, cannot},
};

/// The end of what a process can have of memory.
const MEMORY_END: u64 = 0x7fff_ffff_f000;
/// A stack that grows needs room below it.
const STACK_LEN: u64 = 8 << 20;
/// From here on descriptors are the child's tools, until it is who it becomes.
const TOOLS: RawFd = 256;
/// From here on they are kept until they have their numbers. A process may have 1,024 where nobody said otherwise.
const KEPT: RawFd = 512;
const SIGNALS: i32 = 64;

impl Imprint {
    /// Makes a child that goes on where the process was when it was written down. `given` are new ends for what it had open
    /// as ends of others, by their numbers there; `first` is what the child does before.
    ///
    /// The caller has one thread, as for [`crate::namespace::fork`].
    pub fn revive(
        &self,
        pages: &File,
        given: Vec<(RawFd, OwnedFd)>,
        first: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<Pid> {
        if !crate::proc::is_only_thread()? {
            return Err(io::Error::other("only a process with one thread may fork"));
        }
        self.make(pages, given, first)
    }

    pub(super) fn make(
        &self,
        pages: &File,
        given: Vec<(RawFd, OwnedFd)>,
        first: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<Pid> {
        if !self.is_sound() {
            return Err(cannot("it is none that was written down"));
        }
        if pages.metadata()?.len() < self.pages_len {
            return Err(cannot("its pages are not whole"));
        }
        if self.areas.iter().any(|area| area.from < END && BASE < area.to) {
            return Err(cannot("its memory is where it would be made"));
        }
        let (open, files) = (self.open(given)?, self.files(pages)?);
        let program = executable()?;
        // SAFETY: nothing that another thread may hold is used in the child before it becomes another program.
        match unsafe { libc::fork() } {
            0 => {
                let error = first()
                    .and_then(|()| self.settle(&open, &files))
                    .and_then(|()| crate::trace::by_parent())
                    .err()
                    .unwrap_or_else(|| execute(&program));
                // SAFETY: ends the caller, and nothing of it is run any more.
                unsafe { libc::_exit(error.raw_os_error().unwrap_or(1)) }
            }
            made => {
                let child = Pid::from_raw(made).ok_or_else(io::Error::last_os_error)?;
                let directed = self.direct(child, &files);
                if directed.is_err() {
                    let _ = rustix::process::kill_process(child, Signal::KILL);
                    let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
                }
                directed.map(|()| child)
            }
        }
    }

    /// Whether it has the form of one: it may have come from anywhere.
    fn is_sound(&self) -> bool {
        let threads = self.threads.iter().all(|thread| {
            thread.registers.len() == REGISTERS
                && (VECTORS_LEN_MIN..=VECTORS_LEN_MAX).contains(&thread.vectors.len())
        });
        let lies_within = |from: u64, to: u64| from < to && to <= MEMORY_END;
        threads
            && self.areas.iter().all(|area| lies_within(area.from, area.to))
            && self.pieces.iter().all(|piece| lies_within(piece.from, piece.to))
            && self.descriptors.iter().all(|descriptor| (0..TOOLS).contains(&descriptor.number))
            && self.paths().all(is_plain)
    }

    /// The files that are opened for it.
    fn paths(&self) -> impl Iterator<Item = &Path> {
        let shown = self.areas.iter().filter_map(|area| match &area.of {
            Origin::File(path, _) => Some(path.as_path()),
            Origin::Nothing | Origin::Kernel(_) => None,
        });
        let open = self.descriptors.iter().filter_map(|descriptor| match &descriptor.what {
            What::File(path, _) => Some(path.as_path()),
            _ => None,
        });
        shown.chain(open)
    }

    /// What is open in the child, out of the way of the numbers that it will have.
    fn open(&self, given: Vec<(RawFd, OwnedFd)>) -> io::Result<Vec<(RawFd, OwnedFd)>> {
        let mut given: BTreeMap<RawFd, OwnedFd> = given.into_iter().collect();
        let mut open = Vec::new();
        for descriptor in &self.descriptors {
            let fd = match &descriptor.what {
                What::File(path, position) => {
                    let making = OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC;
                    let flags = OFlags::from_bits_retain(descriptor.flags as u32) - making;
                    let mut file =
                        File::from(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?);
                    file.seek(SeekFrom::Start(*position))?;
                    file.into()
                }
                What::Event(count) => {
                    made(libc::SYS_eventfd2, [(*count).into(), flags_of(descriptor.flags), 0, 0])?
                }
                What::Signals(mask) => {
                    let mask: *const u64 = mask;
                    made(libc::SYS_signalfd4, [-1, mask as c_long, 8, flags_of(descriptor.flags)])?
                }
                What::Poll(_) => made(libc::SYS_epoll_create1, [libc::EPOLL_CLOEXEC.into(), 0, 0, 0])?,
                What::End => {
                    let end = given
                        .remove(&descriptor.number)
                        .ok_or_else(|| cannot("something it had open is not given anew"))?;
                    let flags = OFlags::from_bits_retain(descriptor.flags as u32);
                    rustix::fs::fcntl_setfl(&end, flags & (OFlags::NONBLOCK | OFlags::APPEND))?;
                    end
                }
            };
            open.push((descriptor.number, away(fd)?));
        }
        Ok(open)
    }

    /// The files that its memory shows; the first is that of its own pages.
    fn files(&self, pages: &File) -> io::Result<Vec<(PathBuf, OwnedFd)>> {
        let mut files = vec![(PathBuf::new(), away(pages.try_clone()?.into())?)];
        for area in &self.areas {
            if let Origin::File(path, _) = &area.of
                && !files.iter().any(|(known, _)| known == path)
            {
                let file = File::open(path)?;
                let mark = Mark::of(path, &file.metadata()?);
                if self.files.iter().any(|known| known.path == *path && *known != mark) {
                    return Err(cannot("a file it is made of has changed"));
                }
                files.push((path.clone(), away(file.into())?));
            }
        }
        if files.len() as RawFd > KEPT - TOOLS {
            return Err(cannot("it is made of too many files"));
        }
        Ok(files)
    }

    /// In the child: each descriptor gets its number, and signals are as they were.
    fn settle(&self, open: &[(RawFd, OwnedFd)], files: &[(PathBuf, OwnedFd)]) -> io::Result<()> {
        // All but the one by which it stops when it has become the program.
        crate::signals::set_mask(libc::SIG_SETMASK, !crate::signals::bit(libc::SIGTRAP));
        for signal in 1..=SIGNALS {
            let ignored = self.ignored & crate::signals::bit(signal) != 0;
            let action = if ignored { libc::SIG_IGN } else { libc::SIG_DFL };
            // SAFETY: no handler is set; the two signals that cannot be changed answer with an error, which is right.
            unsafe { libc::signal(signal, action) };
        }
        // It has what it had, and nothing else.
        call(libc::SYS_close_range, [0, u32::MAX.into(), libc::CLOSE_RANGE_CLOEXEC.into(), 0])?;
        let tools = files.iter().enumerate().map(|(index, (_, fd))| (TOOLS + index as RawFd, fd));
        for (number, fd) in open.iter().map(|(number, fd)| (*number, fd)).chain(tools) {
            call(libc::SYS_dup3, [fd.as_raw_fd().into(), number.into(), 0, 0])?;
        }
        for descriptor in &self.descriptors {
            let What::Poll(watched) = &descriptor.what else { continue };
            for (number, events, data) in watched {
                let event = libc::epoll_event { events: *events, u64: *data };
                let arguments = [
                    descriptor.number.into(),
                    libc::EPOLL_CTL_ADD.into(),
                    (*number).into(),
                    &raw const event as c_long,
                ];
                call(libc::SYS_epoll_ctl, arguments)?;
            }
        }
        Ok(())
    }

    /// Writes the list for a child that has just become the program, and lets it go.
    fn direct(&self, child: Pid, files: &[(PathBuf, OwnedFd)]) -> io::Result<()> {
        if crate::trace::wait_stopped(child.as_raw_nonzero().get())? != libc::SIGTRAP {
            return Err(cannot("it did not become the program that was to become it"));
        }
        let place = Path::new("/proc").join(child.as_raw_nonzero().to_string());
        let nothing = Apart { elsewhere: Path::new(""), before: Path::new(""), anew: &[] };
        let (at, list) = self.list(&Maps::read(&place, &nothing)?, files)?;
        let memory = File::options().read(true).write(true).open(place.join("mem"))?;
        memory.write_all_at(&list, at)?;
        // Where its code, data, heap and arguments are; nothing of what else could be told with that.
        let mut note: Vec<u8> = self.places.iter().flat_map(|place| place.to_le_bytes()).collect();
        note.extend(0_u64.to_le_bytes());
        note.extend(0_u32.to_le_bytes());
        note.extend(u32::MAX.to_le_bytes());
        memory.write_all_at(&note, NOTE)?;
        crate::trace::let_go(child)
    }

    fn list(&self, now: &Maps, files: &[(PathBuf, OwnedFd)]) -> io::Result<(u64, Vec<u8>)> {
        let mut list = List::default();
        self.clear(now, &mut list)?;
        self.map(files, &mut list);
        list.must(libc::SYS_close_range, &[TOOLS as u64, u32::MAX.into(), 0]);
        const NOTE_LEN: u64 = 104;
        // What a kernel refuses here costs a heap that grows elsewhere, and a name in lists of processes.
        list.may(libc::SYS_prctl, &[libc::PR_SET_MM as u64, libc::PR_SET_MM_MAP as u64, NOTE, NOTE_LEN, 0]);
        let Some((first, others)) = self.threads.split_first() else {
            return Err(cannot("it has no thread"));
        };
        let entries: Vec<_> = others.iter().map(|thread| list.thread(thread)).collect();
        list.must(libc::SYS_arch_prctl, &[ARCH_SET_FS, first.registers[FS_BASE]]);
        list.keep(libc::SYS_set_tid_address, &[first.number_at], first.number_at);
        list.become_thread(first);
        for (entry, thread) in entries.iter().zip(others) {
            list.begin(entry);
            list.become_thread(thread);
        }
        list.finish()
    }

    /// Everything goes that the child has, but for what the kernel shows to each process, which is put where it was.
    fn clear(&self, now: &Maps, list: &mut List) -> io::Result<()> {
        const MOVE: u64 = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        let shown = |areas: &[Area]| -> Vec<(String, u64, u64)> {
            let of_kernel = areas.iter().filter_map(|area| match &area.of {
                Origin::Kernel(name) => Some((name.clone(), area.from, area.to - area.from)),
                _ => None,
            });
            of_kernel.collect()
        };
        let (there, wanted) = (shown(&now.areas), shown(&self.areas));
        if there.iter().map(|(name, _, len)| (name, len)).ne(wanted.iter().map(|(name, _, len)| (name, len)))
        {
            return Err(cannot("the kernel shows other things than it did"));
        }
        let mut aside = ASIDE;
        for (_, from, len) in &there {
            list.must(libc::SYS_mremap, &[*from, *len, *len, MOVE, aside]);
            aside += len;
        }
        if aside > END {
            return Err(cannot("the kernel shows too much"));
        }
        list.must(libc::SYS_munmap, &[0, BASE]);
        list.must(libc::SYS_munmap, &[END, MEMORY_END - END]);
        let mut aside = ASIDE;
        for (_, to, len) in &wanted {
            list.must(libc::SYS_mremap, &[aside, *len, *len, MOVE, *to]);
            aside += len;
        }
        Ok(())
    }

    /// Its memory, and its own pages over that.
    fn map(&self, files: &[(PathBuf, OwnedFd)], list: &mut List) {
        const OWN: i32 = libc::MAP_PRIVATE | libc::MAP_FIXED;
        const EMPTY: i32 = OWN | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let tool = |path: &Path| {
            files.iter().position(|(known, _)| known == path).unwrap_or_default() as u64 + TOOLS as u64
        };
        let map = |from: u64, to: u64, access: i32, how: i32, fd: u64, at: u64| {
            [from, to - from, access as u64, how as u64, fd, at]
        };
        let holds_stack = |from: u64, to: u64| (from..to).contains(&self.places[STACK_PLACE]);
        for (index, area) in self.areas.iter().enumerate() {
            let mut from = area.from;
            if holds_stack(area.from, area.to) {
                let below = self.areas[..index].last().map_or(0, |before| before.to);
                from = area.to.saturating_sub(STACK_LEN).max(below).min(area.from);
            }
            match &area.of {
                Origin::Nothing => {
                    list.must(libc::SYS_mmap, &map(from, area.to, area.access, EMPTY, u64::MAX, 0))
                }
                Origin::File(path, at) => {
                    list.must(libc::SYS_mmap, &map(from, area.to, area.access, OWN, tool(path), *at))
                }
                Origin::Kernel(_) => {}
            }
        }
        let pages = tool(Path::new(""));
        for piece in &self.pieces {
            if holds_stack(piece.from, piece.to) {
                // Its arguments are there, which the kernel tells others only where they are in no file.
                list.must(libc::SYS_pread64, &[pages, piece.from, piece.to - piece.from, piece.at]);
            } else {
                let view = map(piece.from, piece.to, piece.access, OWN, pages, piece.at);
                list.must(libc::SYS_mmap, &view);
            }
        }
        for (from, to) in &self.guards {
            // A kernel that took it once takes it again.
            list.must(libc::SYS_madvise, &[*from, to.saturating_sub(*from), MADV_GUARD_INSTALL]);
        }
    }
}

/// Whether a path leads to the same file for everybody: not to what the one who opens it has.
fn is_plain(path: &Path) -> bool {
    path.is_absolute()
        && (path == Path::new("/dev/null") || !path.starts_with("/proc") && !path.starts_with("/dev"))
}

/// Where among its places its stack is.
const STACK_PLACE: usize = 6;
const ARCH_SET_FS: u64 = 0x1002;
const MADV_GUARD_INSTALL: u64 = 102;

/// The program in a file that is nowhere.
fn executable() -> io::Result<OwnedFd> {
    let make = |more| rustix::fs::memfd_create("palisade", MemfdFlags::CLOEXEC | more);
    // Older kernels do not know the word, and need none.
    let file = File::from(make(MemfdFlags::EXEC).or_else(|_| make(MemfdFlags::empty()))?);
    file.write_all_at(&program(), 0)?;
    away(file.into())
}

/// Gives the reason why that cannot be.
fn execute(program: &OwnedFd) -> io::Error {
    let none: [*const libc::c_char; 1] = [std::ptr::null()];
    let arguments = [c"".as_ptr() as c_long, none.as_ptr() as c_long, none.as_ptr() as c_long];
    // SAFETY: an empty name and two empty lists; all outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            c_long::from(program.as_raw_fd()),
            arguments[0],
            arguments[1],
            arguments[2],
            c_long::from(libc::AT_EMPTY_PATH),
        )
    };
    io::Error::last_os_error()
}

fn flags_of(flags: c_int) -> c_long {
    (flags & (libc::O_NONBLOCK | libc::O_CLOEXEC)).into()
}

fn call(number: c_long, arguments: [c_long; 4]) -> io::Result<c_long> {
    let [first, second, third, fourth] = arguments;
    // SAFETY: the calls made here read what their callers point to, which outlives them, and make or move descriptors.
    let done = unsafe { libc::syscall(number, first, second, third, fourth) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

fn made(number: c_long, arguments: [c_long; 4]) -> io::Result<OwnedFd> {
    let fd = call(number, arguments)?;
    // SAFETY: a descriptor that was just made and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// The same under a number out of everybody's way.
fn away(fd: OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, KEPT)?)
}
