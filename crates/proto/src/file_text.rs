//! Operations on the text of one file, for every place that keeps files of agents.
//!
//! Invariant: lines end with `\n`. A `\r` before it belongs to the line and is kept.

use crate::file_call::{CONTENT_LEN_MAX, FileAnswer, FileError};

/// Lines of a text: at most `limit` after the first `offset`.
pub fn read_lines(text: &str, offset: u64, limit: u64) -> FileAnswer {
    let total_lines = text.split_inclusive('\n').count() as u64;
    let skip = usize::try_from(offset).unwrap_or(usize::MAX);
    let take = usize::try_from(limit).unwrap_or(usize::MAX);
    let lines: Vec<&str> = text.split_inclusive('\n').skip(skip).take(take).collect();
    let (start_line, end_line) =
        if lines.is_empty() { (0, 0) } else { (offset + 1, offset + lines.len() as u64) };
    FileAnswer::Text { content: lines.concat(), total_lines, start_line, end_line }
}

/// Replaces text, and returns the new text and the number of replacements.
///
/// A model reads lines without `\r`, so that its text may have other line ends than the file. If it does not occur as it
/// is, it is tried with `\r\n` and then with `\n`, and the new text gets the line ends that were found.
pub fn replace_text(text: &str, old: &str, new: &str, replace_all: bool) -> Result<(String, u64), FileError> {
    if old.is_empty() {
        return Err(FileError::EmptyPattern);
    }
    let unix = |text: &str| text.replace("\r\n", "\n");
    let windows = |text: &str| unix(text).replace('\n', "\r\n");
    let forms = [(old.to_owned(), new.to_owned()), (windows(old), windows(new)), (unix(old), unix(new))];
    for (old, new) in forms {
        let occurrences = text.matches(old.as_str()).count() as u64;
        if occurrences == 0 {
            continue;
        }
        if occurrences > 1 && !replace_all {
            return Err(FileError::Ambiguous { occurrences });
        }
        // Computed before it is built: a short text may occur a million times.
        let kept = text.len() as u64 - occurrences * old.len() as u64;
        let len = kept.saturating_add(occurrences.saturating_mul(new.len() as u64));
        if len > CONTENT_LEN_MAX as u64 {
            return Err(FileError::TooLarge { len });
        }
        return Ok((text.replace(&old, &new), occurrences));
    }
    Err(FileError::NoOccurrence)
}

/// The numbers, from 1, and texts of the lines that contain a text, without their line ends.
pub fn find_lines<'a>(text: &'a str, pattern: &'a str) -> impl Iterator<Item = (u64, &'a str)> {
    let lines = text.split_inclusive('\n').map(|line| {
        let line = line.strip_suffix('\n').unwrap_or(line);
        line.strip_suffix('\r').unwrap_or(line)
    });
    (1..).zip(lines).filter(move |(_, line)| line.contains(pattern))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str, offset: u64, limit: u64) -> (String, u64, u64, u64) {
        let FileAnswer::Text { content, total_lines, start_line, end_line } = read_lines(text, offset, limit)
        else {
            panic!("it is text")
        };
        (content, total_lines, start_line, end_line)
    }

    #[test]
    fn pages_have_whole_lines_and_their_numbers() {
        assert_eq!(page("a\nb\nc", 0, 2), ("a\nb\n".into(), 3, 1, 2));
        assert_eq!(page("a\nb\nc", 2, 2), ("c".into(), 3, 3, 3));
        assert_eq!(page("a\n\n", 1, 9), ("\n".into(), 2, 2, 2));
        assert_eq!(page("a\n", 1, 9), (String::new(), 1, 0, 0));
        assert_eq!(page("a\n", 0, 0), (String::new(), 1, 0, 0));
        assert_eq!(page("", 0, 9), (String::new(), 0, 0, 0));
        assert_eq!(page("a", u64::MAX, u64::MAX), (String::new(), 1, 0, 0));
    }

    #[test]
    fn text_is_replaced_once_or_everywhere() {
        assert_eq!(replace_text("a b a", "b", "c", false), Ok(("a c a".into(), 1)));
        assert_eq!(replace_text("a b a", "a", "c", true), Ok(("c b c".into(), 2)));
        assert_eq!(replace_text("a b a", "a", "c", false), Err(FileError::Ambiguous { occurrences: 2 }));
        assert_eq!(replace_text("a", "b", "c", true), Err(FileError::NoOccurrence));
        assert_eq!(replace_text("a", "", "c", true), Err(FileError::EmptyPattern));
    }

    #[test]
    fn a_text_does_not_grow_beyond_the_longest_file() {
        let long = replace_text(&"a".repeat(1 << 20), "a", &"b".repeat(1 << 20), true);
        assert_eq!(long, Err(FileError::TooLarge { len: 1 << 40 }));
    }

    #[test]
    fn line_ends_of_the_file_are_kept() {
        assert_eq!(replace_text("a\r\nb\r\n", "a\nb", "x\ny", false), Ok(("x\r\ny\r\n".into(), 1)));
        assert_eq!(replace_text("a\nb\n", "a\r\nb", "x\r\ny", false), Ok(("x\ny\n".into(), 1)));
    }

    #[test]
    fn lines_are_found_by_their_text() {
        let found: Vec<_> = find_lines("one\r\ntwo one\nthree", "one").collect();
        assert_eq!(found, [(1, "one"), (2, "two one")]);
    }
}
