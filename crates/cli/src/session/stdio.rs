//! How a command is attached to our standard input.

use fleet::{ExecRequest, Stdin};
use proto::{Failure, Kind};
use rustix::{
    fs::{FileType, fstat},
    stdio,
    termios::isatty,
};

use crate::{args::StdioArgs, output::Format, settings::variable, terminal};

/// The standard input of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StdioMode {
    /// A terminal of its own, connected to ours.
    Terminal,
    /// Our standard input, as bytes.
    Open,
    /// No input.
    Null,
}

impl StdioMode {
    /// Chooses by the options and our standard input.
    pub fn choose(wires: StdioArgs, format: Format) -> Result<Self, Failure> {
        if wires.tty && !isatty(stdio::stdin()) {
            return Err(Failure::new(Kind::Usage, "-t needs a terminal, and standard input is not one")
                .hint("leave out -t: a pipe gets bytes; -i passes standard input in"));
        }
        if wires.tty && format == Format::Json {
            return Err(Failure::new(Kind::Usage, "-t and --json do not go together")
                .hint("leave out -t: with --json the output is in the events"));
        }
        Ok(match wires {
            StdioArgs { tty: true, .. } => StdioMode::Terminal,
            StdioArgs { interactive: true, .. } => StdioMode::Open,
            _ if stdin_has_bytes() => StdioMode::Open,
            _ => StdioMode::Null,
        })
    }

    /// A terminal if standard input is one, else bytes.
    pub fn shell(format: Format) -> Result<Self, Failure> {
        match (isatty(stdio::stdin()), format) {
            (true, Format::Json) => {
                Err(Failure::new(Kind::Usage, "a shell on a terminal and --json do not go together")
                    .hint("run one command instead: pal exec --json BODY -- CMD"))
            }
            (true, Format::Text) => Ok(StdioMode::Terminal),
            (false, _) => Ok(StdioMode::Open),
        }
    }

    /// Applies the choice to a request.
    pub fn apply(self, request: &mut ExecRequest) -> Result<(), Failure> {
        request.stdin = if self == StdioMode::Null { Stdin::Null } else { Stdin::Open };
        if self != StdioMode::Terminal {
            return Ok(());
        }
        request.tty = Some(terminal::size());
        for name in ["TERM", "COLORTERM"] {
            if let Some(value) = variable(name)? {
                request.env.entry(name.into()).or_insert(value);
            }
        }
        Ok(())
    }
}

/// Whether standard input is a pipe or a file, not a terminal or /dev/null.
fn stdin_has_bytes() -> bool {
    let Ok(stat) = fstat(stdio::stdin()) else { return false };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice => !is_null(stat.st_rdev) && !isatty(stdio::stdin()),
        FileType::Directory => false,
        _ => true,
    }
}

fn is_null(device: u64) -> bool {
    (rustix::fs::major(device), rustix::fs::minor(device)) == (1, 3)
}
