//! Opens a Body's files on the host: its upper and the snapshots below, for a workspace or a submodule in it.
//!
//! Trust: everything here comes from a Body; see [`crate::overlay_reader`]. If a `.git` is a file, it is
//! followed only to a place below the `.git` of the same workspace.

use std::path::PathBuf;

use body::snapshot;

use crate::{
    BodyWorkspace,
    error::{ErrorContext, WorkspaceError},
    overlay_reader::{self, OverlayDir, OverlayEntry},
    quarantine::QuarantineView,
};

/// Longest `.git` file.
const GITFILE_LEN_MAX: u64 = 4096;

/// The directories of a Body's files on the host.
#[derive(Debug)]
pub(crate) struct UpperFiles {
    /// The upper and the snapshots, topmost first.
    changed: Vec<PathBuf>,
    /// How many of them, from the bottom, a preparation made.
    prepared: usize,
    /// The layer with the `.git` that the Body began with.
    head: Option<PathBuf>,
    /// The path of a submodule; empty for the workspace itself.
    inside: String,
    /// The path of the workspace in the Body.
    path: String,
}

/// A directory of the upper.
#[derive(Debug)]
pub(crate) struct VisibleFiles {
    /// The Body's changes.
    pub(crate) dirs: OverlayDir,
    /// Whether it hides everything that the Body began with.
    pub(crate) hidden: bool,
}

/// The `.git` of a workspace or submodule in a Body.
#[derive(Debug)]
pub(crate) enum BodyGit {
    /// There is none.
    None,
    /// A git directory.
    There(OverlayDir),
    /// It is neither a directory nor a link to one in the workspace's `.git/modules`.
    Odd,
}

impl BodyGit {
    /// The git directory, if there is one.
    pub(crate) fn dirs(&self) -> Option<&OverlayDir> {
        if let Self::There(dirs) = self { Some(dirs) } else { None }
    }
}

impl UpperFiles {
    /// Opens the files. If modes hide some of them from the host's user, the launcher copies them under the
    /// Body's ids first.
    pub(crate) fn open(source: &BodyWorkspace, view: &QuarantineView) -> Result<Self, WorkspaceError> {
        let mut changed = source.changed();
        if !sys::caps::is_host_root() && changed.iter().any(|dir| overlay_reader::hides(dir)) {
            for (number, dir) in changed.iter_mut().enumerate().filter(|(_, dir)| dir.exists()) {
                let to = view.join(&format!("shown{number}"));
                std::fs::create_dir(&to).during("create a directory for copies")?;
                // If the copy fails, the unreadable paths are listed as skipped.
                if snapshot::show(&source.programs, &source.ids, dir, &to).is_ok() {
                    *dir = to;
                }
            }
        }
        let given = source.workspace.layers.first().filter(|_| source.inside.is_empty());
        let head = given.map(|id| source.layers.join(id.as_str()).join("root"));
        let (prepared, inside) = (source.prepared, source.inside.clone());
        Ok(Self { changed, prepared, head, inside, path: source.workspace.path() })
    }

    fn top(&self) -> Result<OverlayDir, WorkspaceError> {
        let (work, prepared) = self.changed.split_at(self.changed.len().saturating_sub(self.prepared));
        OverlayDir::open_above(work, prepared).during("open the Body's files")
    }

    /// The changed files; none if the directory does not exist.
    pub(crate) fn visible_files(&self) -> Result<Option<VisibleFiles>, WorkspaceError> {
        let found = self.top()?.down(&self.inside).during("open the Body's files")?;
        Ok(found.map(|(dirs, hidden)| VisibleFiles { dirs, hidden }))
    }

    /// The Body's `.git`: its changes merged with the one that it began with.
    pub(crate) fn git_dir(&self) -> Result<BodyGit, WorkspaceError> {
        let all: Vec<PathBuf> = self.changed.iter().chain(&self.head).cloned().collect();
        let top = OverlayDir::open(&all).during("open the Body's files")?;
        let Some((dirs, _)) = top.down(&self.inside).during("open the Body's files")? else {
            return Ok(BodyGit::None);
        };
        Ok(match dirs.get(".git") {
            None | Some(OverlayEntry::Gone) => BodyGit::None,
            Some(OverlayEntry::Dir(inner)) => dirs.enter(&inner).map_or(BodyGit::Odd, BodyGit::There),
            Some(OverlayEntry::File(_)) => self.follow_gitfile(&dirs)?.map_or(BodyGit::Odd, BodyGit::There),
            Some(_) => BodyGit::Odd,
        })
    }

    /// Follows a `.git` file: for a submodule that the Body initialised, into the `.git/modules` of the
    /// workspace.
    fn follow_gitfile(&self, dirs: &OverlayDir) -> Result<Option<OverlayDir>, WorkspaceError> {
        let text = dirs.small(".git", GITFILE_LEN_MAX).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let Some(place) = text
            .strip_prefix("gitdir: ")
            .and_then(|place| modules_place(&self.path, &self.inside, place.trim_end()))
        else {
            return Ok(None);
        };
        Ok(self.top()?.down(&place).ok().flatten().map(|(dirs, _)| dirs))
    }

    /// The objects that the Body added.
    pub(crate) fn own_objects(&self, git_dir: &OverlayDir) -> Result<Option<OverlayDir>, WorkspaceError> {
        if self.inside.is_empty() {
            // Read only the Body's changes: the layer's objects are known.
            return Ok(self.top()?.dir(".git").and_then(|git| git.dir("objects")));
        }
        Ok(git_dir.dir("objects"))
    }
}

/// Resolves the target of a `.git` file to a path in the workspace; none if it is not below `.git/modules`.
fn modules_place(workspace: &str, inside: &str, said: &str) -> Option<String> {
    let absolute = said.strip_prefix(workspace).and_then(|rest| rest.strip_prefix('/'));
    if said.starts_with('/') && absolute.is_none() {
        return None;
    }
    let mut parts: Vec<&str> = if absolute.is_some() { Vec::new() } else { inside.split('/').collect() };
    for part in absolute.unwrap_or(said).split('/').filter(|part| !part.is_empty() && *part != ".") {
        match part {
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    matches!(parts[..], [".git", "modules", _, ..]).then(|| parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::modules_place;

    #[test]
    fn a_git_that_is_a_file_leads_below_the_one_around_it() {
        let place = |inside: &str, said: &str| modules_place("/workspace/app", inside, said);
        let there = |text: &str| Some(text.to_owned());
        assert_eq!(place("libs/lib", "../../.git/modules/its name"), there(".git/modules/its name"));
        assert_eq!(
            place("lib", "/workspace/app/.git/modules/a/modules/b"),
            there(".git/modules/a/modules/b")
        );
        for said in [
            "",
            ".",
            "..",
            "../.git",
            "../.git/modules",
            "../../x",
            "../../../../.git/modules/x",
            "/etc",
            "/workspace/application/.git/modules/x",
            "../.git/modules/../../x",
            "sub/.git",
        ] {
            assert_eq!(place("lib", said), None, "{said:?}");
        }
    }
}
