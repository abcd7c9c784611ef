//! Plan templates: phases with a goal, checks, and the tools of the phase.
//!
//! A template is TOML:
//! ```toml
//! name = "fix-bug"
//! description = "Reproduce, locate, fix and verify a bug"
//!
//! [[phase]]
//! name = "reproduce"
//! goal = "Write a test that fails because of the bug."
//! tools = ["execute", "read_file"]
//! exit = { question = "Which command fails, and with which message?" }
//!
//! [[phase]]
//! name = "verify"
//! goal = "Run the whole test suite."
//! exit = { command = "make test" }
//! ```

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::{
    LibraryError,
    command::WordPattern,
    error::{check_len, line_at},
    roles::{self, is_name},
};

/// The longest file of a plan.
const FILE_LEN_MAX: usize = 64 << 10;
/// The most phases.
const PHASES_MAX: usize = 32;
/// The longest goal.
const GOAL_LEN_MAX: usize = 8 << 10;
/// The longest command or question of a check.
const CHECK_LEN_MAX: usize = 4 << 10;

/// A plan: what is done, in which order, and how each part is known to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanTemplate {
    /// The name.
    pub name: String,
    /// When to use it.
    pub description: String,
    /// The phases, in their order.
    pub phases: Vec<PhaseTemplate>,
}

/// One phase of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseTemplate {
    /// The name.
    pub name: String,
    /// The goal.
    pub goal: String,
    /// A check before the phase begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<PhaseCheck>,
    /// A check before the phase ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<PhaseCheck>,
    /// Patterns for the names of the tools that may be used in the phase; all if none are named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
}

/// A check of a phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseCheck {
    /// A command in the Body that must end with 0.
    Command(String),
    /// A question that the agent must answer.
    Question(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    name: String,
    description: String,
    #[serde(default)]
    phase: Vec<Spanned<PhaseTemplate>>,
}

impl PlanTemplate {
    /// Reads the file of a plan.
    pub fn parse(file: &str, text: &str) -> Result<Self, LibraryError> {
        check_len(file, text, FILE_LEN_MAX)?;
        let read: PlanFile =
            toml::from_str(text).map_err(|error| LibraryError::from_toml(file, text, &error))?;
        let lines: Vec<usize> = read.phase.iter().map(|phase| line_at(text, phase.span().start)).collect();
        let phases = read.phase.into_iter().map(Spanned::into_inner).collect();
        let plan = Self { name: read.name, description: read.description, phases };
        plan.check().map_err(|(phase, fault, mend)| {
            let line = phase.and_then(|phase| lines.get(phase)).copied().unwrap_or(1);
            LibraryError::new(file, line, fault, mend)
        })?;
        Ok(plan)
    }

    /// Checks the limits: the fault, how to mend it, and the index of the phase that has it.
    pub fn check(&self) -> Result<(), (Option<usize>, String, String)> {
        let fault = |phase, fault: &str, mend: &str| Err((phase, fault.to_owned(), mend.to_owned()));
        if !is_name(&self.name) {
            return fault(
                None,
                "the name of the plan is no name",
                "use small letters, digits and single hyphens",
            );
        }
        if self.description.trim().is_empty() || self.description.len() > roles::DESCRIPTION_LEN_MAX {
            return fault(None, "the description is empty or too long", "write up to 1024 bytes");
        }
        if self.phases.is_empty() || self.phases.len() > PHASES_MAX {
            return fault(None, "a plan has between 1 and 32 phases", "add or remove a [[phase]]");
        }
        for (index, phase) in self.phases.iter().enumerate() {
            if let Err((found, mend)) = phase.check() {
                return Err((Some(index), found, mend));
            }
            if self.phases[..index].iter().any(|other| other.name == phase.name) {
                return fault(Some(index), "two phases have this name", "rename one of them");
            }
        }
        Ok(())
    }

    /// The phase of a name and its number, from 1.
    pub fn phase(&self, name: &str) -> Option<(usize, &PhaseTemplate)> {
        self.phases
            .iter()
            .enumerate()
            .find(|(_, phase)| phase.name == name)
            .map(|(index, phase)| (index + 1, phase))
    }

    /// The phase after one; none after the last one.
    pub fn phase_after(&self, name: &str) -> Option<&PhaseTemplate> {
        let (number, _) = self.phase(name)?;
        self.phases.get(number)
    }
}

impl PhaseTemplate {
    /// Whether a tool may be used in the phase.
    pub fn allows_tool(&self, tool: &str) -> bool {
        self.tools.as_deref().is_none_or(|tools| roles::matches_any(tools, tool))
    }

    fn check(&self) -> Result<(), (String, String)> {
        let fault = |fault: &str, mend: &str| Err((fault.to_owned(), mend.to_owned()));
        if !is_name(&self.name) {
            return fault("the name of the phase is no name", "use small letters, digits and single hyphens");
        }
        if self.goal.trim().is_empty() || self.goal.len() > GOAL_LEN_MAX {
            return fault("the goal is empty or too long", "write up to 8192 bytes");
        }
        let checks = [&self.entry, &self.exit].into_iter().flatten();
        for PhaseCheck::Command(text) | PhaseCheck::Question(text) in checks {
            if text.trim().is_empty() || text.len() > CHECK_LEN_MAX {
                return fault("the check is empty or too long", "write up to 4096 bytes");
            }
        }
        let tools = self.tools.as_deref().unwrap_or_default();
        if tools.len() > roles::TOOLS_MAX || tools.iter().any(|tool| tool.len() > roles::TOOL_LEN_MAX) {
            return fault("the phase names too many tools", "use patterns such as mcp__*");
        }
        match tools.iter().find_map(|tool| WordPattern::parse(tool).err()) {
            Some(error) => fault(&error, "write names of tools; * is any text"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = "name = \"p\"\ndescription = \"d\"\n\n[[phase]]\nname = \"a\"\ngoal = \"g\"\n\n[[phase]]\nname = \"b\"\ngoal = \"g\"\ntools = [\"ls\"]\nexit = { command = \"make\" }\n";

    #[test]
    fn a_plan_is_read() {
        let plan = PlanTemplate::parse("p.toml", PLAN).unwrap();
        assert_eq!(
            plan.phase("b").map(|(number, phase)| (number, phase.exit.clone())),
            Some((2, Some(PhaseCheck::Command("make".into()))))
        );
        assert_eq!(plan.phase_after("a").map(|phase| phase.name.as_str()), Some("b"));
        assert_eq!(plan.phase_after("b"), None);
        assert!(plan.phases[0].allows_tool("x") && !plan.phases[1].allows_tool("x"));
        let json = serde_json::to_value(&plan).unwrap();
        assert_eq!(serde_json::from_value::<PlanTemplate>(json).unwrap(), plan);
    }

    #[test]
    fn faults_of_plans_are_named() {
        let check = |from: &str, to: &str, expected: &str| {
            let error = PlanTemplate::parse("p.toml", &PLAN.replace(from, to)).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        check("name = \"b\"", "name = \"a\"", "p.toml:8: two phases have this name");
        check("name = \"b\"", "name = \"B\"", "p.toml:8: the name of the phase is no name");
        check("goal = \"g\"\ntools", "goal = \"\"\ntools", "p.toml:8: the goal is empty or too long");
        check("[\"ls\"]", "[\"{ls\"]", "p.toml:8: the brace in \"{ls\" is not closed");
        let typo = PlanTemplate::parse("p.toml", &PLAN.replace("tools", "tool")).unwrap_err();
        assert!((8..=11).contains(&typo.line) && typo.fault.contains("unknown field"), "{typo}");
        let bare = "name = \"p\"\ndescription = \"d\"\n";
        assert_eq!(
            PlanTemplate::parse("p.toml", bare).unwrap_err().fault,
            "a plan has between 1 and 32 phases"
        );
    }
}
