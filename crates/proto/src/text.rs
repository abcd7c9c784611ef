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

/// JSON in which nothing acts on a terminal: the same value, spelt with escapes.
pub fn visible_json(json: &str) -> String {
    // Outside of strings there is nothing but ASCII, and what of it is control is white space.
    let spell = |c: char| {
        if is_unsafe(c) && !c.is_ascii_whitespace() {
            format!("\\u{:04x}", u32::from(c))
        } else {
            c.to_string()
        }
    };
    json.chars().map(spell).collect()
}

fn show(c: char) -> String {
    match c {
        c if c.is_control() => c.escape_default().to_string(),
        c if is_unsafe(c) => format!("\\u{{{:x}}}", u32::from(c)),
        c => c.to_string(),
    }
}

/// What a terminal obeys instead of showing it: control characters of both tables, and those that turn text around,
/// break lines or cannot be seen.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_keeps_its_meaning_and_loses_its_power() {
        let raw = "{\"a\":\"\u{9b}2J \u{202e}x\u{7f}\u{200b} \u{e9}\"}\n";
        let safe = visible_json(raw);
        assert_eq!(safe, "{\"a\":\"\\u009b2J \\u202ex\\u007f\\u200b \u{e9}\"}\n");
        assert_eq!(visible_json("plain \n\t"), "plain \n\t");
    }

    #[test]
    fn escapes_are_shown_not_obeyed() {
        assert_eq!(visible("a\x1b]52;c;x\x07b"), "a\\u{1b}]52;c;x\\u{7}b");
        assert_eq!(visible("x\u{202e}y"), "x\\u{202e}y");
        assert_eq!(visible("žé漢"), "žé漢");
        assert_eq!(visible_bytes(b"\xff\n"), "\u{fffd}\\n");
    }
}
