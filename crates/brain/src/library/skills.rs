//! Skills: directories with a SKILL.md that an agent reads when a task needs it.
//!
//! The limits are those of Deep Agents and of the Agent Skills format, so that a skill written for them works here.

use super::{FrontMatter, LibraryError, error::check_len, roles};

/// The longest SKILL.md.
const FILE_LEN_MAX: usize = 10 << 20;
/// The longest compatibility note.
const COMPATIBILITY_LEN_MAX: usize = 500;
/// The longest name of a licence.
const LICENSE_LEN_MAX: usize = 500;
/// The most entries of the metadata.
const METADATA_MAX: usize = 64;

/// A skill, as the agent sees it before it reads the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skill {
    /// The name.
    pub name: String,
    /// The use of the skill, and when to use it.
    pub description: String,
    /// The path of SKILL.md, as the agent's tools see it.
    pub path: String,
    /// The licence.
    pub license: Option<String>,
    /// The circumstances in which it works.
    pub compatibility: Option<String>,
    /// Further data.
    pub metadata: Vec<(String, String)>,
    /// The tools that it recommends.
    pub allowed_tools: Vec<String>,
}

impl Skill {
    /// Reads a SKILL.md. `path` is its place as the agent's tools see it. Unknown fields are ignored: the format grows.
    pub fn parse(path: &str, text: &str) -> Result<Self, LibraryError> {
        check_len(path, text, FILE_LEN_MAX)?;
        let front = FrontMatter::parse(path, text)?;
        let name = front.required("name", roles::NAME_LEN_MAX)?;
        let directory = path.rsplit('/').nth(1);
        if !roles::is_name(&name) {
            let mend = "use small letters, digits and single hyphens";
            return Err(front.fault("name", format!("{name:?} is no name"), mend));
        }
        if directory.is_some_and(|directory| directory != name) {
            let fault = format!("the skill is named {name}, but its directory is not");
            return Err(front.fault("name", fault, format!("rename the directory to {name}")));
        }
        let metadata = front.map("metadata")?;
        if metadata.len() > METADATA_MAX {
            let fault = format!("metadata has more than {METADATA_MAX} entries");
            return Err(front.fault("metadata", fault, "remove some"));
        }
        let allowed_tools = front.words("allowed-tools", roles::TOOLS_MAX, roles::TOOL_LEN_MAX)?;
        Ok(Self {
            name,
            description: front.required("description", roles::DESCRIPTION_LEN_MAX)?,
            path: path.to_owned(),
            license: front.text("license", LICENSE_LEN_MAX)?,
            compatibility: front.text("compatibility", COMPATIBILITY_LEN_MAX)?,
            metadata,
            allowed_tools: allowed_tools.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skill_is_read() {
        let text = "---\nname: pdf\ndescription: \"Reads PDFs: text and tables\"\nlicense: MIT\nmetadata:\n  author: me\nallowed-tools: execute read_file\nnew-field: x\n---\n# How\n";
        let skill = Skill::parse("/skills/pdf/SKILL.md", text).unwrap();
        assert_eq!((skill.name.as_str(), skill.path.as_str()), ("pdf", "/skills/pdf/SKILL.md"));
        assert_eq!(skill.description, "Reads PDFs: text and tables");
        assert_eq!(skill.allowed_tools, ["execute", "read_file"]);
        assert_eq!(skill.metadata, [("author".to_owned(), "me".to_owned())]);
    }

    #[test]
    fn the_limits_are_those_of_the_format() {
        let skill = |name: &str, description: usize, compatibility: usize| {
            let (description, compatibility) = ("d".repeat(description), "c".repeat(compatibility));
            let text = format!(
                "---\nname: {name}\ndescription: {description}\ncompatibility: {compatibility}\n---\n"
            );
            Skill::parse(&format!("/s/{name}/SKILL.md"), &text).map_err(|error| error.fault)
        };
        assert!(skill(&"n".repeat(64), 1024, 500).is_ok());
        assert!(skill(&"n".repeat(65), 1, 1).is_err());
        assert!(skill("a", 1025, 1).unwrap_err().contains("at most 1024"));
        assert!(skill("a", 1, 501).unwrap_err().contains("at most 500"));
        assert!(skill("A", 1, 1).is_err() && skill("a--b", 1, 1).is_err() && skill("-a", 1, 1).is_err());
        let elsewhere = Skill::parse("/s/b/SKILL.md", "---\nname: a\ndescription: d\n---\n");
        assert_eq!(elsewhere.unwrap_err().mend, "rename the directory to a");
    }
}
