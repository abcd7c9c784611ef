//! The configuration of a server.

use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use bridge::VariableLookup;
use fleet::{GitIdentity, HostVariables, Image, ImageResolver, PrivateAddresses, RegistryAccess};
use proto::Failure;

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
    /// The domain of ports of Bodies: `<port>-<body>.<domain>`; with a port number if clients connect to another
    /// port than the server's own.
    pub domain: String,
    /// Limits for all callers together.
    pub bounds: ServerBounds,
    /// The encryption of connections.
    pub tls: Tls,
    /// The registries that image builds may pull from, besides public ones.
    pub registries: RegistryAccess,
    /// Whether keys of scope `run` may give Bodies a network.
    pub internet: InternetAccess,
    /// Host names that commands of builds may reach.
    pub build_allow: Vec<String>,
    /// Environment variables of every new Body, unless its template or its request sets them.
    pub body_env: BTreeMap<String, String>,
    /// Reads environment variables of the process, for the sources of secrets.
    pub host_variables: HostVariables,
    /// The OpenTelemetry collector, if there is one.
    pub telemetry: Option<Telemetry>,
    /// The identity and settings of the operator's git, for repositories of this host.
    pub git_identity: GitIdentity,
    /// Resolves the images that a repository's devcontainer.json names.
    pub images_of_repositories: ImageResolver,
    /// The settings of agents.
    pub agents: AgentConfig,
}

/// The operator's settings of agents.
#[derive(Clone)]
pub struct AgentConfig {
    /// The configuration directory: `models.toml`, `scripts/`, `rules.toml`, `roles/`, `plans/`, `skills/`, `AGENTS.md`.
    pub directory: PathBuf,
    /// The environment, for the keys of models.
    pub variables: VariableLookup,
}

impl fmt::Debug for AgentConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentConfig").field("directory", &self.directory).finish_non_exhaustive()
    }
}

/// Whether keys of scope `run`, and E2B's clients, may give Bodies a network. Admin keys always may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InternetAccess {
    /// They may not: their Bodies reach only themselves.
    Denied,
    /// They may, to public targets; each connection waits until an admin allows its target.
    Asked,
    /// They may, to public targets.
    Allowed,
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
            internet: InternetAccess::Denied,
            build_allow: fleet::registries(),
            body_env: BTreeMap::new(),
            host_variables: |_| None,
            telemetry: None,
            git_identity: GitIdentity {
                home: "/nonexistent".into(),
                path: "/usr/local/bin:/usr/bin:/bin".into(),
                env: Default::default(),
            },
            images_of_repositories: public_image,
            agents: AgentConfig { directory: "/nonexistent".into(), variables: Arc::new(|_| None) },
        }
    }

    /// The domain of ports without a port number: what certificates and host names contain.
    pub fn domain_name(&self) -> &str {
        self.domain.split_once(':').map_or(&self.domain, |(name, _)| name)
    }
}

/// An image of a public registry, without credentials.
fn public_image(reference: &str) -> Result<Image, Failure> {
    let reach = RegistryAccess { inside: PrivateAddresses::Refused, ..RegistryAccess::default() };
    Ok(Image { reach, ..Image::new(reference) })
}
