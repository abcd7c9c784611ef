//! Finds the files of a commit that layers of a preparation hide.
//!
//! A preparation may change or delete tracked files, and a layer of it is below Bodies of other commits, too. There it
//! would hide the user's newer version of such a file, and a landing would undo the user's change.
//!
//! Trust: the steps of a repository wrote the layers; see [`crate::overlay_reader`].

use std::path::{Path, PathBuf};

use proto::workspace::Workspace;

use crate::{
    error::{ErrorContext, WorkspaceError},
    index::IndexNames,
    overlay_reader::{DEPTH_MAX, OverlayDir, OverlayEntry},
    save::index_of_files,
};

/// The mode of a submodule's commit in an index.
const LINK: u32 = 0o160_000;

/// Finds the topmost paths in `snapshots`, nearest first, that hide files which a workspace begins with. `layers` is the
/// directory of all layers.
pub fn hidden_files(
    workspace: &Workspace,
    layers: &Path,
    snapshots: &[PathBuf],
) -> Result<Vec<Vec<u8>>, WorkspaceError> {
    let names = IndexNames::of(&index_of_files(workspace, layers, "")?)?;
    let dirs: Vec<PathBuf> = snapshots.iter().map(|dir| dir.join(workspace.area_dir())).collect();
    let mut found = Vec::new();
    let top = OverlayDir::open(&dirs).during("open a dependency layer")?;
    collect(&names, &top, b"", 0, &mut found)?;
    Ok(found)
}

fn collect(
    names: &IndexNames,
    dirs: &OverlayDir,
    at: &[u8],
    depth: usize,
    found: &mut Vec<Vec<u8>>,
) -> Result<(), WorkspaceError> {
    for (name, entry) in dirs.entries().during("list a directory of a dependency layer")? {
        let path = if at.is_empty() { name } else { [at, b"/", &name].concat() };
        let holds = names.holds(&path);
        match entry {
            // The files of a submodule have an index of their own.
            OverlayEntry::Dir(_) if names.mode_and_id(&path).is_some_and(|(mode, _)| mode == LINK) => {}
            OverlayEntry::Dir(inner) if holds && !inner.hides && depth < DEPTH_MAX => {
                let inside = dirs.enter(&inner).during("open a directory of a dependency layer")?;
                collect(names, &inside, &path, depth + 1, found)?;
            }
            _ if holds || names.contains(&path) => found.push(path),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::pack_writer::ObjectId;

    #[test]
    fn only_paths_that_the_commit_has_are_hidden() {
        let top = std::env::temp_dir().join(format!("palisade-hidden-{}", std::process::id()));
        let _ = fs::remove_dir_all(&top);
        for dir in ["node_modules/src", "src/__pycache__", "lib", "module/x", "now-a-dir/x"] {
            fs::create_dir_all(top.join(dir)).unwrap();
        }
        for file in ["node_modules/src/a", "src/a", "src/__pycache__/a", "lib/new", "module/a", "docs", "new"]
        {
            fs::write(top.join(file), "").unwrap();
        }
        let mut names = IndexNames::default();
        for (name, mode) in [
            ("src/a", 0o100_644),
            ("src/b", 0o100_644),
            ("lib/old", 0o100_644),
            ("docs/a", 0o100_644),
            ("now-a-dir", 0o100_644),
            ("module", LINK),
        ] {
            names.push(name.as_bytes(), ObjectId::default(), mode);
        }
        names.sort();
        let mut found = Vec::new();
        collect(&names, &OverlayDir::open(&[top.clone()]).unwrap(), b"", 0, &mut found).unwrap();
        let found: Vec<String> = found.into_iter().map(|path| String::from_utf8(path).unwrap()).collect();
        assert_eq!(found, ["docs", "now-a-dir", "src/a"]);
        fs::remove_dir_all(&top).unwrap();
    }
}
