//! The arguments of `pal`. The doc comments are the help.

mod body;
mod exec;
mod serve;
mod templates;
pub mod values;
mod verbs;
mod work;

use std::{ffi::OsString, os::unix::ffi::OsStrExt};

use clap::{Parser, Subcommand};
use fleet::Durability;

pub use body::BodyArgs;
pub use exec::{Exec, Run, Shell, Wires};
pub use serve::{Keys, KeysCommand, NewKey, Serve};
pub use templates::{Import, Pull, Setup, Templates, TemplatesCommand};
pub use verbs::{
    Bodies, Body, Completions, Copy, Events, EventsCommand, Fork, Gc, Homes, Pause, Remove, Snapshot,
    Snapshots, Stop,
};
pub use work::{Compare, Config, ConfigCommand, Diff, Land, Log, Up};

use crate::{ahead, output::Format};

/// Give every AI agent a computer of its own, on yours.
///
/// A Body is a sandbox: files, processes, a network view and limits of its own.
/// Standard output is data, standard error is talk.
///
/// Exit codes: `run` and `exec` pass the command's own through, 126 and 127 as in a shell.
/// Failures of `pal` itself: 2 usage, 120 internal, 121 not found, 122 conflict, 123 denied, 124 limit, 125 host.
///
/// Example: pal run -- uname -a
#[derive(Debug, Parser)]
#[command(name = "pal", version, disable_help_subcommand = true)]
pub struct Cli {
    /// For every command.
    #[command(flatten)]
    pub common: Common,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What every command takes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct Common {
    /// Keep Bodies, snapshots and events in this directory [env: PAL_DATA]
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<String>,
    /// Answer in JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Survive this much with every acknowledged event: power or process [env: PAL_DURABILITY] [default: process]
    #[arg(long, global = true, value_name = "LOSS", value_parser = values::durability)]
    pub durability: Option<Durability>,
}

/// One verb alone. Building the others costs more than the kernel needs for a namespace.
#[derive(Debug, Parser)]
struct One<Verb: clap::Args> {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    verb: Verb,
}

impl Cli {
    /// Reads the arguments. The verbs that must be fast are tried alone first; what is wrong with them, or help, is
    /// told with all the others known.
    pub fn read(argv: &[OsString]) -> Result<Self, clap::Error> {
        let alone = ahead::verb_at(argv.iter().skip(1).map(|argument| argument.as_bytes())).and_then(|at| {
            // With the verb in the place of our own name, and the options that stand before it behind it.
            let (before, rest) = argv[1..].split_at(at);
            let words = || rest[..1].iter().chain(before).chain(&rest[1..]);
            match rest[0].to_str()? {
                "run" => {
                    One::try_parse_from(words()).map(|One { common, verb }| (common, Command::Run(verb))).ok()
                }
                "exec" => One::try_parse_from(words())
                    .map(|One { common, verb }| (common, Command::Exec(verb)))
                    .ok(),
                _ => None,
            }
        });
        match alone {
            Some((common, command)) => Ok(Cli { common, command }),
            None => Cli::try_parse_from(argv),
        }
    }
}

impl Common {
    /// What answers look like.
    pub fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    Up(Box<Up>),
    Run(Box<Run>),
    Create(Box<BodyArgs>),
    Exec(Exec),
    Shell(Shell),
    /// List the Bodies.
    ///
    /// Example: pal ls
    #[command(visible_alias = "list")]
    Ls,
    /// Show all that is known of a Body, with what holds it.
    ///
    /// Example: pal inspect k3v9
    Inspect(Body),
    /// Print what the commands of a Body wrote.
    ///
    /// Example: pal logs k3v9
    Logs(Body),
    Diff(Diff),
    Log(Log),
    Compare(Compare),
    Land(Land),
    /// Save the work of Bodies in their repositories now; print the commits that hold it.
    ///
    /// Everything tracked and untracked goes to refs/palisade/BODY/wip.
    /// `pal stop` and `pal rm` do the same by themselves.
    ///
    /// Example: pal wip k3v9
    Wip(Bodies),
    Cp(Copy),
    /// Start Bodies that are stopped, dead or lost.
    ///
    /// Example: pal start k3v9
    Start(Bodies),
    Stop(Stop),
    Pause(Pause),
    /// Let the processes of paused Bodies go on.
    ///
    /// Example: pal resume k3v9
    Resume(Bodies),
    #[command(visible_alias = "remove")]
    Rm(Remove),
    Snapshot(Snapshot),
    Snapshots(Snapshots),
    Homes(Homes),
    Fork(Fork),
    Templates(Templates),
    Setup(Setup),
    Events(Events),
    /// Find out what this host can do, and how to get what is missing.
    ///
    /// Tries everything; guesses nothing.
    ///
    /// Example: pal doctor
    Doctor,
    Gc(Gc),
    /// Show where the space went.
    ///
    /// Example: pal df
    Df,
    Config(Config),
    Serve(Serve),
    Keys(Keys),
    Completions(Completions),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn clap_finds_no_fault_with_the_arguments() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_verb_read_alone_means_the_same() {
        for line in [
            "run -- true",
            "run true --json",
            "run --json --data /d -it -e A=b --memory 1G --mount /a:/b:rw --keep -- sh -c x",
            "exec -i --durability power k3v9 ls -l",
            "exec k3v9 --user root -- --json",
        ] {
            let argv: Vec<OsString> = std::iter::once("pal").chain(line.split(' ')).map(Into::into).collect();
            let (alone, whole) = (Cli::read(&argv).unwrap(), Cli::try_parse_from(&argv).unwrap());
            assert_eq!(format!("{alone:?}"), format!("{whole:?}"), "{line}");
        }
        for line in ["run", "run --help", "exec", "run --forc x", "run --version"] {
            let argv: Vec<OsString> = std::iter::once("pal").chain(line.split(' ')).map(Into::into).collect();
            let (alone, whole) = (Cli::read(&argv).unwrap_err(), Cli::try_parse_from(&argv).unwrap_err());
            assert_eq!(alone.to_string(), whole.to_string(), "{line}");
        }
    }
}
