//! Finds out what a repository needs, from the file names of a commit and the contents of a few files.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::{
    devcontainer,
    ecosystems::Plan,
    needs::{Needs, PrepareStep, StepWeight},
    node,
    projects::{Project, find_projects},
    python::{VENV_BIN, venv_step},
    settings::RepoSettings,
    tools::PYTHON,
    tree::RepoTree,
};
use crate::error::WorkspaceError;

/// Most prepare steps of one repository.
const STEPS_MAX: usize = 64;
/// Longest name of a step, in characters.
const NAME_LEN_MAX: usize = 60;
/// Directory of programs that a step installs.
const LOCAL_BIN: &str = "/home/user/.local/bin";
const SETTINGS_FILE: &str = "palisade.toml";

/// Manifests without a step: the end of their names, and the line that installs their packages.
const WITHOUT_STEP: &[(&str, &str)] = &[
    ("pubspec.yaml", "dart pub get"),
    ("Package.swift", "swift package resolve"),
    ("deno.json", "deno install"),
    ("deno.jsonc", "deno install"),
    (".sln", "dotnet restore"),
    (".csproj", "dotnet restore"),
    ("build.sbt", "sbt update"),
    ("stack.yaml", "stack build --only-dependencies"),
    ("cabal.project", "cabal build --only-dependencies"),
    ("rebar.config", "rebar3 get-deps"),
    ("project.clj", "lein deps"),
    ("environment.yml", "conda env update"),
    (".gemspec", "gem install --development"),
];

/// A request to find out what a repository needs.
#[derive(Debug, Clone, Copy)]
pub struct NeedsRequest<'a> {
    /// The git directory that holds the commit.
    pub objects: &'a Path,
    /// The commit.
    pub commit: &'a str,
    /// The text of a palisade.toml that takes the place of the commit's.
    pub settings: Option<&'a str>,
}

/// Finds what a repository needs at a commit.
pub fn needs(request: &NeedsRequest<'_>) -> Result<Needs, WorkspaceError> {
    let tree = RepoTree::open(request.objects, request.commit)?;
    let settings = match request.settings {
        Some(text) => Some(text.to_owned()),
        None => tree.text(SETTINGS_FILE)?,
    };
    let parsed = RepoSettings::parse(settings.as_deref().unwrap_or_default())?;
    let mut needs = Needs::default();
    needs.add_projects(&tree, &parsed)?;
    if parsed.prepare.devcontainer
        && let Some(place) = choose_devcontainer(&tree).filter(|place| !parsed.prepare.is_skipped(place))
        && let Some(text) = tree.text(&place)?
    {
        needs.add_devcontainer(&place, &text, &tree)?;
    }
    if let Some(text) = request.settings {
        needs.inputs.insert(SETTINGS_FILE.to_owned(), proto::event::hex(&Sha256::digest(text)));
    }
    needs.add_settings(parsed, &tree);
    if needs.steps.len() > STEPS_MAX {
        return Err(WorkspaceError::Repository(format!(
            "the repository has more than {STEPS_MAX} prepare steps: list the steps in palisade.toml, with auto = false"
        )));
    }
    Ok(needs)
}

/// Chooses the devcontainer.json: one of the two usual paths, else the file of a subdirectory if there is
/// exactly one.
fn choose_devcontainer(tree: &RepoTree) -> Option<String> {
    let usual = [".devcontainer/devcontainer.json", ".devcontainer.json"];
    if let Some(place) = usual.iter().find(|place| tree.has(place)) {
        return Some((*place).to_owned());
    }
    let one = |path: &&String| {
        matches!(path.split('/').collect::<Vec<_>>()[..], [".devcontainer", _, "devcontainer.json"])
    };
    let mut found = tree.ids.keys().filter(one);
    found.next().filter(|_| found.next().is_none()).cloned()
}

/// Makes a short name of a shell line: its first line, cut where it is long.
fn short_name(line: &str) -> String {
    let text = line.trim();
    let first = text.lines().next().unwrap_or_default();
    let cut: String = first.chars().take(NAME_LEN_MAX).collect();
    if cut.len() < text.len() { format!("{}…", cut.trim_end()) } else { cut }
}

/// A step of devcontainer.json or palisade.toml.
fn command_step(line: String, weight: StepWeight) -> PrepareStep {
    let name = short_name(&line);
    PrepareStep { name, dir: String::new(), line, source: String::new(), tool: None, weight }
}

/// The usual test command for a repository with these files.
fn usual_test(tree: &RepoTree) -> Option<String> {
    // Many repositories of other languages have a package.json for their tools alone, and no lockfile.
    let is_node = node::LOCKS.iter().any(|lock| tree.has(lock));
    if is_node && !tree.has("Cargo.toml") && tree.has("package.json") {
        return Some("npm test".to_owned());
    }
    let known = [
        ("Cargo.toml", "cargo test"),
        ("go.mod", "go test ./..."),
        ("pyproject.toml", "python3 -m pytest"),
        ("setup.py", "python3 -m pytest"),
        ("requirements.txt", "python3 -m pytest"),
        ("mix.exs", "mix test"),
        ("pom.xml", "mvn -B test"),
        ("package.json", "npm test"),
    ];
    known.iter().find(|(file, _)| tree.has(file)).map(|(_, line)| (*line).to_owned())
}

impl Needs {
    fn add_input(&mut self, tree: &RepoTree, path: &str) {
        if let Some(id) = tree.ids.get(path) {
            self.inputs.entry(path.to_owned()).or_insert_with(|| id.clone());
        }
    }

    /// Adds the tools of all projects, and their steps unless palisade.toml says `auto = false`.
    fn add_projects(&mut self, tree: &RepoTree, settings: &RepoSettings) -> Result<(), WorkspaceError> {
        let found = find_projects(tree, &settings.prepare)?;
        for project in &found.projects {
            let plan = Plan::make(tree, project, &settings.prepare)?;
            self.add_tool(project);
            for requirement in plan.requirements {
                let same = |known: &&_| **known == requirement;
                if !self.requirements.iter().any(|known| same(&known)) {
                    self.requirements.push(requirement);
                }
            }
            if settings.prepare.auto && !project.is_skipped {
                self.steps.extend(plan.steps);
                self.notes.extend(plan.notes);
                plan.inputs.iter().for_each(|path| self.add_input(tree, path));
            }
        }
        if settings.prepare.auto {
            self.notes.extend(found.notes);
            self.note_unknown(tree, settings);
        }
        self.add_venv(settings);
        Ok(())
    }

    /// Adds a project's tool. Registries and variables belong to the tool, because commands need them, too.
    fn add_tool(&mut self, project: &Project) {
        let ecosystem = project.ecosystem;
        self.tools.insert(ecosystem.tool);
        if self.path.is_empty() {
            self.path.push(LOCAL_BIN);
        }
        self.allow.extend(ecosystem.hosts.iter().map(|host| (*host).to_owned()));
        self.env.extend(ecosystem.env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    }

    /// Adds the virtual environment of Python, into which steps and commands install.
    fn add_venv(&mut self, settings: &RepoSettings) {
        if !self.tools.contains(&PYTHON) {
            return;
        }
        // Python of the virtual environment comes before one that a step installs.
        self.path.insert(0, VENV_BIN);
        let of_python = self.steps.iter().filter(|step| step.tool == Some(PYTHON));
        let required = of_python.clone().any(|step| step.weight == StepWeight::Required);
        if of_python.count() > 0 || !settings.prepare.commands.is_empty() {
            let weight = if required { StepWeight::Required } else { StepWeight::Optional };
            self.steps.insert(0, venv_step(weight));
        }
    }

    /// Notes the manifests at the root for which there is no step.
    fn note_unknown(&mut self, tree: &RepoTree, settings: &RepoSettings) {
        let at_root =
            tree.ids.keys().filter(|path| !path.contains('/') && !settings.prepare.is_skipped(path));
        for path in at_root {
            let Some((_, line)) = WITHOUT_STEP.iter().find(|(ending, _)| path.ends_with(ending)) else {
                continue;
            };
            if path.ends_with(".gemspec") && tree.has("Gemfile") {
                continue;
            }
            self.notes.push(format!(
                "not installed: the packages of {}; palisade.toml: [prepare] commands = [\"{line}\"], allow = [\"HOST:443\"]",
                proto::text::visible(path)
            ));
        }
    }

    fn add_devcontainer(&mut self, place: &str, text: &str, tree: &RepoTree) -> Result<(), WorkspaceError> {
        self.container = devcontainer::read(place, text)?;
        self.add_input(tree, place);
        // A dev container whose command fails comes up, too.
        let commands = self.container.create.iter().cloned();
        self.steps.extend(commands.map(|line| command_step(line, StepWeight::Optional)));
        Ok(())
    }

    fn add_settings(&mut self, settings: RepoSettings, tree: &RepoTree) {
        self.add_input(tree, SETTINGS_FILE);
        settings.prepare.inputs.iter().for_each(|path| self.add_input(tree, path));
        let commands = settings.prepare.commands.into_iter();
        self.steps.extend(commands.map(|line| command_step(line, StepWeight::Required)));
        self.allow.extend(settings.prepare.allow);
        self.env.extend(settings.env);
        self.network = settings.network;
        self.test = settings.test.command.or_else(|| usual_test(tree));
    }
}
