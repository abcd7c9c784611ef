//! A glance at a Body's work: its commits, and when a file was changed last. It reads no file's contents and starts no git.

use std::{collections::BTreeSet, fs::File, os::fd::AsFd, path::PathBuf, time::SystemTime};

use crate::{overlay_reader::OverlayDir, refs, save::BodyWorkspace};

/// Most entries that are looked at; a larger upper counts as changed.
const ENTRIES_MAX: usize = 4096;

/// The result of a glance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkGlance {
    /// The commits of HEAD and of all branches, except the one that the Body began with.
    pub tips: BTreeSet<String>,
    /// The changes of files outside of `.git`.
    pub files: FileChanges,
}

/// Changes of files outside of `.git`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileChanges {
    /// There is none.
    Untouched,
    /// The last one was at this time. Ignored files count, too.
    Last(SystemTime),
    /// There are too many to look at, or some cannot be read.
    Unclear,
}

/// Glances at a workspace. `inherited` are the snapshots below it that hold work of another Body.
pub fn glance(source: &BodyWorkspace, inherited: &[PathBuf]) -> WorkGlance {
    let changed = source.changed();
    let given = source.workspace.layers.first().map(|id| source.layers.join(id.as_str()).join("root"));
    let all: Vec<PathBuf> = changed.iter().cloned().chain(given).collect();
    let refs = OverlayDir::open(&all).ok().and_then(|top| top.dir(".git")).map(|git| refs::read(&git));
    let Some(refs) = refs else { return WorkGlance { tips: BTreeSet::new(), files: FileChanges::Unclear } };
    let tips = refs.branches.into_values().chain(refs.head).filter(|id| *id != source.workspace.commit);
    let area = source.workspace.area_dir();
    let places = [source.upper.join(&area)].into_iter().chain(inherited.iter().map(|dir| dir.join(&area)));
    WorkGlance {
        tips: tips.collect(),
        files: places.fold(FileChanges::Untouched, |known, dir| join(known, look(dir))),
    }
}

fn look(dir: PathBuf) -> FileChanges {
    let opened = match File::open(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return FileChanges::Untouched,
        opened => opened,
    };
    match opened.and_then(|dir| sys::tree::newest_change(dir.as_fd(), c".git", ENTRIES_MAX)) {
        Ok(None) => FileChanges::Untouched,
        Ok(Some(at)) => FileChanges::Last(at),
        Err(_) => FileChanges::Unclear,
    }
}

fn join(one: FileChanges, other: FileChanges) -> FileChanges {
    match (one, other) {
        (FileChanges::Unclear, _) | (_, FileChanges::Unclear) => FileChanges::Unclear,
        (FileChanges::Untouched, known) | (known, FileChanges::Untouched) => known,
        (FileChanges::Last(one), FileChanges::Last(other)) => FileChanges::Last(one.max(other)),
    }
}
