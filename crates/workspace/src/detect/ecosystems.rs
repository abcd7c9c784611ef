//! The ecosystems: their manifests and lockfiles, and the steps that install the packages of each.

use super::{
    hosts,
    members::{self, MemberPatterns},
    needs::{PrepareStep, StepWeight},
    node,
    projects::{Project, path_in},
    python,
    requirement::ToolRequirement,
    settings::PrepareSettings,
    tools::{CARGO, ELIXIR, GO, GRADLE, MAVEN, NODE, PHP, PYTHON, RUBY, Tool},
    tree::RepoTree,
    versions,
};
use crate::error::WorkspaceError;

/// A kind of manifest, and how to install its packages.
#[derive(Debug)]
pub struct Ecosystem {
    pub tool: Tool,
    /// Names of manifests; one with a `*` in front is an ending.
    pub manifests: &'static [&'static str],
    /// Names of lockfiles.
    pub locks: &'static [&'static str],
    /// Names of further files beside the manifest that decide about the steps.
    pub beside: &'static [&'static str],
    pub hosts: &'static [&'static str],
    /// Variables of every command, in the steps and later.
    pub env: &'static [(&'static str, &'static str)],
    pub members: fn(&RepoTree, &str) -> Result<MemberPatterns, WorkspaceError>,
    pub plan: fn(&mut Plan<'_>) -> Result<(), WorkspaceError>,
}

impl Ecosystem {
    pub fn is_manifest(&self, name: &str) -> bool {
        self.manifests.iter().any(|manifest| match manifest.strip_prefix('*') {
            Some(ending) => name.ends_with(ending),
            None => *manifest == name,
        })
    }
}

pub const ECOSYSTEMS: &[Ecosystem] = &[
    Ecosystem {
        tool: CARGO,
        manifests: &["Cargo.toml"],
        locks: &["Cargo.lock"],
        beside: &["rust-toolchain", "rust-toolchain.toml"],
        hosts: hosts::CRATES,
        env: &[],
        members: members::cargo,
        plan: plan_cargo,
    },
    Ecosystem {
        tool: PYTHON,
        manifests: &[
            "pyproject.toml",
            "setup.py",
            "setup.cfg",
            "Pipfile",
            "requirements.txt",
            "*requirements.txt",
        ],
        locks: &["uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "requirements.txt"],
        beside: &[".python-version", ".tool-versions"],
        hosts: hosts::PYPI,
        env: python::ENV,
        members: members::python,
        plan: python::plan,
    },
    Ecosystem {
        tool: NODE,
        manifests: &["package.json"],
        locks: node::LOCKS,
        beside: &[
            ".npmrc",
            "pnpm-workspace.yaml",
            ".yarnrc.yml",
            "bunfig.toml",
            ".nvmrc",
            ".node-version",
            ".tool-versions",
        ],
        hosts: hosts::NPM,
        env: &[],
        members: members::node,
        plan: node::plan,
    },
    Ecosystem {
        tool: GO,
        manifests: &["go.mod", "go.work"],
        locks: &["go.sum", "go.work.sum"],
        beside: &[],
        hosts: hosts::GO_PROXY,
        env: &[],
        members: members::go,
        plan: plan_go,
    },
    Ecosystem {
        tool: RUBY,
        manifests: &["Gemfile"],
        locks: &["Gemfile.lock"],
        beside: &[".ruby-version", ".tool-versions"],
        hosts: hosts::GEMS,
        env: &[("BUNDLE_PATH", "/home/user/.bundle")],
        members: members::none,
        plan: plan_ruby,
    },
    Ecosystem {
        tool: PHP,
        manifests: &["composer.json"],
        locks: &["composer.lock"],
        beside: &[],
        hosts: hosts::PACKAGIST,
        env: &[],
        members: members::php,
        plan: plan_php,
    },
    Ecosystem {
        tool: ELIXIR,
        manifests: &["mix.exs"],
        locks: &["mix.lock"],
        beside: &[],
        hosts: hosts::HEX,
        env: &[],
        members: members::none,
        plan: plan_elixir,
    },
    Ecosystem {
        tool: MAVEN,
        manifests: &["pom.xml"],
        locks: &[],
        beside: &[],
        hosts: hosts::MAVEN_CENTRAL,
        env: &[],
        members: members::maven,
        plan: plan_maven,
    },
    Ecosystem {
        tool: GRADLE,
        manifests: &["build.gradle", "build.gradle.kts", "settings.gradle", "settings.gradle.kts"],
        locks: &[],
        beside: &["gradle.properties", "gradle/libs.versions.toml"],
        hosts: hosts::MAVEN_CENTRAL,
        env: &[],
        members: members::gradle,
        plan: plan_gradle,
    },
];

/// The steps, notes and requirements of one project while they are collected.
#[derive(Debug)]
pub struct Plan<'a> {
    pub tree: &'a RepoTree,
    pub project: &'a Project,
    settings: &'a PrepareSettings,
    pub steps: Vec<PrepareStep>,
    pub notes: Vec<String>,
    pub requirements: Vec<ToolRequirement>,
    pub inputs: Vec<String>,
}

impl<'a> Plan<'a> {
    /// Plans the steps of a project.
    pub fn make(
        tree: &'a RepoTree,
        project: &'a Project,
        settings: &'a PrepareSettings,
    ) -> Result<Self, WorkspaceError> {
        let inputs =
            project.ecosystem.manifests.iter().chain(project.ecosystem.locks).chain(project.ecosystem.beside);
        let inputs = inputs.map(|name| path_in(&project.dir, name)).filter(|path| tree.has(path)).collect();
        let (steps, notes, requirements) = (Vec::new(), Vec::new(), Vec::new());
        let mut plan = Self { tree, project, settings, steps, notes, requirements, inputs };
        (project.ecosystem.plan)(&mut plan)?;
        if plan.requirements.is_empty() {
            plan.requirements.push(ToolRequirement::any(project.ecosystem.tool, plan.manifest()));
        }
        if !plan.has_lock() {
            // Without a lockfile, the manifests of the members decide about the versions, too.
            plan.inputs.extend(project.members.iter().cloned());
        }
        Ok(plan)
    }

    pub fn path(&self, name: &str) -> String {
        path_in(&self.project.dir, name)
    }

    /// The path of the project's manifest.
    pub fn manifest(&self) -> String {
        let found = self.project.ecosystem.manifests.iter().find(|name| self.has(name));
        self.path(found.copied().unwrap_or_default())
    }

    /// Whether the project has a file that palisade.toml does not skip.
    pub fn has(&self, name: &str) -> bool {
        let path = self.path(name);
        self.tree.has(&path) && !self.settings.is_skipped_file(&path)
    }

    pub fn has_lock(&self) -> bool {
        self.project.ecosystem.locks.iter().any(|lock| self.has(lock))
    }

    /// The text of a file of the project; empty if it is missing.
    pub fn text(&self, name: &str) -> Result<String, WorkspaceError> {
        Ok(self.tree.text(&self.path(name))?.unwrap_or_default())
    }

    /// Adds a step that installs what a lockfile states.
    pub fn install_locked(&mut self, name: impl Into<String>, line: impl Into<String>) {
        self.add(name, line, self.manifest(), self.project.weight);
    }

    /// Adds a step that installs from a manifest alone. Its failure is a warning: the repository states no versions.
    pub fn install_unlocked(&mut self, name: impl Into<String>, line: impl Into<String>) {
        self.add(name, line, self.manifest(), StepWeight::Optional);
    }

    /// Adds a step that installs what one requirements file states.
    pub fn install_requirements(&mut self, file: &str, line: impl Into<String>, weight: StepWeight) {
        self.add(format!("pip install -r {file}"), line, self.path(file), weight);
    }

    /// Adds a step that installs from the lockfile if there is one, else from the manifest.
    fn install(&mut self, name: &str, line: &str) {
        if self.has_lock() { self.install_locked(name, line) } else { self.install_unlocked(name, line) }
    }

    fn add(&mut self, name: impl Into<String>, line: impl Into<String>, source: String, weight: StepWeight) {
        let tool = Some(self.project.ecosystem.tool);
        let dir = self.project.dir.clone();
        self.steps.push(PrepareStep { name: name.into(), dir, line: line.into(), source, tool, weight });
    }
}

fn plan_cargo(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    plan.requirements = versions::rust(plan)?;
    if plan.has_lock() {
        plan.install_locked("cargo fetch --locked", "cargo fetch --locked");
    } else {
        plan.install_unlocked("cargo fetch", "cargo fetch");
    }
    Ok(())
}

fn plan_go(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    plan.requirements = versions::go(plan)?;
    // Vendored modules need no download.
    if plan.has("vendor/modules.txt") {
        return Ok(());
    }
    // The members of go.work have lockfiles of their own, which all count.
    if plan.has_lock() || plan.project.members.iter().any(|member| member.ends_with("go.sum")) {
        plan.install_locked("go mod download", "go mod download");
    } else {
        plan.install_unlocked("go mod download", "go mod download");
    }
    Ok(())
}

fn plan_ruby(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    plan.requirements = versions::ruby(plan)?;
    plan.install("bundle install", "bundle install");
    Ok(())
}

fn plan_php(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    plan.install("composer install", "composer install --no-interaction --no-progress");
    Ok(())
}

fn plan_elixir(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    let hex = "mix local.hex --force --if-missing && mix local.rebar --force --if-missing && ";
    let needs_hex = !plan.has_lock() || plan.text("mix.lock")?.contains("{:hex,");
    plan.install("mix deps.get", &format!("{}mix deps.get", if needs_hex { hex } else { "" }));
    Ok(())
}

/// Java programs ignore the proxy variables, so this tells each Java program of the line about the egress proxy.
const JAVA_PROXY: &str = r#"proxy=${HTTPS_PROXY#*://}; proxy=${proxy%/}; host=${proxy%:*}; port=${proxy##*:}
if [ -n "$proxy" ]; then export JAVA_TOOL_OPTIONS="-Dhttps.proxyHost=$host -Dhttps.proxyPort=$port -Dhttp.proxyHost=$host -Dhttp.proxyPort=$port"; fi
"#;

fn plan_maven(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    plan.install_unlocked(
        "mvn dependency:go-offline",
        format!("{JAVA_PROXY}mvn -B -ntp -q dependency:go-offline"),
    );
    Ok(())
}

fn plan_gradle(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    if plan.has("gradlew") {
        // The wrapper downloads Gradle from servers that are no package registry.
        let wrapper = proto::text::visible(&plan.path("gradlew"));
        plan.notes.push(format!(
            "not installed: the dependencies of {wrapper}; palisade.toml: [prepare] commands = [\"./{wrapper} --no-daemon testClasses\"], \
             allow = [\"services.gradle.org:443\", \"github.com:443\", \"release-assets.githubusercontent.com:443\"]"
        ));
        return Ok(());
    }
    plan.install_unlocked("gradle testClasses", format!("{JAVA_PROXY}gradle --no-daemon -q testClasses"));
    Ok(())
}
