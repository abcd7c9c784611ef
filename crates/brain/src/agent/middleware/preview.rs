//! Previews of long texts: the first and the last lines with their numbers, in the words of Deep Agents.
//!
//! Invariant: a preview says which losses it has, and only those.

/// How many lines at each end the preview has.
const LINES: usize = 5;
/// The longest line of the preview, in characters.
const LINE_LEN_MAX: usize = 1000;

/// A preview of a text after the sentence that introduces it; `subject` names what the text is.
pub(super) fn show_preview(text: &str, subject: &str) -> String {
    let lines = split_lines(text);
    let Some(between) = lines.len().checked_sub(2 * LINES).filter(|between| *between > 0) else {
        return format!("{}\n\n{}", note(subject, false, is_clipped(&lines)), number_lines(&lines, 1));
    };
    let (head, tail) = (&lines[..LINES], &lines[lines.len() - LINES..]);
    format!(
        "{}\n\n{}\n... [{between} lines truncated] ...\n{}",
        note(subject, true, is_clipped(head) || is_clipped(tail)),
        number_lines(head, 1),
        number_lines(tail, lines.len() - LINES + 1)
    )
}

fn note(subject: &str, is_cut: bool, is_clipped: bool) -> String {
    let showing = if is_cut { "showing the head and tail " } else { "" };
    let omitted =
        "lines of the form `... [N lines truncated] ...` indicate omitted lines in the middle of the content";
    let clipped = format!(
        "the output contains lines longer than {LINE_LEN_MAX} characters; this preview shows only their first \
         {LINE_LEN_MAX} characters"
    );
    let losses = [(is_cut, omitted), (is_clipped, clipped.as_str())];
    let losses: Vec<&str> = losses.iter().filter(|(applies, _)| *applies).map(|(_, text)| *text).collect();
    let losses = if losses.is_empty() { String::new() } else { format!(" ({})", losses.join("; ")) };
    format!("Here is a preview {showing}of the {subject}{losses}:")
}

fn is_clipped(lines: &[&str]) -> bool {
    lines.iter().any(|line| line.len() > LINE_LEN_MAX && line.chars().count() > LINE_LEN_MAX)
}

fn number_lines(lines: &[&str], first: usize) -> String {
    let width = (first + lines.len()).saturating_sub(1).to_string().len();
    let row = |(number, line): (usize, &&str)| {
        let shown: String = line.chars().take(LINE_LEN_MAX).collect();
        format!("{number:>width$}  {shown}")
    };
    (first..).zip(lines).map(row).collect::<Vec<_>>().join("\n")
}

/// The lines of a text as Python's `splitlines` finds them.
fn split_lines(text: &str) -> Vec<&str> {
    let is_end = |letter: char| {
        matches!(
            letter,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_end) {
        lines.push(&rest[..at]);
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preview_has_both_ends_with_numbers() {
        let text: String = (1..=20).map(|line| format!("line {line}\n")).collect();
        assert_eq!(
            show_preview(&text, "result"),
            "Here is a preview showing the head and tail of the result (lines of the form `... [N lines truncated] ...` \
             indicate omitted lines in the middle of the content):\n\n1  line 1\n2  line 2\n3  line 3\n4  line 4\n\
             5  line 5\n... [10 lines truncated] ...\n16  line 16\n17  line 17\n18  line 18\n19  line 19\n20  line 20"
        );
        assert_eq!(show_preview("a\n\nb", "content"), "Here is a preview of the content:\n\n1  a\n2  \n3  b");
    }

    #[test]
    fn a_long_line_is_clipped_and_the_preview_says_so() {
        let shown = show_preview(&"ä".repeat(2000), "result");
        assert!(
            shown.starts_with("Here is a preview of the result (the output contains lines longer than 1000")
        );
        assert!(shown.ends_with(&format!("\n1  {}", "ä".repeat(1000))), "{shown}");
        let both = show_preview(&format!("{}\n", "x".repeat(1001)).repeat(11), "result");
        assert!(both.contains("content; the output contains lines") && both.contains("\n 7  x"), "{both}");
    }

    #[test]
    fn lines_end_as_in_python() {
        assert_eq!(split_lines("a\r\nb\rc\u{2028}d\u{b}\n"), ["a", "b", "c", "d", ""]);
        assert!(split_lines("").is_empty());
    }
}
