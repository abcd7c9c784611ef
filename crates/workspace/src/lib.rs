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
mod glance;
mod hidden_files;
mod ignore;
mod import;
mod import_objects;
mod index;
mod land;
mod land_base;
mod left_out;
mod lfs;
mod merge;
mod objects;
mod overlay_diff;
mod overlay_reader;
mod pack_writer;
mod partial_clone;
mod publish;
mod quarantine;
mod refs;
mod replay;
mod repository;
mod review;
mod save;
mod submodules;
mod sync;
mod tree_layer;
mod tree_writer;
mod unsaved;
mod upper;

pub use context_archive::{pack, text};
pub use detect::{
    Devcontainer, DevcontainerRoot, HostToolchain, HostToolchains, Needs, NeedsRequest, NetworkSettings,
    PrepareStep as NeedsStep, StepWeight, Tool, ToolRequirement, VariableContext, VersionRange,
    find_toolchains, needs, registries,
};
pub use error::WorkspaceError;
pub use git::{Git, GitError, GitIdentity, GitReason};
pub use glance::{FileChanges, WorkGlance, glance};
pub use hidden_files::hidden_files;
pub use import::{ImportRequest, ImportedWorkspace, UncommittedFiles, import};
pub use land::{
    LandPlan, LandRequest, LandResult, LandSelection, LandTarget, conflicting, free_branch, land,
};
pub use land_base::record_sync;
pub use left_out::{LeftOut, OtherBranch};
pub use lfs::pointers as lfs_pointers;
pub use merge::{MergedWork, merge_work};
pub use quarantine::{Quarantine, QuarantineView, TIME_MAX};
pub use refs::namespace;
pub use repository::{Repository, remote_addresses};
pub use review::{ChangedFile, Commit, DiffFormat, diff, is_auto_executed, log, touched};
pub use save::{
    BodyWorkspace, SaveResult, SavedModule, SkippedPath, WorkPart, WorkTrees, forget, look, release, save,
    write_refs,
};
pub use sync::{SyncPack, make_commit_pack, make_sync_pack};
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
