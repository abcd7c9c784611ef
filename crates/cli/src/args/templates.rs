//! The options of `pal template` and `pal setup`.

/// List, show, import, build or remove templates.
///
/// A Body starts from a template: `pal run --template NAME -- …`.
///
/// Example: pal template ls
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct TemplateArgs {
    /// The command; without it, the templates are listed.
    #[command(subcommand)]
    pub command: Option<TemplateCommand>,
}

/// The commands about templates.
#[derive(Debug, clap::Subcommand)]
pub enum TemplateCommand {
    /// List the templates.
    ///
    /// Example: pal template ls
    #[command(visible_alias = "list")]
    Ls,
    /// Show everything about a template, with its builds.
    ///
    /// Example: pal template inspect base
    Inspect {
        /// The template: its name or its id
        #[arg(value_name = "TEMPLATE")]
        template: String,
    },
    /// Create a template from an image of a registry, or from an archive (tar, tar.gz, tar.zst) of a root
    /// file system.
    ///
    /// Name an image as for `docker pull`; credentials come from Docker's own settings (`docker login`).
    /// Bodies of an image run commands as the image's user; Bodies of an archive as `user`, who must be in
    /// its /etc/passwd. Repeat the command to continue an interrupted download.
    ///
    /// Example: pal template import alpine rootfs.tar.gz --user root
    Import(ImportArgs),
    /// Build a template: run commands and copy files on top of another one.
    ///
    /// The file is written like a Dockerfile: FROM (the name of a template, or an image of a registry), RUN,
    /// COPY, ENV, WORKDIR and USER. COPY takes files from the file's own directory. Steps of an earlier build
    /// are not repeated.
    ///
    /// Example: pal template build my-app Dockerfile
    Build {
        /// The name of the template: NAME or NAME:TAG
        #[arg(value_name = "NAME")]
        name: String,
        /// The Dockerfile
        #[arg(value_name = "FILE")]
        file: std::path::PathBuf,
        /// Run this command in the background of each Body from its start
        #[arg(long, value_name = "COMMAND")]
        start: Option<String>,
        /// Wait until this command succeeds before a Body counts as ready
        #[arg(long, value_name = "COMMAND")]
        ready: Option<String>,
        /// Repeat every step
        #[arg(long)]
        force: bool,
        /// Allow its commands to reach this host, too, besides package registries and distribution mirrors;
        /// add `+plain` for plain http, `+private` for a host of your own network
        #[arg(long, value_name = "HOST:PORT")]
        allow: Vec<String>,
        /// Allow its commands to reach only the hosts of --allow
        #[arg(long)]
        offline: bool,
        /// How an image is pulled
        #[command(flatten)]
        pull: PullArgs,
    },
    /// Remove templates. Bodies and snapshots made from them stay.
    ///
    /// Example: pal template rm my-app
    #[command(visible_alias = "remove")]
    Rm {
        /// The templates: their names or ids
        #[arg(value_name = "TEMPLATE", required = true)]
        templates: Vec<String>,
    },
}

/// The options of an imported template.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// The name of the template
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The image or the archive
    #[arg(value_name = "IMAGE|FILE")]
    pub source: String,
    /// Run commands as this user
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Allow setuid programs, so that `sudo` works
    #[arg(long)]
    pub sudo: bool,
    /// How an image is pulled
    #[command(flatten)]
    pub pull: PullArgs,
}

/// The options of pulling an image.
#[derive(Debug, clap::Args)]
pub struct PullArgs {
    /// Take the image for this platform, if there are several
    #[arg(long, value_name = "linux/ARCH")]
    pub platform: Option<fleet::Platform>,
    /// Use the registry without encryption; a registry on this host is always used without
    #[arg(long)]
    pub plain_http: bool,
}

/// Create one of pal's own templates, or prepare this host for microVMs: `base`, `code-interpreter-v1`,
/// `microvm`.
///
/// Templates are made from Debian's packages by mmdebstrap or debootstrap, or from this host's own root file
/// system if neither is installed. `microvm` downloads a kernel, and prepares a hypervisor and an image of
/// this host's programs. The command may be interrupted and repeated at any time; it skips finished work.
///
/// Example: pal setup base
#[derive(Debug, clap::Args)]
pub struct SetupArgs {
    /// The template, or `microvm`
    #[arg(value_name = "WHAT")]
    pub template: String,
    /// For `microvm`: use this kernel instead of downloading one
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<std::path::PathBuf>,
    /// For `microvm`: the modules of the kernel, such as /lib/modules/VERSION
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<std::path::PathBuf>,
    /// For `microvm`: also prepare this hypervisor, and boot a microVM under it: cloud-hypervisor,
    /// firecracker
    #[arg(long, value_name = "ENGINE", conflicts_with = "kernel")]
    pub engine: Option<proto::vm::Engine>,
    /// For `--engine`: path of the binary, if it is not on PATH
    #[arg(long, value_name = "FILE", requires = "engine")]
    pub program: Option<std::path::PathBuf>,
}
