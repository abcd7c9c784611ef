//! Repositories in, commits out: makes the layers of a workspace, and brings a Body's work back to the user's
//! repository.
//!
//! Invariant: git never runs on the host in a directory that a Body could write. The host reads a Body's
//! files as plain files and makes git objects of them in a quarantine repository first.
//! Invariant: a Body's work reaches the user's repository only under `refs/palisade/BODY/`, checked by git's own fsck;
//! a branch moves only when the user lands.
//! Absent on purpose: events, locks of Bodies, printing. `fleet` does the first two, `cli` the last.

mod bare_repo;
#[cfg(test)]
mod bounds;
mod context_archive;
mod detect;
mod error;
mod files;
mod fsmonitor_index;
mod git;
mod git_batch;
mod git_dir_layer;
mod ignore;
mod import;
mod import_objects;
mod index;
mod land;
mod lfs;
mod objects;
mod overlay_diff;
mod overlay_reader;
mod pack_writer;
mod partial_clone;
mod publish;
mod quarantine;
mod refs;
mod repository;
mod review;
mod save;
mod submodules;
mod tree_layer;
mod tree_writer;
mod unsaved;
mod upper;

pub use context_archive::{pack, text};
pub use detect::{
    Devcontainer, DevcontainerRoot, Needs, PrepareStep as NeedsStep, Tool, VariableContext, needs,
    registries, rust_of,
};
pub use error::WorkspaceError;
pub use git::{Git, GitError, GitIdentity, GitReason};
pub use import::{ImportRequest, ImportedWorkspace, UncommittedFiles, import};
pub use land::{LandRequest, LandResult, LandSelection, LandTarget, conflicting, land};
pub use lfs::pointers as lfs_pointers;
pub use quarantine::{Quarantine, QuarantineView, TIME_MAX};
pub use refs::namespace;
pub use repository::Repository;
pub use review::{ChangedFile, Commit, DiffFormat, diff, is_auto_executed, log, touched};
pub use save::{
    BodyWorkspace, SaveResult, SavedModule, SkippedPath, WorkPart, WorkTrees, forget, look, release, save,
    write_refs,
};
pub use tree_layer::id_of as layer_id;
pub use unsaved::{UnsavedChanges, find_unsaved};

use std::path::PathBuf;

use body::programs::Programs;

/// The directory in which layers are made and kept.
#[derive(Debug, Clone, Copy)]
pub struct LayerStore<'a> {
    /// The launcher, which writes files under a layer's ids.
    pub programs: &'a Programs,
    /// The directory of all layers.
    pub layers: &'a PathBuf,
    /// The time now, RFC 3339.
    pub now: &'a str,
}
