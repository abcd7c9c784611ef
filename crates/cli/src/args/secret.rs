//! The options of `pal secret`.

use std::path::PathBuf;

use clap::{Subcommand, builder::PossibleValuesParser};
use fleet::SERVICES;

/// Store keys that Bodies use and never see.
///
/// A Body that may use a secret holds a placeholder. The Body's egress process puts the value in its place in requests
/// to the hosts of the secret, and nowhere else. `pal` never prints a value.
///
/// Example: pal secret set github --for github -- gh auth token
#[derive(Debug, clap::Args)]
pub struct SecretArgs {
    /// The command.
    #[command(subcommand)]
    pub command: SecretCommand,
}

/// The commands of `pal secret`.
#[derive(Debug, Subcommand)]
pub enum SecretCommand {
    Set(Box<SecretSetArgs>),
    /// List the secrets: where their values come from, where they may go, and which Bodies may use them.
    ///
    /// Example: pal secret ls
    #[command(visible_alias = "list")]
    Ls,
    /// Remove secrets.
    ///
    /// Example: pal secret rm github
    #[command(visible_alias = "remove")]
    Rm {
        /// Take them from the Bodies that may use them, too
        #[arg(long, short)]
        force: bool,
        /// The secrets
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Let a Body use secrets; a rule for their hosts is added where none allows them.
    ///
    /// Example: pal secret grant k3v9 github
    Grant(SecretUseArgs),
    /// Take secrets from a Body, at once.
    ///
    /// Example: pal secret revoke k3v9 github
    Revoke(SecretUseArgs),
}

/// Store a secret, or replace it; Bodies that may use it get the new value at once.
///
/// The value is read from standard input, without echo on a terminal, unless a file, a variable or a command is
/// named; those are read again whenever a Body starts, and their value is not stored.
///
/// Example: pal secret set stripe --to api.stripe.com --env STRIPE_KEY
#[derive(Debug, clap::Args)]
pub struct SecretSetArgs {
    /// The name: lower-case letters, digits, `-` and `_`
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Take hosts, headers and variables of a known service
    #[arg(long = "for", value_name = "SERVICE", value_parser = PossibleValuesParser::new(SERVICES.iter().map(|service| service.name)))]
    pub service: Option<String>,
    /// Let it go to this host, over TLS, or log in there by ssh; may be repeated
    #[arg(long, value_name = "HOST[:PORT]")]
    pub to: Vec<String>,
    /// Put it into this header; may be repeated [default: authorization]
    #[arg(long, value_name = "HEADER")]
    pub header: Vec<String>,
    /// Put it into the user or the password of `Authorization: Basic`
    #[arg(long)]
    pub basic: bool,
    /// Put it into the query of URLs
    #[arg(long)]
    pub query: bool,
    /// Put it into the bodies of requests
    #[arg(long)]
    pub body: bool,
    /// Sign requests to AWS anew with it; the value is ID:SECRET, or JSON as `aws configure export-credentials` prints it
    #[arg(long)]
    pub sigv4: bool,
    /// Set this variable in Bodies to the placeholder; may be repeated [default: the name in upper case]
    #[arg(long, value_name = "NAME")]
    pub env: Vec<String>,
    /// Give it to git as the password for its hosts
    #[arg(long)]
    pub git: bool,
    /// Begin placeholders with this text, for programs that check the shape of a key
    #[arg(long, value_name = "TEXT")]
    pub prefix: Option<String>,
    /// It is a private key of ssh: programs log in with it at its hosts, as `git`, and never see it
    #[arg(long, conflicts_with_all = ["service", "header", "basic", "query", "body", "sigv4", "env", "git", "prefix"])]
    pub ssh: bool,
    /// Log in as this user instead of `git`; may be repeated
    #[arg(long, value_name = "USER", requires = "ssh")]
    pub ssh_user: Vec<String>,
    /// The host has this key: a line of known_hosts; may be repeated [default: those in your known_hosts]
    #[arg(long, value_name = "HOST TYPE KEY", requires = "ssh")]
    pub host_key: Vec<String>,
    /// Read the value from this file of the host
    #[arg(long, value_name = "FILE", group = "source")]
    pub file: Option<PathBuf>,
    /// Read the value from this environment variable of the `pal` that starts a Body
    #[arg(long, value_name = "NAME", group = "source")]
    pub from_env: Option<String>,
    /// Read the value from the output of this command, which no shell runs
    #[arg(last = true, value_name = "COMMAND", group = "source")]
    pub from_command: Vec<String>,
}

/// A Body, and secrets.
#[derive(Debug, clap::Args)]
pub struct SecretUseArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
    /// The secrets
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}
