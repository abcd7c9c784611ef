//! The spec of a Body: written once into its directory, read by every later `pal`.

use std::{collections::BTreeMap, ops::Deref, path::PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use serde_json::{Map, Value};

use crate::{
    BodyId, BodyName, Layer, LayerId, Limits, SnapshotId,
    egress::EgressRule,
    template::BodyBase,
    vm::{Engine, Sharing},
    workspace::Workspace,
};

/// The version of `spec.json`.
pub const VERSION: u32 = 1;

/// The lifetime of a Body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Life {
    /// It stays until it is removed; its upper is on disk.
    Kept,
    /// It ends with the `pal` that created it; its upper is in memory.
    Run,
}

/// A directory or file of the host that the user mounts into a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Its path on the host.
    pub source: PathBuf,
    /// Its path in the Body.
    pub target: PathBuf,
    /// The Body's access to it.
    pub access: Access,
}

/// A Body's access to a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// The Body may read it.
    #[serde(rename = "ro")]
    ReadOnly,
    /// The Body may write it, as far as the host's permissions allow its ids; git directories stay read-only.
    #[serde(rename = "rw")]
    ReadWrite,
    /// The Body may also write git directories. A user who then runs git there on the host runs hooks and
    /// settings that the Body wrote.
    #[serde(rename = "rw,unprotected")]
    Unprotected,
}

impl Access {
    /// Whether a Body may write to the mount.
    pub fn is_writable(self) -> bool {
        self != Self::ReadOnly
    }

    /// The word for it in a `--mount` option.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "ro",
            Self::ReadWrite => "rw",
            Self::Unprotected => "rw,unprotected",
        }
    }
}

/// The networks that a Body can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Only its own loopback.
    Closed,
}

/// The egress policy of a Body: a process on the host connects it to these names only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    /// Targets that are allowed without a reason; the only form of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Further rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<EgressRule>,
    /// The number of the policy: each change has the next one.
    #[serde(default, skip_serializing_if = "is_first")]
    pub generation: u64,
    /// The secrets that the Body may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretGrant>,
    /// Other Bodies that may connect, each as `BODY:PORTS`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accept: Vec<String>,
}

/// The right of a Body to use a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretGrant {
    /// The name of the secret.
    pub name: String,
    /// The text that stands for it in the Body.
    pub placeholder: String,
}

fn is_first(generation: &u64) -> bool {
    *generation == 0
}

impl Egress {
    /// All rules, in the order in which they count.
    pub fn all_rules(&self) -> Vec<EgressRule> {
        self.allow.iter().map(EgressRule::allow).chain(self.rules.iter().cloned()).collect()
    }
}

/// The purpose of a Body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BodyRole {
    /// Work of a user.
    #[default]
    Work,
    /// One step of a preparation or a build: it ends with the `pal` that created it, and its supervisor removes it.
    Step,
}

impl BodyRole {
    fn is_work(&self) -> bool {
        *self == Self::Work
    }
}

/// The home directory of a Body's user, without a leading `/`.
pub const HOME: &str = "home/user";

/// A home directory that outlives its Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Its name; none if the Body has only a copy, as a fork or a Body from a snapshot has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its layers when the Body was created, topmost first.
    pub layers: Vec<LayerId>,
}

/// The spec of a Body.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Version of this record.
    pub v: u32,
    /// The id of the Body.
    pub id: BodyId,
    /// The name that its user gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<BodyName>,
    /// When it was created, RFC 3339.
    pub created_at: String,
    /// The isolation layer.
    pub layer: Layer,
    /// The hypervisor of a microVM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// The template, as the user named it.
    pub template: String,
    /// Snapshots below its upper, topmost first.
    #[serde(default)]
    pub snapshots: Vec<SnapshotId>,
    /// The root file system below those, if it is not the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BodyBase>,
    /// The Body it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<BodyId>,
    /// The resource limits.
    pub limits: Limits,
    /// Environment of every process in it.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Directories and files of the host that the Body sees.
    #[serde(default)]
    pub mounts: Vec<Mount>,
    /// How a microVM shares them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Sharing>,
    /// The repositories in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workspaces: Vec<Workspace>,
    /// A home directory that is kept separately from the other files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<Home>,
    /// Shell lines that run at each start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at_start: Vec<String>,
    /// Ports that the user wants to reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// The working directory of commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// The user that runs commands.
    pub user: String,
    /// The networks that it can reach.
    pub network: Network,
    /// The egress policy; none without an egress proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Its purpose.
    #[serde(default, skip_serializing_if = "BodyRole::is_work")]
    pub role: BodyRole,
    /// Its lifetime.
    pub life: Life,
    /// The host ids to which its ids are mapped.
    pub ids: Ids,
}

impl Spec {
    /// The spec as users and events see it: only the names of variables, because values may be secrets.
    pub fn without_secrets(&self) -> Value {
        let mut shown = serde_json::to_value(self).unwrap_or_default();
        shown["env"] = self.env.keys().cloned().collect();
        shown
    }
}

/// The spec in events: only the names of variables.
///
/// Invariant: it holds no value of a variable, so that no output or log can reveal one.
#[derive(Debug, Clone, PartialEq)]
pub struct PublicSpec(Box<Spec>);

impl PublicSpec {
    /// Copies a spec without the values of its variables.
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

/// The host ids to which a Body's ids are mapped.
///
/// Invariant: no id of a Body maps to host id 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// User ids.
    pub users: Vec<IdRange>,
    /// Group ids.
    pub groups: Vec<IdRange>,
}

/// A range of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    /// First id in the Body.
    pub inside: u32,
    /// First id on the host.
    pub outside: u32,
    /// Number of ids.
    pub count: u32,
}

/// The id of `user` in every Body.
pub const USER_ID: u32 = 1000;

impl Ids {
    /// The host's user id for a user id of the Body.
    pub fn user_outside(&self, inside: u32) -> Option<u32> {
        outside(&self.users, inside)
    }

    /// The host's group id for a group id of the Body.
    pub fn group_outside(&self, inside: u32) -> Option<u32> {
        outside(&self.groups, inside)
    }

    /// Whether the Body has a root user.
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
