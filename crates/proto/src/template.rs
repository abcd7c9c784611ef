//! Templates: what Bodies start from if it is not the host's own root file system.
//!
//! A template names a series of builds. A build is a root of read-only layers with the settings for its
//! Bodies; it never changes. A tag names one build; without a tag, `default` is meant.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{LayerId, Size, TemplateId, spec::Ids};

/// The version of the records here.
pub const VERSION: u32 = 1;
/// The tag that is meant if none is given.
pub const DEFAULT_TAG: &str = "default";
/// Longest name, and longest tag.
pub const NAME_LEN_MAX: usize = 128;
/// Most layers of one root: every Body mounts each of them.
pub const LAYERS_MAX: usize = 96;

/// The id of a template's build: a UUID, because E2B's clients parse it as one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BuildId(String);

/// The text is not the id of a build.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not the id of a build: those are UUIDs in lower case")]
pub struct BuildIdError(String);

impl BuildId {
    /// Makes an id from random bytes of the caller: a UUID of version 4.
    pub fn from_random(mut drawn: [u8; 16]) -> Self {
        (drawn[6], drawn[8]) = (drawn[6] & 0x0f | 0x40, drawn[8] & 0x3f | 0x80);
        let hex = crate::event::hex(&drawn);
        Self([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for BuildId {
    type Err = BuildIdError;
    fn from_str(text: &str) -> Result<Self, BuildIdError> {
        Self::try_from(text.to_owned())
    }
}

impl TryFrom<String> for BuildId {
    type Error = BuildIdError;
    fn try_from(text: String) -> Result<Self, BuildIdError> {
        let dash = |at: usize| matches!(at, 8 | 13 | 18 | 23);
        let fits = |(at, byte): (usize, u8)| {
            if dash(at) { byte == b'-' } else { matches!(byte, b'0'..=b'9' | b'a'..=b'f') }
        };
        if text.len() == 36 && text.bytes().enumerate().all(fits) {
            Ok(Self(text))
        } else {
            Err(BuildIdError(text))
        }
    }
}

impl From<BuildId> for String {
    fn from(id: BuildId) -> String {
        id.0
    }
}

/// The record of a template: its names and its tags.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Template {
    /// Version of this record.
    pub v: u32,
    /// The id of the template.
    pub id: TemplateId,
    /// Its name.
    pub name: String,
    /// Further names.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// The id of the key that owns it; none if it belongs to the user of the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Whether Bodies of other keys may start from it.
    #[serde(default)]
    pub public: bool,
    /// The build of each tag.
    #[serde(default)]
    pub tags: BTreeMap<String, Tag>,
    /// When it was created.
    pub created_at: String,
    /// When it last changed.
    pub updated_at: String,
}

/// The build of a tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    /// The build.
    pub build: BuildId,
    /// Since when.
    pub since: String,
}

/// `templates/ID/builds/BUILD.json`: a root and its settings; written last, never changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TemplateBuild {
    /// Version of this record.
    pub v: u32,
    /// The id of the build.
    pub id: BuildId,
    /// The template.
    pub template: TemplateId,
    /// When it was complete.
    pub created_at: String,
    /// A description of its source.
    pub source: String,
    /// Its layers, topmost first.
    pub layers: Vec<LayerId>,
    /// The size of its layers on disk.
    pub bytes: u64,
    /// Settings for its Bodies.
    #[serde(flatten)]
    pub settings: TemplateSettings,
}

/// Settings that Bodies inherit from their template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateSettings {
    /// Environment of every process.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The working directory of commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// The user that runs commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The command that runs in the background from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartCommand>,
    /// Whether setuid programs work, so that `user` can become root in the Body.
    #[serde(default)]
    pub sudo: bool,
    /// The default CPU limit, in thousandths of one CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<u32>,
    /// The default memory limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Size>,
}

/// The command that runs in a Body from its start, and the check that tells when it is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartCommand {
    /// A shell line that runs in the background; none to only wait for `ready`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// A shell line that succeeds as soon as the Body is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<String>,
}

/// The build that a Body uses. The Body's spec keeps it, because the template may change or be removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BodyBase {
    /// The template.
    pub template: TemplateId,
    /// Its build.
    pub build: BuildId,
    /// Its layers, topmost first.
    pub layers: Vec<LayerId>,
    /// Whether setuid programs work.
    pub sudo: bool,
    /// The command that runs from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartCommand>,
}

/// `layers/ID/layer.json`: one read-only layer; written last, never changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Version of this record.
    pub v: u32,
    /// The id of the layer.
    pub id: LayerId,
    /// The ids that own its files.
    pub ids: Ids,
    /// Its size on disk.
    pub bytes: u64,
    /// When it was created.
    pub created_at: String,
    /// A description of its contents.
    pub about: String,
    /// The layers that it needs below it, topmost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub over: Vec<LayerId>,
}

/// The text is not a valid name of a template.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} cannot name a template: names are 1 to {NAME_LEN_MAX} of a-z, 0-9, `-`, `_` and `.`, with `namespace/` before and `:tag` after if wanted"
)]
pub struct NameError(String);

/// A template as a user names it: `name`, `name:tag`, `namespace/name:tag`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateName {
    /// The name, with its namespace.
    pub name: String,
    /// The tag, if the user gave one.
    pub tag: Option<String>,
}

impl FromStr for TemplateName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let (name, tag) = text.split_once(':').map_or((text, None), |(name, tag)| (name, Some(tag)));
        let parts: Vec<&str> = name.split('/').collect();
        if parts.len() > 2
            || !parts.iter().chain(tag.iter()).all(|part| is_plain(part))
            || name.len() > NAME_LEN_MAX
        {
            return Err(NameError(crate::text::visible(&text.chars().take(200).collect::<String>())));
        }
        // Names are case-insensitive, as E2B's are.
        Ok(Self { name: name.to_ascii_lowercase(), tag: tag.map(str::to_owned) })
    }
}

/// Whether a text can be a tag, or a part of a name.
pub fn is_plain(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !text.is_empty()
        && text.len() <= NAME_LEN_MAX
        && text.chars().all(plain)
        && text.chars().any(|c| c != '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_namespace_and_a_tag_if_wanted() {
        let named = |text: &str| text.parse::<TemplateName>().ok().map(|named| (named.name, named.tag));
        assert_eq!(named("base"), Some(("base".into(), None)));
        assert_eq!(named("Team/My-App:v1.2"), Some(("team/my-app".into(), Some("v1.2".into()))));
        for bad in
            ["", ":", "a:", ":b", "a/b/c", "a b", "../x", "..", "a/..", "a:b:c", "é", "a\0", &"x".repeat(129)]
        {
            assert_eq!(named(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn builds_are_uuids() {
        let id = BuildId::from_random([255; 16]);
        assert_eq!(id.as_str(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert!(id.as_str().parse::<BuildId>().is_ok());
        for bad in [
            "",
            "x",
            "ffffffff-ffff-4fff-bfff-fffffffffff",
            "FFFFFFFF-ffff-4fff-bfff-ffffffffffff",
            "../../../../../../../../../../../..x",
        ] {
            assert!(bad.parse::<BuildId>().is_err(), "{bad:?}");
        }
    }
}
