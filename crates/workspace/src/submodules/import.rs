//! Imports the files of submodules that the host has, as layers below the repository's own.
//!
//! Trust: paths and names come from the repository; both are checked before they become part of a host path.

use std::path::{Path, PathBuf};

use proto::workspace::Submodule;

use crate::{LayerStore, Repository, error::WorkspaceError, git::Git, tree_layer};

/// Deepest nesting of submodules.
const DEPTH_MAX: usize = 4;
/// Most submodules of one repository.
const COUNT_MAX: usize = 64;

/// Finds all submodules that the host has, and makes the layers of their files that are missing.
pub fn import(
    layer_store: LayerStore<'_>,
    repository: &Repository,
) -> Result<Vec<Submodule>, WorkspaceError> {
    let mut found = Vec::new();
    let modules = repository.common.join("modules");
    if modules.is_dir() {
        below(
            layer_store,
            &ModuleLevel {
                git_dir: &repository.common,
                modules: &modules,
                tree: &repository.tree,
                at: "",
                depth: 0,
            },
            &mut found,
        )?;
    }
    Ok(found)
}

/// A repository and the path of its files.
struct ModuleLevel<'a> {
    git_dir: &'a Path,
    modules: &'a Path,
    tree: &'a str,
    at: &'a str,
    depth: usize,
}

fn below(
    layer_store: LayerStore<'_>,
    level: &ModuleLevel<'_>,
    found: &mut Vec<Submodule>,
) -> Result<(), WorkspaceError> {
    let git = Git::at(level.git_dir);
    for (path, commit) in links(&git, level.tree)? {
        if found.len() >= COUNT_MAX {
            return Ok(());
        }
        let Some(name) = name_of(&git, level.tree, &path) else { continue };
        let dir = level.modules.join(&name);
        let module = Git::at(&dir);
        // A submodule that the host does not have at this commit stays an empty directory.
        let Ok(files) = module.line(["rev-parse", "--verify", "--quiet", &format!("{commit}^{{tree}}")])
        else {
            continue;
        };
        let at = if level.at.is_empty() { path.clone() } else { format!("{}/{path}", level.at) };
        let layer = tree_layer::make_at(layer_store, &dir.join("objects"), &files, &at)?;
        found.push(Submodule { path: at.clone(), repository: dir.clone(), commit, files: layer });
        let modules = dir.join("modules");
        if level.depth < DEPTH_MAX && modules.is_dir() {
            below(
                layer_store,
                &ModuleLevel {
                    git_dir: &dir,
                    modules: &modules,
                    tree: &files,
                    at: &at,
                    depth: level.depth + 1,
                },
                found,
            )?;
        }
    }
    Ok(())
}

/// The submodule links of a tree: their paths and commits.
fn links(git: &Git, tree: &str) -> Result<Vec<(String, String)>, WorkspaceError> {
    let said = git.run(["ls-tree", "-r", "-z", "--full-tree", tree])?;
    let link = |record: &[u8]| {
        let (about, path) = std::str::from_utf8(record).ok()?.split_once('\t')?;
        let commit = about.strip_prefix("160000 commit ")?.trim();
        is_plain(path).then(|| (path.to_owned(), commit.to_owned()))
    };
    Ok(said.split(|byte| *byte == 0).filter_map(link).collect())
}

/// The name that `.gitmodules` gives to the submodule at a path.
fn name_of(git: &Git, tree: &str, path: &str) -> Option<PathBuf> {
    let blob = format!("--blob={tree}:.gitmodules");
    let said = git.run(["config", blob.as_str(), "-z", "--get-regexp", r"^submodule\..*\.path$"]).ok()?;
    let name = |record: &[u8]| {
        let (key, value) = std::str::from_utf8(record).ok()?.split_once('\n')?;
        let name = key.strip_prefix("submodule.")?.strip_suffix(".path")?;
        (value == path && is_plain(name)).then(|| PathBuf::from(name))
    };
    said.split(|byte| *byte == 0).find_map(name)
}

/// Whether a path has no `..`, is relative and does not touch a `.git`.
fn is_plain(path: &str) -> bool {
    path.split('/').all(|part| {
        !part.is_empty() && part != "." && part != ".." && !crate::overlay_diff::is_dot_git(part.as_bytes())
    })
}

#[cfg(test)]
mod tests {
    use super::is_plain;

    #[test]
    fn paths_and_names_lead_down() {
        assert!(["lib", "a/b", "x.y"].into_iter().all(is_plain));
        assert!(!["", "../x", "/x", "a//b", "a/../b", ".git/x", "a/.GIT", "./a"].into_iter().any(is_plain));
    }
}
