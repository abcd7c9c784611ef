//! Commands in Bodies.

use std::{collections::BTreeMap, time::Duration};

use super::{BodyArgs, values};

/// Run a command in a fresh Body, which ends with it.
///
/// The command's exit status is passed on.
/// Standard input is passed in when it is a pipe or a file; `-i` passes a terminal's too, `-t` gives a terminal.
///
/// Example: pal run -- uname -a
#[derive(Debug, clap::Args)]
#[command(override_usage = "pal run [OPTIONS] -- <CMD>...")]
pub struct RunArgs {
    /// The Body.
    #[command(flatten)]
    pub body: BodyArgs,
    /// Keep the Body when the command has ended, and say its id
    #[arg(long)]
    pub keep: bool,
    /// Show what holds the Body before the command runs
    #[arg(long)]
    pub record: bool,
    /// How it is spoken to.
    #[command(flatten)]
    pub wires: StdioArgs,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// Run a command in a Body that runs.
///
/// The command's exit status is passed on.
///
/// Example: pal exec k3v9 -- ls -l /
#[derive(Debug, clap::Args)]
#[command(override_usage = "pal exec [OPTIONS] <BODY> -- <CMD>...")]
pub struct ExecArgs {
    /// How it is spoken to.
    #[command(flatten)]
    pub wires: StdioArgs,
    /// Set a variable for the command; may be repeated
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// Run the command as this user
    #[arg(long, short = 'u', value_name = "USER")]
    pub user: Option<String>,
    /// Run the command in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,
    /// Kill the command after this long, such as 90s, 10m or 2h
    #[arg(long, value_name = "DURATION", value_parser = values::timeout, allow_hyphen_values = true)]
    pub timeout: Option<Duration>,
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

impl ExecArgs {
    /// The variables.
    pub fn env(&self) -> BTreeMap<String, String> {
        self.env.iter().cloned().collect()
    }
}

/// How a command is spoken to.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct StdioArgs {
    /// Pass standard input in, also when it is a terminal
    #[arg(long, short)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(long, short)]
    pub tty: bool,
}

/// Open a shell in a Body.
///
/// On a terminal it is a login shell (bash where there is one, else sh); from a pipe, `sh` reads its commands.
///
/// Example: pal shell k3v9
#[derive(Debug, clap::Args)]
pub struct ShellArgs {
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
    /// Be this user
    #[arg(long, short = 'u', value_name = "USER")]
    pub user: Option<String>,
    /// Begin in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,
}
