//! A Body's files on the host: its upper and the snapshots below, of a workspace or of a submodule inside of it.
//!
//! Trust: everything here is a Body's; see [`crate::overlay_reader`]. A `.git` that is a file is followed to one place only:
//! below the `.git` of the same workspace.

use std::path::PathBuf;

use body::snapshot;

use crate::{
    BodyWorkspace,
    error::{ErrorContext, WorkspaceError},
    overlay_reader::{self, OverlayDir, OverlayEntry},
    quarantine::QuarantineView,
};

/// Longest `.git` that is a file.
const GITFILE_LEN_MAX: u64 = 4096;

/// A Body's files, open to be read.
#[derive(Debug)]
pub(crate) struct UpperFiles {
    /// Nearest first.
    changed: Vec<PathBuf>,
    /// What it was given of a `.git`.
    head: Option<PathBuf>,
    /// Where in the workspace.
    inside: String,
    /// Where commands find the workspace.
    path: String,
}

/// Files of a Body, and what it may have hidden.
#[derive(Debug)]
pub(crate) struct VisibleFiles {
    /// What it changed.
    pub(crate) dirs: OverlayDir,
    /// Whether it sees nothing of what it began with.
    pub(crate) hidden: bool,
}

/// The `.git` of a Body's files.
#[derive(Debug)]
pub(crate) enum BodyGit {
    /// It has none.
    None,
    /// It has this.
    There(OverlayDir),
    /// It leads somewhere else, or is none.
    Odd,
}

impl BodyGit {
    /// Its files, where there are some.
    pub(crate) fn dirs(&self) -> Option<&OverlayDir> {
        if let Self::There(dirs) = self { Some(dirs) } else { None }
    }
}

impl UpperFiles {
    /// Where modes keep something from us, the helper makes a copy that they do not.
    pub(crate) fn open(source: &BodyWorkspace, view: &QuarantineView) -> Result<Self, WorkspaceError> {
        let mut changed = source.changed();
        if !sys::caps::is_host_root() && changed.iter().any(|dir| overlay_reader::hides(dir)) {
            for (number, dir) in changed.iter_mut().enumerate().filter(|(_, dir)| dir.exists()) {
                let to = view.join(&format!("shown{number}"));
                std::fs::create_dir(&to).during("make room for a copy")?;
                // Where that does not work, what cannot be read is told.
                if snapshot::show(&source.programs, &source.ids, dir, &to).is_ok() {
                    *dir = to;
                }
            }
        }
        let given = source.workspace.layers.first().filter(|_| source.inside.is_empty());
        let head = given.map(|id| source.layers.join(id.as_str()).join("root"));
        Ok(Self { changed, head, inside: source.inside.clone(), path: source.workspace.path() })
    }

    fn top(&self) -> Result<OverlayDir, WorkspaceError> {
        OverlayDir::open(&self.changed).during("open the Body's files")
    }

    /// All of it; none where there is no such directory.
    pub(crate) fn visible_files(&self) -> Result<Option<VisibleFiles>, WorkspaceError> {
        let found = self.top()?.down(&self.inside).during("open the Body's files")?;
        Ok(found.map(|(dirs, hidden)| VisibleFiles { dirs, hidden }))
    }

    /// The Body's `.git`: what it changed of it over what it was given.
    pub(crate) fn git_dir(&self) -> Result<BodyGit, WorkspaceError> {
        let all: Vec<PathBuf> = self.changed.iter().chain(&self.head).cloned().collect();
        let top = OverlayDir::open(&all).during("open the Body's files")?;
        let Some((dirs, _)) = top.down(&self.inside).during("open the Body's files")? else {
            return Ok(BodyGit::None);
        };
        Ok(match dirs.get(".git") {
            None | Some(OverlayEntry::Gone) => BodyGit::None,
            Some(OverlayEntry::Dir(inner)) => dirs.enter(&inner).map_or(BodyGit::Odd, BodyGit::There),
            Some(OverlayEntry::File(_)) => self.is_elsewhere(&dirs)?.map_or(BodyGit::Odd, BodyGit::There),
            Some(_) => BodyGit::Odd,
        })
    }

    /// Where a `.git` that is a file leads: for a submodule that the Body made itself, below the `.git` around it.
    fn is_elsewhere(&self, dirs: &OverlayDir) -> Result<Option<OverlayDir>, WorkspaceError> {
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

    /// The objects it added itself.
    pub(crate) fn own_objects(&self, git_dir: &OverlayDir) -> Result<Option<OverlayDir>, WorkspaceError> {
        if self.inside.is_empty() {
            // Without what it was given.
            return Ok(self.top()?.dir(".git").and_then(|git| git.dir("objects")));
        }
        Ok(git_dir.dir("objects"))
    }
}

/// What a `.git` in a directory of a workspace names, where that is below the workspace's own `.git/modules`.
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
