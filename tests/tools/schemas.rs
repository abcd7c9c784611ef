//! Names, descriptions and parameters of the tools that models know from Deep Agents.
//!
//! `schemas.json` is printed by deepagents 0.7.32 and langchain 1.4.7: `convert_to_openai_tool` of each tool of
//! `FilesystemMiddleware` and `TodoListMiddleware`, by name.

use serde_json::Value;
use testkit::{Bodies, body_test};

use crate::world::ToolWorld;

const SCHEMAS: &str = include_str!("schemas.json");

#[body_test(except(microvm = "no Body is asked"))]
async fn schemas_are_those_of_deep_agents(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let known: Value = serde_json::from_str(SCHEMAS).unwrap();
    for (name, expected) in known.as_object().unwrap() {
        let schema = world.tools.get(name).unwrap_or_else(|| panic!("{name} is missing")).schema();
        assert_eq!(schema.parameters, expected["parameters"], "{name}");
        let text = expected["description"].as_str().unwrap();
        // One sentence more: which shell runs the command.
        let more = if name == "execute" {
            "\n\nCommands run in bash if the sandbox has it, else in sh."
        } else {
            ""
        };
        assert_eq!(schema.description, format!("{text}{more}"), "{name}");
    }
    let all = world.tools.names();
    assert_eq!(all.len(), known.as_object().unwrap().len() + 5, "{all:?}");
}
