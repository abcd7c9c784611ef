//! Detects what a repository needs before its tests run, from its manifests, lockfiles, devcontainer.json and
//! palisade.toml.
//!
//! Trust: these files come from a repository. They decide what runs in a Body and which names that Body may
//! reach while it is being prepared; they never decide what runs on the host.

mod devcontainer;
mod ecosystems;
mod find;
mod host_toolchains;
mod hosts;
mod jsonc;
mod managers;
mod members;
mod needs;
mod node;
mod projects;
mod python;
mod requirement;
mod settings;
#[cfg(test)]
mod shapes;
mod tools;
mod tree;
mod versions;

pub use devcontainer::{Devcontainer, DevcontainerRoot, VariableContext};
pub use find::{NeedsRequest, needs};
pub use host_toolchains::{HostToolchain, HostToolchains, find_toolchains};
pub use hosts::registries;
pub use needs::{Needs, PrepareStep, StepWeight};
pub use requirement::{ToolRequirement, VersionRange};
pub use settings::NetworkSettings;
pub use tools::Tool;
