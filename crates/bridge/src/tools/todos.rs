//! `write_todos`: the agent's list of tasks.

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult},
    model::ToolSchema,
};
use proto::event_data::{PlanChanged, Todo, TodoStatus};
use serde_json::{Map, Value, json};

use super::{
    arguments::{ArgumentReader, choice_error},
    python,
};

const NAME: &str = "write_todos";
const DESCRIPTION: &str = include_str!("todos.txt");
const STATES: &[&str] = &["pending", "in_progress", "completed"];
/// The most tasks of a list.
const TODOS_MAX: usize = 200;
/// The longest task, in characters.
const TODO_LEN_MAX: usize = 4000;

/// Replaces the list of tasks.
pub struct TodosTool;

impl AgentTool for TodosTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.trim_end_matches('\n').into(),
            parameters: json!({
                "type": "object",
                "properties": {"todos": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "description": "A single todo item with content and status.",
                        "properties": {
                            "content": {"type": "string"},
                            "status": {"type": "string", "enum": STATES},
                        },
                        "required": ["content", "status"],
                    },
                }},
                "required": ["todos"],
            }),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        read(arguments).map(|_| CallPlan::in_log(NAME))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            match read(&context.arguments) {
                Ok(todos) => CallResult::text(show(&todos)).with_event(PlanChanged { todos }),
                Err(text) => CallResult::error(text),
            }
        })
    }

    /// The list changes together with the end of the call.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move { Some(self.run(context).await) })
    }
}

fn read(arguments: &Map<String, Value>) -> Result<Vec<Todo>, String> {
    let mut read = ArgumentReader::new(NAME, arguments);
    let values = read.list("todos");
    if values.len() > TODOS_MAX {
        read.refuse("todos", &format!("List should have at most {TODOS_MAX} items"));
    }
    let mut todos = Vec::with_capacity(values.len());
    for (index, value) in values.iter().take(TODOS_MAX).enumerate() {
        let Some(item) = value.as_object() else {
            read.refuse(&format!("todos.{index}"), "Input should be a valid dictionary");
            continue;
        };
        let content = match item.get("content") {
            Some(Value::String(content)) if content.chars().count() <= TODO_LEN_MAX => content.as_str(),
            Some(Value::String(_)) => {
                let message = format!("String should have at most {TODO_LEN_MAX} characters");
                read.refuse(&format!("todos.{index}.content"), &message);
                ""
            }
            Some(_) => {
                read.refuse(&format!("todos.{index}.content"), "Input should be a valid string");
                ""
            }
            None => {
                read.refuse(&format!("todos.{index}.content"), "Field required");
                ""
            }
        };
        match item.get("status").map(|status| status.as_str().unwrap_or_default()) {
            Some(status) if STATES.contains(&status) => {
                let status = TodoStatus::from(status.to_owned());
                todos.push(Todo { content: content.to_owned(), status });
            }
            Some(_) => read.refuse(&format!("todos.{index}.status"), &choice_error(STATES)),
            None => read.refuse(&format!("todos.{index}.status"), "Field required"),
        }
    }
    read.finish()?;
    Ok(todos)
}

fn show(todos: &[Todo]) -> String {
    let shown: Vec<String> = todos
        .iter()
        .map(|todo| {
            let status = String::from(todo.status.clone());
            format!("{{'content': {}, 'status': {}}}", python::repr(&todo.content), python::repr(&status))
        })
        .collect();
    format!("Updated todo list to [{}]", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(arguments: Value) -> Result<String, String> {
        read(arguments.as_object().unwrap()).map(|todos| show(&todos))
    }

    /// Printed by LangChain 1.4.7.
    #[test]
    fn texts_are_those_of_langchain() {
        let todos = json!([{"content": "it's \"a\"\né\u{200b}", "status": "pending"}, {"status": "completed", "content": "b"}]);
        assert_eq!(
            result(json!({"todos": todos})).unwrap(),
            "Updated todo list to [{'content': 'it\\'s \"a\"\\né\\u200b', 'status': 'pending'}, {'content': 'b', 'status': 'completed'}]"
        );
        assert_eq!(
            result(json!({"todos": [{"content": "a", "status": "x"}]})).unwrap_err(),
            "Error invoking tool 'write_todos' with kwargs {'todos': [{'content': 'a', 'status': 'x'}]} with error:\n todos.0.status: Input should be 'pending', 'in_progress' or 'completed'\n Please fix the error and try again."
        );
        assert_eq!(result(json!({"todos": []})).unwrap(), "Updated todo list to []");
    }

    #[test]
    fn a_list_has_limits() {
        let todos: Vec<Value> = (0..300).map(|_| json!({"content": "a", "status": "pending"})).collect();
        assert!(result(json!({"todos": todos})).is_err());
        assert!(result(json!({"todos": [{"content": "x".repeat(5000), "status": "pending"}]})).is_err());
    }
}
