//! Values as Python prints them: the texts of Deep Agents have such values in them.

use std::fmt::Write;

use serde_json::Value;

/// A text as `repr` prints it.
pub fn repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut shown = String::with_capacity(text.len() + 2);
    shown.push(quote);
    for letter in text.chars() {
        match letter {
            '\\' => shown.push_str("\\\\"),
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            letter if letter == quote => {
                shown.push('\\');
                shown.push(letter);
            }
            letter if is_printable(letter) => shown.push(letter),
            letter => push_escape(&mut shown, u32::from(letter)),
        }
    }
    shown.push(quote);
    shown
}

fn push_escape(shown: &mut String, code: u32) {
    let _ = match code {
        0..=0xff => write!(shown, "\\x{code:02x}"),
        0x100..=0xffff => write!(shown, "\\u{code:04x}"),
        _ => write!(shown, "\\U{code:08x}"),
    };
}

/// Whether Python prints a letter as it is. Rust's own escapes follow the same categories of Unicode; a letter before it
/// keeps a combining mark from being escaped.
fn is_printable(letter: char) -> bool {
    if letter.is_ascii() {
        return letter == ' ' || letter.is_ascii_graphic();
    }
    let mut text = String::from("a");
    text.push(letter);
    text.escape_debug().eq(text.chars())
}

/// A list of texts as `str` prints it.
pub fn repr_list<S: AsRef<str>>(texts: &[S]) -> String {
    let shown: Vec<String> = texts.iter().map(|text| repr(text.as_ref())).collect();
    format!("[{}]", shown.join(", "))
}

/// A JSON value as Python prints it.
pub fn repr_value(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => repr(text),
        Value::Array(values) => {
            let shown: Vec<String> = values.iter().map(repr_value).collect();
            format!("[{}]", shown.join(", "))
        }
        Value::Object(map) => {
            let shown: Vec<String> =
                map.iter().map(|(name, value)| format!("{}: {}", repr(name), repr_value(value))).collect();
            format!("{{{}}}", shown.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Printed by Python 3.13.
    #[test]
    fn texts_look_as_in_python() {
        let cases = [
            ("a", "'a'"),
            ("it's", "\"it's\""),
            ("say \"x\"", "'say \"x\"'"),
            ("it's \"x\"", "'it\\'s \"x\"'"),
            ("a\\b\n\r\t", "'a\\\\b\\n\\r\\t'"),
            ("\u{0}\u{1b}\u{7f}", "'\\x00\\x1b\\x7f'"),
            ("\u{e9}\u{a0}\u{ad}", "'\u{e9}\\xa0\\xad'"),
            ("\u{200b}\u{2028}\u{feff}", "'\\u200b\\u2028\\ufeff'"),
            ("e\u{301} \u{1f600} \u{e000}", "'e\u{301} \u{1f600} \\ue000'"),
            ("\u{10ffff}", "'\\U0010ffff'"),
        ];
        for (text, expected) in cases {
            assert_eq!(repr(text), expected);
        }
    }

    #[test]
    fn values_look_as_in_python() {
        assert_eq!(repr_list(&["/a", "/b c"]), "['/a', '/b c']");
        assert_eq!(
            repr_value(&json!({"a": [1, 2.5, true, null], "b": "x"})),
            "{'a': [1, 2.5, True, None], 'b': 'x'}"
        );
    }
}
