//! How a server is started.

use std::net::{Ipv4Addr, SocketAddr};

use fleet::{PrivateAddresses, RegistryAccess};

use crate::{ServerBounds, Telemetry, Tls};

/// The port where nobody says another.
pub const PORT: u16 = 3900;

/// How a server is started; the caller brings all of it.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Which Bodies, and how safe their log is.
    pub fleet: fleet::FleetConfig,
    /// Where callers come in; port 0 takes one that is free.
    pub listen: SocketAddr,
    /// Whether callers may come from other machines.
    pub exposure: Exposure,
    /// Name under which ports of Bodies are reached: `<port>-<body>.<domain>`.
    pub domain: String,
    /// How much there is for everybody.
    pub bounds: ServerBounds,
    /// How what is said is encrypted.
    pub tls: Tls,
    /// Where images of builds may come from, besides registries that anybody can reach.
    pub registries: RegistryAccess,
    /// Names that commands of builds may reach.
    pub build_allow: Vec<String>,
    /// Who is told what happens, besides the log.
    pub telemetry: Option<Telemetry>,
}

/// Whether callers may come from other machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposure {
    /// Only this machine, unless what they say is encrypted.
    Guarded,
    /// Anybody who can reach the address, in plain text: somebody asked for it.
    Open,
}

impl ServerConfig {
    /// On this machine only.
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
