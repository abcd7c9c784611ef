//! The verbs of repositories.

use std::{ffi::OsString, path::PathBuf};

use super::{BodyArgs, StdioArgs, values};

/// Make a Body with a repository in it, ready to work in; print its id.
///
/// The repository is the one you stand in, at the commit it is on, under /workspace.
/// Uncommitted and untracked files come along with --uncommitted, ignored ones when --include names them.
/// What is done in the Body stays there until `pal land`; `pal diff` shows it.
///
/// Example: pal up --committed -- git log -1 --oneline
#[derive(Debug, clap::Args)]
pub struct UpArgs {
    /// Take this repository, a path or an address, instead of the one you stand in; may be repeated
    #[arg(long, value_name = "PATH|URL")]
    pub repo: Vec<String>,
    /// Take this commit, branch or tag
    #[arg(long = "ref", value_name = "REF")]
    pub reference: Option<String>,
    /// Bring uncommitted and untracked files along
    #[arg(long, alias = "with-dirty", conflicts_with_all = ["committed", "reference"])]
    pub uncommitted: bool,
    /// Bring only what is committed, and do not look whether there is more
    #[arg(long, alias = "clean")]
    pub committed: bool,
    /// Bring this ignored file or directory along; may be repeated
    #[arg(long, value_name = "PATH", conflicts_with = "reference")]
    pub include: Vec<PathBuf>,
    /// Install nothing that lockfiles, devcontainer.json or palisade.toml ask for
    #[arg(long)]
    pub no_prepare: bool,
    /// Have this home, which outlives the Body: what is kept there is there for the next one that names it
    #[arg(long, value_name = "NAME")]
    pub home: Option<String>,
    /// Make this many
    #[arg(long, short = 'n', value_name = "COUNT", default_value = "1", value_parser = values::forks,
        allow_hyphen_values = true)]
    pub count: u32,
    /// What it is.
    #[command(flatten)]
    pub body: BodyArgs,
    /// How it is spoken to.
    #[command(flatten)]
    pub wires: StdioArgs,
    /// Run this in it, once it is there
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Show what a Body changed: committed, uncommitted and untracked, against what it began with.
///
/// Example: pal diff --stat k3v9
#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    /// Only a line for each file
    #[arg(long)]
    pub stat: bool,
    /// In this repository, of a Body that has several
    #[arg(long, value_name = "NAME")]
    pub workspace: Option<String>,
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
    /// Only below these paths
    #[arg(value_name = "PATH")]
    pub paths: Vec<OsString>,
}

/// List the commits of a Body, newest first.
///
/// Example: pal log k3v9
#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// In this repository, of a Body that has several
    #[arg(long, value_name = "NAME")]
    pub workspace: Option<String>,
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
}

/// Bring the work of a Body onto a branch of your repository.
///
/// Without an option, onto a new branch `pal/BODY`: its commits, and one more for what is not committed.
/// Commits keep their author; you are who commits, and signs if your git is set to.
/// Nothing of a Body runs: no hook, no filter.
///
/// Example: pal land --onto main k3v9
#[derive(Debug, clap::Args)]
pub struct LandArgs {
    /// Make this branch, or move it forward
    #[arg(long, value_name = "BRANCH", conflicts_with = "onto")]
    pub branch: Option<String>,
    /// Put the work on top of this branch
    #[arg(long, value_name = "BRANCH")]
    pub onto: Option<String>,
    /// Land all of it as one commit of yours
    #[arg(long, conflicts_with_all = ["pick", "committed"])]
    pub squash: bool,
    /// Say this in that commit
    #[arg(long, short, value_name = "TEXT", requires = "squash")]
    pub message: Option<String>,
    /// Land only this commit; may be repeated
    #[arg(long, value_name = "COMMIT")]
    pub pick: Vec<String>,
    /// Leave out what is not committed
    #[arg(long, conflicts_with = "pick")]
    pub committed: bool,
    /// Change nothing: print all of it as a patch
    #[arg(long, conflicts_with_all = ["branch", "onto", "squash", "pick", "committed"])]
    pub patch: bool,
    /// Land several Bodies one after the other: each is put on top of the branch, tested in a fresh Body, and lands
    /// only if the test passes
    #[arg(long, requires = "onto", conflicts_with_all = ["squash", "pick", "committed", "patch"])]
    pub queue: bool,
    /// Judge them by this line of shell, instead of the project's own test
    #[arg(long, value_name = "LINE", requires = "queue")]
    pub test: Option<String>,
    /// In this repository, of a Body that has several
    #[arg(long, value_name = "NAME", conflicts_with = "queue")]
    pub workspace: Option<String>,
    /// The Body: its id, or the beginning of it; several with --queue
    #[arg(required = true, value_name = "BODY")]
    pub bodies: Vec<String>,
}

/// Compare the work of several Bodies: files, lines, what overlaps, what conflicts.
///
/// Example: pal compare k3v9 m2hf
#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// Run this line of shell in each, and say how it ended
    #[arg(long, value_name = "LINE")]
    pub test: Option<String>,
    /// The Bodies: their ids, or the beginnings of them
    #[arg(required = true, num_args = 2.., value_name = "BODY")]
    pub bodies: Vec<String>,
}

/// Show or change how this data directory is kept.
///
/// store.budget: what layers, snapshots and dependencies may take before `pal gc` removes layers and dependencies that
/// nobody stands on, the longest unused first. microvm.engine: what drives microVMs that ask for no engine: qemu,
/// cloud-hypervisor or firecracker. microvm.pool_size: how many running microVMs of a template a server keeps ready, 0 for
/// none. microvm.cloud-hypervisor, microvm.firecracker: where their programs are, if not where programs are.
/// microvm.jailer: where Firecracker's jailer is, if neither beside Firecracker nor where programs are; or `none`.
///
/// Example: pal config set store.budget 20GiB
#[derive(Debug, clap::Args)]
pub struct ConfigArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What can be done with settings.
#[derive(Debug, clap::Subcommand)]
pub enum ConfigCommand {
    /// Print a setting.
    ///
    /// Example: pal config get store.budget
    Get {
        /// Which
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Change a setting.
    ///
    /// Example: pal config set store.budget 20GiB
    Set {
        /// Which
        #[arg(value_name = "NAME")]
        name: String,
        /// To what
        #[arg(value_name = "VALUE")]
        value: String,
    },
}
