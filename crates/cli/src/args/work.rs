//! The options of commands about repositories.

use std::{ffi::OsString, path::PathBuf};

use super::{BodyArgs, StdioArgs, values};

/// Create a Body with a repository in it, ready to work in; print its id.
///
/// The repository is the one of the current directory, at its current commit, under /workspace. --uncommitted
/// includes uncommitted and untracked files, --include ignored ones. Work in the Body stays there until `pal
/// land`; `pal diff` shows it.
///
/// Example: pal up --committed -- git log -1 --oneline
#[derive(Debug, clap::Args)]
pub struct UpArgs {
    /// The repositories and the Body.
    #[command(flatten)]
    pub work: RepoArgs,
    /// The options of standard input and the terminal.
    #[command(flatten)]
    pub wires: StdioArgs,
    /// Run this command in the Body after it is ready
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// The repositories of a new Body, and the Body itself.
#[derive(Debug, Clone, clap::Args)]
pub struct RepoArgs {
    /// Use this repository, a path or an address, instead of that of the current directory; may be repeated
    #[arg(long, value_name = "PATH|URL")]
    pub repo: Vec<String>,
    /// Start at this commit, branch or tag
    #[arg(long = "ref", value_name = "REF")]
    pub reference: Option<String>,
    /// Include uncommitted and untracked files
    #[arg(long, alias = "with-dirty", conflicts_with_all = ["committed", "reference"])]
    pub uncommitted: bool,
    /// Include only committed files, without a note about others
    #[arg(long, alias = "clean")]
    pub committed: bool,
    /// Include this ignored file or directory; may be repeated
    #[arg(long, value_name = "PATH", conflicts_with = "reference")]
    pub include: Vec<PathBuf>,
    /// Install nothing of lockfiles, devcontainer.json or palisade.toml; toolchains are still there
    #[arg(long)]
    pub no_prepare: bool,
    /// Keep a Body to look into if a step of the preparation fails
    #[arg(long, conflicts_with = "no_prepare")]
    pub keep: bool,
    /// Create the Body even if steps of the preparation fail; `pal inspect` lists them
    #[arg(long, conflicts_with_all = ["no_prepare", "keep"])]
    pub anyway: bool,
    /// Mount this home, which outlives the Body: the next Body that names it finds the same files
    #[arg(long, value_name = "NAME")]
    pub home: Option<String>,
    /// Create this many Bodies
    #[arg(long, short = 'n', value_name = "COUNT", default_value = "1", value_parser = values::forks,
        allow_hyphen_values = true)]
    pub count: u32,
    /// The options of the Body.
    #[command(flatten)]
    pub body: BodyArgs,
}

/// Run the steps of the preparation that a Body lacks again, in the Body.
///
/// The Body is restarted for it, twice: while the steps run, its programs reach the registries as in `pal up`.
///
/// Example: pal prepare k3v9
#[derive(Debug, clap::Args)]
pub struct PrepareArgs {
    /// Run all steps, not only those that the Body lacks
    #[arg(long)]
    pub all: bool,
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
}

/// Show what a Body changed: committed, uncommitted and untracked, compared with its beginning.
///
/// Without BODY, the only Body of the current repository is meant.
///
/// Example: pal diff --stat k3v9
#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    /// Print only one line for each file
    #[arg(long)]
    pub stat: bool,
    /// Use this repository of a Body that has several
    #[arg(long, value_name = "NAME")]
    pub workspace: Option<String>,
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: Option<String>,
    /// Show only these paths
    #[arg(value_name = "PATH")]
    pub paths: Vec<OsString>,
}

/// List the commits of a Body, newest first.
///
/// Without BODY, the only Body of the current repository is meant.
///
/// Example: pal log k3v9
#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// Use this repository of a Body that has several
    #[arg(long, value_name = "NAME")]
    pub workspace: Option<String>,
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: Option<String>,
}

/// Put the work of a Body onto a branch of your repository.
///
/// By default it goes to a new branch `pal/BODY`: the Body's commits, and one more of yours for uncommitted
/// work. Commits keep their author; you become the committer, and your git signs them if it is set to. The
/// branch gains the changes that `pal diff` shows, and nothing else; `pal` names work that is left out. No hook
/// and no filter of the Body runs. Without BODY, the only Body of the current repository is meant.
///
/// Example: pal land --onto main k3v9
#[derive(Debug, clap::Args)]
pub struct LandArgs {
    /// Create this branch, or move it forward
    #[arg(long, value_name = "BRANCH", conflicts_with = "onto")]
    pub branch: Option<String>,
    /// Put the work on top of this branch
    #[arg(long, value_name = "BRANCH")]
    pub onto: Option<String>,
    /// Land everything as one commit of yours
    #[arg(long, conflicts_with_all = ["pick", "committed"])]
    pub squash: bool,
    /// Use this message for that commit, or for the one of uncommitted work
    #[arg(long, short, value_name = "TEXT", conflicts_with_all = ["pick", "committed", "patch", "queue"])]
    pub message: Option<String>,
    /// Land only this commit; may be repeated
    #[arg(long, value_name = "COMMIT")]
    pub pick: Vec<String>,
    /// Leave out uncommitted work
    #[arg(long, conflicts_with = "pick")]
    pub committed: bool,
    /// Change nothing; print the work as a patch
    #[arg(long, conflicts_with_all = ["branch", "onto", "squash", "pick", "committed"])]
    pub patch: bool,
    /// Land several Bodies in order: each is put on top of the branch and tested in a new Body, and lands
    /// only if the test passes
    #[arg(long, requires = "onto", conflicts_with_all = ["squash", "pick", "committed", "patch"])]
    pub queue: bool,
    /// Test with this shell command instead of the project's own test
    #[arg(long, value_name = "LINE", requires = "queue")]
    pub test: Option<String>,
    /// Use this repository of a Body that has several
    #[arg(long, value_name = "NAME", conflicts_with = "queue")]
    pub workspace: Option<String>,
    /// The Body: its id, the beginning of it, or its name; several with --queue
    #[arg(required_if_eq("queue", "true"), value_name = "BODY")]
    pub bodies: Vec<String>,
}

/// Bring new commits of your branch into a running Body.
///
/// They become the branch `host/BRANCH` there, and no file changes: the Body's agent merges them or rebases onto
/// them, and resolves conflicts. `pal diff` and `pal land` then compare with them. --merge and --rebase do that at
/// once. No hook runs.
///
/// Example: pal sync --merge k3v9
#[derive(Debug, clap::Args)]
pub struct SyncArgs {
    /// Bring in this branch instead of the one that the Body began on
    #[arg(long, value_name = "BRANCH")]
    pub branch: Option<String>,
    /// Merge the commits in the Body
    #[arg(long, conflicts_with = "rebase")]
    pub merge: bool,
    /// Rebase the Body's branch onto them
    #[arg(long)]
    pub rebase: bool,
    /// Use this repository of a Body that has several
    #[arg(long, value_name = "NAME")]
    pub workspace: Option<String>,
    /// The Body: its id, or the beginning of it
    #[arg(value_name = "BODY")]
    pub body: String,
}

/// Compare the work of several Bodies: files, lines, overlaps and conflicts.
///
/// Example: pal compare k3v9 m2hf
#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// Run this shell command in each, and print its exit code and the last line of a failure
    #[arg(long, value_name = "LINE")]
    pub test: Option<String>,
    /// The Bodies: their ids, the beginnings of them, or their names
    #[arg(required = true, num_args = 2.., value_name = "BODY")]
    pub bodies: Vec<String>,
}

/// Show or change a setting of the data directory.
///
/// store.budget: how much layers, snapshots and dependencies may take; beyond it `pal gc` removes unused
/// layers and dependencies, the longest unused first. microvm.engine: the hypervisor of microVMs that name
/// none: qemu, cloud-hypervisor or firecracker. microvm.pool_size: how many running microVMs of a template a
/// server keeps ready, 0 for none. microvm.cloud-hypervisor, microvm.firecracker: paths of the binaries, if
/// they are not on PATH. microvm.jailer: path of Firecracker's jailer, if it is neither beside Firecracker
/// nor on PATH; or `none`. network.proxy: http://HOST:PORT of the proxy through which Bodies that start from now
/// on reach hosts. network.proxy_secret: the secret with USER:PASSWORD for it. network.no_proxy: the names and
/// .suffixes that they reach without it, with commas between them.
///
/// Example: pal config set store.budget 20GiB
#[derive(Debug, clap::Args)]
pub struct ConfigArgs {
    /// The command.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// The commands about settings.
#[derive(Debug, clap::Subcommand)]
pub enum ConfigCommand {
    /// Print a setting.
    ///
    /// Example: pal config get store.budget
    Get {
        /// The name of the setting
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Change a setting.
    ///
    /// Example: pal config set store.budget 20GiB
    Set {
        /// The name of the setting
        #[arg(value_name = "NAME")]
        name: String,
        /// The new value
        #[arg(value_name = "VALUE")]
        value: String,
    },
}
