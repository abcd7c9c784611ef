//! Finds lines of a patch in a file: exactly, and then with more and more tolerance.
//!
//! Invariant: the cost of all searches in one file is at most [`SEARCH_COST_MAX`]. A model could otherwise write a patch
//! whose lines match almost everywhere, and keep a thread busy for hours.

use std::cell::OnceCell;

/// The highest cost of the searches in one file: one for each comparison, and one more for each 16 bytes compared.
pub const SEARCH_COST_MAX: u64 = 100_000_000;

/// How two lines are compared, from the strictest on.
const FORMS: [fn(&str) -> String; 4] = [
    |line| line.to_owned(),
    |line| line.trim_end().to_owned(),
    |line| line.trim().to_owned(),
    |line| line.trim().chars().map(plain_letter).collect(),
];

/// Why lines were not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeekError {
    /// The file does not have them.
    Missing,
    /// The search took too long.
    Cost,
}

/// The lines of a file, in the forms in which they are compared.
pub struct LineSeeker<'a> {
    lines: &'a [&'a str],
    forms: [OnceCell<Vec<String>>; 4],
    cost: u64,
}

impl<'a> LineSeeker<'a> {
    pub fn new(lines: &'a [&'a str]) -> Self {
        Self { lines, forms: Default::default(), cost: 0 }
    }

    /// The place of lines that are at `start` or after it, or exactly at the end of the file.
    pub fn find(&mut self, wanted: &[&str], start: usize, at_end: bool) -> Result<usize, SeekError> {
        let Some(last) = self.lines.len().checked_sub(wanted.len()) else { return Err(SeekError::Missing) };
        let first = if at_end { last.max(start) } else { start };
        for (index, form) in FORMS.iter().enumerate() {
            let wanted: Vec<String> = wanted.iter().map(|line| form(line)).collect();
            let lines = self.forms[index].get_or_init(|| self.lines.iter().map(|line| form(line)).collect());
            for place in first..=last {
                if matches_at(&lines[place..], &wanted, &mut self.cost) {
                    return Ok(place);
                }
                if self.cost > SEARCH_COST_MAX {
                    return Err(SeekError::Cost);
                }
            }
        }
        Err(SeekError::Missing)
    }
}

fn matches_at(lines: &[String], wanted: &[String], cost: &mut u64) -> bool {
    lines.iter().zip(wanted).all(|(line, wanted)| {
        *cost += 1 + if line.len() == wanted.len() { line.len() as u64 / 16 } else { 0 };
        line == wanted
    })
}

/// A letter, or the plain one that models write for it: typographic dashes, quotes and spaces.
fn plain_letter(letter: char) -> char {
    match letter {
        '\u{2010}'..='\u{2015}' | '\u{2212}' => '-',
        '\u{2018}'..='\u{201b}' => '\'',
        '\u{201c}'..='\u{201f}' => '"',
        '\u{a0}' | '\u{2002}'..='\u{200a}' | '\u{202f}' | '\u{205f}' | '\u{3000}' => ' ',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(lines: &[&str], wanted: &[&str], start: usize, at_end: bool) -> Result<usize, SeekError> {
        LineSeeker::new(lines).find(wanted, start, at_end)
    }

    #[test]
    fn the_strictest_match_wins() {
        assert_eq!(find(&["  a", "a ", "a"], &["a"], 0, false), Ok(2));
        assert_eq!(find(&["  a", "a "], &["a"], 0, false), Ok(1));
        assert_eq!(find(&["  a", "b"], &["a"], 0, false), Ok(0));
        assert_eq!(find(&["x \u{2013} \u{201c}y\u{201d}"], &["x - \"y\""], 0, false), Ok(0));
        assert_eq!(find(&["a"], &["b"], 0, false), Err(SeekError::Missing));
        assert_eq!(find(&["a"], &["a", "b"], 0, false), Err(SeekError::Missing));
        assert_eq!(find(&[], &["a"], 0, false), Err(SeekError::Missing));
    }

    #[test]
    fn a_place_before_the_start_or_before_the_end_does_not_count() {
        assert_eq!(find(&["a", "b", "a"], &["a"], 1, false), Ok(2));
        assert_eq!(find(&["a", "b"], &["a"], 1, false), Err(SeekError::Missing));
        assert_eq!(find(&["a", "b", "a"], &["a"], 0, true), Ok(2));
        assert_eq!(find(&["a", "b"], &["a"], 0, true), Err(SeekError::Missing));
        assert_eq!(find(&["a"], &["a"], 5, false), Err(SeekError::Missing));
    }

    #[test]
    fn a_search_that_would_take_hours_ends() {
        let lines = vec!["same"; 300_000];
        let wanted = [vec!["same"; 100_000], vec!["other"]].concat();
        assert_eq!(find(&lines, &wanted, 0, false), Err(SeekError::Cost));
    }
}
