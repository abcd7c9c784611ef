//! Hostile text made fit for a terminal.

/// Shows control characters, bidirectional overrides and broken UTF-8 instead of obeying them.
///
/// Names, messages and reasons that came out of a Body go through here before a person sees them; the store keeps
/// them raw.
pub fn visible(text: &str) -> String {
    text.chars().map(show).collect()
}

/// As [`visible`], for bytes that may not be UTF-8.
pub fn visible_bytes(bytes: &[u8]) -> String {
    visible(&String::from_utf8_lossy(bytes))
}

fn show(c: char) -> String {
    match c {
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' => format!("\\u{{{:x}}}", u32::from(c)),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_shown_not_obeyed() {
        assert_eq!(visible("a\x1b]52;c;x\x07b"), "a\\u{1b}]52;c;x\\u{7}b");
        assert_eq!(visible("x\u{202e}y"), "x\\u{202e}y");
        assert_eq!(visible("žé漢"), "žé漢");
        assert_eq!(visible_bytes(b"\xff\n"), "\u{fffd}\\n");
    }
}
