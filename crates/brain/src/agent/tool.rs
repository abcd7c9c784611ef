//! Tools, as the Brain sees them: a schema, a plan and a function, registered in one place.

use std::{collections::BTreeMap, sync::Arc};

use proto::{AgentId, BodyId};
use serde_json::{Map, Value};

use super::{
    call::{CallPlan, CallResult},
    journal::BoxFuture,
};
use crate::model::ToolSchema;

/// The longest arguments of a call, as JSON.
pub const ARGUMENTS_LEN_MAX: usize = 4 << 20;

/// The circumstances of one call.
#[derive(Debug, Clone)]
pub struct CallContext {
    /// The agent.
    pub agent: AgentId,
    /// The id that the model gave to the call.
    pub call: String,
    /// The tool.
    pub tool: String,
    /// The idempotency key of the call: unique in the store.
    pub key: String,
    /// The Body in which the agent works.
    pub body: Option<BodyId>,
    /// The place that the plan chose.
    pub plan: CallPlan,
    /// The arguments.
    pub arguments: Map<String, Value>,
}

/// A tool that a model can call.
pub trait AgentTool: Send + Sync {
    /// The name, the description and the parameters, for the model.
    fn schema(&self) -> ToolSchema;

    /// Checks the arguments and says how the call would be carried out. An error is a text for the model.
    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String>;

    /// Carries out a call. Dropping the future interrupts the call.
    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult>;

    /// The result of a call that an earlier driver started; `None` if it cannot be known.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        let _ = context;
        Box::pin(async { None })
    }
}

/// The tools of one agent, by name.
#[derive(Clone, Default)]
pub struct ToolRegistry {
    tools: BTreeMap<String, Arc<dyn AgentTool>>,
}

impl ToolRegistry {
    /// Adds a tool. A tool of the same name is replaced.
    pub fn add(&mut self, tool: Arc<dyn AgentTool>) {
        self.tools.insert(tool.schema().name, tool);
    }

    /// Keeps only the tools that a condition allows.
    pub fn retain(&mut self, allowed: impl Fn(&str) -> bool) {
        self.tools.retain(|name, _| allowed(name));
    }

    /// The tool of a name.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn AgentTool>> {
        self.tools.get(name)
    }

    /// The names, in order.
    pub fn names(&self) -> Vec<&str> {
        self.tools.keys().map(String::as_str).collect()
    }

    /// The schemas in the order of their names, so that equal tools make equal requests.
    pub fn schemas(&self) -> Vec<ToolSchema> {
        self.tools.values().map(|tool| tool.schema()).collect()
    }

    /// Plans a call; an error is a text for the model.
    pub fn plan(&self, name: &str, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let Some(tool) = self.get(name) else {
            let shown: String = name.chars().take(64).collect();
            return Err(format!(
                "Error: {shown} is not a valid tool, try one of [{}].",
                self.names().join(", ")
            ));
        };
        tool.plan(arguments)
    }
}

impl std::fmt::Debug for ToolRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.tools.keys()).finish()
    }
}
