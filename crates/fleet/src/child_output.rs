//! Reads the output of a child process on the host, line by line.
//!
//! Invariant: the output is read to its end, because the kernel kills a process that writes to a pipe without a reader
//! (SIGPIPE).

use std::io::{BufRead, BufReader, Read};

/// Longest line in bytes; a longer line is split.
const LINE_LEN_MAX: u64 = 4096;

/// Calls `hear` with each line. Bytes that a terminal must not see, or that are not UTF-8, are replaced.
pub(crate) fn for_each_line(from: impl Read, mut hear: impl FnMut(String)) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while matches!(from.by_ref().take(LINE_LEN_MAX).read_until(b'\n', &mut line), Ok(1..)) {
        hear(proto::text::visible_bytes(line.strip_suffix(b"\n").unwrap_or(&line)));
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_heard_whatever_is_in_it() {
        let long = "x".repeat(2 * LINE_LEN_MAX as usize);
        let said = [b"one\ncaf\xe9\n\n".as_slice(), long.as_bytes(), b"\nlast"].concat();
        let mut heard = Vec::new();
        for_each_line(&said[..], |line| heard.push(line));
        let half = &long[..LINE_LEN_MAX as usize];
        assert_eq!(heard, ["one", "caf\u{fffd}", "", half, half, "", "last"]);
    }
}
