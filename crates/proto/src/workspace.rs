//! Workspaces: a repository inside a Body, as its spec remembers it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{LayerId, launch::area_dir};

/// The directory that holds every workspace of a Body, without a leading `/`.
pub const PLACE: &str = "workspace";
/// The program that git asks what was changed, below a workspace.
pub const CHANGES: &str = ".git/palisade/changes";
/// What tells git in a Body to ask it: settings that the `.git` of a workspace includes where they are.
pub const CHANGES_SETTINGS: &str = "run/palisade-git";
/// Longest name of a workspace.
pub const NAME_LEN_MAX: usize = 64;

/// A repository inside a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workspace {
    /// What it is called: its directory below `/workspace`.
    pub name: String,
    /// The host's repository it came from and goes back to: the directory that holds its objects and refs.
    pub repository: PathBuf,
    /// The branch it began on; none where the repository stood on no branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// The commit its branch began at.
    pub commit: String,
    /// The commit whose files it began with: `commit`, or one above it that holds uncommitted work of the host.
    pub base: String,
    /// Whether ignored files came along: they are no part of the base.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub included: bool,
    /// Its files and its `.git`, nearest first.
    pub layers: Vec<LayerId>,
    /// Submodules whose files came along.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub submodules: Vec<Submodule>,
}

/// A submodule whose files came along: what is done there goes back to a repository of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submodule {
    /// Where in the workspace.
    pub path: String,
    /// The host's repository of it: the directory that holds its objects and refs.
    pub repository: PathBuf,
    /// The commit whose files it began with.
    pub commit: String,
    /// The layer of those.
    pub files: LayerId,
}

impl Workspace {
    /// Where it is in the Body, without a leading `/`.
    pub fn at(&self) -> String {
        format!("{PLACE}/{}", self.name)
    }

    /// Where commands find it.
    pub fn path(&self) -> String {
        format!("/{}", self.at())
    }

    /// The directory of its part of an upper or a snapshot.
    pub fn area_dir(&self) -> String {
        area_dir(&self.at())
    }
}

/// What git calls the state of a workspace that nobody has changed: a number that tells which head it is, and that is
/// no time, which git itself begins with.
pub fn unchanged_token(head: &LayerId) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    head.as_str().bytes().fold(0xcbf2_9ce4_8422_2325, hash) | 1 << 63
}

/// A name for a workspace, made of whatever its repository is called.
pub fn name_for(called: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = called.chars().map(plain).take(NAME_LEN_MAX).collect();
    let name = name.trim_matches(['-', '.']);
    if name.is_empty() { "repository".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_directories() {
        for (called, name) in [
            ("app", "app"),
            ("my app", "my-app"),
            ("..", "repository"),
            ("", "repository"),
            (".dotfiles", "dotfiles"),
            ("a/b", "a-b"),
            ("d\u{e9}j\u{e0}", "d-j"),
        ] {
            assert_eq!(name_for(called), name, "{called}");
        }
        assert_eq!(name_for(&"x".repeat(300)).len(), NAME_LEN_MAX);
    }
}
