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

use std::path::PathBuf;

pub use take::Apart;

use serde::{Deserialize, Serialize};

const PAGE_LEN: u64 = 4096;

/// A process that was written down, without its pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imprint {
    /// Its threads, the first of all first.
    threads: Vec<Thread>,
    /// What its memory consists of.
    areas: Vec<Area>,
    /// Pages that are its own, over those areas.
    pieces: Vec<Piece>,
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
        io::{BufRead, BufReader, Write},
        os::{
            fd::OwnedFd,
            unix::{net::UnixStream, process::CommandExt},
        },
        path::Path,
        process::{Command, Stdio},
    };

    use rustix::process::{Pid, Signal, WaitOptions};

    use super::*;

    /// Counts what it hears, and knows what it heard first.
    const COUNTS: &str =
        "first=; n=0; while read -r word; do : ${first:=$word}; n=$((n+1)); echo $n $first $word $$; done";

    fn ask(talk: &mut BufReader<UnixStream>, word: &str) -> String {
        talk.get_mut().write_all(format!("{word}\n").as_bytes()).unwrap();
        let mut line = String::new();
        talk.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    #[test]
    fn a_process_goes_on_where_it_was_written_down_as_often_as_is_wanted() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = OwnedFd::from(theirs);
        let mut command = Command::new("bash");
        command.args(["-c", COUNTS]).stderr(Stdio::null());
        command.stdin(Stdio::from(theirs.try_clone().unwrap())).stdout(Stdio::from(theirs));
        // Whoever runs tests may have left something open.
        let alone = || {
            // SAFETY: marks descriptors of the caller.
            unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) };
            Ok(())
        };
        // SAFETY: one system call is made.
        unsafe { command.pre_exec(alone) };
        let mut child = command.spawn().unwrap();
        let mut talk = BufReader::new(ours);
        assert!(ask(&mut talk, "one").starts_with("1 one one "));
        let pages =
            std::fs::File::from(rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let nothing = Apart { elsewhere: Path::new(""), before: Path::new("") };
        let imprint = Imprint::take(Pid::from_child(&child), &nothing, &pages).unwrap();
        assert!(ask(&mut talk, "two").starts_with("2 one two "), "it goes on");
        child.kill().unwrap();
        child.wait().unwrap();
        for round in 0..3 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let theirs = OwnedFd::from(theirs);
            let given = vec![(0, theirs.try_clone().unwrap()), (1, theirs)];
            let child = imprint.make(&pages, given, || Ok(())).unwrap();
            let mut talk = BufReader::new(ours);
            assert!(ask(&mut talk, "three").starts_with("2 one three "), "round {round}");
            assert!(ask(&mut talk, "four").starts_with("3 one four "));
            rustix::process::kill_process(child, Signal::KILL).unwrap();
            rustix::process::waitpid(Some(child), WaitOptions::empty()).unwrap();
        }
    }
}
