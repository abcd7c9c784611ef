//! The tool `task`, with the name, the parameters and the texts of Deep Agents.

use std::sync::Arc;

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult},
    library::{Role, RoleVenue},
    model::ToolSchema,
};
use serde_json::{Map, Value, json};

use super::Subagents;

/// The name of the tool.
pub const TASK_TOOL: &str = "task";
/// The longest task in bytes.
const DESCRIPTION_LEN_MAX: usize = 256 << 10;

const DESCRIPTION_BEGIN: &str = "Launch an ephemeral subagent to handle a complex, multi-step task.

Available agent types and the tools they have access to:
";
const DESCRIPTION_END: &str = "

Specify subagent_type to select the agent. Usage notes:
- Launch multiple agents concurrently when their tasks are independent, using a single message with multiple tool calls.
- Each invocation is stateless by default: the agent sees only the prompt you give it and returns a single final report. Put full detail in the prompt and state exactly what it should return — unless an agent type below says it inherits your conversation instead.
- The agent's report is not shown to the user; relay a summary yourself.
- Tell the agent whether to create content, analyze, or only research, since it can't necessarily see the user's intent unless it inherits your conversation, as noted per agent type below.
- If an agent's description says to use it proactively, do so without waiting to be asked.
- When only general-purpose is available, use it for any complex, context-heavy task; it has the same capabilities as the main agent.";

/// Gives a task to a sub-agent.
pub(super) struct TaskTool {
    subagents: Arc<Subagents>,
}

impl TaskTool {
    pub(super) fn new(subagents: Arc<Subagents>) -> Self {
        Self { subagents }
    }
}

/// The arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TaskArguments {
    pub(super) description: String,
    pub(super) role: String,
}

impl TaskArguments {
    /// Reads the arguments; an error is a text for the model.
    pub(super) fn read(arguments: &Map<String, Value>) -> Result<Self, String> {
        let mut faults = Vec::new();
        for key in arguments.keys().filter(|key| !["description", "subagent_type"].contains(&key.as_str())) {
            let key: String = proto::text::visible(key).chars().take(64).collect();
            faults.push(format!(
                "{key}: Unexpected argument '{key}'; put all instructions for the subagent in `description`."
            ));
        }
        let mut text = |name: &str| match arguments.get(name) {
            Some(Value::String(text)) => text.clone(),
            Some(_) => {
                faults.push(format!("{name}: Input should be a valid string"));
                String::new()
            }
            None => {
                faults.push(format!("{name}: Field required"));
                String::new()
            }
        };
        let (description, role) = (text("description"), text("subagent_type"));
        if description.len() > DESCRIPTION_LEN_MAX {
            faults.push(format!("description: at most {} KiB", DESCRIPTION_LEN_MAX >> 10));
        }
        if faults.is_empty() {
            return Ok(Self { description, role });
        }
        Err(format!(
            "Error invoking tool 'task' with error:\n {}\n Please fix the error and try again.",
            faults.join("\n ")
        ))
    }
}

impl AgentTool for TaskTool {
    fn schema(&self) -> ToolSchema {
        let lines = self.subagents.roles.iter().map(|role| format!("- {}: {}", role.name, role.description));
        let agents = lines.collect::<Vec<_>>().join("\n");
        ToolSchema {
            name: TASK_TOOL.to_owned(),
            description: format!("{DESCRIPTION_BEGIN}{agents}{DESCRIPTION_END}"),
            parameters: json!({
                "type": "object",
                "properties": {
                    "description": {
                        "type": "string",
                        "description": "A detailed description of the task for the subagent to perform autonomously. \
                            Include all necessary context and specify the expected output format.",
                    },
                    "subagent_type": {
                        "type": "string",
                        "description": "The type of subagent to use. Must be one of the available agent types listed \
                            in the tool description.",
                    },
                },
                "required": ["description", "subagent_type"],
            }),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let arguments = TaskArguments::read(arguments)?;
        let role = self.subagents.role(&arguments.role).ok_or_else(|| self.unknown_role(&arguments.role))?;
        Ok(match role.venue {
            RoleVenue::ReadOnly => CallPlan::reading("a sub-agent that only reads"),
            RoleVenue::Body | RoleVenue::Fork => {
                CallPlan::working("a sub-agent; rules judge each of its calls")
            }
        })
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            let read = TaskArguments::read(&context.arguments);
            let found = read.and_then(|arguments| match self.subagents.role(&arguments.role) {
                Some(role) => Ok((arguments, role)),
                None => Err(self.unknown_role(&arguments.role)),
            });
            match found {
                Ok((arguments, role)) => self.subagents.run_task(&context, &arguments, role).await,
                Err(text) => CallResult::error(text),
            }
        })
    }

    /// Goes on with the sub-agent of the call; starts it if it does not exist yet.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move { Some(self.run(context).await) })
    }
}

impl TaskTool {
    fn unknown_role(&self, name: &str) -> String {
        let name: String = proto::text::visible(name).chars().take(64).collect();
        let quote = |role: &Role| format!("`{}`", role.name);
        let known = self.subagents.roles.iter().map(quote).collect::<Vec<_>>().join(", ");
        format!(
            "We cannot invoke subagent {name} because it does not exist, the only allowed types are {known}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_checked_as_deep_agents_does() {
        let read = |value: Value| TaskArguments::read(value.as_object().unwrap());
        let arguments = read(json!({"description": "d", "subagent_type": "tester"}));
        assert_eq!(arguments, Ok(TaskArguments { description: "d".into(), role: "tester".into() }));
        let cases = [
            (json!({"description": "d"}), "subagent_type: Field required"),
            (json!({"description": 5, "subagent_type": "a"}), "description: Input should be a valid string"),
            (
                json!({"description": "d", "subagent_type": "a", "prompt": "p"}),
                "Unexpected argument 'prompt'; put all instructions for the subagent in `description`.",
            ),
            (
                json!({"description": "x".repeat(DESCRIPTION_LEN_MAX + 1), "subagent_type": "a"}),
                "at most 256 KiB",
            ),
        ];
        for (value, expected) in cases {
            let text = read(value).unwrap_err();
            assert!(text.contains(expected), "{text}");
        }
    }
}
