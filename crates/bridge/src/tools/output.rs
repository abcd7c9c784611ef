//! Output of a command: its beginning and its end, whatever it prints.
//!
//! Invariant: the memory is bounded, however long the output is.

/// The most bytes at the beginning of an output that are kept.
pub const HEAD_LEN_MAX: usize = 9 << 20;
/// The most bytes at the end of an output that are kept beside the beginning; the guest keeps as many.
pub const TAIL_LEN_MAX: usize = 1 << 20;

/// The output of a command.
#[derive(Debug, Default)]
pub struct OutputExcerpt {
    /// How many bytes before the head the reader knows.
    skipped: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
    /// How many bytes before the head, and between head and tail, are not there.
    missing_before: u64,
    missing_between: u64,
}

impl OutputExcerpt {
    /// The output after a place up to which the reader knows it.
    pub fn starting_at(place: u64) -> Self {
        Self { skipped: place, ..Self::default() }
    }

    /// Adds bytes to the beginning; false if there is no more room.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        let room = HEAD_LEN_MAX.saturating_sub(self.head.len());
        self.head.extend_from_slice(&bytes[..bytes.len().min(room)]);
        // A part of these bytes is behind the head; the end of the output is read later.
        bytes.len() <= room && self.head.len() < HEAD_LEN_MAX
    }

    /// The number of bytes that the command wrote up to the end of the head.
    pub fn head_end(&self) -> u64 {
        self.skipped + self.missing_before + self.head.len() as u64
    }

    /// Adds bytes at a place of the output that is behind everything so far.
    pub fn push_at(&mut self, from: u64, bytes: &[u8]) {
        let end = self.head_end() + self.missing_between + self.tail.len() as u64;
        let known = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX).min(bytes.len());
        let (gap, bytes) = (from.saturating_sub(end), &bytes[known..]);
        if self.head.is_empty() && self.tail.is_empty() && self.missing_between == 0 {
            self.missing_before += gap;
        } else if gap > 0 && self.tail.is_empty() {
            self.missing_between += gap;
        }
        if gap == 0 && self.tail.is_empty() && self.missing_between == 0 && self.head.len() < HEAD_LEN_MAX {
            let room = (HEAD_LEN_MAX - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..room]);
            self.tail.extend_from_slice(&bytes[room..]);
        } else {
            self.tail.extend_from_slice(bytes);
        }
        let excess = self.tail.len().saturating_sub(TAIL_LEN_MAX);
        self.missing_between += excess as u64;
        self.tail.drain(..excess);
    }

    /// Whether a part of the output is not there.
    pub fn is_truncated(&self) -> bool {
        self.missing_before + self.missing_between > 0
    }

    /// The output as text; a line stands for each part that is not there.
    pub fn into_text(self) -> String {
        let marker = |missing: u64| match missing {
            0 => String::new(),
            missing => format!("... [{missing} bytes truncated] ...\n"),
        };
        let mut text = marker(self.missing_before);
        text.push_str(&String::from_utf8_lossy(&self.head));
        if self.missing_between > 0 && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&marker(self.missing_between));
        text.push_str(&String::from_utf8_lossy(&self.tail));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_output_is_whole() {
        let mut output = OutputExcerpt::default();
        assert!(output.push(b"one\n") && output.push(b"two\n"));
        assert!(!output.is_truncated());
        assert_eq!(output.into_text(), "one\ntwo\n");
    }

    #[test]
    fn the_middle_of_a_long_output_is_left_out_and_said() {
        let mut output = OutputExcerpt::default();
        let chunk = vec![b'a'; 1 << 20];
        while output.push(&chunk) {}
        let end = output.head_end();
        assert_eq!(end, HEAD_LEN_MAX as u64);
        output.push_at(end + 5000, b"\nlast\n");
        assert!(output.is_truncated());
        let text = output.into_text();
        assert!(text.ends_with("a\n... [5000 bytes truncated] ...\n\nlast\n"));
    }

    #[test]
    fn pieces_by_place_join_without_repetition() {
        let mut output = OutputExcerpt::default();
        output.push_at(0, b"abc");
        output.push_at(2, b"cde");
        assert_eq!(output.head_end(), 5);
        assert_eq!(output.into_text(), "abcde");
        let mut late = OutputExcerpt::default();
        late.push_at(10, b"x");
        assert!(late.is_truncated());
        assert_eq!(late.into_text(), "... [10 bytes truncated] ...\nx");
    }

    #[test]
    fn an_endless_tail_stays_short() {
        let mut output = OutputExcerpt::default();
        while output.push(&[b'a'; 65_536]) {}
        let mut at = output.head_end();
        for _ in 0..64 {
            output.push_at(at, &[b'b'; 65_536]);
            at += 65_536;
        }
        assert_eq!(output.tail.len(), TAIL_LEN_MAX);
        assert_eq!(output.missing_between, 64 * 65_536 - TAIL_LEN_MAX as u64);
    }
}
