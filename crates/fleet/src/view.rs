//! The views that the fleet returns to callers.

use proto::{
    AgentId, BodyId, Enforcement, SnapshotId, Spec, event_data::MissingStep, launch::GuestEnd,
    tree::OmittedKind, vm::StartReport,
};
use serde::Serialize;

/// The status of a Body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Its guest runs.
    Running,
    /// Its processes are frozen, or its memory is suspended to disk.
    Paused,
    /// It was stopped; it can be started.
    Stopped,
    /// Its guest died; `end` says why. It can be started.
    Dead,
    /// It ran when the host restarted. Its files are intact; it can be started.
    Interrupted,
}

impl Status {
    /// The status as a word, for the command line, the API and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Status::Running => "running",
            Status::Paused => "paused",
            Status::Stopped => "stopped",
            Status::Dead => "dead",
            Status::Interrupted => "interrupted",
        }
    }
}

/// A Body as callers see it, without secrets.
#[derive(Debug, Clone, Serialize)]
pub struct BodyView {
    /// Its spec.
    #[serde(flatten, serialize_with = "shown")]
    pub spec: Spec,
    /// Its status.
    pub status: Status,
    /// The reason why its guest ended, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<GuestEnd>,
    /// The guest's pid on the host, if it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Its enforcement record: the mechanisms that confine it.
    pub enforcement: Enforcement,
    /// The prepare steps that it lacks: it is prepared only in part.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_steps: Vec<MissingStep>,
    /// How its microVM started; `None` on layers without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receipt: Option<StartReport>,
}

fn shown<S: serde::Serializer>(spec: &Spec, to: S) -> Result<S::Ok, S::Error> {
    spec.without_secrets().serialize(to)
}

impl BodyView {
    /// The Body's id.
    pub fn id(&self) -> &BodyId {
        &self.spec.id
    }
}

/// A snapshot as callers see it.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotView {
    /// Its id.
    pub id: SnapshotId,
    /// The name that the user gave it.
    pub name: Option<String>,
    /// The Body of which it was taken.
    pub body: BodyId,
    /// The API key that owned that Body.
    #[serde(skip)]
    pub owner: Option<String>,
    /// The time at which it was taken.
    pub created_at: String,
    /// The size in bytes of the changes that it holds.
    pub bytes: u64,
    /// Whether it was taken for forks; then it is removed with the last of them.
    #[serde(skip)]
    pub for_forks: bool,
    /// The agent whose checkpoint it belongs to; then it is removed with that agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_of: Option<AgentId>,
}

/// The end of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExecEnd {
    /// The exit code that a shell would report (128 + signal if a signal ended the command).
    pub code: i32,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Whether the kernel's OOM killer killed a process in the Body while the command ran.
    pub out_of_memory: bool,
    /// Whether it was killed at its timeout.
    pub timed_out: bool,
    /// The reason why the Body ended before the command, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_end: Option<GuestEnd>,
}

/// An item that `gc` removed or would remove.
#[derive(Debug, Clone, Serialize)]
pub struct GarbageItem {
    /// The kind, such as `body`, `snapshot`, `layer`, `cgroup` or `temporary`.
    pub kind: &'static str,
    /// The name.
    pub name: String,
    /// The size.
    pub bytes: u64,
    /// The reason why it is garbage.
    pub why: String,
}

/// The totals of a copy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyTotals {
    /// The number of files, links and directories.
    pub entries: u64,
    /// The bytes of file contents, without holes.
    pub bytes: u64,
    /// The entries that were left out.
    pub omitted: OmittedEntries,
}

/// Entries that a copy left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct OmittedEntries {
    /// How many there are.
    pub count: u64,
    /// How many of them are git directories, or files that lead to one.
    pub git_count: u64,
    /// The first ones by name.
    pub first: Vec<OmittedEntry>,
}

/// An entry that a copy left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OmittedEntry {
    /// Its path below the source, with control characters escaped.
    pub path: String,
    /// Its kind.
    pub kind: OmittedKind,
}

impl OmittedEntries {
    /// How many entries are named.
    const NAMED_MAX: usize = 20;

    pub(crate) fn add(&mut self, path: &[u8], kind: OmittedKind) {
        self.count += 1;
        self.git_count += u64::from(kind == OmittedKind::Git);
        if self.first.len() < Self::NAMED_MAX {
            self.first.push(OmittedEntry { path: proto::text::visible_bytes(path), kind });
        }
    }
}
