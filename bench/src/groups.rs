//! Cgroups that peers leave behind, mostly after failures.
//!
//! Invariant: only empty cgroups are removed, and only those that this run may have made.

use std::{
    fs,
    path::{Path, PathBuf},
};

const ROOT: &str = "/sys/fs/cgroup";
/// Podman's own cgroup, which it makes and never removes.
const PODMAN: &str = "libpod_parent";

/// The cgroups before the run.
#[derive(Debug)]
pub struct CgroupsBefore {
    podman: Vec<PathBuf>,
}

impl CgroupsBefore {
    /// Lists the cgroups.
    pub fn look() -> Self {
        Self {
            podman: hierarchies()
                .into_iter()
                .map(|dir| dir.join(PODMAN))
                .filter(|dir| dir.exists())
                .collect(),
        }
    }

    /// Removes the cgroups that are new.
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

/// The kernel refuses to remove a cgroup that is not empty.
fn remove(dir: &Path) {
    below(dir).iter().for_each(|dir| remove(dir));
    let _ = fs::remove_dir(dir);
}
