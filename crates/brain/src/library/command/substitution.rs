//! Substitutions in text that the grammar leaves unparsed: here-documents, arithmetic, defaults of parameters.

/// Whether single quotes hide substitutions: they do in a word, and do not in a here-document or in arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quotes {
    /// They do.
    Hide,
    /// They do not.
    Show,
}

/// The texts of the commands that are substituted in a text. An error says why they cannot be found.
pub(super) fn find_substitutions(text: &str, quotes: Quotes) -> Result<Vec<String>, &'static str> {
    let mut found = Vec::new();
    let bytes = text.as_bytes();
    let (mut index, mut is_double) = (0, false);
    while index < bytes.len() {
        match bytes[index] {
            b'\\' => index += 2,
            b'"' if quotes == Quotes::Hide => {
                is_double = !is_double;
                index += 1;
            }
            b'\'' if quotes == Quotes::Hide && !is_double => {
                let is_ansi = index > 0 && bytes[index - 1] == b'$';
                index = skip_quoted(bytes, index + 1, is_ansi).ok_or("a quote has no end")?;
            }
            b'$' if is_arithmetic(bytes, index) => index += 3,
            b'$' | b'<' | b'>' if bytes.get(index + 1) == Some(&b'(') => {
                let end = find_end(bytes, index + 2).ok_or("a substitution has no end")?;
                found.push(text[index + 2..end].to_owned());
                index = end + 1;
            }
            b'`' => {
                let (inner, end) = read_backticks(text, index + 1).ok_or("a substitution has no end")?;
                found.push(inner);
                index = end + 1;
            }
            _ => index += 1,
        }
    }
    Ok(found)
}

/// The place after a text in single quotes. In `$'…'` a backslash protects a quote.
fn skip_quoted(bytes: &[u8], begin: usize, is_ansi: bool) -> Option<usize> {
    let mut index = begin;
    while index < bytes.len() {
        match bytes[index] {
            b'\'' => return Some(index + 1),
            b'\\' if is_ansi => index += 2,
            _ => index += 1,
        }
    }
    None
}

/// Whether `$((` begins arithmetic and not a substitution that begins with a subshell.
fn is_arithmetic(bytes: &[u8], index: usize) -> bool {
    if !bytes[index..].starts_with(b"$((") {
        return false;
    }
    let (outer, inner) = (find_end(bytes, index + 2), find_end(bytes, index + 3));
    matches!((outer, inner), (Some(outer), Some(inner)) if inner + 1 == outer)
}

/// The closing bracket of a substitution that begins here. Quotes hide brackets, and substitutions nest in quotes.
fn find_end(bytes: &[u8], begin: usize) -> Option<usize> {
    let (mut open, mut index) = (vec![b'('], begin);
    while let (Some(top), Some(byte)) = (open.last().copied(), bytes.get(index).copied()) {
        match (top, byte) {
            (b'\'', b'\'') | (b'"', b'"') | (b'`', b'`') => {
                open.pop();
            }
            (b'\'', _) => {}
            (_, b'\\') => index += 1,
            (b'(', b')') => {
                open.pop();
            }
            (b'"', b'$') if bytes.get(index + 1) == Some(&b'(') => {
                open.push(b'(');
                index += 1;
            }
            (b'"', b'`') | (b'(', b'(' | b'\'' | b'"' | b'`') => open.push(byte),
            _ => {}
        }
        if open.is_empty() {
            return Some(index);
        }
        index += 1;
    }
    None
}

/// The text between backticks, in which a backslash may protect a further backtick.
fn read_backticks(text: &str, begin: usize) -> Option<(String, usize)> {
    let mut inner = String::new();
    let mut letters = text[begin..].char_indices();
    while let Some((index, letter)) = letters.next() {
        match letter {
            '`' => return Some((inner, begin + index)),
            '\\' => match letters.next()? {
                (_, escaped @ ('`' | '\\' | '$')) => inner.push(escaped),
                (_, other) => inner.extend(['\\', other]),
            },
            letter => inner.push(letter),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn substitutions_are_found_in_text() {
        let check = |text: &str, expected: &[&str]| {
            let expected: Vec<String> = expected.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(find_substitutions(text, Quotes::Show), Ok(expected), "{text}");
        };
        check("a $(b c) d", &["b c"]);
        check("1 + $((2 * $(n)))", &["n"]);
        check("`a \\`b\\``x", &["a `b`"]);
        check("\\$(a) \\`b\\`", &[]);
        check("$(a ')' \"(\" (b)) <(c)", &["a ')' \"(\" (b)", "c"]);
        check("ä $(ö) ü", &["ö"]);
        check("$((a); b) $((1 + (2)))", &["(a); b"]);
        check("'$(a)'", &["a"]);
        check("$(a \"$(b ')\"')\" `c )`) d", &["a \"$(b ')\"')\" `c )`"]);
        assert!(find_substitutions("$(a", Quotes::Show).is_err());
        assert!(find_substitutions("`a", Quotes::Show).is_err());
    }

    #[test]
    fn single_quotes_hide_substitutions_in_words() {
        let find = |text: &str| find_substitutions(text, Quotes::Hide);
        assert_eq!(find("'$(a)'\"$(b)'\"$'\\'$(c)'`d`"), Ok(vec!["b".into(), "d".into()]));
        assert_eq!(find("\"'$(a)'\""), Ok(vec!["a".into()]));
        assert!(find("'").is_err());
    }
}
