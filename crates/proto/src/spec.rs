//! What a Body was asked to be: written once into its directory, read by every later `pal`.

use std::{collections::BTreeMap, ops::Deref, path::PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use serde_json::{Map, Value};

use crate::{
    BodyId, Layer, LayerId, Limits, SnapshotId,
    template::BodyBase,
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
    /// Change, as far as the host's permissions let the Body's ids; git directories stay read-only.
    #[serde(rename = "rw")]
    ReadWrite,
    /// Change, git directories too: whoever runs git there on the host runs what the Body wrote into them.
    #[serde(rename = "rw,unprotected")]
    Unprotected,
}

impl Access {
    /// Whether a Body may change something there.
    pub fn is_writable(self) -> bool {
        self != Self::ReadOnly
    }

    /// As it stands behind a mount.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "ro",
            Self::ReadWrite => "rw",
            Self::Unprotected => "rw,unprotected",
        }
    }
}

/// What the Body can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Its own loopback.
    Closed,
}

/// The egress policy of a Body: a process of the host connects it to these names, and to nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    /// The names and ports that it may reach, as rules of [`crate::egress::Policy`].
    pub allow: Vec<String>,
}

/// Why a Body was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BodyRole {
    /// For its user.
    #[default]
    Work,
    /// For one step of a preparation or a build: it is garbage once the `pal` that made it is gone.
    Step,
}

impl BodyRole {
    fn is_work(&self) -> bool {
        *self == Self::Work
    }
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
    pub base: Option<BodyBase>,
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
    /// The names that it may reach; none where it has no egress proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Why it was made.
    #[serde(default, skip_serializing_if = "BodyRole::is_work")]
    pub role: BodyRole,
    /// What becomes of it.
    pub life: Life,
    /// Which host ids stand behind its ids.
    pub ids: Ids,
}

impl Spec {
    /// As it is shown to people and written into events: variables by their names alone, for their values may be secrets.
    pub fn without_secrets(&self) -> Value {
        let mut shown = serde_json::to_value(self).unwrap_or_default();
        shown["env"] = self.env.keys().cloned().collect();
        shown
    }
}

/// A spec as events have it: variables by their names alone.
///
/// Invariant: it holds no value of a variable, so nothing that prints or stores it can tell one.
#[derive(Debug, Clone, PartialEq)]
pub struct PublicSpec(Box<Spec>);

impl PublicSpec {
    /// Leaves out of a spec what others must not read.
    pub fn new(spec: &Spec) -> Self {
        let mut spec = spec.clone();
        spec.env.values_mut().for_each(String::clear);
        Self(Box::new(spec))
    }
}

impl Deref for PublicSpec {
    type Target = Spec;
    fn deref(&self) -> &Spec {
        &self.0
    }
}

impl Serialize for PublicSpec {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.without_secrets().serialize(to)
    }
}

impl<'de> Deserialize<'de> for PublicSpec {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut shown = Value::deserialize(from)?;
        if let Some(names) = shown.get("env").and_then(Value::as_array) {
            let names = names.iter().filter_map(Value::as_str);
            shown["env"] = names.map(|name| (name.to_owned(), Value::from(""))).collect::<Map<_, _>>().into();
        }
        Ok(Self(serde_json::from_value(shown).map_err(D::Error::custom)?))
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
