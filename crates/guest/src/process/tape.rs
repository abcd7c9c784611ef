//! The newest output of a kept command, in the order of its arrival, with the stream of each byte.
//!
//! Invariant: a tape holds at most [`KEPT_LEN_MAX`] bytes, the cost of its runs included, and never allocates more.

use std::collections::VecDeque;

use bytes::Bytes;
use proto::guest::KEPT_LEN_MAX;

use super::{OutputSource, hub::OutputPiece};

/// Memory that a run costs besides its bytes.
const RUN_COST: usize = size_of::<(OutputSource, u32)>();
/// The longest piece of a replay.
const PIECE_LEN_MAX: usize = 32 * 1024;

/// The newest output of a command.
#[derive(Debug, Default)]
pub struct Tape {
    bytes: VecDeque<u8>,
    /// The lengths of the sections of `bytes` that came from one stream.
    runs: VecDeque<(OutputSource, u32)>,
    /// How many bytes were ever written.
    written: u64,
}

impl Tape {
    pub fn push(&mut self, (stream, bytes): &OutputPiece) {
        self.written += bytes.len() as u64;
        let newest = &bytes[bytes.len().saturating_sub(KEPT_LEN_MAX - RUN_COST)..];
        // The room is made first, so that the buffers never grow beyond the limit.
        let room = KEPT_LEN_MAX - RUN_COST - newest.len();
        while self.cost() > room {
            self.forget(self.cost() - room);
        }
        let needed = self.bytes.len() + newest.len();
        if needed > self.bytes.capacity() {
            let capacity = needed.next_power_of_two().min(KEPT_LEN_MAX);
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend(newest);
        let len = newest.len() as u32;
        match self.runs.back_mut() {
            Some((last, joined)) if last == stream => *joined += len,
            _ if len == 0 => {}
            _ => self.runs.push_back((*stream, len)),
        }
    }

    fn cost(&self) -> usize {
        self.bytes.len() + self.runs.len() * RUN_COST
    }

    /// Forgets at most `len` of the oldest bytes, of one run.
    fn forget(&mut self, len: usize) {
        let Some((_, oldest)) = self.runs.front_mut() else { return };
        let gone = len.min(*oldest as usize);
        self.bytes.drain(..gone);
        *oldest -= gone as u32;
        if *oldest == 0 {
            self.runs.pop_front();
        }
    }

    /// Forgets all bytes, and not how many there were.
    pub fn clear(&mut self) {
        *self = Self { written: self.written, ..Self::default() };
    }

    /// Gives back memory that no byte uses.
    pub fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.runs.shrink_to_fit();
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The number of bytes that were written before the first one that is kept.
    pub fn first(&self) -> u64 {
        self.written - self.bytes.len() as u64
    }

    /// The bytes after the first `from` that were written, and how many were written before them.
    pub fn after(&self, from: u64) -> (u64, Vec<u8>) {
        let from = from.clamp(self.first(), self.written);
        let skipped = usize::try_from(from - self.first()).unwrap_or(usize::MAX).min(self.bytes.len());
        (from, self.bytes.range(skipped..).copied().collect())
    }

    /// All bytes that are kept, as pieces of their streams.
    pub fn pieces(&self) -> VecDeque<OutputPiece> {
        let mut bytes = Bytes::from(self.bytes.iter().copied().collect::<Vec<u8>>());
        let mut pieces = VecDeque::with_capacity(self.runs.len());
        for (stream, len) in &self.runs {
            let mut run = bytes.split_to((*len as usize).min(bytes.len()));
            while !run.is_empty() {
                pieces.push_back((*stream, run.split_to(run.len().min(PIECE_LEN_MAX))));
            }
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(stream: OutputSource, bytes: &[u8]) -> OutputPiece {
        (stream, Bytes::copy_from_slice(bytes))
    }

    #[test]
    fn a_tape_is_read_from_any_byte_and_replayed_by_stream() {
        let mut tape = Tape::default();
        for (stream, bytes) in [
            (OutputSource::Stdout, &b"ab"[..]),
            (OutputSource::Stdout, b"c"),
            (OutputSource::Stderr, b""),
            (OutputSource::Stderr, b"de"),
        ] {
            tape.push(&piece(stream, bytes));
        }
        assert_eq!(tape.pieces(), [piece(OutputSource::Stdout, b"abc"), piece(OutputSource::Stderr, b"de")]);
        assert_eq!(tape.after(0), (0, b"abcde".to_vec()));
        assert_eq!(tape.after(4), (4, b"e".to_vec()));
        assert_eq!((tape.after(5), tape.after(u64::MAX)), ((5, vec![]), (5, vec![])));
        tape.clear();
        assert_eq!((tape.after(0), tape.first(), tape.written), ((5, vec![]), 5, 5));
    }

    #[test]
    fn a_tape_forgets_the_oldest_and_counts_it() {
        let mut tape = Tape::default();
        for n in 0..100_u8 {
            tape.push(&piece(OutputSource::Stdout, &[n; 30_000]));
        }
        assert_eq!(tape.written, 3_000_000);
        assert!(tape.cost() <= KEPT_LEN_MAX && tape.len() > KEPT_LEN_MAX - 30_000 - 2 * RUN_COST);
        assert!(tape.bytes.capacity() <= KEPT_LEN_MAX, "{}", tape.bytes.capacity());
        let (from, bytes) = tape.after(0);
        assert_eq!((from, from + bytes.len() as u64), (tape.first(), 3_000_000));
        assert_eq!((bytes.first(), bytes.last()), (Some(&((from / 30_000) as u8)), Some(&99)));
        assert!(tape.pieces().iter().all(|(_, bytes)| bytes.len() <= PIECE_LEN_MAX));
    }

    #[test]
    fn single_bytes_of_two_streams_cost_what_they_take() {
        let mut tape = Tape::default();
        for n in 0..1_000_000_u32 {
            let stream = if n % 2 == 0 { OutputSource::Stdout } else { OutputSource::Stderr };
            tape.push(&piece(stream, &[n as u8]));
        }
        assert!(tape.cost() <= KEPT_LEN_MAX);
        assert_eq!(tape.runs.len(), tape.len());
        assert_eq!(tape.pieces().back(), Some(&piece(OutputSource::Stderr, &[999_999_u32 as u8])));
        tape.push(&piece(OutputSource::Pty, &vec![7; 2 * KEPT_LEN_MAX]));
        assert_eq!((tape.runs.len(), tape.len()), (1, KEPT_LEN_MAX - RUN_COST));
    }
}
