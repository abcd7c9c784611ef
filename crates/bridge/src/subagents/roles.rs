//! The roles of sub-agents: which there are, and which tools each has.

use std::sync::Arc;

use brain::{
    agent::ToolRegistry,
    library::{Library, Role, RoleVenue},
};

use crate::venue::{CallRouting, fork_tools};

/// The role that every agent can give a task to, as Deep Agents has it.
const GENERAL_PURPOSE: &str = "general-purpose";
const GENERAL_DESCRIPTION: &str = "General-purpose agent for researching complex questions, searching for files and \
    content, and executing multi-step tasks. When you are searching for a keyword or file and are not confident that \
    you will find the right match in the first few tries use this agent to perform the search for you. This agent has \
    access to all tools as the main agent.";
const GENERAL_PROMPT: &str = "In order to complete the objective that the user asks of you, you have access to a \
    number of standard tools.\n\nThe calling agent only sees your final assistant message, not your intermediate work, \
    tool results, or status tracking. Ensure your final\nresponse contains the complete answer.";

/// The tools that change neither the Body nor anything outside of it.
const READING_TOOLS: &[&str] = &["ls", "read_file", "glob", "grep", "write_todos", "compact_conversation"];
/// The tools that a reading role may have in a fork of the Body for each call.
const FORKED_TOOLS: &[&str] = &["execute"];

/// The role that every agent can give a task to.
pub fn general_purpose() -> Role {
    Role {
        name: GENERAL_PURPOSE.to_owned(),
        description: GENERAL_DESCRIPTION.to_owned(),
        tools: None,
        model: None,
        venue: RoleVenue::Fork,
        prompt: GENERAL_PROMPT.to_owned(),
    }
}

/// The roles that an agent can give tasks to, the general one first.
pub fn roles_for_tasks(library: &Library) -> Vec<Role> {
    let general = library.role(GENERAL_PURPOSE).cloned().unwrap_or_else(general_purpose);
    let others = library.roles().filter(|role| role.name != GENERAL_PURPOSE).cloned();
    std::iter::once(general).chain(others).collect()
}

/// The role of a name, also the general one if the library has none of that name.
pub fn find_role(library: &Library, name: &str) -> Option<Role> {
    library.role(name).cloned().or_else(|| Some(general_purpose()).filter(|role| role.name == name))
}

/// Leaves an agent the tools of its role. A role that only reads keeps no tool that could change the Body: its commands
/// run in a fork that is thrown away.
pub fn shape_tools(tools: &mut ToolRegistry, role: &Role, routing: &Arc<CallRouting>) {
    tools.retain(|name| role.allows_tool(name));
    if role.venue == RoleVenue::ReadOnly {
        tools.retain(|name| READING_TOOLS.contains(&name) || FORKED_TOOLS.contains(&name));
        fork_tools(tools, FORKED_TOOLS, routing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_general_role_is_always_there_and_can_be_replaced() {
        let mut library = Library::default();
        let names = |library: &Library| {
            roles_for_tasks(library).into_iter().map(|role| role.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&library), [GENERAL_PURPOSE]);
        library.add_role("a.md", "---\nname: a\ndescription: d\n---\np").unwrap();
        library.add_role("g.md", "---\nname: general-purpose\ndescription: mine\n---\np").unwrap();
        assert_eq!(names(&library), [GENERAL_PURPOSE, "a"]);
        assert_eq!(find_role(&library, GENERAL_PURPOSE).unwrap().description, "mine");
        assert_eq!(find_role(&Library::default(), GENERAL_PURPOSE), Some(general_purpose()));
        assert_eq!(find_role(&library, "b"), None);
    }
}
