//! `compact_conversation`: asks for a summary of the conversation.

use brain::{
    agent::{AgentTool, BoxFuture, COMPACT_TOOL, CallContext, CallEffect, CallPlan, CallResult},
    model::ToolSchema,
};
use serde_json::{Map, Value, json};

const DESCRIPTION: &str = "Compact the conversation by summarizing older messages into a concise summary. Use this proactively when the conversation is getting long to free up context window space. Use it when moving on to a completely new, unrelated task, or after finishing synthesis or extraction when the previous working context is no longer needed. This tool takes no arguments.";

/// Summarises the conversation before the next answer.
pub struct CompactTool;

impl AgentTool for CompactTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: COMPACT_TOOL.into(),
            description: DESCRIPTION.into(),
            parameters: json!({"type": "object", "properties": {}}),
        }
    }

    fn plan(&self, _: &Map<String, Value>) -> Result<CallPlan, String> {
        Ok(CallPlan::in_log(COMPACT_TOOL))
    }

    fn run(&self, _: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async {
            let text = "Conversation compacted. Older messages are summarized before your next answer.";
            CallResult { effect: Some(CallEffect::Compact), ..CallResult::text(text) }
        })
    }

    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move { Some(self.run(context).await) })
    }
}
