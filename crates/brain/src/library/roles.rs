//! Roles: Markdown files that make a sub-agent out of a model: a name, the tools, the place, and the prompt.

use super::{FrontMatter, LibraryError, command::WordPattern, error::check_len};

/// The longest file of a role.
const FILE_LEN_MAX: usize = 128 << 10;
/// The longest name of a role or plan.
pub(super) const NAME_LEN_MAX: usize = 64;
/// The longest description.
pub(super) const DESCRIPTION_LEN_MAX: usize = 1_024;
/// The most tools that a role or phase names.
pub(super) const TOOLS_MAX: usize = 64;
/// The longest name of a tool.
pub(super) const TOOL_LEN_MAX: usize = 128;
/// The longest address of a model.
const MODEL_LEN_MAX: usize = 512;
/// The longest prompt.
const PROMPT_LEN_MAX: usize = 64 << 10;
const FIELDS: &[&str] = &["name", "description", "tools", "model", "venue"];

/// The kind of an agent: its prompt, its tools, and the place in which it works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// The name.
    pub name: String,
    /// When to give it a task, for the agent that delegates.
    pub description: String,
    /// Patterns for the names of the tools that it may use; all if none are named.
    pub tools: Option<Vec<String>>,
    /// The model, as an address or alias; that of the parent if none is named.
    pub model: Option<String>,
    /// The place in which it works.
    pub venue: RoleVenue,
    /// The prompt.
    pub prompt: String,
}

/// The place in which an agent of a role works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RoleVenue {
    /// The Body of the agent that started it.
    Body,
    /// A fork of that Body; its commits are merged back.
    #[default]
    Fork,
    /// The Body of the agent that started it, without a way to change it.
    ReadOnly,
}

impl Role {
    /// Reads the file of a role.
    pub fn parse(file: &str, text: &str) -> Result<Self, LibraryError> {
        check_len(file, text, FILE_LEN_MAX)?;
        let front = FrontMatter::parse(file, text)?;
        front.check_names(FIELDS)?;
        let name = front.required("name", NAME_LEN_MAX)?;
        check_name(&front, &name)?;
        let tools = front.words("tools", TOOLS_MAX, TOOL_LEN_MAX)?.filter(|tools| !tools.is_empty());
        check_tools(&front, tools.as_deref().unwrap_or_default())?;
        if front.body.is_empty() {
            return Err(front.fault("", "the role has no prompt", "write it below the front matter"));
        }
        if front.body.len() > PROMPT_LEN_MAX {
            let fault = format!("the prompt is longer than {PROMPT_LEN_MAX} bytes");
            return Err(front.fault("", fault, "make it shorter"));
        }
        Ok(Self {
            name,
            description: front.required("description", DESCRIPTION_LEN_MAX)?,
            tools,
            model: front.text("model", MODEL_LEN_MAX)?,
            venue: read_venue(&front)?,
            prompt: front.body.to_owned(),
        })
    }

    /// Whether the role may use a tool.
    pub fn allows_tool(&self, tool: &str) -> bool {
        self.tools.as_deref().is_none_or(|tools| matches_any(tools, tool))
    }
}

/// Whether a name matches one of these patterns.
pub(super) fn matches_any(patterns: &[String], name: &str) -> bool {
    patterns.iter().any(|pattern| WordPattern::parse(pattern).is_ok_and(|pattern| pattern.matches(name)))
}

/// Whether a name has only small letters, digits and single hyphens.
pub(super) fn is_name(name: &str) -> bool {
    let letters = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
    let hyphens_fit = !name.starts_with('-') && !name.ends_with('-') && !name.contains("--");
    !name.is_empty() && name.len() <= NAME_LEN_MAX && name.chars().all(letters) && hyphens_fit
}

fn check_name(front: &FrontMatter<'_>, name: &str) -> Result<(), LibraryError> {
    if is_name(name) {
        return Ok(());
    }
    Err(front.fault("name", format!("{name:?} is no name"), "use small letters, digits and single hyphens"))
}

fn check_tools(front: &FrontMatter<'_>, tools: &[String]) -> Result<(), LibraryError> {
    let error = tools.iter().find_map(|tool| WordPattern::parse(tool).err());
    error.map_or(Ok(()), |error| Err(front.fault("tools", error, "write names of tools; * is any text")))
}

fn read_venue(front: &FrontMatter<'_>) -> Result<RoleVenue, LibraryError> {
    match front.text("venue", NAME_LEN_MAX)?.as_deref() {
        None => Ok(RoleVenue::default()),
        Some("body") => Ok(RoleVenue::Body),
        Some("fork") => Ok(RoleVenue::Fork),
        Some("read-only") => Ok(RoleVenue::ReadOnly),
        Some(other) => {
            Err(front.fault("venue", format!("there is no venue {other:?}"), "use body, fork or read-only"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_read() {
        let text = "---\nname: searcher\ndescription: finds things\ntools: [ls, 'mcp__*']\nvenue: read-only\n---\nFind it.\n";
        let role = Role::parse("r.md", text).unwrap();
        assert_eq!(
            role,
            Role {
                name: "searcher".into(),
                description: "finds things".into(),
                tools: Some(vec!["ls".into(), "mcp__*".into()]),
                model: None,
                venue: RoleVenue::ReadOnly,
                prompt: "Find it.".into(),
            }
        );
        assert!(role.allows_tool("ls") && role.allows_tool("mcp__a__b") && !role.allows_tool("execute"));
    }

    #[test]
    fn faults_of_roles_are_named() {
        let check = |text: &str, expected: &str| {
            assert_eq!(Role::parse("r.md", text).unwrap_err().to_string(), expected);
        };
        check("---\nname: A b\ndescription: x\n---\np", "r.md:2: \"A b\" is no name");
        check("---\nname: a\ndescription: x\nvenue: host\n---\np", "r.md:4: there is no venue \"host\"");
        check("---\nname: a\ndescription: x\ntool: y\n---\np", "r.md:4: there is no field \"tool\"");
        check("---\nname: a\n---\np", "r.md:1: description is missing");
        check("---\nname: a\ndescription: x\n---\n", "r.md:1: the role has no prompt");
        check(&"x".repeat(FILE_LEN_MAX + 1), "r.md:1: the file has 131073 bytes; at most 131072 are read");
    }
}
