//! Turns errors of the argument parser into failures; prints help and version.

use std::ffi::OsString;

use clap::{CommandFactory, error::ErrorKind};
use proto::{Failure, Kind};

use crate::{args::Cli, output};

/// The beginning of the last line of clap's errors.
const MORE: &str = "For more information, try";

/// Prints help or the version; anything else is a usage failure.
pub fn answer(error: &clap::Error, argv: &[OsString]) -> Result<u8, Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            output::data(error.render().to_string().as_bytes()).map(|()| 0)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            output::talk(&error.render().to_string());
            Ok(Kind::Usage.exit_code())
        }
        ErrorKind::InvalidUtf8 => Err(not_utf8()),
        _ => Err(parse(&error.render().to_string()).hint(format!("see `{} --help`", command(argv)))),
    }
}

fn not_utf8() -> Failure {
    Failure::new(Kind::Usage, "an argument is not valid UTF-8")
        .hint("arguments must be text: pass bytes through standard input, or in a file copied with `pal cp`")
}

/// Splits clap's text into the message, the tips and the usage.
fn parse(text: &str) -> Failure {
    let mut blocks = text.trim().split("\n\n");
    let what = blocks.next().unwrap_or_default();
    let what: Vec<&str> = what.strip_prefix("error: ").unwrap_or(what).lines().map(str::trim).collect();
    let failure = Failure::new(Kind::Usage, what.join(" "));
    let lines =
        blocks.flat_map(str::lines).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(MORE));
    lines.fold(failure, |failure, line| failure.hint(hint(line)))
}

fn hint(line: &str) -> String {
    match line.strip_prefix("Usage: ") {
        Some(usage) => format!("usage: {usage}"),
        None => line.trim_start_matches("tip: ").replace('\'', "`"),
    }
}

/// The command whose help is relevant.
fn command(argv: &[OsString]) -> String {
    let known = Cli::command();
    let verb = argv.iter().skip(1).take_while(|arg| *arg != "--").find_map(|arg| known.find_subcommand(arg));
    verb.map_or("pal".to_owned(), |verb| format!("pal {}", verb.get_name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claps_words_become_a_failure_with_hints() {
        let failure = parse(
            "error: unexpected argument '--forc' found\n\n  tip: a similar argument exists: '--force'\n\n\
             Usage: pal rm --force <BODY>...\n\nFor more information, try '--help'.\n",
        );
        assert_eq!(failure.message, "unexpected argument '--forc' found");
        assert_eq!(
            failure.hints,
            ["a similar argument exists: `--force`", "usage: pal rm --force <BODY>..."]
        );
    }

    #[test]
    fn the_help_of_the_command_at_hand_is_named() {
        let of = |argv: &[&str]| command(&argv.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(of(&["pal", "--json", "rm", "--forc"]), "pal rm");
        assert_eq!(of(&["pal", "list", "x"]), "pal ls");
        assert_eq!(of(&["pal", "what", "--", "rm"]), "pal");
    }
}
