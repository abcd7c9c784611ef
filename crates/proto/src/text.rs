//! Escapes hostile text for a terminal.

/// Escapes control characters, bidirectional overrides and invalid UTF-8.
///
/// Names, messages and reasons from a Body go through this function before a user sees them; the store keeps
/// them unescaped.
pub fn visible(text: &str) -> String {
    text.chars().map(show).collect()
}

/// Escapes bytes that may not be UTF-8, as [`visible`] does.
pub fn visible_bytes(bytes: &[u8]) -> String {
    visible(&String::from_utf8_lossy(bytes))
}

/// Escapes JSON for a terminal; its value stays the same.
pub fn visible_json(json: &str) -> String {
    // Outside of strings JSON is ASCII, and its only control characters there are white space.
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

/// Whether a terminal would act on a character instead of showing it: control characters (C0 and C1), and
/// characters that reverse text, break lines or are invisible.
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
