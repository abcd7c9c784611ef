//! Shows long text on a terminal: coloured like a patch, and through the user's pager if it is longer than
//! the screen.
//!
//! Invariant: the text was escaped for a terminal before; only colours are added here.

use std::{
    env,
    io::Write,
    process::{Command, Stdio},
};

use proto::Failure;
use rustix::{stdio, termios::isatty};

use crate::output;

/// The escape sequence that ends a colour.
const PLAIN: &str = "\x1b[m";

/// Shows a patch or its summary on the terminal that standard output is.
pub fn show_patch(text: &[u8]) -> Result<(), Failure> {
    let colours = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && env::var_os("TERM").is_none_or(|term| term != "dumb");
    let mut shown = String::new();
    let mut lines = 0;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let visible =
            line.split(|byte| *byte == b'\t').map(proto::text::visible_bytes).collect::<Vec<_>>().join("\t");
        match colour(&visible).filter(|_| colours) {
            Some(colour) => shown.push_str(&format!("{colour}{visible}{PLAIN}\n")),
            None => shown.push_str(&format!("{visible}\n")),
        }
        lines += 1;
    }
    let rows = rustix::termios::tcgetwinsize(stdio::stdout()).map_or(0, |size| usize::from(size.ws_row));
    if rows > 0 && lines >= rows && isatty(stdio::stdin()) && paged(&shown) {
        return Ok(());
    }
    output::data(shown.as_bytes())
}

/// The colour of a line, as git chooses it.
fn colour(line: &str) -> Option<&'static str> {
    const HEADS: [&str; 9] = [
        "diff --git ",
        "index ",
        "--- ",
        "+++ ",
        "new file ",
        "deleted file ",
        "similarity ",
        "rename ",
        "old mode ",
    ];
    match line.as_bytes().first()? {
        _ if HEADS.iter().any(|head| line.starts_with(head)) => Some("\x1b[1m"),
        b'+' => Some("\x1b[32m"),
        b'-' => Some("\x1b[31m"),
        b'@' => Some("\x1b[36m"),
        _ => None,
    }
}

/// Pipes the text to the pager; returns false if there is none.
fn paged(text: &str) -> bool {
    let pager = env::var("PAGER").ok().filter(|pager| !pager.is_empty()).unwrap_or_else(|| "less".to_owned());
    if pager == "cat" {
        return false;
    }
    let mut command = Command::new("sh");
    command.args(["-c", &pager]).stdin(Stdio::piped());
    if env::var_os("LESS").is_none() {
        command.env("LESS", "FRX");
    }
    let Ok(mut child) = command.spawn() else { return false };
    // If the user quits the pager early, the write fails, and that is fine.
    let _ = child.stdin.take().map(|mut pipe| pipe.write_all(text.as_bytes()));
    // A shell exits with these codes if the program does not exist.
    !matches!(child.wait().map(|status| status.code()), Ok(Some(126 | 127)) | Err(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_patch_have_their_colours() {
        let seen = |line: &str| colour(line).unwrap_or_default();
        assert_eq!(
            ["+a", "-a", "@@ -1 +1 @@", "+++ b/a", "--- a/a", "diff --git a/a b/a", " a", ""].map(seen),
            ["\x1b[32m", "\x1b[31m", "\x1b[36m", "\x1b[1m", "\x1b[1m", "\x1b[1m", "", ""]
        );
    }
}
