//! All roles, plans and skills that an agent has.

use std::collections::BTreeMap;

use super::{LibraryError, PlanTemplate, Role, Skill};

/// The most entries of one kind.
const ENTRIES_MAX: usize = 256;

macro_rules! files {
    ($directory:literal, $extension:literal: $($name:literal)*) => {
        [$((
            concat!($directory, "/", $name, ".", $extension),
            include_str!(concat!("../../library/", $directory, "/", $name, ".", $extension)),
        )),*]
    };
}

const ROLES: &[(&str, &str)] = &files!("roles", "md":
    "searcher" "planner" "reproducer" "programmer" "tester" "editor" "reviewer" "researcher");
const PLANS: &[(&str, &str)] = &files!("plans", "toml": "fix-bug" "research");

/// Roles, plans and skills by their names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Library {
    roles: BTreeMap<String, Role>,
    plans: BTreeMap<String, PlanTemplate>,
    skills: BTreeMap<String, Skill>,
}

impl Library {
    /// The roles and plans that are part of Palisade.
    pub fn built_in() -> Result<Self, LibraryError> {
        let mut library = Self::default();
        for (file, text) in ROLES {
            library.add_role(file, text)?;
        }
        for (file, text) in PLANS {
            library.add_plan(file, text)?;
        }
        Ok(library)
    }

    /// Adds a role from the text of its file. One of the same name is replaced.
    pub fn add_role(&mut self, file: &str, text: &str) -> Result<(), LibraryError> {
        let role = Role::parse(file, text)?;
        insert(&mut self.roles, role.name.clone(), role, file)
    }

    /// Adds a plan from the text of its file. One of the same name is replaced.
    pub fn add_plan(&mut self, file: &str, text: &str) -> Result<(), LibraryError> {
        let plan = PlanTemplate::parse(file, text)?;
        insert(&mut self.plans, plan.name.clone(), plan, file)
    }

    /// Adds a skill from the text of its SKILL.md, whose path is the one that the agent's tools see. One of the same name
    /// is replaced.
    pub fn add_skill(&mut self, path: &str, text: &str) -> Result<(), LibraryError> {
        let skill = Skill::parse(path, text)?;
        insert(&mut self.skills, skill.name.clone(), skill, path)
    }

    /// Adds everything of a later source, which wins by name.
    #[must_use]
    pub fn merge(mut self, later: Self) -> Self {
        self.roles.extend(later.roles);
        self.plans.extend(later.plans);
        self.skills.extend(later.skills);
        self
    }

    /// Removes the models that roles name, because their source must not choose one.
    pub fn forget_models(&mut self) {
        self.roles.values_mut().for_each(|role| role.model = None);
    }

    /// The role of a name.
    pub fn role(&self, name: &str) -> Option<&Role> {
        self.roles.get(name)
    }

    /// The roles, in the order of their names.
    pub fn roles(&self) -> impl Iterator<Item = &Role> {
        self.roles.values()
    }

    /// The plan of a name.
    pub fn plan(&self, name: &str) -> Option<&PlanTemplate> {
        self.plans.get(name)
    }

    /// The plans, in the order of their names.
    pub fn plans(&self) -> impl Iterator<Item = &PlanTemplate> {
        self.plans.values()
    }

    /// The skill of a name.
    pub fn skill(&self, name: &str) -> Option<&Skill> {
        self.skills.get(name)
    }

    /// The skills, in the order of their names.
    pub fn skills(&self) -> impl Iterator<Item = &Skill> {
        self.skills.values()
    }
}

fn insert<T>(
    entries: &mut BTreeMap<String, T>,
    name: String,
    entry: T,
    file: &str,
) -> Result<(), LibraryError> {
    if entries.len() >= ENTRIES_MAX && !entries.contains_key(&name) {
        let fault = format!("there are more than {ENTRIES_MAX} files of this kind");
        return Err(LibraryError::new(file, 1, fault, "remove some"));
    }
    entries.insert(name, entry);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::RoleVenue;

    #[test]
    fn the_built_in_library_is_whole() {
        let library = Library::built_in().unwrap();
        let roles: Vec<&str> = library.roles().map(|role| role.name.as_str()).collect();
        assert_eq!(
            roles,
            ["editor", "planner", "programmer", "reproducer", "researcher", "reviewer", "searcher", "tester"]
        );
        let phases = |name: &str| {
            let plan = library.plan(name).unwrap();
            plan.phases.iter().map(|phase| phase.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(phases("fix-bug"), ["reproduce", "locate", "fix", "verify", "summarise"]);
        assert_eq!(phases("research"), ["hypothesis", "design", "research", "verify", "write"]);
    }

    #[test]
    fn a_role_that_reads_has_no_tool_that_changes() {
        let library = Library::built_in().unwrap();
        for role in library.roles().filter(|role| role.venue == RoleVenue::ReadOnly) {
            for tool in ["write_file", "edit_file", "delete", "apply_patch"] {
                assert!(!role.allows_tool(tool), "{} {tool}", role.name);
            }
        }
    }

    #[test]
    fn the_later_source_wins_by_name() {
        let role = |name: &str, prompt: &str| format!("---\nname: {name}\ndescription: d\n---\n{prompt}");
        let mut user = Library::default();
        user.add_role("a.md", &role("editor", "mine")).unwrap();
        let mut repository = Library::default();
        repository.add_role("b.md", &role("tester", "theirs")).unwrap();
        let merged = Library::built_in().unwrap().merge(user).merge(repository);
        let prompt = |name: &str| merged.role(name).map(|role| role.prompt.clone());
        assert_eq!(prompt("editor").as_deref(), Some("mine"));
        assert_eq!(prompt("tester").as_deref(), Some("theirs"));
        assert!(prompt("planner").is_some_and(|prompt| prompt.len() > 100));
    }

    #[test]
    fn the_number_of_entries_has_a_limit() {
        let mut library = Library::default();
        for index in 0..ENTRIES_MAX {
            library.add_role("r.md", &format!("---\nname: r{index}\ndescription: d\n---\np")).unwrap();
        }
        assert!(library.add_role("r.md", "---\nname: more\ndescription: d\n---\np").is_err());
        assert!(library.add_role("r.md", "---\nname: r1\ndescription: d\n---\np").is_ok());
    }
}
