//! The options of networks, and of `pal net`.

use clap::Subcommand;
use fleet::{NetworkRequest, Preset};
use proto::{
    Failure,
    egress::{AcceptList, EgressRule, Policy},
};

use super::BodyArg;

/// The network of a new Body.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct NetworkArgs {
    /// Open the network by these presets: registries, models, git (the remotes of the repository), open
    /// (everything) or closed; a list, or repeated [default: closed]
    #[arg(long, value_name = "PRESET", value_delimiter = ',', value_parser = preset)]
    net: Vec<Preset>,
    /// Let the Body reach this target, such as api.example.org:443; may be repeated. docs/guides/network.md
    /// has all forms
    #[arg(long, value_name = "HOST[:PORTS][+MARK]", value_parser = target)]
    allow: Vec<String>,
    /// Never let the Body reach this target, whatever allows it; may be repeated
    #[arg(long, value_name = "HOST[:PORTS]", value_parser = target)]
    deny: Vec<String>,
    /// Let connections to this target, such as '*:*', wait until `pal net allow` or `pal net deny` answers;
    /// `pal net watch` shows them; may be repeated
    #[arg(long, value_name = "HOST[:PORTS]", value_parser = target)]
    ask: Vec<String>,
    /// Let another Body connect to a port of this one, such as app:5432; its policy must allow
    /// NAME.body.internal:5432; may be repeated
    #[arg(long, value_name = "BODY:PORTS", value_parser = accepted)]
    accept: Vec<String>,
}

/// The ceiling for the networks of a key's Bodies.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CeilingArgs {
    /// Let its Bodies have a network, whatever `pal serve --internet` says, and reach at most what these presets
    /// name: registries, models, research, open or closed
    #[arg(long, value_name = "PRESET", value_delimiter = ',', value_parser = preset)]
    net: Vec<Preset>,
    /// Let its Bodies have a network, and reach at most such targets; may be repeated
    #[arg(long, value_name = "HOST[:PORTS][+MARK]", value_parser = target)]
    allow: Vec<String>,
    /// Never let its Bodies reach this target, whatever their policies allow; may be repeated
    #[arg(long, value_name = "HOST[:PORTS]", value_parser = target)]
    deny: Vec<String>,
}

impl CeilingArgs {
    /// The rules of the ceiling.
    pub fn rules(&self) -> Result<Vec<EgressRule>, Failure> {
        let (presets, allow, deny) = (self.net.clone(), self.allow.clone(), self.deny.clone());
        NetworkRequest { presets, allow, deny, ..NetworkRequest::default() }.ceiling()
    }
}

impl NetworkArgs {
    /// The request for it.
    pub fn request(&self) -> NetworkRequest {
        NetworkRequest {
            presets: self.net.clone(),
            allow: self.allow.clone(),
            deny: self.deny.clone(),
            ask: self.ask.clone(),
            accept: self.accept.clone(),
            ..NetworkRequest::default()
        }
    }
}

/// Show and change what a Body may reach, also while it runs.
///
/// A Body reaches only what a rule allows. A rule that denies wins. A change counts at once and closes connections
/// that it no longer allows; the Body keeps it when it is stopped and started.
///
/// Example: pal net allow k3v9 api.example.org:443
#[derive(Debug, clap::Args)]
pub struct NetArgs {
    /// The command.
    #[command(subcommand)]
    pub command: NetCommand,
}

/// The commands of `pal net`.
#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// Show the rules of a Body, and its open connections.
    ///
    /// Example: pal net show k3v9
    Show(BodyArg),
    /// Let connections to targets wait until `pal net allow` or `pal net deny` answers, for up to two minutes.
    ///
    /// Example: pal net ask k3v9 '*:*'
    Ask(NetChangeArgs),
    /// Allow targets.
    ///
    /// Example: pal net allow k3v9 api.example.org:443 '**.example.net'
    Allow(NetChangeArgs),
    /// Deny targets, and close the connections to them.
    ///
    /// Example: pal net deny k3v9 '**.example.net:*'
    Deny(NetChangeArgs),
    /// Let other Bodies connect, each to some ports of this one.
    ///
    /// The policy of the other Body must allow `NAME.body.internal:PORT`, too, with the name or the id of this one.
    ///
    /// Example: pal net accept db app:5432
    Accept(NetPeerArgs),
    /// No longer let other Bodies connect, and close their connections.
    ///
    /// Example: pal net reject db app:5432
    Reject(NetPeerArgs),
    /// Follow the decisions about connections of a Body; each denial has the command that would allow it.
    ///
    /// Example: pal net watch k3v9
    Watch(NetWatchArgs),
    /// Tell which rule decides about a target, without a connection; the exit code is 1 if it is denied.
    ///
    /// Example: pal net test k3v9 pypi.org:443
    Test {
        /// The Body: its id, the beginning of it, or its name
        #[arg(value_name = "BODY")]
        body: String,
        /// The target: a name or an address, and a port; without a port 443
        #[arg(value_name = "TARGET")]
        target: String,
    },
    /// Propose rules for what a Body was denied so far; nothing changes.
    ///
    /// Example: pal net learn k3v9
    Learn(BodyArg),
}

/// A change of rules.
#[derive(Debug, clap::Args)]
pub struct NetChangeArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
    /// The targets, such as api.example.org:443
    #[arg(required = true, value_name = "TARGET", value_parser = target)]
    pub targets: Vec<String>,
}

/// A change of the Bodies that may connect.
#[derive(Debug, clap::Args)]
pub struct NetPeerArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
    /// The other Bodies, each by its name or whole id, and the ports of BODY to which it may connect: app:5432,
    /// app:8000-8080 or app:*
    #[arg(required = true, value_name = "FROM:PORTS", value_parser = accepted)]
    pub from: Vec<String>,
}

/// The Body to follow.
#[derive(Debug, clap::Args)]
pub struct NetWatchArgs {
    /// Print the earlier decisions, too
    #[arg(long)]
    pub all: bool,
    /// The Body.
    #[command(flatten)]
    pub of: BodyArg,
}

fn preset(text: &str) -> Result<Preset, String> {
    text.parse().map_err(|failure: Failure| {
        failure.hints.iter().fold(failure.message.clone(), |message, hint| format!("{message}: {hint}"))
    })
}

fn accepted(text: &str) -> Result<String, String> {
    AcceptList::new(&[text]).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

fn target(text: &str) -> Result<String, String> {
    Policy::parse(&[text]).map(|_| text.to_owned()).map_err(|error| error.to_string())
}
