//! The terminal view: lines that stay, and below them a few lines that change.
//!
//! Invariant: a line below fits into one row of the terminal, so that the rows to overwrite can be counted.
//! Invariant: lines that stay are written once; scrolling back shows all of them.

use proto::Failure;
use rustix::{
    stdio,
    termios::{isatty, tcgetwinsize},
};

use super::style::{Paint, TextLine};
use crate::{output, settings::variable};

/// The size of a terminal that reports none.
const ROWS: usize = 24;
const COLUMNS: usize = 80;

/// Whether standard output shows colours.
pub fn paint() -> Paint {
    let is_off = variable("NO_COLOR").is_ok_and(|value| value.is_some());
    if is_off || is_dumb() || !isatty(stdio::stdout()) { Paint::Monochrome } else { Paint::Colours }
}

fn is_dumb() -> bool {
    variable("TERM").is_ok_and(|term| term.is_some_and(|term| term == "dumb"))
}

/// A terminal whose last rows change.
pub struct LiveScreen {
    paint: Paint,
    /// The columns of each row below that was drawn last.
    drawn: Vec<usize>,
    newest: String,
}

impl LiveScreen {
    /// The terminal that standard output is; none if it is none, or one that cannot move its cursor.
    pub fn open() -> Option<Self> {
        let can_move = isatty(stdio::stdout()) && !is_dumb();
        can_move.then(|| Self { paint: paint(), drawn: Vec::new(), newest: String::new() })
    }

    /// The rows and columns of the terminal.
    pub fn size() -> (usize, usize) {
        match tcgetwinsize(stdio::stdout()) {
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
            _ => (ROWS, COLUMNS),
        }
    }

    /// Adds lines that stay, and replaces those below.
    pub fn update(&mut self, lasting: &[TextLine], below: &[TextLine]) -> Result<(), Failure> {
        let (rows, columns) = Self::size();
        // The cursor stands in the row behind the last one.
        let below: Vec<TextLine> = below
            .iter()
            .skip(below.len().saturating_sub(rows.saturating_sub(1)))
            .map(|line| line.cut(columns.saturating_sub(1)))
            .collect();
        let drawn: String = below.iter().map(|line| format!("{}\n", line.print(self.paint))).collect();
        if lasting.is_empty() && drawn == self.newest {
            return Ok(());
        }
        let mut text = self.erasure(rows, columns);
        for line in lasting.iter().flat_map(|line| line.fold(columns)) {
            text.push_str(&line.print(self.paint));
            text.push('\n');
        }
        text.push_str(&drawn);
        self.drawn = below.iter().map(TextLine::columns).collect();
        self.newest = drawn;
        output::data(text.as_bytes())
    }

    /// Removes the lines below.
    pub fn clear(&mut self) -> Result<(), Failure> {
        self.update(&[], &[])
    }

    /// Forgets the lines below, because another program has used the terminal.
    pub fn forget(&mut self) {
        self.drawn.clear();
        self.newest.clear();
    }

    /// The text that moves the cursor to the first row below and clears from there. A terminal that became narrower
    /// has wrapped the rows.
    fn erasure(&self, rows: usize, columns: usize) -> String {
        let drawn: usize = self.drawn.iter().map(|wide| wide.div_ceil(columns).max(1)).sum();
        match drawn.min(rows.saturating_sub(1)) {
            0 => String::new(),
            up => format!("\r\x1b[{up}A\x1b[J"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_a_narrower_terminal_wrapped_are_erased() {
        let screen = LiveScreen { paint: Paint::Monochrome, drawn: vec![79, 0, 20], newest: String::new() };
        assert_eq!(screen.erasure(24, 80), "\r\x1b[3A\x1b[J");
        assert_eq!(screen.erasure(24, 40), "\r\x1b[4A\x1b[J");
        assert_eq!(screen.erasure(3, 40), "\r\x1b[2A\x1b[J");
        let fresh = LiveScreen { drawn: Vec::new(), ..screen };
        assert_eq!(fresh.erasure(24, 80), "");
    }
}
