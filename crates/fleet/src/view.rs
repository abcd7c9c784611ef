//! What callers see of the fleet.

use proto::{BodyId, Enforcement, SnapshotId, Spec, launch::GuestEnd, vm::StartReport};
use serde::Serialize;

/// How a Body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Its guest answers.
    Running,
    /// Frozen.
    Paused,
    /// Ended in order; startable.
    Stopped,
    /// Its guest died; `end` says why. Startable.
    Dead,
    /// It ran before the host's last boot. Startable, its files are intact.
    Interrupted,
}

impl Status {
    /// The word on every surface.
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

/// One Body, as far as anybody may know.
#[derive(Debug, Clone, Serialize)]
pub struct BodyView {
    /// What it was asked to be.
    #[serde(flatten, serialize_with = "shown")]
    pub spec: Spec,
    /// How it is.
    pub status: Status,
    /// Why its guest is gone, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<GuestEnd>,
    /// The guest's pid on the host, if it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// What holds it.
    pub enforcement: Enforcement,
    /// How its machine came to life, on the layer that has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receipt: Option<StartReport>,
}

fn shown<S: serde::Serializer>(spec: &Spec, to: S) -> Result<S::Ok, S::Error> {
    spec.without_secrets().serialize(to)
}

impl BodyView {
    /// Which Body.
    pub fn id(&self) -> &BodyId {
        &self.spec.id
    }
}

/// One snapshot.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotView {
    /// Which.
    pub id: SnapshotId,
    /// The name somebody gave it.
    pub name: Option<String>,
    /// The Body it was taken of.
    pub body: BodyId,
    /// The key of a server whose Body that was.
    #[serde(skip)]
    pub owner: Option<String>,
    /// When.
    pub created_at: String,
    /// Bytes of the change it holds.
    pub bytes: u64,
    /// Taken for forks, it goes with the last of them.
    #[serde(skip)]
    pub for_forks: bool,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExecEnd {
    /// Its exit code, as a shell would give it (128 + signal when a signal ended it).
    pub code: i32,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The kernel killed in this Body for want of memory while it ran.
    pub out_of_memory: bool,
    /// It was killed at its timeout.
    pub timed_out: bool,
    /// Why the Body itself ended under it, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_end: Option<GuestEnd>,
}

/// Something that `gc` removed or would remove.
#[derive(Debug, Clone, Serialize)]
pub struct GarbageItem {
    /// `body`, `snapshot`, `artifact`, `cgroup`, `temporary`.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// What it takes.
    pub bytes: u64,
    /// Why nobody needs it.
    pub why: String,
}

/// What a copy moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CopyTotals {
    /// Files, links and directories.
    pub entries: u64,
    /// Contents.
    pub bytes: u64,
}
