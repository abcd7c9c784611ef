//! Repositories in, commits out: tree layers, heads, and the way of a Body's work back to the user's repository.
//!
//! Invariant: git never runs on the host in a directory that a Body could write. What a Body holds is read as plain
//! files, and becomes git objects in a repository of ours first.
//! Invariant: a Body's work reaches the user's repository only under `refs/palisade/BODY/`, checked by git's own fsck;
//! a branch moves only when the user lands.
//! Absent on purpose: events, locks of Bodies, printing. `fleet` does the first two, `cli` the last.

#[cfg(test)]
mod bounds;
mod bring;
mod error;
mod files;
mod git;
mod head;
mod ignore;
mod index;
mod land;
mod lfs;
mod loose;
mod losses;
mod merged;
mod monitor;
mod needs;
mod objects;
mod pack;
mod packing;
mod promised;
mod publish;
mod quarantine;
mod refs;
mod repository;
mod review;
mod save;
mod scratch;
mod submodules;
mod talk;
mod tree;
mod trees;
mod upper;
mod walk;

pub use bring::{Bring, Brought, Dirty, bring};
pub use error::WorkspaceError;
pub use git::{Git, GitError, Person};
pub use land::{How, LandRequest, Landed, What, conflicting, land};
pub use lfs::pointers as lfs_pointers;
pub use losses::{Losses, losses};
pub use needs::{Container, Known, Needs, Root, Step as NeedsStep, Tool, needs, registries, rust_of};
pub use pack::{pack, text};
pub use quarantine::{Quarantine, TIME_MAX, View};
pub use refs::namespace;
pub use repository::Repository;
pub use review::{Commit, Shape, Touched, diff, log, runs_something, touched};
pub use save::{LeftOut, Part, Saved, SavedModule, Source, Work, anchor, forget, look, release, save};
pub use tree::id_of as layer_id;

use std::path::PathBuf;

use body::programs::Programs;

/// Where layers are made and kept.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'a> {
    /// The helper that works under a layer's ids.
    pub programs: &'a Programs,
    /// The directory of all layers.
    pub layers: &'a PathBuf,
    /// The time now, RFC 3339.
    pub now: &'a str,
}
