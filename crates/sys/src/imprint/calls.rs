//! The program that becomes another one: a page of code that makes the system calls of a list, and the list.
//!
//! It has no stack and calls nothing: the register that would hold the stack is where it is in its list. A thread that it
//! makes begins with a list of its own in that register. The last entry of each list has the kernel put all registers in
//! place at once, as it does after a signal.

use std::{arch::global_asm, io};

use libc::c_long;

use super::{
    Thread,
    frame::{FS_BASE, Frame},
};
use crate::pages::PAGE_LEN;

/// Where the program is, far from where the kernel puts anything by itself.
pub(super) const BASE: u64 = 0x1000_0000_0000;
/// Where its list is, and how long that may be.
const LIST: u64 = BASE + PAGE_LEN;
const LIST_LEN_MAX: u64 = 1 << 20;
/// Something that a call points to.
pub(super) const NOTE: u64 = LIST + LIST_LEN_MAX;
/// Room where something is put on its way.
pub(super) const ASIDE: u64 = BASE + (16 << 20);
/// The end of all of that.
pub(super) const END: u64 = BASE + (32 << 20);

/// The number of an entry that ends a list.
const BECOME: u64 = u64::MAX;
/// An entry: the number of a call, six arguments, and what to do with the answer.
const ENTRY_WORDS: usize = 8;
const ENTRY_LEN: u64 = 64;
/// An answer that is no error is put nowhere.
const MUST: u64 = 0;
/// Whatever the answer is.
const MAY: u64 = 1;

global_asm!(
    ".pushsection .rodata.palisade_calls, \"a\", @progbits",
    ".globl palisade_calls",
    ".globl palisade_calls_end",
    "palisade_calls:",
    "movabs rsp, {list}",
    "2: mov rax, [rsp]",
    "cmp rax, -1",
    "je 4f",
    "mov rdi, [rsp + 8]",
    "mov rsi, [rsp + 16]",
    "mov rdx, [rsp + 24]",
    "mov r10, [rsp + 32]",
    "mov r8, [rsp + 40]",
    "mov r9, [rsp + 48]",
    "syscall",
    // What to do with the answer: nothing, or to end where it is an error, or to put it somewhere.
    "mov rcx, [rsp + 56]",
    "cmp rcx, 1",
    "je 3f",
    "cmp rax, -4096",
    "ja 5f",
    "test rcx, rcx",
    "jz 3f",
    "mov [rcx], eax",
    "3: add rsp, 64",
    "jmp 2b",
    // The end of a list: every register as it was.
    "4: mov rsp, [rsp + 8]",
    "mov eax, 15",
    "syscall",
    // A call that had to be made and was refused ends the process with its reason.
    "5: neg eax",
    "mov edi, eax",
    "mov eax, 231",
    "syscall",
    "palisade_calls_end:",
    ".popsection",
    list = const LIST,
);

unsafe extern "C" {
    static palisade_calls: [u8; 0];
    static palisade_calls_end: [u8; 0];
}

/// The code of the program.
fn code() -> &'static [u8] {
    let (from, to) = (&raw const palisade_calls, &raw const palisade_calls_end);
    let len = to as usize - from as usize;
    // SAFETY: both are marks in the same read-only section of this program, the second after the first.
    unsafe { std::slice::from_raw_parts(from.cast(), len) }
}

/// The program as a file that can be executed: its code, and an empty list.
pub(super) fn program() -> Vec<u8> {
    const HEADER_LEN: u64 = 64;
    const SEGMENT_LEN: u64 = 56;
    let start = HEADER_LEN + 2 * SEGMENT_LEN;
    let len = start + code().len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    let mut put = |bytes: &[u8]| file.extend_from_slice(bytes);
    // An executable for this architecture.
    put(&2_u16.to_le_bytes());
    put(&62_u16.to_le_bytes());
    put(&1_u32.to_le_bytes());
    for word in [BASE + start, HEADER_LEN, 0] {
        put(&word.to_le_bytes());
    }
    put(&0_u32.to_le_bytes());
    for half in [HEADER_LEN, SEGMENT_LEN, 2, 0, 0, 0] {
        put(&(half as u16).to_le_bytes());
    }
    const READ_EXECUTE: u32 = 5;
    const READ_WRITE: u32 = 6;
    for (access, address, file_len, len) in
        [(READ_EXECUTE, BASE, len, len), (READ_WRITE, LIST, 0, LIST_LEN_MAX + PAGE_LEN)]
    {
        put(&1_u32.to_le_bytes());
        put(&access.to_le_bytes());
        for word in [0, address, address, file_len, len, PAGE_LEN] {
            put(&word.to_le_bytes());
        }
    }
    put(code());
    file
}

/// An entry that makes a thread, by where it is in its list.
#[derive(Debug)]
pub(super) struct ThreadEntry(usize);

/// A list that is being written.
#[derive(Debug, Default)]
pub(super) struct List {
    bytes: Vec<u8>,
}

impl List {
    /// A call that must succeed.
    pub(super) fn must(&mut self, number: c_long, arguments: &[u64]) {
        self.entry(number as u64, arguments, MUST);
    }

    /// A call that may be refused.
    pub(super) fn may(&mut self, number: c_long, arguments: &[u64]) {
        self.entry(number as u64, arguments, MAY);
    }

    /// A call whose answer is put somewhere, in four bytes.
    pub(super) fn keep(&mut self, number: c_long, arguments: &[u64], at: u64) {
        self.entry(number as u64, arguments, at);
    }

    fn entry(&mut self, number: u64, arguments: &[u64], answer: u64) {
        let mut words = [0; ENTRY_WORDS];
        words[0] = number;
        words[1..=arguments.len()].copy_from_slice(arguments);
        words[ENTRY_WORDS - 1] = answer;
        self.bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }

    /// Makes a thread, which goes on with a list of its own. Where that will be is known when it was written.
    pub(super) fn thread(&mut self, thread: &Thread) -> ThreadEntry {
        const FLAGS: i32 = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM
            | libc::CLONE_SETTLS
            | libc::CLONE_CHILD_SETTID
            | libc::CLONE_CHILD_CLEARTID;
        let at = self.bytes.len();
        self.must(libc::SYS_clone, &[FLAGS as u64, 0, 0, thread.number_at, thread.registers[FS_BASE]]);
        ThreadEntry(at)
    }

    /// The list of that thread begins here.
    pub(super) fn begin(&mut self, entry: &ThreadEntry) {
        // It comes back from the call that made it, with an answer that is put nowhere.
        let begin = LIST + self.bytes.len() as u64;
        self.entry(0, &[], MUST);
        self.bytes[entry.0 + 16..][..8].copy_from_slice(&begin.to_le_bytes());
    }

    /// The end of a list: the thread that made the calls is that one.
    pub(super) fn become_thread(&mut self, thread: &Thread) {
        if let Some((address, len, mark)) = thread.restartable {
            self.must(libc::SYS_rseq, &[address, len.into(), 0, mark.into()]);
        }
        const LOCKS_LEN: u64 = 24;
        self.must(libc::SYS_set_robust_list, &[thread.locks, LOCKS_LEN]);
        // Behind this and the last entry.
        let name_at = LIST + self.bytes.len() as u64 + 2 * ENTRY_LEN;
        self.must(libc::SYS_prctl, &[libc::PR_SET_NAME as u64, name_at]);
        let frame = Frame::of(thread, name_at + ENTRY_LEN);
        self.entry(BECOME, &[frame.stack], MUST);
        let mut name = thread.name.as_bytes().to_vec();
        name.resize(ENTRY_LEN as usize, 0);
        self.bytes.extend(name);
        self.bytes.extend(frame.bytes);
    }

    /// The list, and where it belongs.
    pub(super) fn finish(self) -> io::Result<(u64, Vec<u8>)> {
        if self.bytes.len() as u64 > LIST_LEN_MAX {
            return Err(super::maps::cannot("it has too many parts"));
        }
        Ok((LIST, self.bytes))
    }
}
