//! What a program of the host says while it works.
//!
//! Invariant: it is listened to until it has nothing more to say: the kernel ends whoever says something to nobody.

use std::io::{BufRead, BufReader, Read};

/// Longest line that is passed on whole.
const LINE_LEN_MAX: u64 = 4096;

/// Has each line heard, made fit for a terminal, whatever bytes are in it.
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
