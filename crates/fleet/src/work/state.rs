//! The state of a Body's work as far as it is known without reading its files, for listings.
//!
//! A save notes the state that it found in `recorded`, and the time of that in the file's modification time; a landing
//! notes in `landed` which commits landed.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    time::SystemTime,
};

use body::snapshot;
use proto::{BodyId, Spec, workspace::Workspace};
use serde::{Deserialize, Serialize};
use workspace::{BodyWorkspace, FileChanges, LandSelection, SaveResult, WorkGlance};

use crate::{BodyView, Fleet, Status, Workspaces};

/// The file beside a quarantine with the commits that landed, one in each line.
const LANDED: &str = "landed";

/// The state of the work in a workspace, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkState {
    /// There is none.
    None,
    /// All of it landed.
    Landed,
    /// Files were changed after the last save. They may be ignored ones, such as build products.
    Changed,
    /// Some of it did not land.
    Unlanded,
    /// It cannot be known without reading the Body's disk.
    Unknown,
}

impl WorkState {
    /// The state as a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Landed => "landed",
            Self::Changed => "changed",
            Self::Unlanded => "unlanded",
            Self::Unknown => "unknown",
        }
    }
}

/// The parts of a [`SaveResult`] from which the state follows.
#[derive(Debug, Deserialize)]
struct SavedNote {
    base: String,
    head: String,
    wip: String,
    branches: std::collections::BTreeMap<String, String>,
}

/// A saved state and its time.
#[derive(Debug)]
struct LastSave {
    note: SavedNote,
    at: SystemTime,
}

impl Workspaces<'_> {
    /// The state of the work in each workspace of a Body, in the order of its spec. This is cheap: it reads the refs of
    /// the Body's git and the times of changed files.
    pub fn states(&self, view: &BodyView) -> Vec<WorkState> {
        let Ok(sources) = self.sources(&view.spec) else { return Vec::new() };
        let inherited = inherited_work(self.fleet, &view.spec);
        sources.iter().map(|source| state_of(source, view.status, &inherited)).collect()
    }
}

fn state_of(source: &BodyWorkspace, status: Status, inherited: &[PathBuf]) -> WorkState {
    let dir = notes_dir(source);
    let (saved, landed) = (read_saved(&dir), read_landed(&dir));
    let glance = match (source.upper.is_dir(), &saved) {
        (true, _) => workspace::glance(source, inherited),
        // The upper is a disk image, and stopping the Body has saved its work.
        (false, Some(saved)) if status == Status::Stopped => glance_of_save(saved, &source.workspace),
        (false, _) => return WorkState::Unknown,
    };
    judge(&glance, saved.as_ref(), &landed)
}

/// Gives a fork the notes of its parent: commits that landed from there have landed.
pub(crate) fn inherit_landed(fleet: &Fleet, parent: &Spec, fork: &BodyId) {
    for workspace in &parent.workspaces {
        let notes = |body: &BodyId| fleet.body_path(body).join("git").join(&workspace.name);
        let Ok(landed) = fs::read(notes(&parent.id).join(LANDED)) else { continue };
        let to = notes(fork);
        // Without the note, a listing says `unlanded`.
        let _ = fs::create_dir_all(&to).and_then(|()| fs::write(to.join(LANDED), landed));
    }
}

/// The snapshots below a Body that hold work of the Body it began with; a dependency layer holds none.
fn inherited_work(fleet: &Fleet, spec: &Spec) -> Vec<PathBuf> {
    let dirs = spec.snapshots.iter().map(|id| fleet.snapshots().path(id));
    dirs.filter(|dir| snapshot::read(dir).is_ok_and(|manifest| manifest.dependency.is_none())).collect()
}

/// Notes when a save began to read the work.
pub(super) fn note_save_time(recorded: &Path, at: SystemTime) {
    // Without the time, a listing says `changed` where it could say more.
    let _ = File::options().write(true).open(recorded).and_then(|file| file.set_modified(at));
}

/// Notes which commits landed.
pub(super) fn note_landed(source: &BodyWorkspace, saved: &SaveResult, what: &LandSelection) {
    let landed = match what {
        LandSelection::All | LandSelection::AllWithMessage(_) | LandSelection::Squash { .. } => {
            format!("{}\n{}\n", saved.head, saved.wip)
        }
        LandSelection::Committed => format!("{}\n", saved.head),
        LandSelection::Pick(_) => return,
    };
    // Without the note, a listing says `unlanded`.
    let _ = fs::write(notes_dir(source).join(LANDED), landed);
}

fn notes_dir(source: &BodyWorkspace) -> PathBuf {
    source.dir.join("git").join(&source.workspace.name)
}

fn read_saved(dir: &Path) -> Option<LastSave> {
    let path = dir.join("recorded");
    let note = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
    Some(LastSave { note, at: fs::metadata(&path).and_then(|found| found.modified()).ok()? })
}

fn read_landed(dir: &Path) -> BTreeSet<String> {
    fs::read_to_string(dir.join(LANDED)).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn glance_of_save(saved: &LastSave, workspace: &Workspace) -> WorkGlance {
    let tips = saved.note.branches.values().chain([&saved.note.head]);
    WorkGlance {
        tips: tips.filter(|id| **id != workspace.commit).cloned().collect(),
        files: FileChanges::Last(SystemTime::UNIX_EPOCH),
    }
}

fn judge(glance: &WorkGlance, saved: Option<&LastSave>, landed: &BTreeSet<String>) -> WorkState {
    if !glance.tips.is_subset(landed) {
        return WorkState::Unlanded;
    }
    let committed = if glance.tips.is_empty() { WorkState::None } else { WorkState::Landed };
    match (glance.files, saved) {
        (FileChanges::Untouched, _) => committed,
        (FileChanges::Last(at), Some(saved)) if at <= saved.at => match &saved.note {
            note if note.wip == note.base || note.wip == note.head => committed,
            note if landed.contains(&note.wip) => WorkState::Landed,
            _ => WorkState::Unlanded,
        },
        _ => WorkState::Changed,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_state_follows_from_commits_times_and_notes() {
        let time = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let saved = |head: &str, wip: &str| LastSave {
            note: SavedNote {
                base: "base".into(),
                head: head.into(),
                wip: wip.into(),
                branches: Default::default(),
            },
            at: time(10),
        };
        let (early, late) = (FileChanges::Last(time(9)), FileChanges::Last(time(11)));
        let check = |tips: &[&str], files, saved: Option<&LastSave>, landed: &[&str], expected| {
            let set = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<BTreeSet<_>>();
            let glance = WorkGlance { tips: set(tips), files };
            assert_eq!(judge(&glance, saved, &set(landed)), expected, "{glance:?} {saved:?} {landed:?}");
        };
        let untouched = FileChanges::Untouched;
        check(&[], untouched, None, &[], WorkState::None);
        check(&["c"], untouched, None, &[], WorkState::Unlanded);
        check(&["c"], untouched, None, &["c", "w"], WorkState::Landed);
        check(&["c", "other"], untouched, None, &["c", "w"], WorkState::Unlanded);
        check(&[], late, None, &[], WorkState::Changed);
        check(&[], late, Some(&saved("base", "base")), &[], WorkState::Changed);
        check(&[], early, Some(&saved("base", "base")), &[], WorkState::None);
        check(&[], early, Some(&saved("base", "w")), &[], WorkState::Unlanded);
        check(&[], early, Some(&saved("base", "w")), &["base", "w"], WorkState::Landed);
        check(&["c"], early, Some(&saved("c", "c")), &["c"], WorkState::Landed);
        check(&["c"], early, Some(&saved("c", "w")), &["c"], WorkState::Unlanded);
        check(&["c"], late, Some(&saved("c", "w")), &["c", "w"], WorkState::Changed);
        check(&[], FileChanges::Unclear, Some(&saved("base", "base")), &[], WorkState::Changed);
    }
}
