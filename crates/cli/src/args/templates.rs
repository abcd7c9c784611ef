//! `pal template` and `pal setup`.

/// List the templates, or work with them.
///
/// A template is what a Body starts from: `pal run --template NAME -- …`.
///
/// Example: pal template ls
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct TemplateArgs {
    /// Something else.
    #[command(subcommand)]
    pub command: Option<TemplateCommand>,
}

/// What can be done with templates.
#[derive(Debug, clap::Subcommand)]
pub enum TemplateCommand {
    /// List them.
    ///
    /// Example: pal template ls
    #[command(visible_alias = "list")]
    Ls,
    /// Show all that is known of a template, with its builds.
    ///
    /// Example: pal template inspect base
    Inspect {
        /// The template: its name or its id
        #[arg(value_name = "TEMPLATE")]
        template: String,
    },
    /// Make a template from an image of a registry, or from an archive (tar, tar.gz, tar.zst) of its whole root.
    ///
    /// An image is named as `docker pull` names it; who pulls is taken from Docker's own settings (`docker login`).
    /// Bodies run commands as the image's user; those of an archive as `user`, who must be in its /etc/passwd.
    /// A download that is interrupted goes on when it is repeated.
    ///
    /// Example: pal template import alpine rootfs.tar.gz --user root
    Import(ImportArgs),
    /// Build a template: commands and files on top of another one.
    ///
    /// The file has lines as a Dockerfile has them: FROM (a template's name, or an image of a registry), RUN, COPY, ENV,
    /// WORKDIR and USER. What COPY names is below the file's own directory. Steps that were done before are not done
    /// again.
    ///
    /// Example: pal template build my-app Dockerfile
    Build {
        /// What it is called: NAME or NAME:TAG
        #[arg(value_name = "NAME")]
        name: String,
        /// The steps
        #[arg(value_name = "FILE")]
        file: std::path::PathBuf,
        /// Run this in each of its Bodies from the start
        #[arg(long, value_name = "COMMAND")]
        start: Option<String>,
        /// Wait for this to succeed before a Body is handed out
        #[arg(long, value_name = "COMMAND")]
        ready: Option<String>,
        /// Do every step again
        #[arg(long)]
        force: bool,
        /// Let its commands reach this name too, besides registries of packages and mirrors of distributions; `+plain` behind
        /// it for plain http, `+private` for a host of your own network
        #[arg(long, value_name = "HOST:PORT")]
        allow: Vec<String>,
        /// Let its commands reach nothing but what --allow names
        #[arg(long)]
        offline: bool,
        /// Where an image of a registry comes from
        #[command(flatten)]
        pull: PullArgs,
    },
    /// Remove templates. Bodies and snapshots made from them stay as they are.
    ///
    /// Example: pal template rm my-app
    #[command(visible_alias = "remove")]
    Rm {
        /// The templates: their names or ids
        #[arg(value_name = "TEMPLATE", required = true)]
        templates: Vec<String>,
    },
}

/// A template to be made from what is there already.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// What it is called
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The image, or the archive
    #[arg(value_name = "IMAGE|FILE")]
    pub source: String,
    /// Run commands as this user
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Let setuid programs work, so that `sudo` does
    #[arg(long)]
    pub sudo: bool,
    /// Where an image of a registry comes from
    #[command(flatten)]
    pub pull: PullArgs,
}

/// How an image is brought here.
#[derive(Debug, clap::Args)]
pub struct PullArgs {
    /// Take the image for this platform, where it is for several
    #[arg(long, value_name = "linux/ARCH")]
    pub platform: Option<fleet::Platform>,
    /// Ask the registry without encryption; one on this machine always is asked so
    #[arg(long)]
    pub plain_http: bool,
}

/// Make a template of pal's own, or prepare this host for microVMs, unless that was done: `base`, `code-interpreter-v1`, `microvm`.
///
/// Templates are made from Debian's packages by mmdebstrap or debootstrap, and from this machine's own root where
/// neither is. `microvm` fetches a kernel and prepares a hypervisor and an image of this host's programs. May be
/// interrupted and repeated at any time.
///
/// Example: pal setup base
#[derive(Debug, clap::Args)]
pub struct SetupArgs {
    /// Which
    #[arg(value_name = "WHAT")]
    pub template: String,
    /// For `microvm`: run this kernel instead of fetching one
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<std::path::PathBuf>,
    /// For `microvm`: the kernel's modules, such as /lib/modules/VERSION
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<std::path::PathBuf>,
    /// For `microvm`: prepare this hypervisor, too, and try whether machines run under it: cloud-hypervisor, firecracker
    #[arg(long, value_name = "ENGINE", conflicts_with = "kernel")]
    pub engine: Option<proto::vm::Engine>,
    /// For `--engine`: where its program is, if not where programs are
    #[arg(long, value_name = "FILE", requires = "engine")]
    pub program: Option<std::path::PathBuf>,
}
