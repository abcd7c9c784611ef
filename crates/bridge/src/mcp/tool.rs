//! One tool of an MCP server, as the agent sees it.
//!
//! Trust: names, descriptions, schemas and results come from a server. They are bounded here, and a result is text for
//! the model, never an instruction for Palisade.

use std::{sync::Arc, time::Duration};

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult},
    model::{ImageData, ResultBlock, ToolSchema},
};
use proto::event_data::{CallOutcome, CallRisk, CallVenue};
use rmcp::{
    RoleClient,
    model::{CallToolRequestParams, CallToolResult, ContentBlock, ResourceContents, Tool},
    service::RunningService,
};
use serde_json::{Map, Value};

/// The longest description of a tool, in characters.
const DESCRIPTION_LEN_MAX: usize = 4096;
/// The longest schema of a tool, as JSON.
const SCHEMA_LEN_MAX: usize = 64 << 10;
/// The longest name of a tool that model APIs accept.
const NAME_LEN_MAX: usize = 64;
/// The longest text of a result, in bytes.
const RESULT_LEN_MAX: usize = 10 << 20;

/// A connection to a server. The tools of the server share it.
pub type McpClient = Arc<RunningService<RoleClient, ()>>;

/// A tool of a server.
pub struct McpTool {
    client: McpClient,
    schema: ToolSchema,
    server: String,
    tool: String,
    risk: CallRisk,
    venue: CallVenue,
    timeout: Duration,
}

impl McpTool {
    /// A tool of a connected server; an error says why an agent cannot have it.
    pub fn new(
        client: McpClient,
        server: &str,
        tool: &Tool,
        risk: CallRisk,
        venue: CallVenue,
        timeout: Duration,
    ) -> Result<Self, String> {
        let name = format!("mcp__{server}__{}", tool.name);
        let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
        if name.len() > NAME_LEN_MAX || !name.chars().all(plain) {
            return Err("its name is too long, or has letters that model APIs refuse".into());
        }
        let parameters = Value::Object((*tool.input_schema).clone());
        if parameters.to_string().len() > SCHEMA_LEN_MAX {
            return Err(format!("its schema is longer than {} KiB", SCHEMA_LEN_MAX >> 10));
        }
        let description: String =
            tool.description.as_deref().unwrap_or_default().chars().take(DESCRIPTION_LEN_MAX).collect();
        let description = format!("{description}\n\nA tool of the MCP server `{server}`.");
        Ok(Self {
            client,
            schema: ToolSchema { name, description, parameters },
            server: server.to_owned(),
            tool: tool.name.to_string(),
            risk,
            venue,
            timeout,
        })
    }

    async fn call(&self, arguments: Map<String, Value>) -> CallResult {
        let params = CallToolRequestParams::new(self.tool.clone()).with_arguments(arguments);
        match tokio::time::timeout(self.timeout, self.client.call_tool(params)).await {
            Ok(Ok(result)) => to_call_result(result),
            Ok(Err(error)) => CallResult::error(format!("Error: MCP server {}: {error}", self.server)),
            Err(_) => CallResult::error(format!(
                "Error: MCP server {} did not answer within {} s.",
                self.server,
                self.timeout.as_secs()
            )),
        }
    }
}

impl AgentTool for McpTool {
    fn schema(&self) -> ToolSchema {
        self.schema.clone()
    }

    fn plan(&self, _arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        Ok(CallPlan {
            risk: self.risk.clone(),
            venue: self.venue.clone(),
            why: format!("a tool of the MCP server {}", self.server),
            writes: Vec::new(),
        })
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(self.call(context.arguments))
    }
}

fn to_call_result(result: CallToolResult) -> CallResult {
    let mut blocks: Vec<ResultBlock> = Vec::new();
    let mut left = RESULT_LEN_MAX;
    for block in &result.content {
        let block = to_result_block(block);
        let len = match &block {
            ResultBlock::Text { text } => text.len(),
            ResultBlock::Image(image) => image.data.len(),
        };
        if len > left {
            blocks.push(ResultBlock::Text { text: "[the rest of the result is too long]".into() });
            break;
        }
        left -= len;
        blocks.push(block);
    }
    if let (true, Some(value)) = (blocks.is_empty(), result.structured_content) {
        blocks.push(ResultBlock::Text { text: value.to_string() });
    }
    if blocks.is_empty() {
        blocks.push(ResultBlock::Text { text: "[the tool returned nothing]".into() });
    }
    let outcome = if result.is_error == Some(true) { CallOutcome::Failed } else { CallOutcome::Done };
    CallResult { outcome, blocks, exit_code: None, events: Vec::new(), effect: None }
}

fn to_result_block(block: &ContentBlock) -> ResultBlock {
    let text = |text: String| ResultBlock::Text { text };
    match block {
        ContentBlock::Text(content) => text(content.text.clone()),
        ContentBlock::Image(image) => {
            ResultBlock::Image(ImageData { media_type: image.mime_type.clone(), data: image.data.clone() })
        }
        ContentBlock::Audio(audio) => text(format!("[audio, {}]", audio.mime_type)),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { text: content, uri, .. } => {
                text(format!("[resource {uri}]\n{content}"))
            }
            ResourceContents::BlobResourceContents { uri, .. } => text(format!("[binary resource {uri}]")),
            _ => text("[a resource of an unknown kind]".into()),
        },
        ContentBlock::ResourceLink(link) => text(format!("[link to {}: {}]", link.name, link.uri)),
        _ => text("[content of an unknown kind]".into()),
    }
}
