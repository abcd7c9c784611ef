//! Cgroups that peers leave behind, most of all where they fail.
//!
//! Invariant: only empty groups are removed, and only such as this run can have made.

use std::{
    fs,
    path::{Path, PathBuf},
};

const ROOT: &str = "/sys/fs/cgroup";
/// Podman's own, which it makes and never removes.
const PODMAN: &str = "libpod_parent";

/// What was there before.
#[derive(Debug)]
pub struct CgroupsBefore {
    podman: Vec<PathBuf>,
}

impl CgroupsBefore {
    /// Looks.
    pub fn look() -> Self {
        Self {
            podman: hierarchies()
                .into_iter()
                .map(|dir| dir.join(PODMAN))
                .filter(|dir| dir.exists())
                .collect(),
        }
    }

    /// Removes what came since.
    pub fn restore(&self) {
        let ours = format!("palbench{}", std::process::id());
        for hierarchy in hierarchies() {
            let named = below(&hierarchy).into_iter().filter(|dir| name(dir).starts_with(&ours));
            named.for_each(|dir| remove(&dir));
            let podman = hierarchy.join(PODMAN);
            if !self.podman.contains(&podman) {
                remove(&podman);
            }
        }
    }
}

fn hierarchies() -> Vec<PathBuf> {
    let mut found = below(Path::new(ROOT));
    found.push(ROOT.into());
    found
}

fn below(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && !path.is_symlink())
        .collect()
}

fn name(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The kernel refuses what is not empty.
fn remove(dir: &Path) {
    below(dir).iter().for_each(|dir| remove(dir));
    let _ = fs::remove_dir(dir);
}
