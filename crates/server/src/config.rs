//! The configuration of a server.

use std::net::{Ipv4Addr, SocketAddr};

use fleet::{PrivateAddresses, RegistryAccess};

use crate::{ServerBounds, Telemetry, Tls};

/// The default port.
pub const PORT: u16 = 3900;

/// The configuration of a server; the caller provides all of it.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The data directory and the durability of its log.
    pub fleet: fleet::FleetConfig,
    /// The address to listen on; port 0 chooses a free port.
    pub listen: SocketAddr,
    /// Whether callers on other hosts may connect.
    pub exposure: Exposure,
    /// The domain of ports of Bodies: `<port>-<body>.<domain>`.
    pub domain: String,
    /// Limits for all callers together.
    pub bounds: ServerBounds,
    /// The encryption of connections.
    pub tls: Tls,
    /// The registries that image builds may pull from, besides public ones.
    pub registries: RegistryAccess,
    /// Host names that commands of builds may reach.
    pub build_allow: Vec<String>,
    /// The OpenTelemetry collector, if there is one.
    pub telemetry: Option<Telemetry>,
}

/// Whether callers on other hosts may connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposure {
    /// Only callers on this host, unless connections are encrypted.
    Guarded,
    /// Any caller that reaches the address, in plain text, because the operator asked for it.
    Open,
}

impl ServerConfig {
    /// A server that listens on the loopback address only.
    pub fn new(fleet: fleet::FleetConfig) -> Self {
        Self {
            fleet,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)),
            exposure: Exposure::Guarded,
            domain: "localhost".into(),
            bounds: ServerBounds::default(),
            tls: Tls::Off,
            registries: RegistryAccess { inside: PrivateAddresses::Refused, ..RegistryAccess::default() },
            build_allow: fleet::registries(),
            telemetry: None,
        }
    }
}
