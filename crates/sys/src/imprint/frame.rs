//! All registers of a thread as the kernel takes them back after a signal was handled.

use super::Thread;

/// Where registers are in what `PTRACE_GETREGSET` gives.
const R15: usize = 0;
const R14: usize = 1;
const R13: usize = 2;
const R12: usize = 3;
const RBP: usize = 4;
const RBX: usize = 5;
const R11: usize = 6;
const R10: usize = 7;
const R9: usize = 8;
const R8: usize = 9;
const RAX: usize = 10;
const RCX: usize = 11;
const RDX: usize = 12;
const RSI: usize = 13;
const RDI: usize = 14;
const CALL: usize = 15;
const RIP: usize = 16;
const CS: usize = 17;
const FLAGS: usize = 18;
const RSP: usize = 19;
const SS: usize = 20;
/// What a thread finds its own data by.
pub(super) const FS_BASE: usize = 21;
/// How many there are.
pub(super) const REGISTERS: usize = 27;
/// What there is of vectors on every processor, and the most of them.
pub(super) const VECTORS_LEN_MIN: usize = 576;
/// See [`VECTORS_LEN_MIN`].
pub(super) const VECTORS_LEN_MAX: usize = 16 << 10;

/// The order in which the kernel takes them back.
const ORDER: [usize; 18] =
    [R8, R9, R10, R11, R12, R13, R14, R15, RDI, RSI, RBP, RBX, RDX, RAX, RCX, RSP, RIP, FLAGS];
/// Answers of calls that were interrupted, and are made again: the kernel's own, which no program sees.
const AGAIN: [i64; 4] = [-512, -513, -514, -516];
/// The instruction that makes a call is so long.
const CALL_LEN: u64 = 2;
/// There are vectors, and the segment of the stack is taken back as it stands here.
const CONTEXT_FLAGS: u64 = 0b111;
const NO_OTHER_STACK: u64 = 2;
/// Vectors that a process has to ask for, which is not done again.
pub(super) const VECTORS_ASKED_FOR: u64 = 1 << 18;
/// Where the kernel says which vectors it and the processor have, and where it wants a mark: that there are more than the
/// oldest.
pub(super) const VECTORS_MARK_AT: usize = 464;
const VECTORS_MARK: u32 = 0x4650_5853;
const VECTORS_END_MARK: u32 = 0x4650_5845;
const ALIGNED: usize = 64;

/// Something that a list ends with.
#[derive(Debug)]
pub(super) struct Frame {
    /// What is put behind the list, a multiple of an entry.
    pub bytes: Vec<u8>,
    /// What the register of the stack must say for the kernel to find it.
    pub stack: u64,
}

impl Frame {
    /// For a thread, to be put at an address that is a multiple of 64.
    pub(super) fn of(thread: &Thread, address: u64) -> Self {
        let mut bytes = vectors(&thread.vectors);
        // The address to return to, which nobody does, and then what the kernel takes.
        let stack = address + bytes.len() as u64 + 8;
        let mut words = vec![0, CONTEXT_FLAGS, 0, 0, NO_OTHER_STACK, 0];
        let registers = resumed(&thread.registers);
        words.extend(ORDER.map(|index| registers[index]));
        // Segments: of code, two that nobody uses, of the stack.
        words.push(registers[CS] & 0xffff | (registers[SS] & 0xffff) << 48);
        // Why it was interrupted, which is nobody's concern.
        words.extend([0; 4]);
        words.push(address);
        words.extend([0; 8]);
        words.push(thread.mask);
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(ALIGNED), 0);
        Self { bytes, stack }
    }
}

/// Vectors as the kernel writes them for a program to see.
fn vectors(saved: &[u8]) -> Vec<u8> {
    let len = saved.len() as u32;
    let mut bytes = saved.to_vec();
    let there: [u8; 8] = bytes[VECTORS_MARK_AT..][..8].try_into().unwrap_or_default();
    let mask = (u64::from_le_bytes(there) & !VECTORS_ASKED_FOR).to_le_bytes();
    let mut mark = Vec::new();
    mark.extend(VECTORS_MARK.to_le_bytes());
    mark.extend((len + 4).to_le_bytes());
    mark.extend(mask);
    mark.extend(len.to_le_bytes());
    mark.resize(48, 0);
    bytes[VECTORS_MARK_AT..][..48].copy_from_slice(&mark);
    bytes.extend(VECTORS_END_MARK.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(ALIGNED), 0);
    bytes
}

/// Registers with which a thread goes on: a call that was interrupted is made again.
fn resumed(registers: &[u64]) -> Vec<u64> {
    let mut registers = registers.to_vec();
    if registers[CALL] as i64 >= 0 && AGAIN.contains(&(registers[RAX] as i64)) {
        registers[RAX] = registers[CALL];
        registers[RIP] = registers[RIP].wrapping_sub(CALL_LEN);
    }
    registers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_was_interrupted_is_made_again_and_no_other() {
        let at = |call: i64, answer: i64| {
            let mut registers = vec![0; REGISTERS];
            (registers[CALL], registers[RAX], registers[RIP]) = (call as u64, answer as u64, 0x1002);
            let registers = resumed(&registers);
            (registers[RAX] as i64, registers[RIP])
        };
        assert_eq!(at(202, -512), (202, 0x1000), "it waited for a lock");
        assert_eq!(at(7, -516), (7, 0x1000), "it waited for a time");
        assert_eq!(at(0, 5), (5, 0x1002), "it had an answer");
        assert_eq!(at(0, -4), (-4, 0x1002), "it had been told that it was interrupted");
        assert_eq!(at(-1, -512), (-512, 0x1002), "it made no call, and has a number there");
    }
}
