//! From a text to its commands: limits first, then the grammar on a stack of its own.

use super::{ShellLine, calls::CallWalk};

/// The longest text that is parsed.
const TEXT_LEN_MAX: usize = 128 << 10;
/// The most opening brackets in a text. Each may be one level of recursion.
const OPENERS_MAX: usize = 4_000;
/// The deepest nesting of substitutions. Time grows with its fourth power. Backticks need not be counted: each level of
/// them doubles the length of the text.
const SUBSTITUTIONS_MAX: usize = 32;
/// The stack for the grammar. Only the part that is used takes memory.
const STACK_LEN: usize = 64 << 20;

/// Reads a text for the shell. It never fails: a text that cannot be read is unknown.
pub fn read_command(text: &str) -> ShellLine {
    if let Some(limit) = exceeded_limit(text) {
        return unknown(limit);
    }
    let text = text.to_owned();
    let reader = std::thread::Builder::new().name("shell-grammar".into()).stack_size(STACK_LEN);
    let read = reader.spawn(move || {
        let mut walk = CallWalk::default();
        walk.read_text(&text);
        walk.into_line()
    });
    match read.map(std::thread::JoinHandle::join) {
        Ok(Ok(line)) => line,
        Ok(Err(_)) => unknown("the text cannot be parsed: the grammar failed on it"),
        Err(_) => unknown("the text was not parsed: the host gave no thread for it"),
    }
}

fn unknown(why: &str) -> ShellLine {
    ShellLine { calls: Vec::new(), unknown: vec![why.to_owned()] }
}

fn exceeded_limit(text: &str) -> Option<&'static str> {
    if text.len() > TEXT_LEN_MAX {
        return Some("the text is longer than 128 KiB");
    }
    if text.contains('\0') {
        return Some("the text contains a zero byte");
    }
    let openers = text.bytes().filter(|byte| matches!(byte, b'(' | b'{' | b'[' | b'`')).count();
    if openers > OPENERS_MAX {
        return Some("the text has more than 4000 opening brackets");
    }
    if substitution_depth(text) > SUBSTITUTIONS_MAX {
        return Some("the text may nest more than 32 substitutions");
    }
    None
}

/// An upper bound for the depth of substitutions: at no place can more of them be open than began before it, nor more
/// than can end after it.
fn substitution_depth(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut ends_after = bytes.iter().filter(|byte| **byte == b')').count();
    let (mut begun, mut depth, mut before) = (0, 0, b' ');
    for byte in bytes {
        ends_after -= usize::from(*byte == b')');
        begun += usize::from(*byte == b'(' && matches!(before, b'$' | b'<' | b'>'));
        depth = depth.max(begun.min(ends_after));
        before = *byte;
    }
    depth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_depth_of_substitutions_is_never_underestimated() {
        assert_eq!(substitution_depth("echo hi"), 0);
        assert_eq!(substitution_depth("a $(b $(c))"), 2);
        assert_eq!(substitution_depth("$(a) $(b) $(c) $(d)"), 2);
        assert_eq!(substitution_depth("f ')' $(a ')' $(b))"), 2);
    }

    #[test]
    fn deep_and_long_texts_end_as_unknown() {
        let nest =
            |open: &str, close: &str, count: usize| format!("{}x{}", open.repeat(count), close.repeat(count));
        for text in [
            nest("echo $(", ")", 3_000),
            nest("( ", " )", 3_900),
            nest("{ ", "; }", 3_900),
            nest("if ", "; then y; fi", 5_000),
            nest("[[ ( ", " ) ]]", 1_900),
            "x".repeat(TEXT_LEN_MAX + 1),
            "(".repeat(OPENERS_MAX + 1),
            "a\0b".to_owned(),
        ] {
            let line = read_command(&text);
            assert!(!line.unknown.is_empty(), "{}…", &text[..20.min(text.len())]);
        }
    }

    #[test]
    fn deep_texts_below_the_limits_are_read() {
        let nest =
            |open: &str, close: &str, count: usize| format!("{}x{}", open.repeat(count), close.repeat(count));
        for text in [
            nest("echo $(", ")", 32),
            nest("( ", " )", 450),
            format!("[[ {} ]]; x", nest("( ", " )", 1_900)),
            format!("echo {}; x", nest("${a:-", "}", 1_900)),
            "x; ".repeat(400),
        ] {
            let line = read_command(&text);
            let found = line.calls.iter().any(|call| call.words[0].head == "x");
            assert!(found, "{}… {:?}", &text[..20], line.unknown);
        }
    }
}
