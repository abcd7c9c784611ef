//! Detects what a repository needs before its tests run, from its lockfiles, devcontainer.json and
//! palisade.toml.
//!
//! Trust: these files come from a repository. They decide what runs in a Body and which names that Body may
//! reach while it is being prepared; they never decide what runs on the host.

mod devcontainer;
mod find;
mod jsonc;
mod lockfiles;
mod rust;
mod settings;
mod tools;

pub use devcontainer::{Devcontainer, DevcontainerRoot, VariableContext};
pub use find::{Needs, PrepareStep, needs};
pub use lockfiles::registries;
pub use rust::rust_of;
pub use tools::Tool;
