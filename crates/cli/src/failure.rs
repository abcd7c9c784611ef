//! How a failure looks to a person, to a program, and to the shell.

use proto::{Failure, Kind, failure::NO_COMMAND, text::visible};
use serde_json::json;

use crate::output::{self, Format};

/// The exit code of a shell whose command does not exist.
const COMMAND_NOT_FOUND: u8 = 127;
/// The exit code of a shell whose command cannot be run.
const COMMAND_NOT_EXECUTABLE: u8 = 126;
/// The exit code of a command that a closed pipe ended (128 + SIGPIPE).
const READER_GONE: u8 = 141;

/// Says what went wrong on standard error; gives the exit code.
pub fn report(failure: &Failure, format: Format) -> u8 {
    if output::is_reader_gone(failure) {
        return READER_GONE;
    }
    output::talk(&match format {
        Format::Text => text("error", failure),
        Format::Json => json("error", failure),
    });
    exit_code(failure)
}

/// Says what went wrong beside something more important.
pub fn warn(failure: &Failure, format: Format) {
    if output::is_reader_gone(failure) {
        return;
    }
    output::talk(&match format {
        Format::Text => text("warning", failure),
        Format::Json => json("warning", failure),
    });
}

/// The exit code of a failure: a command that cannot be run ends as it would in a shell.
fn exit_code(failure: &Failure) -> u8 {
    match failure.kind {
        Kind::NotFound if failure.message.starts_with(NO_COMMAND) => COMMAND_NOT_FOUND,
        Kind::Denied if failure.message.starts_with("not executable: ") => COMMAND_NOT_EXECUTABLE,
        kind => kind.exit_code(),
    }
}

fn text(word: &str, failure: &Failure) -> String {
    let mut text = format!("{word}: {}\n", visible(&failure.message));
    for cause in failure.causes() {
        text.push_str(&format!("  caused by: {}\n", visible(&cause)));
    }
    for hint in &failure.hints {
        text.push_str(&format!("  hint: {}\n", visible(hint)));
    }
    text
}

fn json(word: &str, failure: &Failure) -> String {
    let told = json!({
        "kind": failure.kind, "message": failure.message, "causes": failure.causes(), "hints": failure.hints,
    });
    format!("{}\n", json!({ word: told }))
}

#[cfg(test)]
mod tests {
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
    fn a_command_that_cannot_run_ends_as_in_a_shell() {
        let cases = [
            (Kind::NotFound, "command not found: x", 127),
            (Kind::Denied, "not executable: x", 126),
            (Kind::NotFound, "there is no body x", 121),
            (Kind::Denied, "policy says no", 123),
        ];
        for (kind, message, code) in cases {
            assert_eq!(exit_code(&Failure::new(kind, message)), code, "{message}");
        }
    }
}
