//! Tools of MCP servers that the user names in `mcp.toml`.
//!
//! A server with a command runs in the agent's Body and ends with the driver; a server with an address is called by the
//! host, with a token from the host's environment that never enters the Body.
//!
//! Invariant: a server that does not start, or does not answer in time, is an error before the first request to the
//! model, so the list of tools of an agent is the same in all its requests.

mod body_stdio;
mod config;
mod tool;

use std::{sync::Arc, time::Duration};

use brain::agent::AgentTool;
use fleet::{ExecRequest, Fleet};
use proto::{BodyId, Failure, Kind, event_data::CallVenue};
use rmcp::{
    model::ProtocolVersion,
    service::{ClientLifecycleMode, ClientServiceExt},
    transport::{
        StreamableHttpClientTransport, async_rw::AsyncRwTransport,
        streamable_http_client::StreamableHttpClientTransportConfig,
    },
};

use crate::VariableLookup;
pub use config::{McpConfig, McpServer};
use tool::{McpClient, McpTool};

/// How long a server may take to start and to list its tools.
const START_MAX: Duration = Duration::from_secs(60);
/// The longest line of a server that speaks on standard output.
const LINE_LEN_MAX: usize = 16 << 20;
/// The most tools of one server.
const TOOLS_MAX: usize = 256;

/// Connects to all servers, and returns their tools.
pub async fn connect(
    config: &McpConfig,
    fleet: &Arc<Fleet>,
    body: &BodyId,
    workdir: Option<&str>,
    variables: &VariableLookup,
) -> Result<Vec<Arc<dyn AgentTool>>, Failure> {
    let mut tools: Vec<Arc<dyn AgentTool>> = Vec::new();
    for (name, server) in &config.servers {
        let connected = tokio::time::timeout(START_MAX, async {
            let client = open(name, server, fleet, body, workdir, variables).await?;
            list(name, server, client).await
        });
        let found = connected.await.unwrap_or_else(|_| {
            Err(Failure::new(
                Kind::Host,
                format!("MCP server {name} did not start within {} s", START_MAX.as_secs()),
            ))
        });
        tools.extend(found.map_err(|failure| failure.hint("mend or remove the server in mcp.toml"))?);
    }
    Ok(tools)
}

async fn open(
    name: &str,
    server: &McpServer,
    fleet: &Arc<Fleet>,
    body: &BodyId,
    workdir: Option<&str>,
    variables: &VariableLookup,
) -> Result<McpClient, Failure> {
    let cannot = |error: rmcp::service::ClientInitializeError| {
        Failure::new(Kind::Host, format!("MCP server {name} does not answer")).because(error)
    };
    let client = match &server.url {
        Some(url) => {
            let transport = http_transport(name, url, server, variables)?;
            ().serve_with_lifecycle(transport, lifecycle()).await.map_err(cannot)?
        }
        None => {
            let mut request = ExecRequest::new(server.command.iter().cloned());
            request.env = server.env.clone();
            request.workdir = workdir.map(str::to_owned);
            let (output, input) = body_stdio::open(Arc::clone(fleet), body.clone(), request).await?;
            let transport = AsyncRwTransport::new_client(output, input).with_max_line_length(LINE_LEN_MAX);
            ().serve_with_lifecycle(transport, lifecycle()).await.map_err(cannot)?
        }
    };
    Ok(Arc::new(client))
}

/// Asks in the way of the newest protocol first, and in the older way if the server does not know it.
fn lifecycle() -> ClientLifecycleMode {
    ClientLifecycleMode::Auto {
        preferred_versions: vec![ProtocolVersion::LATEST],
        legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
    }
}

fn http_transport(
    name: &str,
    url: &str,
    server: &McpServer,
    variables: &VariableLookup,
) -> Result<StreamableHttpClientTransport<reqwest::Client>, Failure> {
    let client = brain::model::http_client().map_err(|error| {
        Failure::new(Kind::Host, "cannot set up the HTTP client for MCP servers").because(error)
    })?;
    let mut config = StreamableHttpClientTransportConfig::with_uri(url);
    if let Some(variable) = &server.bearer_variable {
        let token = variables(variable).ok_or_else(|| {
            Failure::new(Kind::Usage, format!("MCP server {name} needs a token, and {variable} is not set"))
                .hint(format!("export {variable}=…"))
        })?;
        config = config.auth_header(token);
    }
    Ok(StreamableHttpClientTransport::with_client(client, config))
}

/// The tools of a server that the agent gets. A tool that model APIs would refuse is left out.
async fn list(name: &str, server: &McpServer, client: McpClient) -> Result<Vec<Arc<dyn AgentTool>>, Failure> {
    let listed = client.list_all_tools().await.map_err(|error| {
        Failure::new(Kind::Host, format!("MCP server {name} does not list its tools")).because(error)
    })?;
    if listed.len() > TOOLS_MAX {
        return Err(Failure::new(Kind::Limit, format!("MCP server {name} has more than {TOOLS_MAX} tools"))
            .hint("name the tools that the agent needs: tools = [\"…\"] in mcp.toml"));
    }
    if let Some(wanted) = &server.tools
        && let Some(missing) = wanted.iter().find(|wanted| !listed.iter().any(|tool| tool.name == **wanted))
    {
        return Err(Failure::new(Kind::Usage, format!("MCP server {name} has no tool {missing}")));
    }
    let venue = if server.url.is_some() { CallVenue::Server } else { CallVenue::Body };
    let offered = listed.iter().filter(|tool| server.offers(&tool.name));
    let made = offered.filter_map(|tool| {
        McpTool::new(client.clone(), name, tool, server.risk(), venue.clone(), server.timeout()).ok()
    });
    Ok(made.map(|tool| Arc::new(tool) as Arc<dyn AgentTool>).collect())
}
