//! The smaller verbs.

use std::{ffi::OsString, time::Duration};

use super::values;

/// One Body.
#[derive(Debug, clap::Args)]
pub struct Body {
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
}

/// Bodies.
#[derive(Debug, clap::Args)]
pub struct Bodies {
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
pub struct Copy {
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
pub struct Stop {
    /// Let processes end by themselves for this long before they are killed
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = values::duration,
        allow_hyphen_values = true)]
    pub grace: Duration,
    /// Which.
    #[command(flatten)]
    pub of: Bodies,
}

/// Freeze every process of Bodies.
///
/// Example: pal pause k3v9
#[derive(Debug, clap::Args)]
pub struct Pause {
    /// Put a microVM's memory on the disk, and take none meanwhile
    #[arg(long)]
    pub swap: bool,
    /// Which.
    #[command(flatten)]
    pub of: Bodies,
}

/// Remove Bodies and their files.
///
/// Work in a repository is saved there first, under refs/palisade/BODY; a Body whose work cannot be saved stays.
///
/// Example: pal rm k3v9
#[derive(Debug, clap::Args)]
pub struct Remove {
    /// Also Bodies that run
    #[arg(long, short)]
    pub force: bool,
    /// Give their work up: say what is lost, and save nothing
    #[arg(long)]
    pub discard: bool,
    /// Which.
    #[command(flatten)]
    pub of: Bodies,
}

/// Keep the files of a Body as they are now, under an id and perhaps a name.
///
/// `pal create --template NAME` starts from it; `pal snapshots` lists what there is.
///
/// Example: pal snapshot k3v9 --name tested
#[derive(Debug, clap::Args)]
pub struct Snapshot {
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
    /// Name the snapshot
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
}

/// List the snapshots, or remove some.
///
/// Example: pal snapshots
#[derive(Debug, clap::Args)]
pub struct Snapshots {
    /// Remove this snapshot, by id or name, instead of listing; may be repeated
    #[arg(long = "rm", value_name = "SNAPSHOT")]
    pub remove: Vec<String>,
}

/// List the homes that outlive their Bodies, or remove some.
///
/// `pal up --home NAME` has one; what a Body keeps there is kept when the Body is removed.
///
/// Example: pal homes
#[derive(Debug, clap::Args)]
pub struct Homes {
    /// Remove this home instead of listing; may be repeated
    #[arg(long = "rm", value_name = "NAME")]
    pub remove: Vec<String>,
}

/// Make Bodies that begin as another one is now; print their ids.
///
/// Example: pal fork k3v9 -n 3
#[derive(Debug, clap::Args)]
pub struct Fork {
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
pub struct Events {
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
pub struct Gc {
    /// Only say what would go
    #[arg(long)]
    pub dry_run: bool,
}

/// Print the completions of a shell.
///
/// Example: pal completions bash
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}
