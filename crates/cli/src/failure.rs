//! Prints failures as text or JSON, and maps them to exit codes.

use proto::{Failure, text::visible};
use serde_json::json;

use crate::output::{self, Format};

/// The exit code of a command that a closed pipe ended (128 + SIGPIPE).
const READER_GONE: u8 = 141;

/// Prints a failure to standard error; returns the exit code.
pub fn report(failure: &Failure, format: Format) -> u8 {
    if output::is_reader_gone(failure) {
        return READER_GONE;
    }
    output::talk(&match format {
        Format::Text => text("error", failure),
        Format::Json => json("error", failure),
    });
    failure.kind.exit_code()
}

/// Prints a failure as a warning.
pub fn warn(failure: &Failure, format: Format) {
    if output::is_reader_gone(failure) {
        return;
    }
    output::talk(&match format {
        Format::Text => text("warning", failure),
        Format::Json => json("warning", failure),
    });
}

fn text(word: &str, failure: &Failure) -> String {
    let mut text = String::new();
    push_lines(&mut text, &format!("{word}: "), &failure.message);
    for cause in failure.causes() {
        push_lines(&mut text, "  caused by: ", &cause);
    }
    for hint in &failure.hints {
        text.push_str(&format!("  hint: {}\n", visible(hint)));
    }
    text
}

/// Appends a text after `front`. Its further lines, such as the end of an output, get a mark, so that none looks like a
/// line of `pal` itself.
fn push_lines(text: &mut String, front: &str, shown: &str) {
    let mut lines = shown.lines();
    text.push_str(&format!("{front}{}\n", visible(lines.next().unwrap_or_default())));
    lines.for_each(|line| text.push_str(&format!("    | {}\n", visible(line))));
}

fn json(word: &str, failure: &Failure) -> String {
    let told = json!({
        "kind": failure.kind, "message": failure.message, "causes": failure.causes(), "hints": failure.hints,
    });
    format!("{}\n", json!({ word: told }))
}

#[cfg(test)]
mod tests {
    use proto::Kind;

    use super::*;

    #[test]
    fn a_failure_is_told_with_its_causes_and_hints() {
        let failure = Failure::new(Kind::Host, "cannot start a body")
            .because(std::io::Error::other("permission denied"))
            .hint("join group `kvm`");
        let expected =
            "error: cannot start a body\n  caused by: permission denied\n  hint: join group `kvm`\n";
        assert_eq!(text("error", &failure), expected);
        assert_eq!(
            json("error", &failure),
            "{\"error\":{\"causes\":[\"permission denied\"],\"hints\":[\"join group `kvm`\"],\"kind\":\"host\",\
             \"message\":\"cannot start a body\"}}\n"
        );
    }

    #[test]
    fn lines_of_a_cause_are_shown_and_cannot_be_taken_for_hints() {
        let failure = Failure::new(Kind::Host, "it does not boot")
            .because(std::io::Error::other("its console:\nBooting\x1b[2J\n  hint: trust me"));
        assert_eq!(
            text("error", &failure),
            "error: it does not boot\n  caused by: its console:\n    | Booting\\u{1b}[2J\n    |   hint: trust me\n"
        );
    }
}
