//! Terminals of Bodies: each one process, its screen, and those who watch it.
//!
//! A terminal is a command in a Body with a tag, so it is found again by whoever asks for its name: the same server, or
//! the next one after this was killed. Nobody has to watch: then its output goes to the screen alone.
//!
//! Invariant: nobody who watches misses a byte or gets one out of order without being told: who falls behind is either
//! waited for, or gets a resync and then the screen as it is.
//! Invariant: what waits for one viewer is bounded, whatever the viewer does.

mod actor;
mod registry;
mod screen;
mod viewer;

use fleet::TtySize;
use proto::{Failure, Kind};

pub use actor::{TerminalOrder, TerminalOrders};
pub use registry::{TerminalRequest, Terminals};
pub use viewer::{ViewerFrame, ViewerRight, ViewerSeat};

/// Largest terminal; a cell of the screen is some twenty bytes, for each of two screens.
const COLS_MAX: u16 = 1000;
const ROWS_MAX: u16 = 500;
const NAME_LEN_MAX: usize = 64;

/// A size that a terminal can have.
pub fn check_size(cols: i64, rows: i64) -> Result<TtySize, Failure> {
    let fit = |count: i64, max: u16| u16::try_from(count).ok().filter(|count| (1..=max).contains(count));
    match (fit(cols, COLS_MAX), fit(rows, ROWS_MAX)) {
        (Some(cols), Some(rows)) => Ok(TtySize { cols, rows }),
        _ => Err(Failure::new(Kind::Usage, format!("a terminal cannot have {cols} columns and {rows} rows"))
            .hint(format!("ask for 1 to {COLS_MAX} columns and 1 to {ROWS_MAX} rows"))),
    }
}

/// A name that a terminal can have.
pub fn check_name(name: &str) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.is_empty() && name.len() <= NAME_LEN_MAX && name.chars().all(plain) {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, format!("{:?} cannot name a terminal", proto::text::visible(name)))
        .hint(format!("use 1 to {NAME_LEN_MAX} letters, digits, `-` or `_`")))
}

const TAG: &str = "terminal:";

/// The tag of the command behind a terminal.
fn tag(name: &str) -> String {
    format!("{TAG}{name}")
}

/// The terminal behind a tag.
pub fn name_of(tag: &str) -> Option<&str> {
    tag.strip_prefix(TAG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_sizes_and_names_are_refused() {
        for (cols, rows) in
            [(0, 0), (0, 24), (80, 0), (-1, 24), (100_000, 24), (80, 501), (i64::MAX, i64::MIN)]
        {
            assert_eq!(check_size(cols, rows).unwrap_err().kind, Kind::Usage, "{cols}x{rows}");
        }
        assert_eq!(check_size(1000, 500).unwrap(), TtySize { cols: 1000, rows: 500 });
        for name in ["", "a b", "../x", "é", "a\n", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert!(check_name("main-1_A").is_ok());
    }
}
