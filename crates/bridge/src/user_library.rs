//! The user's own roles, plans, skills and rules, as files of the configuration directory, and those of a repository.
//!
//! Invariant: rules are read from the configuration directory alone. A repository can add roles, plans and skills, which
//! change what an agent is told, never what it may do.
//! Invariant: a file of the user with an error refuses the agent; one of a repository is left out, because a hostile
//! repository must not be able to stop agents.

use std::{
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use brain::{
    agent::{AgentView, CallStage, middleware::AgentFiles},
    library::{Library, LibraryError, RuleSet, rules},
    model::ToolArguments,
};
use proto::{Failure, Kind};

use crate::AgentHost;

/// The longest file of a library.
const FILE_LEN_MAX: u64 = 1 << 20;
/// The most files of one directory.
const FILES_MAX: usize = 256;
/// The directory of a repository with files for agents.
const REPOSITORY_DIR: &str = ".palisade";

/// A directory of skills on the host, and the path by which the agent's tools see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkillDirectory {
    /// The directory.
    pub path: PathBuf,
    /// The prefix of its files for the agent, such as `/skills/user/`.
    pub prefix: String,
}

/// The directories of skills of a user: the one of the configuration, and those that an agent was given.
pub fn skill_directories(config: &Path, given: &[PathBuf]) -> Vec<SkillDirectory> {
    let own = config.join("skills");
    let mut found = Vec::new();
    if own.is_dir() {
        found.push(SkillDirectory { path: own, prefix: "/skills/user/".into() });
    }
    for (index, path) in given.iter().enumerate() {
        found.push(SkillDirectory { path: path.clone(), prefix: format!("/skills/{}/", index + 1) });
    }
    found
}

/// The built-in library and that of the user.
pub fn read_library(config: &Path, skills: &[SkillDirectory]) -> Result<Library, Failure> {
    let mut library = Library::built_in().map_err(LibraryError::into_failure)?;
    for (file, text) in read_directory(&config.join("roles"), &["md"])? {
        library.add_role(&file, &text).map_err(LibraryError::into_failure)?;
    }
    for (file, text) in read_directory(&config.join("plans"), &["md", "toml"])? {
        library.add_plan(&file, &text).map_err(LibraryError::into_failure)?;
    }
    for directory in skills {
        for name in list_directory(&directory.path)? {
            let file = directory.path.join(&name).join("SKILL.md");
            if let Some(text) = read_file(&file)? {
                let path = format!("{}{name}/SKILL.md", directory.prefix);
                library.add_skill(&path, &text).map_err(LibraryError::into_failure)?;
            }
        }
    }
    Ok(library)
}

/// The rules of the user, behind those that are part of Palisade.
pub fn read_rules(config: &Path) -> Result<RuleSet, Failure> {
    let rules = RuleSet::built_in().map_err(LibraryError::into_failure)?;
    match read_file(&config.join("rules.toml"))? {
        None => Ok(rules),
        Some(text) => {
            let own = RuleSet::parse("rules.toml", &text).map_err(LibraryError::into_failure)?;
            Ok(rules.merge(own))
        }
    }
}

/// The text of a file of the configuration directory; none if there is no such file.
pub fn read_config(config: &Path, name: &str) -> Result<Option<String>, Failure> {
    read_file(&config.join(name))
}

/// The roles, plans and skills of a repository, read through the agent's own files. Files with an error are left out.
pub async fn read_repository(files: &dyn AgentFiles, workdir: &str) -> Library {
    let mut library = Library::default();
    let root = format!("{}/{REPOSITORY_DIR}", workdir.trim_end_matches('/'));
    for kind in ["roles", "plans", "skills"] {
        let directory = format!("{root}/{kind}");
        let listed = files.list(&directory).await.unwrap_or_default();
        for path in listed.into_iter().take(FILES_MAX) {
            let file = if kind == "skills" { format!("{path}/SKILL.md") } else { path };
            let Ok(Some(text)) = files.read(&file).await else { continue };
            let _ = match kind {
                "roles" => library.add_role(&file, &text),
                "plans" => library.add_plan(&file, &text),
                _ => library.add_skill(&file, &text),
            };
        }
    }
    // A model of the repository's choice would get the conversation, and the key of the user.
    library.forget_models();
    library
}

impl AgentHost {
    /// Checks that a role and a plan exist. Those of a repository are known only in its Body, so that a name that
    /// could be one of them is checked when the agent starts.
    pub fn check_names(&self, role: Option<&str>, plan: Option<&str>) -> Result<(), Failure> {
        let library = read_library(&self.settings().config, &[])?;
        let unknown = |what: &str, name: &str, known: Vec<&str>| {
            Failure::new(Kind::NotFound, format!("there is no {what} {name}"))
                .hint(format!("the {what}s are {}", known.join(", ")))
        };
        if let Some(name) = role.filter(|name| library.role(name).is_none()) {
            return Err(unknown("role", name, library.roles().map(|role| role.name.as_str()).collect()));
        }
        if let Some(name) = plan.filter(|name| library.plan(name).is_none()) {
            return Err(unknown("plan", name, library.plans().map(|plan| plan.name.as_str()).collect()));
        }
        Ok(())
    }

    /// Keeps the calls that wait for an approval as rules of the user.
    pub fn keep_rules(&self, view: &AgentView, call: Option<&str>) -> Result<(), Failure> {
        let path = self.settings().config.join("rules.toml");
        let mut text = read_file(&path)?.unwrap_or_default();
        for state in &view.calls {
            let CallStage::Asked(why) = &state.stage else { continue };
            if call.is_some_and(|call| call != state.call.id) {
                continue;
            }
            let ToolArguments::Object(arguments) = &state.call.arguments else { continue };
            let why = format!("a person approved it: {why}");
            let rule = rules::keep_rule(&state.call.name, arguments, &why).map_err(|why| {
                Failure::new(Kind::Usage, why)
                    .hint("approve it once, or for this agent: pal agent approve --always agent")
            })?;
            text.push_str(&rule);
        }
        RuleSet::parse("rules.toml", &text).map_err(LibraryError::into_failure)?;
        write_file(&path, &text).map_err(|error| {
            Failure::new(Kind::Host, "cannot write rules.toml").because(error).hint("approve it once instead")
        })
    }
}

/// Writes a file of the configuration directory whole or not at all.
fn write_file(path: &Path, text: &str) -> io::Result<()> {
    let directory = path.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(directory)?;
    let beside = path.with_extension("toml.new");
    let mut file = fs::File::create(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

/// The names of a directory, in order; none if there is no such directory.
fn list_directory(path: &Path) -> Result<Vec<String>, Failure> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(unreadable(path, error)),
    };
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).take(FILES_MAX + 1).collect();
    if names.len() > FILES_MAX {
        return Err(Failure::new(
            Kind::Limit,
            format!("the directory {} of the configuration has more than {FILES_MAX} files", name_of(path)),
        ));
    }
    names.sort();
    Ok(names)
}

/// The files of a directory with one of these endings.
fn read_directory(path: &Path, endings: &[&str]) -> Result<Vec<(String, String)>, Failure> {
    let mut files = Vec::new();
    for name in list_directory(path)? {
        if endings.iter().any(|ending| name.ends_with(&format!(".{ending}")))
            && let Some(text) = read_file(&path.join(&name))?
        {
            files.push((name, text));
        }
    }
    Ok(files)
}

fn read_file(path: &Path) -> Result<Option<String>, Failure> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(unreadable(path, error)),
    };
    let mut text = String::new();
    file.take(FILE_LEN_MAX + 1).read_to_string(&mut text).map_err(|error| unreadable(path, error))?;
    if text.len() as u64 > FILE_LEN_MAX {
        return Err(Failure::new(
            Kind::Limit,
            format!("{} is longer than {} KiB", name_of(path), FILE_LEN_MAX >> 10),
        ));
    }
    Ok(Some(text))
}

fn unreadable(path: &Path, error: io::Error) -> Failure {
    Failure::new(Kind::Usage, format!("cannot read {} of the configuration directory", name_of(path)))
        .because(error)
}

/// The name of a file without the directories of the host.
fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_later_source_wins_and_errors_name_their_file() {
        let config = std::env::temp_dir().join(format!("palisade-library-{}", std::process::id()));
        fs::create_dir_all(config.join("roles")).unwrap();
        fs::create_dir_all(config.join("skills/greet")).unwrap();
        let role = "---\nname: tester\ndescription: mine\n---\nTest it.\n";
        fs::write(config.join("roles/tester.md"), role).unwrap();
        fs::write(config.join("skills/greet/SKILL.md"), "---\nname: greet\ndescription: d\n---\nHi.\n")
            .unwrap();
        let library = read_library(&config, &skill_directories(&config, &[])).unwrap();
        assert_eq!(library.role("tester").unwrap().description, "mine");
        assert!(library.role("searcher").is_some(), "built-in roles stay");
        assert!(library.skill("greet").is_some());
        fs::write(config.join("rules.toml"), "[[rule]]\ndecision = \"perhaps\"\n").unwrap();
        let failure = read_rules(&config).unwrap_err();
        assert!(failure.message.contains("rules.toml"), "{failure}");
        fs::remove_dir_all(&config).unwrap();
    }
}
