//! Workspaces: a repository inside a Body, as its spec records it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{LayerId, launch::area_dir};

/// The directory that holds every workspace of a Body, without a leading `/`.
pub const PLACE: &str = "workspace";
/// The fsmonitor program that git starts, relative to a workspace.
pub const CHANGES: &str = ".git/palisade/changes";
/// The git settings that name this program; the `.git` of a workspace includes them if the file exists in the
/// Body.
pub const CHANGES_SETTINGS: &str = "run/palisade-git";
/// Longest name of a workspace.
pub const NAME_LEN_MAX: usize = 64;

/// A repository inside a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workspace {
    /// Its name: the directory below `/workspace`.
    pub name: String,
    /// The common git directory of the host's repository, from which it came and to which its work goes.
    pub repository: PathBuf,
    /// The branch that it began on; none for a detached HEAD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// The commit of its branch at the beginning.
    pub commit: String,
    /// The commit whose files it began with: `commit`, or one on top of it that holds uncommitted work of the
    /// host.
    pub base: String,
    /// Whether ignored files were included; they are not part of the base.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub included: bool,
    /// The layers of its `.git` and its files, topmost first.
    pub layers: Vec<LayerId>,
    /// Submodules whose files were imported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub submodules: Vec<Submodule>,
}

/// A submodule whose files were imported; work in it goes to a repository of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submodule {
    /// The path in the workspace.
    pub path: String,
    /// The common git directory of the host's repository for the submodule.
    pub repository: PathBuf,
    /// The commit whose files it began with.
    pub commit: String,
    /// The layer with these files.
    pub files: LayerId,
}

impl Workspace {
    /// The path in the Body, without a leading `/`.
    pub fn at(&self) -> String {
        format!("{PLACE}/{}", self.name)
    }

    /// The absolute path in the Body.
    pub fn path(&self) -> String {
        format!("/{}", self.at())
    }

    /// The name of its directory in an upper or a snapshot.
    pub fn area_dir(&self) -> String {
        area_dir(&self.at())
    }
}

/// The fsmonitor token for an unchanged workspace: a number that identifies its `.git` layer and cannot be
/// confused with a time, which is git's own default token.
pub fn unchanged_token(head: &LayerId) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    head.as_str().bytes().fold(0xcbf2_9ce4_8422_2325, hash) | 1 << 63
}

/// Makes the name of a workspace from the name of its repository.
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
