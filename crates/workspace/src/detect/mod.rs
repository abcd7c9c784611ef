//! What a repository needs before its tests run: found in its lockfiles, its devcontainer.json and its palisade.toml.
//!
//! Trust: all of it is text of a repository. It decides what runs in a Body and which names that Body may reach while it
//! is being prepared; it never decides what runs on the host.

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
