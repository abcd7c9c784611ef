//! Reads and saves a Body's work in submodules, each as a workspace of its own.
//!
//! Trust: a `.git` that a Body created in a submodule is read as plain files by descriptor, like any file of
//! a Body.

use std::collections::BTreeMap;

use proto::{
    event_data::SavedSubmodule,
    workspace::{Submodule, Workspace},
};
use serde::Serialize;

use crate::{
    error::WorkspaceError,
    pack_writer::{ObjectId, id_of},
    save::{self, BodyWorkspace, SaveResult, SkippedPath, WorkPart},
};

/// Why nothing of a submodule was saved.
const REFUSED: &str = "the repository of this submodule refuses the work";
/// Why commits in a submodule were not saved.
const COMMITS: &str = "commits made in this submodule cannot be saved";

/// A Body's work in a submodule, saved in that submodule's repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SavedModule {
    /// The path of the submodule in the workspace.
    pub path: String,
    /// The commit that the Body began with.
    pub base: String,
    /// The HEAD of the Body's own repository in the submodule; `base` if it made none.
    pub head: String,
    /// The commit that holds every file.
    pub wip: String,
    /// Branches that the Body made in the submodule.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub branches: BTreeMap<String, String>,
}

/// The data of a submodule in the event `workspace.saved`.
impl From<SavedModule> for SavedSubmodule {
    fn from(saved: SavedModule) -> Self {
        let SavedModule { path, base, head, wip, branches } = saved;
        Self { path, base, head, wip, branches }
    }
}

/// The submodules, which the outer repository must not save itself.
#[derive(Debug, Default)]
pub struct SubmoduleWork {
    /// Their paths, each with the HEAD of the Body's own repository there.
    pub links: BTreeMap<Vec<u8>, Option<ObjectId>>,
    /// Paths that are saved nowhere.
    pub skipped: Vec<SkippedPath>,
}

impl SubmoduleWork {
    fn add_skipped(&mut self, module: &Submodule, why: &'static str, below: &str) {
        let path = proto::text::visible(&format!("{}{below}", module.path));
        self.skipped.push(SkippedPath { path, why });
    }

    fn add_skipped_below(&mut self, module: &Submodule, skipped: Vec<SkippedPath>) {
        let above = proto::text::visible(&module.path);
        let whole = |left: SkippedPath| SkippedPath { path: format!("{above}/{}", left.path), why: left.why };
        self.skipped.extend(skipped.into_iter().map(whole));
    }
}

/// Saves the work in each submodule.
pub fn save(source: &BodyWorkspace) -> Result<(SubmoduleWork, Vec<SavedModule>), WorkspaceError> {
    let (mut apart, mut modules) = (SubmoduleWork::default(), Vec::new());
    for (module, inner) in touched(source) {
        match save::save(&inner) {
            Ok(saved) => {
                let head = Some(&saved.head).filter(|head| **head != module.commit);
                apart
                    .links
                    .insert(module.path.clone().into_bytes(), head.and_then(|head| id_of(head.as_bytes())));
                if saved.commit_error.is_some() {
                    apart.add_skipped(&module, COMMITS, "/.git");
                }
                apart.add_skipped_below(&module, saved.skipped.clone());
                modules.extend(flatten(&module, saved));
            }
            Err(error) if error.is_full() => return Err(error),
            Err(_) => {
                apart.links.insert(module.path.clone().into_bytes(), None);
                apart.add_skipped(&module, REFUSED, "");
            }
        }
    }
    Ok((apart, modules))
}

/// Reads the work in each submodule; the user's repositories do not change.
pub fn look(source: &BodyWorkspace) -> Result<(SubmoduleWork, Vec<WorkPart>), WorkspaceError> {
    let (mut apart, mut parts) = (SubmoduleWork::default(), Vec::new());
    for (module, inner) in touched(source) {
        apart.links.insert(module.path.clone().into_bytes(), None);
        match save::look(&inner) {
            Ok(work) => {
                apart.add_skipped_below(&module, work.skipped);
                parts.extend(work.parts);
            }
            Err(error) if error.is_full() => return Err(error),
            Err(_) => apart.add_skipped(&module, REFUSED, ""),
        }
    }
    Ok((apart, parts))
}

/// The results of a submodule, if it was changed, and of the submodules inside it.
fn flatten(module: &Submodule, saved: SaveResult) -> Vec<SavedModule> {
    let below = |inner: SavedModule| SavedModule { path: format!("{}/{}", module.path, inner.path), ..inner };
    let inner: Vec<SavedModule> = saved.submodules.into_iter().map(below).collect();
    let idle = saved.wip == saved.base && saved.branches.is_empty();
    let itself = (!idle).then(|| SavedModule {
        path: module.path.clone(),
        base: saved.base,
        head: saved.head,
        wip: saved.wip,
        branches: saved.branches,
    });
    itself.into_iter().chain(inner).collect()
}

/// Each submodule that the Body may have changed, as a workspace of its own. Nested ones belong to the outer
/// submodule.
fn touched(source: &BodyWorkspace) -> Vec<(Submodule, BodyWorkspace)> {
    let all = &source.workspace.submodules;
    let inside = |module: &&Submodule| !all.iter().any(|other| below(&module.path, &other.path).is_some());
    all.iter()
        .filter(inside)
        .map(|module| (module.clone(), of(source, module)))
        .filter(|(_, inner)| inner.is_touched())
        .collect()
}

/// A submodule as a workspace of its own.
fn of(source: &BodyWorkspace, module: &Submodule) -> BodyWorkspace {
    let inner = source.workspace.submodules.iter().filter_map(|other| {
        let path = below(&other.path, &module.path)?.to_owned();
        Some(Submodule { path, ..other.clone() })
    });
    let workspace = Workspace {
        name: source.workspace.name.clone(),
        repository: module.repository.clone(),
        branch: None,
        commit: module.commit.clone(),
        base: module.commit.clone(),
        included: false,
        layers: vec![module.files.clone()],
        submodules: inner.collect(),
    };
    let inside = match source.inside.as_str() {
        "" => module.path.clone(),
        above => format!("{above}/{}", module.path),
    };
    BodyWorkspace { workspace, inside, ..source.clone() }
}

/// The part of `path` below `above`.
fn below<'a>(path: &'a str, above: &str) -> Option<&'a str> {
    path.strip_prefix(above)?.strip_prefix('/')
}
