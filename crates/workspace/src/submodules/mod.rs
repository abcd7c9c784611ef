//! Submodules: imports their files as layers, and saves a Body's work in them to their own repositories.
//!
//! In a Body a submodule is plain files without a `.git`, so git there treats it as uninitialised and ignores
//! it. Palisade reads and saves each one as a small workspace of its own: into the repository that the host
//! has for the submodule, under the same refs, on top of the commit that the Body began with.
//!
//! Invariant: work in a submodule is saved or listed as skipped; the outer repository keeps its link.

mod import;
mod work;

pub use import::import;
pub use work::{SavedModule, SubmoduleWork, look, save};
