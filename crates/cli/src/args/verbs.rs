//! The smaller verbs.

use std::{ffi::OsString, time::Duration};

use super::values;

/// One Body.
#[derive(Debug, clap::Args)]
pub struct BodyArg {
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
}

/// Print the output of a Body's commands, those of E2B clients included.
///
/// The newest 100 commands are shown, oldest first.
///
/// Example: pal logs k3v9
#[derive(Debug, clap::Args)]
pub struct LogsArgs {
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
    /// Show the newest N commands
    #[arg(long, short = 'n', value_name = "N", default_value_t = 100)]
    pub last: usize,
    /// Show all commands
    #[arg(long, conflicts_with = "last")]
    pub all: bool,
}

/// Bodies.
#[derive(Debug, clap::Args)]
pub struct BodiesArg {
    /// The Bodies: their ids, or the beginnings of them
    #[arg(required = true, value_name = "BODY")]
    pub bodies: Vec<String>,
}

/// Copy files into a Body or out of it.
///
/// One side is `BODY:PATH`, the other a path of the host (write `./a:b` for one with a colon).
/// Directories are copied whole; an existing directory receives the source under its own name.
///
/// Example: pal cp notes.txt k3v9:/tmp
#[derive(Debug, clap::Args)]
pub struct CopyArgs {
    /// What to copy
    #[arg(value_name = "SRC")]
    pub source: OsString,
    /// Where to
    #[arg(value_name = "DST")]
    pub target: OsString,
}

/// End the processes of Bodies; their files stay.
///
/// Example: pal stop k3v9
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// Let processes end by themselves for this long before they are killed
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = values::duration,
        allow_hyphen_values = true)]
    pub grace: Duration,
    /// Which.
    #[command(flatten)]
    pub of: BodiesArg,
}

/// Freeze every process of Bodies.
///
/// Example: pal pause k3v9
#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// The earlier spelling of `pal suspend`
    #[arg(long, hide = true)]
    pub swap: bool,
    /// Which.
    #[command(flatten)]
    pub of: BodiesArg,
}

/// Remove Bodies and their files.
///
/// Work in a repository is saved there first, under refs/palisade/BODY; a Body whose work cannot be saved stays.
///
/// Example: pal rm k3v9
#[derive(Debug, clap::Args)]
pub struct RemoveArgs {
    /// Also Bodies that run
    #[arg(long, short)]
    pub force: bool,
    /// Give their work up: say what is lost, and save nothing
    #[arg(long)]
    pub discard: bool,
    /// Which.
    #[command(flatten)]
    pub of: BodiesArg,
}

/// Keep the files of a Body as they are now, under an id and perhaps a name.
///
/// `pal create --template NAME` starts from it; `pal snapshot ls` lists the snapshots.
///
/// Example: pal snapshot k3v9 --name tested
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SnapshotArgs {
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY", required = true)]
    pub body: Option<String>,
    /// Name the snapshot
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Work with snapshots instead of taking one.
    #[command(subcommand)]
    pub command: Option<SnapshotCommand>,
}

/// Work with the snapshots.
#[derive(Debug, clap::Subcommand)]
pub enum SnapshotCommand {
    /// List the snapshots.
    ///
    /// Example: pal snapshot ls
    #[command(visible_alias = "list")]
    Ls,
    /// Remove snapshots.
    ///
    /// Example: pal snapshot rm tested
    #[command(visible_alias = "remove")]
    Rm {
        /// The snapshots: their names or ids
        #[arg(value_name = "SNAPSHOT", required = true)]
        snapshots: Vec<String>,
    },
}

/// The earlier spelling of `pal snapshot ls` and `pal snapshot rm`.
///
/// Example: pal snapshots
#[derive(Debug, clap::Args)]
pub struct SnapshotsArgs {
    /// Remove this snapshot, by id or name, instead of listing; may be repeated
    #[arg(long = "rm", value_name = "SNAPSHOT")]
    pub remove: Vec<String>,
}

/// List the homes that outlive their Bodies, or remove some.
///
/// `pal up --home NAME` has one; what a Body keeps there is kept when the Body is removed.
///
/// Example: pal home ls
#[derive(Debug, clap::Args)]
pub struct HomeArgs {
    /// List or remove.
    #[command(subcommand)]
    pub command: Option<HomeCommand>,
}

/// Work with the homes.
#[derive(Debug, clap::Subcommand)]
pub enum HomeCommand {
    /// List the homes.
    ///
    /// Example: pal home ls
    #[command(visible_alias = "list")]
    Ls,
    /// Remove homes.
    ///
    /// Example: pal home rm mine
    #[command(visible_alias = "remove")]
    Rm {
        /// The homes: their names
        #[arg(value_name = "NAME", required = true)]
        homes: Vec<String>,
    },
}

/// The earlier spelling of `pal home ls` and `pal home rm`.
///
/// Example: pal homes
#[derive(Debug, clap::Args)]
pub struct HomesArgs {
    /// Remove this home instead of listing; may be repeated
    #[arg(long = "rm", value_name = "NAME")]
    pub remove: Vec<String>,
}

/// Make Bodies that begin as another one is now; print their ids.
///
/// Example: pal fork k3v9 -n 3
#[derive(Debug, clap::Args)]
pub struct ForkArgs {
    /// Make this many
    #[arg(long, short = 'n', value_name = "COUNT", default_value = "1", value_parser = values::forks,
        allow_hyphen_values = true)]
    pub count: u32,
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
}

/// Print what happened, oldest first.
///
/// Example: pal events --body k3v9
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct EventsArgs {
    /// Go on as more happens
    #[arg(long, short)]
    pub follow: bool,
    /// Only of this Body, also when it is gone
    #[arg(long, value_name = "BODY")]
    pub body: Option<String>,
    /// Only after this number
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    pub after: u64,
    /// Something else.
    #[command(subcommand)]
    pub command: Option<EventsCommand>,
}

/// What else can be done with events.
#[derive(Debug, Clone, Copy, clap::Subcommand)]
pub enum EventsCommand {
    /// Prove that the log is whole: nothing cut, changed or reordered.
    ///
    /// Example: pal events verify
    Verify,
}

/// Remove what nobody needs: leftovers of Bodies that ended badly, and output that was never finished.
///
/// Example: pal gc --dry-run
#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// Only say what would go
    #[arg(long)]
    pub dry_run: bool,
}

/// Print the completions of a shell.
///
/// Example: pal completions bash
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}
