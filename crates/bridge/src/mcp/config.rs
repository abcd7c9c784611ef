//! `mcp.toml`: the MCP servers whose tools an agent may call.
//!
//! Invariant: only the user's own configuration directory names servers; a repository cannot.
//! Invariant: a key for a server is named by a variable of the host's environment and goes to that server alone.

use std::{collections::BTreeMap, path::Path, time::Duration};

use proto::{Failure, Kind, event_data::CallRisk};
use serde::Deserialize;

/// The longest `mcp.toml`.
const FILE_LEN_MAX: u64 = 256 << 10;
/// The most servers.
const SERVERS_MAX: usize = 32;
/// The longest name of a server: it is part of the names of its tools, which models limit to 64 characters.
const NAME_LEN_MAX: usize = 24;

/// The servers of `mcp.toml`, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpConfig {
    /// The servers.
    #[serde(default)]
    pub servers: BTreeMap<String, McpServer>,
}

/// One server: a command that runs in the agent's Body, or an address that the host calls.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpServer {
    /// The program and its arguments. It runs in the Body, and speaks MCP on standard input and output.
    #[serde(default)]
    pub command: Vec<String>,
    /// Variables for the command. They enter the Body, so they hold no keys.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The address of a server that speaks streamable HTTP.
    #[serde(default)]
    pub url: Option<String>,
    /// The variable of the host's environment with the bearer token for `url`.
    #[serde(default)]
    pub bearer_variable: Option<String>,
    /// The tools that the agent gets; all if left out.
    #[serde(default)]
    pub tools: Option<Vec<String>>,
    /// The risk of the tools; `workspace` for a command, `outside` for an address.
    #[serde(default)]
    pub risk: Option<CallRisk>,
    /// The longest time of a call, in seconds.
    #[serde(default = "default_timeout")]
    pub timeout_s: u64,
}

fn default_timeout() -> u64 {
    120
}

impl McpServer {
    /// The risk of a call of this server's tools.
    pub fn risk(&self) -> CallRisk {
        self.risk.clone().unwrap_or(if self.url.is_some() { CallRisk::Outside } else { CallRisk::Workspace })
    }

    /// Whether the agent gets a tool.
    pub fn offers(&self, tool: &str) -> bool {
        self.tools.as_ref().is_none_or(|tools| tools.iter().any(|offered| offered == tool))
    }

    /// The longest time of a call.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s.clamp(1, 3600))
    }
}

impl McpConfig {
    /// Reads `mcp.toml` of a configuration directory; no servers without such a file.
    pub fn read(config: &Path) -> Result<Self, Failure> {
        let path = config.join("mcp.toml");
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Failure::new(Kind::Usage, "cannot read mcp.toml").because(error)),
            Ok(found) if found.len() > FILE_LEN_MAX => {
                return Err(Failure::new(
                    Kind::Limit,
                    format!("mcp.toml is longer than {} KiB", FILE_LEN_MAX >> 10),
                ));
            }
            Ok(_) => {}
        }
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Failure::new(Kind::Usage, "cannot read mcp.toml").because(error))?;
        Self::parse(&text)
    }

    /// Reads the text of a `mcp.toml`.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |what: String| {
            Failure::new(Kind::Usage, format!("mcp.toml has an error: {what}"))
                .hint("see docs/reference/mcp.md for the fields of a server")
        };
        let config: Self = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if config.servers.len() > SERVERS_MAX {
            return Err(wrong(format!("it names more than {SERVERS_MAX} servers")));
        }
        for (name, server) in &config.servers {
            let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
            if name.is_empty() || name.len() > NAME_LEN_MAX || !name.chars().all(plain) {
                return Err(wrong(format!(
                    "a server is named {name:?}; a name has at most {NAME_LEN_MAX} letters, digits, - and _"
                )));
            }
            if server.command.is_empty() == server.url.is_none() {
                return Err(wrong(format!("server {name} needs either `command` or `url`")));
            }
            if server.url.as_deref().is_some_and(|url| !is_safe_url(url)) {
                return Err(wrong(format!(
                    "the address of server {name} is neither https nor http on loopback"
                )));
            }
            if server.url.is_none() && server.bearer_variable.is_some() {
                return Err(wrong(format!(
                    "server {name} runs in the Body, where no key may go; only a server with `url` has a \
                     `bearer_variable`"
                )));
            }
        }
        Ok(config)
    }
}

/// Whether a token may go to an address: over TLS, or to this machine.
fn is_safe_url(url: &str) -> bool {
    if url.starts_with("https://") {
        return true;
    }
    let Some(rest) = url.strip_prefix("http://") else { return false };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    matches!(host, "localhost" | "::1") || host.parse::<std::net::Ipv4Addr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn servers_have_a_place_and_a_risk() {
        let text = "[servers.files]\ncommand = [\"server\", \"--stdio\"]\ntools = [\"find\"]\n\
                    [servers.search]\nurl = \"https://example.org/mcp\"\nbearer_variable = \"SEARCH_KEY\"\n";
        let config = McpConfig::parse(text).unwrap();
        assert_eq!(config.servers["files"].risk(), CallRisk::Workspace);
        assert_eq!(config.servers["search"].risk(), CallRisk::Outside);
        assert!(config.servers["files"].offers("find") && !config.servers["files"].offers("drop"));
    }

    #[test]
    fn what_is_unsafe_or_unclear_is_refused() {
        for (text, part) in [
            ("[servers.x]", "either"),
            ("[servers.x]\ncommand = [\"a\"]\nurl = \"https://a\"", "either"),
            ("[servers.x]\nurl = \"http://example.org/mcp\"", "loopback"),
            ("[servers.x]\nurl = \"http://127.0.0.1.example.org/\"", "loopback"),
            ("[servers.x]\nurl = \"http://user@example.org/\"", "loopback"),
            ("[servers.\"a b\"]\ncommand = [\"a\"]", "named"),
            ("[servers.x]\ncommand = [\"a\"]\nbearer_variable = \"K\"", "no key"),
            ("[servers.x]\ncommand = [\"a\"]\nkey = \"secret\"", "unknown field"),
        ] {
            let failure = McpConfig::parse(text).unwrap_err();
            assert!(failure.message.contains(part), "{text}: {}", failure.message);
        }
        assert!(McpConfig::parse("[servers.x]\nurl = \"http://[::1]:8000/mcp\"").is_ok());
        assert!(McpConfig::parse("[servers.x]\nurl = \"http://127.0.0.1:8000/mcp\"").is_ok());
    }
}
