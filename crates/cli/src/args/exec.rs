//! The options of commands that run something in a Body.

use std::{collections::BTreeMap, time::Duration};

use super::{BodyArgs, values};

/// Run a command in a new Body, which ends with the command.
///
/// `pal` exits with the command's exit status. The command reads standard input if it is a pipe or a file;
/// `-i` also passes a terminal's, `-t` gives the command a terminal.
///
/// Example: pal run -- uname -a
#[derive(Debug, clap::Args)]
#[command(override_usage = "pal run [OPTIONS] -- <CMD>...")]
pub struct RunArgs {
    /// The options of the Body.
    #[command(flatten)]
    pub body: BodyArgs,
    /// Keep the Body after the command has ended, and print its id
    #[arg(long)]
    pub keep: bool,
    /// Print the enforcement record before the command runs
    #[arg(long)]
    pub record: bool,
    /// The options of standard input and the terminal.
    #[command(flatten)]
    pub wires: StdioArgs,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// Run a command in a running Body.
///
/// `pal` exits with the command's exit status. Without BODY, the only Body of the current repository is meant.
///
/// Example: pal exec k3v9 -- ls -l /
#[derive(Debug, clap::Args)]
#[command(override_usage = "pal exec [OPTIONS] [BODY] -- <CMD>...")]
pub struct ExecArgs {
    /// The options of standard input and the terminal.
    #[command(flatten)]
    pub wires: StdioArgs,
    /// Set an environment variable for the command; may be repeated
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// Run the command as this user
    #[arg(long, short = 'u', value_name = "USER")]
    pub user: Option<String>,
    /// Run the command in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,
    /// Kill the command after this time, such as 90s, 10m or 2h
    #[arg(long, value_name = "DURATION", value_parser = values::timeout, allow_hyphen_values = true)]
    pub timeout: Option<Duration>,
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

impl ExecArgs {
    /// The environment variables.
    pub fn env(&self) -> BTreeMap<String, String> {
        self.env.iter().cloned().collect()
    }
}

/// The options of standard input and the terminal.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct StdioArgs {
    /// Pass standard input to the command, also if it is a terminal
    #[arg(long, short)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(long, short)]
    pub tty: bool,
}

/// Open a shell in a Body.
///
/// On a terminal it is a login shell (bash if the Body has it, else sh); from a pipe, `sh` reads commands.
/// Without BODY, the only Body of the current repository is meant.
///
/// Example: pal shell k3v9
#[derive(Debug, clap::Args)]
pub struct ShellArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: Option<String>,
    /// Run the shell as this user
    #[arg(long, short = 'u', value_name = "USER")]
    pub user: Option<String>,
    /// Start the shell in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    pub workdir: Option<String>,
}
