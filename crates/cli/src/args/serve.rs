//! `pal serve`.

use std::{net::SocketAddr, path::PathBuf};

use proto::Size;

use super::values;

/// Serve the Bodies over HTTP: programs written for E2B run unchanged.
///
/// Prints where it listens and how to use it; the first start makes an API key and shows it.
/// Ends at SIGTERM or Ctrl-C; the Bodies go on, and the next `pal serve` finds them.
///
/// Example: pal serve --listen 127.0.0.1:3900
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Listen at this address; port 0 takes one that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3900")]
    pub listen: SocketAddr,
    /// Ports of Bodies are reached as PORT-BODY.DOMAIN
    #[arg(long, value_name = "DOMAIN", default_value = "localhost")]
    pub domain: String,
    /// Listen beyond this machine without encryption
    #[arg(long)]
    pub insecure: bool,
    /// Encrypt what is said, with a certificate of our own making unless one is given
    #[arg(long)]
    pub tls: bool,
    /// Use this certificate chain, in PEM
    #[arg(long, value_name = "FILE", requires = "tls", requires = "key")]
    pub cert: Option<PathBuf>,
    /// Use this key of the certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls", requires = "cert")]
    pub key: Option<PathBuf>,
    /// Refuse to make more Bodies than this
    #[arg(long, value_name = "COUNT", value_parser = values::count, default_value = "2000")]
    pub max_bodies: u32,
    /// Make no Body while the host has less free memory than this
    #[arg(long, value_name = "SIZE", value_parser = values::size, default_value = "256MiB")]
    pub reserve: Size,
    /// Let builds begin with images of this registry, also where it is in the network of this machine; `http://` before it
    /// asks it without encryption
    #[arg(long = "registry", value_name = "HOST[:PORT]")]
    pub registries: Vec<String>,
    /// Let commands of builds reach this name too, besides registries of packages and mirrors of distributions; `+plain`
    /// behind it for plain http, `+private` for a host of your own network
    #[arg(long, value_name = "HOST:PORT")]
    pub build_allow: Vec<String>,
    /// Let commands of builds reach nothing but what --build-allow names
    #[arg(long)]
    pub build_offline: bool,
    /// Tell traces and metrics to the OpenTelemetry collector at this address, by HTTP; OTEL_EXPORTER_OTLP_ENDPOINT says the
    /// same
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,
    /// Tell on standard error what happens from this level on
    #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = ["off", "error", "warn", "info", "debug"])]
    pub log: String,
}

/// Make, list and revoke the API keys of `pal serve`.
///
/// Example: pal keys create ci --scope run --bodies 10
#[derive(Debug, clap::Args)]
pub struct KeysArgs {
    /// What to do
    #[command(subcommand)]
    pub command: KeysCommand,
}

/// What to do with keys.
#[derive(Debug, clap::Subcommand)]
pub enum KeysCommand {
    /// Make a key, and show it this once.
    ///
    /// Example: pal keys create ci --scope run
    Create(NewKeyArgs),
    /// List the keys.
    ///
    /// Example: pal keys ls
    #[command(visible_alias = "list")]
    Ls,
    /// Make keys worthless, from the next request on.
    ///
    /// Example: pal keys revoke 1a2b3c4d
    Revoke {
        /// Which, by id
        #[arg(value_name = "KEY", required = true)]
        keys: Vec<String>,
    },
}

/// A key to be made.
#[derive(Debug, clap::Args)]
pub struct NewKeyArgs {
    /// Call it this
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Let it do this: read (look), run (make, use and end Bodies), admin (everything)
    #[arg(long, value_name = "SCOPE", default_value = "run", value_parser = ["read", "run", "admin"])]
    pub scope: String,
    /// Let it have this many Bodies at once
    #[arg(long, value_name = "COUNT", value_parser = values::count)]
    pub bodies: Option<u32>,
    /// Let its Bodies use this many processors together
    #[arg(long, value_name = "COUNT", value_parser = values::cpus)]
    pub cpus: Option<u32>,
    /// Let its Bodies use this much memory together
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    pub memory: Option<Size>,
    /// Let its Bodies write this much together
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    pub disk: Option<Size>,
}
