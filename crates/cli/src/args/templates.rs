//! `pal templates` and `pal setup`.

/// List the templates, or work with them.
///
/// A template is what a Body starts from: `pal run --template NAME -- …`.
///
/// Example: pal templates
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Templates {
    /// Something else.
    #[command(subcommand)]
    pub command: Option<TemplatesCommand>,
}

/// What can be done with templates.
#[derive(Debug, clap::Subcommand)]
pub enum TemplatesCommand {
    /// List them.
    ///
    /// Example: pal templates ls
    #[command(visible_alias = "list")]
    Ls,
    /// Show all that is known of a template, with its builds.
    ///
    /// Example: pal templates inspect base
    Inspect {
        /// The template: its name or its id
        #[arg(value_name = "TEMPLATE")]
        template: String,
    },
    /// Remove templates. Bodies and snapshots made from them stay as they are.
    ///
    /// Example: pal templates rm my-app
    #[command(visible_alias = "remove")]
    Rm {
        /// The templates: their names or ids
        #[arg(value_name = "TEMPLATE", required = true)]
        templates: Vec<String>,
    },
}

/// Make a template of pal's own, unless it is there: `base`.
///
/// It is made from Debian's packages by mmdebstrap or debootstrap, and from this machine's own root where neither is.
/// May be interrupted and repeated at any time.
///
/// Example: pal setup base
#[derive(Debug, clap::Args)]
pub struct Setup {
    /// Which
    #[arg(value_name = "TEMPLATE")]
    pub template: String,
}
