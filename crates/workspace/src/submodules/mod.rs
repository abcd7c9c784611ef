//! Submodules: their files come in as layers, and what a Body does there goes back to repositories of their own.
//!
//! In a Body they are plain files without a `.git`: git takes their directory for a submodule that nobody initialised,
//! and looks no further. So each is a small workspace inside the workspace, read and saved as that is: in the
//! repository that the host has for the submodule, under the same name, on top of the commit it began with.
//!
//! Invariant: what a Body does in a submodule is saved, or named as left out; the repository around it keeps the link.

mod import;
mod work;

pub use import::import;
pub use work::{SavedModule, SubmoduleWork, look, save};
