//! Terminals of Bodies: each has a process, a screen and viewers.
//!
//! A terminal is a command in a Body with a tag, so any server finds it again by its name, also after a
//! server was killed. A terminal needs no viewers: without them, its output goes only to the screen.
//!
//! Invariant: a viewer gets all output in order, or gets a resync: if a viewer falls behind, the task either
//! waits for it or sends it the current screen.
//! Invariant: the queue of one viewer is bounded, whatever the viewer does.

mod actor;
mod registry;
mod screen;
mod viewer;

use fleet::TtySize;
use proto::{Failure, Kind};

pub use actor::{TerminalOrder, TerminalOrders};
pub use registry::{TerminalRequest, Terminals};
pub use viewer::{ViewerFrame, ViewerRight, ViewerSeat};

/// The largest terminal; a cell takes about twenty bytes in each of two screens.
const COLS_MAX: u16 = 1000;
const ROWS_MAX: u16 = 500;
const NAME_LEN_MAX: usize = 64;

/// Checks the size of a terminal.
pub fn check_size(cols: i64, rows: i64) -> Result<TtySize, Failure> {
    let fit = |count: i64, max: u16| u16::try_from(count).ok().filter(|count| (1..=max).contains(count));
    match (fit(cols, COLS_MAX), fit(rows, ROWS_MAX)) {
        (Some(cols), Some(rows)) => Ok(TtySize { cols, rows }),
        _ => Err(Failure::new(Kind::Usage, format!("a terminal cannot have {cols} columns and {rows} rows"))
            .hint(format!("ask for 1 to {COLS_MAX} columns and 1 to {ROWS_MAX} rows"))),
    }
}

/// Checks the name of a terminal.
pub fn check_name(name: &str) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.is_empty() && name.len() <= NAME_LEN_MAX && name.chars().all(plain) {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Usage,
        format!("{:?} is not a valid name for a terminal", proto::text::visible(name)),
    )
    .hint(format!("use 1 to {NAME_LEN_MAX} letters, digits, `-` or `_`")))
}

const TAG: &str = "terminal:";

/// The tag of the command of a terminal.
fn tag(name: &str) -> String {
    format!("{TAG}{name}")
}

/// The terminal name in a tag.
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
