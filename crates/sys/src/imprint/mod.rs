//! A process as it stands, written down and taken up again: its memory, its threads, its descriptors.
//!
//! A hypervisor that emulates a processor has translated what its machine runs, and all of that is lost with its process.
//! A machine that is to begin many times where another one was frozen begins quickest in a copy of that very process: its
//! pages come from a file, each when it is first looked at, and nothing is started, read in or translated again.
//!
//! It is no way to keep a process for long: a copy is good on the kernel and the processor it was taken on, while nobody
//! has changed the programs it is made of. Whoever has none begins in the usual way.
//!
//! - [`Imprint::take`] looks at a process while all of its threads stand still, and lets it go on.
//! - [`Imprint::revive`] makes a child that becomes it. The child is a program of one page, which makes the system calls of a
//!   list (`calls`) and then is who it was told to be.
//!
//! Invariant: what cannot be taken up again (a device, a file that is gone, a pipe that nobody gives anew) is an error, when
//! it is written down or before a child is made, never a process that lacks something.
//! Invariant: a child makes no call that the caller's own filter refuses, and has no right that the caller lacks.
//! Absent on purpose: signals that are caught. Who is taken up again ends by those that would have been handled.

mod calls;
mod frame;
mod maps;
mod revive;
mod take;

use std::{
    fs::Metadata,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

pub use take::Apart;

use serde::{Deserialize, Serialize};

/// A process that was written down, without its pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imprint {
    /// Its threads, the first of all first.
    threads: Vec<Thread>,
    /// What its memory consists of.
    areas: Vec<Area>,
    /// The files among that, as they were.
    files: Vec<Mark>,
    /// Pages that are its own, over those areas.
    pieces: Vec<Piece>,
    /// Pages that nobody may touch.
    guards: Vec<(u64, u64)>,
    /// How long the file with those pages is.
    pages_len: u64,
    /// What it has open.
    descriptors: Vec<Descriptor>,
    /// Signals that it ignores.
    ignored: u64,
    /// Where the kernel knows its code, data, heap, stack and arguments to be, in the order in which it is told so.
    places: [u64; 11],
}

impl Imprint {
    /// How long the file with its pages is.
    pub fn pages_len(&self) -> u64 {
        self.pages_len
    }
}

/// A thread that stood still.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Thread {
    /// What it is called.
    name: String,
    /// As `PTRACE_GETREGS` gives them.
    registers: Vec<u64>,
    /// Its vector registers, as the kernel saves them.
    vectors: Vec<u8>,
    /// Signals that are held back.
    mask: u64,
    /// Where it hears on which processor it runs: address, length, mark.
    restartable: Option<(u64, u32, u32)>,
    /// Where its list of locks begins.
    locks: u64,
    /// Where it keeps its number.
    number_at: u64,
}

/// A part of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Area {
    from: u64,
    to: u64,
    /// As `mmap` takes it.
    access: i32,
    of: Origin,
}

/// A file that has not changed since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    path: PathBuf,
    len: u64,
    modified: (i64, i64),
}

impl Mark {
    fn of(path: &Path, found: &Metadata) -> Self {
        Self { path: path.to_owned(), len: found.len(), modified: (found.mtime(), found.mtime_nsec()) }
    }
}

/// What a part of memory shows where it is nobody's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Origin {
    /// Zeros.
    Nothing,
    /// A file, from that offset on.
    File(PathBuf, u64),
    /// What the kernel shows to every process, by the name it has.
    Kernel(String),
}

/// Pages that follow each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Piece {
    from: u64,
    to: u64,
    access: i32,
    /// Where they are in the file.
    at: u64,
}

/// Something that is open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Descriptor {
    number: i32,
    flags: i32,
    what: What,
}

/// What it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum What {
    /// A file, and how far it was read.
    File(PathBuf, u64),
    /// A counter that can be waited for.
    Event(u32),
    /// Signals that can be read.
    Signals(u64),
    /// Others that are waited for: number, events, and what is told of them.
    Poll(Vec<(i32, u32, u64)>),
    /// One end of something; whoever takes the process up gives it another.
    End,
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{self, BufRead, BufReader, Read, Write},
        os::{
            fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
            unix::{fs::FileExt, net::UnixStream, process::CommandExt},
        },
        process::{Child, Command, Stdio},
    };

    use rustix::process::{Pid, Signal, WaitOptions};

    use super::*;

    /// Counts what it hears, and knows what it heard first.
    const COUNTS: &str =
        "first=; n=0; while read -r word; do : ${first:=$word}; n=$((n+1)); echo $n $first $word; done";

    fn nothing() -> Apart<'static> {
        Apart { elsewhere: Path::new(""), before: Path::new(""), anew: &[] }
    }

    fn pages() -> File {
        rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
    }

    /// A shell that counts, with nothing open but the other end of what it is spoken to over.
    fn counting(script: &str) -> (Child, BufReader<UnixStream>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = OwnedFd::from(theirs);
        let mut command = Command::new("bash");
        command.args(["-c", script]).stderr(Stdio::null());
        command.stdin(Stdio::from(theirs.try_clone().unwrap())).stdout(Stdio::from(theirs));
        // Whoever runs tests may have left something open.
        let alone = || {
            // SAFETY: marks descriptors of the caller.
            unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) };
            Ok(())
        };
        // SAFETY: one system call is made.
        unsafe { command.pre_exec(alone) };
        (command.spawn().unwrap(), BufReader::new(ours))
    }

    fn ask(talk: &mut BufReader<UnixStream>, word: &str) -> String {
        talk.get_mut().write_all(format!("{word}\n").as_bytes()).unwrap();
        let mut line = String::new();
        talk.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// New ends for descriptors, and the end to speak to them all.
    fn ends(numbers: &[RawFd]) -> (UnixStream, Vec<(RawFd, OwnedFd)>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = OwnedFd::from(theirs);
        (ours, numbers.iter().map(|number| (*number, theirs.try_clone().unwrap())).collect())
    }

    fn end(child: Pid) {
        rustix::process::kill_process(child, Signal::KILL).unwrap();
        rustix::process::waitpid(Some(child), WaitOptions::empty()).unwrap();
    }

    #[test]
    fn a_process_goes_on_where_it_was_written_down_as_often_as_is_wanted() {
        let (mut child, mut talk) = counting(COUNTS);
        assert_eq!(ask(&mut talk, "one"), "1 one one");
        let pages = pages();
        let imprint = Imprint::take(Pid::from_child(&child), &nothing(), &pages).unwrap();
        assert_eq!(ask(&mut talk, "two"), "2 one two", "it goes on");
        child.kill().unwrap();
        child.wait().unwrap();
        for round in 0..3 {
            let (ours, given) = ends(&[0, 1]);
            let child = imprint.make(&pages, given, || Ok(())).unwrap();
            let mut talk = BufReader::new(ours);
            assert_eq!(ask(&mut talk, "three"), "2 one three", "round {round}");
            assert_eq!(ask(&mut talk, "four"), "3 one four", "round {round}");
            let place = format!("/proc/{}", child.as_raw_nonzero());
            assert!(std::fs::read_to_string(format!("{place}/cmdline")).unwrap().contains("while read"));
            assert_eq!(std::fs::read_to_string(format!("{place}/comm")).unwrap(), "bash\n");
            end(child);
        }
    }

    #[test]
    fn one_that_was_taken_up_can_be_written_down_again() {
        let (mut child, mut talk) = counting(COUNTS);
        assert_eq!(ask(&mut talk, "one"), "1 one one");
        let place = std::env::temp_dir().join(format!("pal-imprint-{}", std::process::id()));
        let first = File::options().read(true).write(true).create(true).truncate(true).open(&place).unwrap();
        let imprint = Imprint::take(Pid::from_child(&child), &nothing(), &first).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let (ours, given) = ends(&[0, 1]);
        let child = imprint.make(&first, given, || Ok(())).unwrap();
        // It stays as long as somebody may speak to it.
        let mut talk = BufReader::new(ours);
        assert_eq!(ask(&mut talk, "two"), "2 one two");
        let second = pages();
        let again = Imprint::take(child, &Apart { before: &place, ..nothing() }, &second).unwrap();
        end(child);
        // It needs nothing of where it came from.
        first.set_len(0).unwrap();
        std::fs::remove_file(place).unwrap();
        let (ours, given) = ends(&[0, 1]);
        let child = again.make(&second, given, || Ok(())).unwrap();
        assert_eq!(ask(&mut BufReader::new(ours), "three"), "3 one three");
        end(child);
    }

    /// Answers each byte with how many there were, and with what a register for vectors has held since before.
    fn answer(mut way: UnixStream) {
        let (mut count, mut sum) = (0, 0.5);
        let mut byte = [0];
        while way.read_exact(&mut byte).is_ok() {
            (count, sum) = (count + 1, sum * 2.0);
            let _ = way.write_all(&[count, sum as u8]);
        }
    }

    /// Pages at a place of their own: two with something between them that nobody may touch, and one that no child may have.
    const MARKED: u64 = 0x3000_0000_0000;

    fn mark_memory() {
        let at = |page: u64| (MARKED + page) as *mut libc::c_void;
        let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: nobody has anything there.
        unsafe { libc::mmap(at(0), 16384, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0) };
        for page in [0, 8192, 12288] {
            // SAFETY: it was just mapped.
            unsafe { at(page).cast::<u8>().write(7) };
        }
        // SAFETY: the second and the last of those pages; older kernels know no guards.
        unsafe { libc::syscall(libc::SYS_madvise, at(4096), 4096, 102) };
        // SAFETY: as above.
        unsafe { libc::madvise(at(12288), 4096, libc::MADV_WIPEONFORK) };
    }

    fn marks(process: Pid) -> [u8; 3] {
        let memory = File::open(format!("/proc/{}/mem", process.as_raw_nonzero())).unwrap();
        [0, 8192, 12288].map(|page| {
            let mut byte = [0xff];
            memory.read_exact_at(&mut byte, MARKED + page).unwrap();
            byte[0]
        })
    }

    fn is_guard(process: Pid) -> bool {
        let pagemap = File::open(format!("/proc/{}/pagemap", process.as_raw_nonzero())).unwrap();
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, (MARKED / 4096 + 1) * 8).unwrap();
        u64::from_ne_bytes(entry) & 1 << 58 != 0
    }

    fn hear(way: &mut UnixStream) -> [u8; 2] {
        let mut heard = [0; 2];
        way.write_all(b".").and_then(|()| way.read_exact(&mut heard)).unwrap();
        heard
    }

    #[test]
    fn every_thread_goes_on() {
        let ((mut one, one_there), (mut two, two_there)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let numbers = [20, 21];
        // SAFETY: the child uses nothing that another thread of this process may hold, and never comes back.
        let child = match unsafe { libc::fork() } {
            0 => {
                for (number, way) in numbers.into_iter().zip([&one_there, &two_there]) {
                    // SAFETY: takes any two numbers.
                    unsafe { libc::dup2(way.as_raw_fd(), number) };
                }
                // SAFETY: closes what the child does not use.
                unsafe { libc::close_range(0, 19, 0) };
                // SAFETY: as above.
                unsafe { libc::close_range(22, u32::MAX, 0) };
                let [first, second] = numbers.map(|number| {
                    // SAFETY: it was just made, and is nobody else's.
                    unsafe { UnixStream::from_raw_fd(number) }
                });
                mark_memory();
                std::thread::spawn(|| answer(second));
                answer(first);
                // SAFETY: ends the caller.
                unsafe { libc::_exit(0) }
            }
            child => Pid::from_raw(child).unwrap(),
        };
        drop((one_there, two_there));
        assert_eq!((hear(&mut one), hear(&mut two), hear(&mut two)), ([1, 1], [1, 1], [2, 2]));
        let pages = pages();
        let guards: Vec<_> = is_guard(child).then_some((MARKED + 4096, MARKED + 8192)).into_iter().collect();
        assert_eq!(marks(child), [7, 7, 7]);
        let imprint = Imprint::take(child, &nothing(), &pages).unwrap();
        end(child);
        assert_eq!(imprint.threads.len(), 2);
        assert_eq!(imprint.guards, guards, "what ends a stack is known");
        let ((mut one, one_there), (mut two, two_there)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let given = vec![(numbers[0], one_there.into()), (numbers[1], two_there.into())];
        let child = imprint.make(&pages, given, || Ok(())).unwrap();
        assert_eq!((hear(&mut two), hear(&mut one), hear(&mut two)), ([3, 4], [2, 2], [4, 8]));
        assert_eq!(marks(child), [7, 7, 0], "what no child may have is not there");
        assert_eq!(is_guard(child), !guards.is_empty());
        end(child);
    }

    #[test]
    fn what_cannot_be_taken_up_again_is_said_and_harms_nobody() {
        let lost = std::env::temp_dir().join(format!("pal-lost-{}", std::process::id()));
        let script = format!("exec 5>{0}; rm {0}; {COUNTS}", lost.display());
        let (mut child, mut talk) = counting(&script);
        assert_eq!(ask(&mut talk, "one"), "1 one one");
        let refused = Imprint::take(Pid::from_child(&child), &nothing(), &pages()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported, "{refused}");
        assert_eq!(ask(&mut talk, "two"), "2 one two", "it goes on");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn nobody_is_made_of_something_else_than_was_written_down() {
        let (mut child, mut talk) = counting(COUNTS);
        assert_eq!(ask(&mut talk, "one"), "1 one one");
        let whole = pages();
        let imprint = Imprint::take(Pid::from_child(&child), &nothing(), &whole).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let refused = |imprint: &Imprint, pages: &File, numbers: &[RawFd]| {
            imprint.make(pages, ends(numbers).1, || Ok(())).unwrap_err().to_string()
        };
        let cut = pages();
        cut.set_len(imprint.pages_len() - 1).unwrap();
        assert_eq!(refused(&imprint, &cut, &[0, 1]), "its pages are not whole");
        assert_eq!(refused(&imprint, &whole, &[0]), "something it had open is not given anew");
        let mut other = imprint.clone();
        other.files[0].modified.0 += 1;
        assert_eq!(refused(&other, &whole, &[0, 1]), "a file it is made of has changed");
        let mut other = imprint.clone();
        for area in &mut other.areas {
            if let Origin::Kernel(name) = &mut area.of {
                name.push('2');
            }
        }
        assert_eq!(refused(&other, &whole, &[0, 1]), "the kernel shows other things than it did");
        let unsound: [&dyn Fn(&mut Imprint); 3] = [
            &|other| other.threads[0].registers.truncate(3),
            &|other| other.pieces[0].to = 0,
            // That would be what the maker has there.
            &|other| other.descriptors[0].what = What::File("/proc/self/mem".into(), 0),
        ];
        for harm in unsound {
            let mut other = imprint.clone();
            harm(&mut other);
            assert_eq!(refused(&other, &whole, &[0, 1]), "it is none that was written down");
        }
        let fails = imprint.make(&whole, ends(&[0, 1]).1, || Err(io::ErrorKind::Other.into()));
        assert_eq!(fails.unwrap_err().kind(), io::ErrorKind::NotFound, "a child that cannot begin is gone");
        let child = imprint.make(&whole, ends(&[0, 1]).1, || Ok(())).unwrap();
        end(child);
    }
}
