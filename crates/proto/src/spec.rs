//! What a Body was asked to be: written once into its directory, read by every later `pal`.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    BodyId, Layer, LayerId, Limits, SnapshotId,
    template::Base,
    vm::{Engine, Sharing},
    workspace::Workspace,
};

/// The version of `spec.json`.
pub const VERSION: u32 = 1;

/// What becomes of a Body when nobody uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Life {
    /// Stays until it is removed; its upper is on disk.
    Kept,
    /// Ends with the `pal` that made it; its upper is in memory.
    Run,
}

/// A directory or file of the host, seen in a Body because somebody named it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where it is on the host.
    pub source: PathBuf,
    /// Where the Body sees it.
    pub target: PathBuf,
    /// What the Body may do with it.
    pub access: Access,
}

/// What a Body may do with a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// Look.
    #[serde(rename = "ro")]
    ReadOnly,
    /// Change, as far as the host's permissions let the Body's ids.
    #[serde(rename = "rw")]
    ReadWrite,
}

/// What the Body can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Its own loopback.
    Closed,
}

/// A way out for a Body: a proxy on the host decides, name by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    /// The directory of the proxy's socket on the host.
    pub dir: PathBuf,
    /// The names and ports it lets through.
    pub allow: Vec<String>,
}

/// Where the home of a Body's user is, without a leading `/`.
pub const HOME: &str = "home/user";

/// A home that outlives its Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// What it is called; none where the Body has but a copy: a fork, or one that began with a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What it held when the Body was made, nearest first.
    pub layers: Vec<LayerId>,
}

/// What a Body was asked to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Version of this record.
    pub v: u32,
    /// Which Body.
    pub id: BodyId,
    /// When it was made, RFC 3339.
    pub created_at: String,
    /// How it is held.
    pub layer: Layer,
    /// What drives its machine, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// What it starts from.
    pub template: String,
    /// Snapshots below its upper, nearest first.
    #[serde(default)]
    pub snapshots: Vec<SnapshotId>,
    /// The root below those, where it is not the host's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// The Body it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<BodyId>,
    /// How much it may use.
    pub limits: Limits,
    /// Environment of every process in it.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// What it sees of the host by name.
    #[serde(default)]
    pub mounts: Vec<Mount>,
    /// How a machine sees them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Sharing>,
    /// Repositories in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workspaces: Vec<Workspace>,
    /// A home of its own, apart from the rest of its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<Home>,
    /// Lines of shell that run at each of its starts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at_start: Vec<String>,
    /// Ports in it that somebody will want to reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// Where commands run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Who runs commands.
    pub user: String,
    /// What it can reach.
    pub network: Network,
    /// A way out to names, while somebody on the host serves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// What becomes of it.
    pub life: Life,
    /// Which host ids stand behind its ids.
    pub ids: Ids,
}

impl Spec {
    /// As it is shown to people and written into events: variables by their names alone, for their values may be secrets.
    pub fn shown(&self) -> serde_json::Value {
        let mut shown = serde_json::to_value(self).unwrap_or_default();
        shown["env"] = self.env.keys().cloned().collect();
        // Where on the host its socket is helps nobody.
        if let Some(egress) = &self.egress {
            shown["egress"] = serde_json::json!({ "allow": egress.allow });
        }
        shown
    }
}

/// Which host ids stand behind a Body's ids.
///
/// Invariant: host id 0 stands behind none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// User ids.
    pub users: Vec<IdRange>,
    /// Group ids.
    pub groups: Vec<IdRange>,
}

/// A run of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    /// First id in the Body.
    pub inside: u32,
    /// First id on the host.
    pub outside: u32,
    /// How many.
    pub count: u32,
}

/// The id of `user` in every Body.
pub const USER_ID: u32 = 1000;

impl Ids {
    /// The host's user id behind a user id inside.
    pub fn user_outside(&self, inside: u32) -> Option<u32> {
        outside(&self.users, inside)
    }

    /// The host's group id behind a group id inside.
    pub fn group_outside(&self, inside: u32) -> Option<u32> {
        outside(&self.groups, inside)
    }

    /// Whether there is a root inside.
    pub fn has_root(&self) -> bool {
        self.user_outside(0).is_some()
    }
}

fn outside(ranges: &[IdRange], inside: u32) -> Option<u32> {
    ranges
        .iter()
        .find(|range| inside >= range.inside && inside - range.inside < range.count)
        .map(|range| range.outside + (inside - range.inside))
}
