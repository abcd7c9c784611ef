//! `pal serve`.

use std::net::SocketAddr;

/// Serve the Bodies over HTTP: programs written for E2B run unchanged.
///
/// Prints where it listens and how to use it; the first start makes an API key and shows it.
/// Ends at SIGTERM or Ctrl-C; the Bodies go on, and the next `pal serve` finds them.
///
/// Example: pal serve --listen 127.0.0.1:3900
#[derive(Debug, clap::Args)]
pub struct Serve {
    /// Listen at this address; port 0 takes one that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3900")]
    pub listen: SocketAddr,
    /// Ports of Bodies are reached as PORT-BODY.DOMAIN
    #[arg(long, value_name = "DOMAIN", default_value = "localhost")]
    pub domain: String,
    /// Listen beyond this machine without encryption
    #[arg(long)]
    pub insecure: bool,
}
