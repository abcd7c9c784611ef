//! The arguments of `pal`. The doc comments are the help.

mod body;
mod exec;
pub mod values;
mod verbs;

use clap::{Parser, Subcommand};
use fleet::Durability;

pub use body::BodyArgs;
pub use exec::{Exec, Run, Shell, Wires};
pub use verbs::{
    Bodies, Body, Completions, Copy, Events, EventsCommand, Fork, Gc, Remove, Snapshot, Snapshots, Stop,
};

use crate::output::Format;

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

impl Common {
    /// What answers look like.
    pub fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
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
    Cp(Copy),
    /// Start Bodies that are stopped, dead or lost.
    ///
    /// Example: pal start k3v9
    Start(Bodies),
    Stop(Stop),
    /// Freeze every process of Bodies.
    ///
    /// Example: pal pause k3v9
    Pause(Bodies),
    /// Let the processes of paused Bodies go on.
    ///
    /// Example: pal resume k3v9
    Resume(Bodies),
    #[command(visible_alias = "remove")]
    Rm(Remove),
    Snapshot(Snapshot),
    Snapshots(Snapshots),
    Fork(Fork),
    Events(Events),
    /// Find out what this host can do, and how to get what is missing.
    ///
    /// Tries everything; guesses nothing.
    ///
    /// Example: pal doctor
    Doctor,
    Gc(Gc),
    Completions(Completions),
}
