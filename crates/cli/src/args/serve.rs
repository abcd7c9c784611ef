//! The options of `pal serve` and `pal keys`.

use std::{net::SocketAddr, path::PathBuf};

use proto::Size;

use super::{CeilingArgs, values};

/// Serve Bodies over HTTP; programs written for E2B run unchanged.
///
/// Prints its address and how to use it; the first start creates an API key and prints it. Ends at SIGTERM or
/// Ctrl-C; the Bodies keep running, and the next `pal serve` finds them.
///
/// Example: pal serve --listen 127.0.0.1:3900
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Listen at this address; port 0 chooses a free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3900")]
    pub listen: SocketAddr,
    /// Serve the ports of Bodies as PORT-BODY.DOMAIN
    #[arg(long, value_name = "DOMAIN", default_value = "localhost")]
    pub domain: String,
    /// Listen on an address that other hosts can reach, without encryption
    #[arg(long)]
    pub insecure: bool,
    /// Encrypt with TLS, by a certificate of an authority of its own unless --cert gives one
    #[arg(long)]
    pub tls: bool,
    /// Use this certificate chain, in PEM
    #[arg(long, value_name = "FILE", requires = "tls", requires = "key")]
    pub cert: Option<PathBuf>,
    /// Use this private key of the certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls", requires = "cert")]
    pub key: Option<PathBuf>,
    /// Create no more Bodies than this
    #[arg(long, value_name = "COUNT", value_parser = values::count, default_value = "2000")]
    pub max_bodies: u32,
    /// Accept no more connections of one address at a time than this
    #[arg(long, value_name = "COUNT", value_parser = values::count, default_value = "2048")]
    pub max_peer_connections: u32,
    /// Create no Body while the host has less free memory than this
    #[arg(long, value_name = "SIZE", value_parser = values::size, default_value = "256MiB")]
    pub reserve: Size,
    /// Allow builds to pull images from this registry, even if it is in this host's network; with `http://`
    /// in front, without encryption
    #[arg(long = "registry", value_name = "HOST[:PORT]")]
    pub registries: Vec<String>,
    /// Let keys of scope run, and programs written for E2B, give their Bodies a network of public hosts: allow, deny,
    /// or ask, so that each connection waits until an admin allows its target; admin keys always may
    #[arg(long, value_name = "WHICH", default_value = "deny", value_parser = ["allow", "ask", "deny"])]
    pub internet: String,
    /// Allow commands of builds to reach this host, too, besides package registries and distribution mirrors;
    /// add `+plain` for plain http, `+private` for a host of your own network
    #[arg(long, value_name = "HOST:PORT")]
    pub build_allow: Vec<String>,
    /// Allow commands of builds to reach only the hosts of --build-allow
    #[arg(long)]
    pub build_offline: bool,
    /// Export traces and metrics to the OpenTelemetry collector at this address, over HTTP; the same as
    /// OTEL_EXPORTER_OTLP_ENDPOINT
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,
    /// Log to standard error from this level on
    #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = ["off", "error", "warn", "info", "debug"])]
    pub log: String,
}

/// Create, list and revoke the API keys of `pal serve`.
///
/// Example: pal keys create ci --scope run --bodies 10
#[derive(Debug, clap::Args)]
pub struct KeysArgs {
    /// The command
    #[command(subcommand)]
    pub command: KeysCommand,
}

/// The commands about keys.
#[derive(Debug, clap::Subcommand)]
pub enum KeysCommand {
    /// Create a key, and print it once.
    ///
    /// Example: pal keys create ci --scope run
    Create(NewKeyArgs),
    /// List the keys.
    ///
    /// Example: pal keys ls
    #[command(visible_alias = "list")]
    Ls,
    /// Revoke keys; the next request with one of them fails.
    ///
    /// Example: pal keys revoke 1a2b3c4d
    Revoke {
        /// The id of the key
        #[arg(value_name = "KEY", required = true)]
        keys: Vec<String>,
    },
}

/// The options of a new key.
#[derive(Debug, clap::Args)]
pub struct NewKeyArgs {
    /// The name of the key
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The permissions: read (view), run (create, use and end Bodies), admin (everything)
    #[arg(long, value_name = "SCOPE", default_value = "run", value_parser = ["read", "run", "admin"])]
    pub scope: String,
    /// The Bodies that the key reaches besides its own: own (no others), all, or label=NAME=VALUE for those whose
    /// metadata has that pair
    #[arg(long, value_name = "BODIES")]
    pub reach: Option<String>,
    /// Limit the Bodies of the key at one time
    #[arg(long, value_name = "COUNT", value_parser = values::count)]
    pub bodies: Option<u32>,
    /// Limit the CPUs of its Bodies together
    #[arg(long, value_name = "COUNT", value_parser = values::cpus)]
    pub cpus: Option<u32>,
    /// Limit the memory of its Bodies together
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    pub memory: Option<Size>,
    /// Limit the disk space of its Bodies together
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    pub disk: Option<Size>,
    /// The ceiling for the networks of its Bodies.
    #[command(flatten)]
    pub ceiling: CeilingArgs,
}
