//! The options of commands about Bodies, snapshots, homes and events.

use std::{ffi::OsString, time::Duration};

use fleet::LimitRequest;
use proto::{BodyName, Size};

use super::values;

/// A command about one Body.
#[derive(Debug, clap::Args)]
pub struct BodyArg {
    /// The Body: its id, the beginning of it, or its name; without it, the only Body of the current
    /// repository
    #[arg(value_name = "BODY")]
    pub body: Option<String>,
}

/// Change limits of a Body; print its id.
///
/// A running Body of layer `process` gets them at once, as far as cgroups limit it; a microVM gets them at its
/// next start. `pal inspect` shows all limits.
///
/// Example: pal limit k3v9 --memory 4GiB
#[derive(Debug, clap::Args)]
pub struct LimitArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
    /// The limits to change.
    #[command(flatten)]
    pub limits: NewLimitArgs,
}

/// The limits to change; at least one.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = true)]
pub struct NewLimitArgs {
    /// Limit its memory, such as 512MiB
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    memory: Option<Size>,
    /// Limit its CPU time, in CPUs, such as 1.5
    #[arg(long, value_name = "COUNT", value_parser = values::cpus, allow_hyphen_values = true)]
    cpus: Option<u32>,
    /// Limit its processes and threads
    #[arg(long, value_name = "COUNT", value_parser = values::count, allow_hyphen_values = true)]
    pids: Option<u32>,
    /// Limit the bytes that it may write to its own files
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    disk: Option<Size>,
    /// Limit the files and directories that it may create
    #[arg(long, value_name = "COUNT", value_parser = values::count, allow_hyphen_values = true)]
    inodes: Option<u32>,
    /// End it this long after its start, such as 90s, 10m or 2h
    #[arg(long, value_name = "DURATION", value_parser = values::timeout, allow_hyphen_values = true)]
    timeout: Option<Duration>,
}

impl NewLimitArgs {
    /// The request for them.
    pub fn request(&self) -> LimitRequest {
        LimitRequest {
            memory: self.memory,
            cpu_milli: self.cpus,
            pids: self.pids,
            disk: self.disk,
            inodes: self.inodes.map(u64::from),
            wall: self.timeout,
            ..LimitRequest::default()
        }
    }
}

/// Print the output of a Body's commands, those of E2B clients included.
///
/// The newest 100 commands are shown, oldest first.
///
/// Example: pal logs k3v9
#[derive(Debug, clap::Args)]
pub struct LogsArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
    /// Show the newest N commands
    #[arg(long, short = 'n', value_name = "N", default_value_t = 100)]
    pub last: usize,
    /// Show all commands
    #[arg(long, conflicts_with = "last")]
    pub all: bool,
}

/// A command about several Bodies.
#[derive(Debug, clap::Args)]
pub struct BodiesArg {
    /// The Bodies: their ids, the beginnings of them, or their names
    #[arg(required = true, value_name = "BODY")]
    pub bodies: Vec<String>,
}

/// Copy files into a Body or out of it.
///
/// One side is `BODY:PATH`, the other a path of the host (write `./a:b` for a path with a colon). Directories
/// are copied with their contents; if the target is an existing directory, the source is copied into it.
/// Git directories do not come out of a Body: bring commits out with `pal land` or `pal save`.
///
/// Example: pal cp notes.txt k3v9:/tmp
#[derive(Debug, clap::Args)]
pub struct CopyArgs {
    /// Copy git directories out as well, although git on this host will run what their settings name
    #[arg(long)]
    pub with_git: bool,
    /// The source
    #[arg(value_name = "SRC")]
    pub source: OsString,
    /// The target
    #[arg(value_name = "DST")]
    pub target: OsString,
}

/// End the processes of Bodies; their files stay.
///
/// Example: pal stop k3v9
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// Give processes this long to end by themselves before they are killed
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = values::duration,
        allow_hyphen_values = true)]
    pub grace: Duration,
    /// The Bodies.
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
    /// The Bodies.
    #[command(flatten)]
    pub of: BodiesArg,
}

/// Remove Bodies and their files.
///
/// Work in a repository is saved there first, under refs/palisade/BODY; a Body whose work cannot be saved is
/// not removed.
///
/// Example: pal rm k3v9
#[derive(Debug, clap::Args)]
pub struct RemoveArgs {
    /// Also remove running Bodies
    #[arg(long, short)]
    pub force: bool,
    /// Give up their work: print what is lost, and save nothing
    #[arg(long)]
    pub discard: bool,
    /// The Bodies.
    #[command(flatten)]
    pub of: BodiesArg,
}

/// Save the current files of a Body as a snapshot, with an id and an optional name.
///
/// `pal create --template NAME` starts from a snapshot; `pal snapshot ls` lists the snapshots.
///
/// Example: pal snapshot k3v9 --name tested
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SnapshotArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY", required = true)]
    pub body: Option<String>,
    /// Name the snapshot
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The other commands about snapshots.
    #[command(subcommand)]
    pub command: Option<SnapshotCommand>,
}

/// The other commands about snapshots.
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

/// List or remove homes.
///
/// A home is a named home directory that outlives its Bodies: `pal up --home NAME` mounts it, and removing
/// the Body keeps its files.
///
/// Example: pal home ls
#[derive(Debug, clap::Args)]
pub struct HomeArgs {
    /// The command.
    #[command(subcommand)]
    pub command: Option<HomeCommand>,
}

/// The commands about homes.
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
        /// The names of the homes
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

/// Create Bodies that begin in the current state of another one; print their ids.
///
/// Example: pal fork k3v9 -n 3
#[derive(Debug, clap::Args)]
pub struct ForkArgs {
    /// Name the new Body; several are named NAME-1, NAME-2, …
    #[arg(long, value_name = "NAME")]
    pub name: Option<BodyName>,
    /// Create this many Bodies
    #[arg(long, short = 'n', value_name = "COUNT", default_value = "1", value_parser = values::forks,
        allow_hyphen_values = true)]
    pub count: u32,
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
}

/// Print the events of the log, oldest first.
///
/// Example: pal events --body k3v9
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct EventsArgs {
    /// Wait for new events and print them, too
    #[arg(long, short)]
    pub follow: bool,
    /// Print only the events of this Body, also after it was removed
    #[arg(long, value_name = "BODY")]
    pub body: Option<String>,
    /// Print only events behind this position
    #[arg(long, value_name = "POS", default_value_t = 0)]
    pub after: u64,
    /// The other commands about events.
    #[command(subcommand)]
    pub command: Option<EventsCommand>,
}

/// The other commands about events.
#[derive(Debug, Clone, Copy, clap::Subcommand)]
pub enum EventsCommand {
    /// Verify that no event of the log was cut, changed or reordered.
    ///
    /// Example: pal events verify
    Verify,
}

/// Remove unused data: leftovers of Bodies that ended badly, incomplete output, and unused layers beyond the
/// budget.
///
/// Example: pal gc --dry-run
#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// Only print what would be removed
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
