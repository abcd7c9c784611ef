//! The result of the detection: the steps, notes, tool requirements, names and variables of a repository.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    devcontainer::Devcontainer, requirement::ToolRequirement, settings::NetworkSettings, tools::Tool,
};

/// Whether the failure of a step ends the preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepWeight {
    /// The repository cannot be worked on without the step: a step at its root, or one that palisade.toml or
    /// devcontainer.json names.
    Required,
    /// The failure of the step is a warning, and the Body comes up *prepared in part*.
    Optional,
}

/// One step that prepares a Body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareStep {
    /// A short name for people, such as `npm ci`; unique only together with `dir`.
    pub name: String,
    /// The directory in which it runs, below the workspace; empty for its top.
    pub dir: String,
    /// The shell line.
    pub line: String,
    /// The file that makes the step, which `skip` in palisade.toml can name; empty for a command.
    pub source: String,
    /// The tool that it needs.
    pub tool: Option<Tool>,
    /// Whether its failure ends the preparation.
    pub weight: StepWeight,
}

impl PrepareStep {
    /// Names the step and its directory, such as `npm ci in web`.
    pub fn title(&self) -> String {
        let name = proto::text::visible(&self.name);
        if self.dir.is_empty() { name } else { format!("{name} in {}", proto::text::visible(&self.dir)) }
    }
}

/// The steps, names and variables that a repository needs before its tests run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// The prepare steps, in order.
    pub steps: Vec<PrepareStep>,
    /// One line for each thing that no step does, with the line that does it, and for each choice between
    /// package managers.
    pub notes: Vec<String>,
    /// The tools and their versions that the steps need. A tool that any version satisfies is listed, too.
    pub requirements: Vec<ToolRequirement>,
    /// Host names that the steps may reach, with those of the tools' registries.
    pub allow: BTreeSet<String>,
    /// Variables of every command, in the steps and later.
    pub env: BTreeMap<String, String>,
    /// Directories in front of the usual `PATH`, in order; toolchains of the host follow them.
    pub path: Vec<&'static str>,
    /// Files that decide about the steps, with their blob ids.
    pub inputs: BTreeMap<String, String>,
    /// The tools of the repository's manifests, also when no step runs.
    pub tools: BTreeSet<Tool>,
    /// The shell line that runs the tests.
    pub test: Option<String>,
    /// The settings of devcontainer.json.
    pub container: Devcontainer,
    /// The network of Bodies, apart from the steps.
    pub network: NetworkSettings,
}
