//! Finds out what a repository needs, from the file names of a tree and the contents of a few files.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{
    devcontainer::{self, Devcontainer},
    lockfiles::{self, LOCAL_BIN, LOCKFILES, Lockfile, LockfileContext, VENV},
    settings::RepoSettings,
    tools::{GO, PYTHON, Tool},
};
use crate::{error::WorkspaceError, git::Git};

/// Most prepare steps of one repository.
const STEPS_MAX: usize = 64;
/// Longest palisade.toml or devcontainer.json.
const TEXT_LEN_MAX: usize = 1 << 20;
/// Longest lockfile that is read.
const LOCK_LEN_MAX: usize = 64 << 20;

/// One step that prepares a Body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareStep {
    /// The directory in which it runs, below the workspace; empty for its top.
    pub dir: String,
    /// The shell line.
    pub line: String,
    /// The tool that it needs.
    pub tool: Option<Tool>,
}

impl PrepareStep {
    /// A step at the top of the workspace that needs no tool.
    pub fn plain(line: impl Into<String>) -> Self {
        Self { dir: String::new(), line: line.into(), tool: None }
    }
}

/// The steps, names and variables that a repository needs before its tests run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// The prepare steps, in order.
    pub steps: Vec<PrepareStep>,
    /// Host names that the steps may reach.
    pub allow: BTreeSet<String>,
    /// Variables of every command, in the steps and later.
    pub env: BTreeMap<String, String>,
    /// Directories in front of the usual `PATH`.
    pub path: BTreeSet<&'static str>,
    /// Files that decide about the steps, with their blob ids.
    pub inputs: BTreeMap<String, String>,
    /// The tools that the repository's lockfiles belong to.
    pub tools: BTreeSet<Tool>,
    /// The shell line that runs the tests.
    pub test: Option<String>,
    /// The settings of devcontainer.json.
    pub container: Devcontainer,
}

/// The paths of a git tree; file contents are read on demand.
pub struct RepoTree {
    git: Git,
    /// Paths and their blob ids.
    pub ids: BTreeMap<String, String>,
}

impl RepoTree {
    fn look(objects: &Path, tree: &str) -> Result<Self, WorkspaceError> {
        let git = Git::at(objects);
        let said = git.run(["ls-tree", "-r", "-z", "--full-tree", tree])?;
        Ok(Self { git, ids: listing(&said) })
    }

    /// The text of a file; none if there is no such file.
    pub fn text(&self, path: &str, len_max: usize) -> Result<Option<String>, WorkspaceError> {
        let Some(id) = self.ids.get(path) else { return Ok(None) };
        let bytes = self.git.run(["cat-file", "blob", id])?;
        if bytes.len() > len_max {
            return Err(WorkspaceError::Repository(format!(
                "{} is longer than {} MiB",
                proto::text::visible(path),
                len_max >> 20
            )));
        }
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// Finds what the repository needs at a tree.
pub fn needs(objects: &Path, tree: &str) -> Result<Needs, WorkspaceError> {
    let files = RepoTree::look(objects, tree)?;
    let mut needs = Needs::default();
    let settings: RepoSettings = match files.text("palisade.toml", TEXT_LEN_MAX)? {
        Some(text) => toml::from_str(&text).map_err(|error| {
            WorkspaceError::Repository(format!("palisade.toml: {}", proto::text::visible(error.message())))
        })?,
        None => RepoSettings::default(),
    };
    if settings.prepare.auto {
        needs.lockfiles(&files.ids, |path| Ok(files.text(path, LOCK_LEN_MAX)?.unwrap_or_default()))?;
    }
    if let Some(place) = devcontainer_of(&files.ids)
        && let Some(text) = files.text(&place, TEXT_LEN_MAX)?
    {
        needs.devcontainer(&place, &text, &files.ids)?;
    }
    needs.settings(settings, &files.ids);
    if needs.steps.len() > STEPS_MAX {
        return Err(WorkspaceError::Repository(format!(
            "the repository has more than {STEPS_MAX} prepare steps: list the steps in palisade.toml, with auto = false"
        )));
    }
    Ok(needs)
}

/// Chooses the devcontainer.json: one of the two usual paths, else the file of a subdirectory if there is
/// exactly one.
fn devcontainer_of(files: &BTreeMap<String, String>) -> Option<String> {
    let usual = [".devcontainer/devcontainer.json", ".devcontainer.json"];
    if let Some(place) = usual.iter().find(|place| files.contains_key(**place)) {
        return Some((*place).to_owned());
    }
    let one = |path: &&String| {
        matches!(path.split('/').collect::<Vec<_>>()[..], [".devcontainer", _, "devcontainer.json"])
    };
    let mut found = files.keys().filter(one);
    found.next().filter(|_| found.next().is_none()).cloned()
}

/// Parses the output of `git ls-tree -z` into paths and blob ids.
fn listing(said: &[u8]) -> BTreeMap<String, String> {
    let record = |record: &[u8]| {
        let text = std::str::from_utf8(record).ok()?;
        let (about, path) = text.split_once('\t')?;
        Some((path.to_owned(), about.split(' ').nth(2)?.to_owned()))
    };
    said.split(|byte| *byte == 0).filter_map(record).collect()
}

/// Whether files in a directory are vendored code, test data or examples, whose lockfiles do not count.
fn is_foreign(dir: &str) -> bool {
    dir.split('/').any(|part| {
        matches!(
            part,
            "node_modules" | "vendor" | "third_party" | "testdata" | "fixtures" | "examples" | "example"
        )
    })
}

impl Needs {
    fn input(&mut self, files: &BTreeMap<String, String>, path: &str) {
        if let Some(id) = files.get(path) {
            self.inputs.insert(path.to_owned(), id.clone());
        }
    }

    fn lockfiles(
        &mut self,
        files: &BTreeMap<String, String>,
        text: impl Fn(&str) -> Result<String, WorkspaceError>,
    ) -> Result<(), WorkspaceError> {
        for path in files.keys() {
            let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
            if is_foreign(dir) {
                continue;
            }
            let at = |name: &str| if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
            if name.starts_with("requirements") && name.ends_with(".txt") {
                self.requirements(dir, name);
                self.input(files, path);
            }
            if let Some(lock) =
                LOCKFILES.iter().find(|lock| lock.name == name && files.contains_key(&at(lock.beside[0])))
            {
                lock.beside.iter().for_each(|name| self.input(files, &at(name)));
                self.input(files, path);
                let beside = LockfileContext { lock: text(path)?, manifest: text(&at(lock.beside[0]))? };
                // Vendored Go modules need no download.
                let vendored = lock.tool == GO && files.contains_key(&at("vendor/modules.txt"));
                self.lockfile(dir, lock, (!vendored).then(|| (lock.line)(&beside)));
            }
        }
        self.places();
        Ok(())
    }

    fn lockfile(&mut self, dir: &str, lock: &Lockfile, line: Option<String>) {
        self.tools.insert(lock.tool);
        self.env.extend(lock.env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        if let Some(line) = line {
            self.steps.push(PrepareStep { dir: dir.to_owned(), line, tool: Some(lock.tool) });
            self.allow.extend(lock.hosts.iter().map(|host| (*host).to_owned()));
        }
    }

    /// Adds the directories of installed programs to `PATH`.
    fn places(&mut self) {
        if self.tools.contains(&PYTHON) {
            self.steps.insert(
                0,
                PrepareStep { dir: String::new(), line: lockfiles::fresh_venv(), tool: Some(PYTHON) },
            );
            self.path.insert("/home/user/.venv/bin");
            self.env.insert("VIRTUAL_ENV".into(), VENV.into());
        }
        if self.tools.iter().any(|tool| ["node", "python"].contains(&tool.language)) {
            self.path.insert(LOCAL_BIN);
        }
    }

    fn requirements(&mut self, dir: &str, name: &str) {
        self.tools.insert(PYTHON);
        self.allow.extend(lockfiles::pypi());
        self.steps.push(PrepareStep {
            dir: dir.to_owned(),
            line: lockfiles::requirements(name),
            tool: Some(PYTHON),
        });
    }

    fn devcontainer(
        &mut self,
        place: &str,
        text: &str,
        files: &BTreeMap<String, String>,
    ) -> Result<(), WorkspaceError> {
        self.container = devcontainer::read(place, text)?;
        self.input(files, place);
        self.steps.extend(self.container.create.iter().map(PrepareStep::plain));
        Ok(())
    }

    fn settings(&mut self, settings: RepoSettings, files: &BTreeMap<String, String>) {
        self.input(files, "palisade.toml");
        settings.prepare.inputs.iter().for_each(|path| self.input(files, path));
        self.steps.extend(settings.prepare.commands.into_iter().map(PrepareStep::plain));
        self.allow.extend(settings.prepare.allow);
        self.env.extend(settings.env);
        self.test = settings.test.command.or_else(|| lockfiles::usual_test(files));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(paths: &[&str]) -> Needs {
        let files = paths.iter().map(|path| ((*path).to_owned(), format!("id of {path}"))).collect();
        let mut needs = Needs::default();
        needs.lockfiles(&files, |_| Ok(String::new())).unwrap();
        needs
    }

    #[test]
    fn lockfiles_of_a_monorepo_are_found_and_those_of_others_are_not() {
        let needs = found(&[
            "Cargo.lock",
            "Cargo.toml",
            "web/package-lock.json",
            "web/package.json",
            "api/requirements.txt",
            "api/requirements-dev.txt",
            "go/go.sum",
            "go/go.mod",
            "go/vendor/modules.txt",
            "web/node_modules/x/package-lock.json",
            "web/node_modules/x/package.json",
            "lonely/Cargo.lock",
        ]);
        let steps: Vec<(&str, &str)> = needs
            .steps
            .iter()
            .map(|step| (step.dir.as_str(), step.line.split(' ').next().unwrap()))
            .collect();
        let pip = "/home/user/.venv/bin/pip";
        assert_eq!(steps, [("", "python3"), ("", "cargo"), ("api", pip), ("api", pip), ("web", "npm")]);
        assert_eq!(
            needs.tools.iter().map(|tool| tool.language).collect::<Vec<_>>(),
            ["cargo", "go", "node", "python"]
        );
        assert!(needs.allow.contains("pypi.org:443") && !needs.allow.contains("proxy.golang.org:443"));
        assert!(
            needs.inputs.contains_key("web/package.json") && !needs.inputs.contains_key("lonely/Cargo.lock")
        );
    }

    #[test]
    fn the_devcontainer_is_the_usual_one_or_the_only_one() {
        let files = |paths: &[&str]| {
            devcontainer_of(&paths.iter().map(|path| ((*path).to_owned(), String::new())).collect())
        };
        assert_eq!(
            files(&[".devcontainer.json", ".devcontainer/a/devcontainer.json"]).as_deref(),
            Some(".devcontainer.json")
        );
        assert_eq!(
            files(&[".devcontainer/a/devcontainer.json"]).as_deref(),
            Some(".devcontainer/a/devcontainer.json")
        );
        assert_eq!(files(&[".devcontainer/a/devcontainer.json", ".devcontainer/b/devcontainer.json"]), None);
    }
}
