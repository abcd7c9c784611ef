//! Reads `palisade.toml`, which states what lockfiles and manifests cannot.

use std::collections::BTreeMap;

use proto::egress::EgressRule;
use serde::Deserialize;

use crate::error::WorkspaceError;

/// The contents of `palisade.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RepoSettings {
    pub prepare: PrepareSettings,
    pub env: BTreeMap<String, String>,
    pub test: TestSettings,
    pub network: NetworkSettings,
}

/// The network that the repository asks for; `fleet` reads and checks the presets and rules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkSettings {
    /// Names of presets.
    pub preset: Vec<String>,
    /// Targets that Bodies may reach.
    pub allow: Vec<String>,
    /// Targets that Bodies may not reach.
    pub deny: Vec<String>,
    /// Further rules.
    pub rules: Vec<EgressRule>,
    /// Other Bodies that may connect, each as `BODY:PORTS`.
    pub accept: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrepareSettings {
    /// Whether lockfiles and manifests make steps. Toolchains come either way.
    pub auto: bool,
    /// Whether devcontainer.json is read.
    pub devcontainer: bool,
    /// Directories whose dependencies count as the root's do, whatever their names are.
    pub directories: Vec<String>,
    /// Directories and files that make no steps.
    pub skip: Vec<String>,
    /// Shell lines that run after the steps of the lockfiles.
    pub commands: Vec<String>,
    /// Further files whose change makes the steps run again.
    pub inputs: Vec<String>,
    /// Host names that the steps may reach.
    pub allow: Vec<String>,
}

impl Default for PrepareSettings {
    fn default() -> Self {
        Self {
            auto: true,
            devcontainer: true,
            directories: Vec::new(),
            skip: Vec::new(),
            commands: Vec::new(),
            inputs: Vec::new(),
            allow: Vec::new(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TestSettings {
    pub command: Option<String>,
}

impl RepoSettings {
    /// Parses the text of palisade.toml.
    pub fn parse(text: &str) -> Result<Self, WorkspaceError> {
        let mut settings: Self = toml::from_str(text).map_err(|error| {
            WorkspaceError::Repository(format!("palisade.toml: {}", proto::text::visible(error.message())))
        })?;
        let paths = settings.prepare.directories.iter_mut().chain(&mut settings.prepare.skip);
        paths.for_each(|path| *path = plain_path(path));
        Ok(settings)
    }
}

impl PrepareSettings {
    /// Whether `skip` names this path or a directory above it.
    pub fn is_skipped(&self, path: &str) -> bool {
        self.skip.iter().any(|skipped| is_below(path, skipped))
    }

    /// Whether `skip` names this file itself. Its directory may have others that make steps.
    pub fn is_skipped_file(&self, path: &str) -> bool {
        self.skip.iter().any(|skipped| skipped == path)
    }

    /// Whether `directories` names this directory.
    pub fn is_named(&self, dir: &str) -> bool {
        self.directories.iter().any(|named| named == dir)
    }
}

/// Whether a path is `dir` or below it. The empty directory is the root, which only equals itself.
fn is_below(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || (!dir.is_empty() && rest.starts_with('/')))
}

/// A path as git writes it: without `./` in front and without a slash at its end; the root is empty.
fn plain_path(path: &str) -> String {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_not_known_are_refused() {
        let known = "[prepare]\ncommands = ['make']\nallow = ['x.org:443']\ndirectories = ['web']\nskip = ['fuzz']\n\
                     devcontainer = false\n[test]\ncommand = 'make test'\n[env]\nA = 'b'\n";
        assert!(RepoSettings::parse(known).is_ok());
        assert!(RepoSettings::parse("[prepare]\ncomands = ['make']\n").is_err());
    }

    #[test]
    fn the_network_is_read() {
        let text = "[network]\npreset = ['registries']\nallow = ['a.test:443']\ndeny = ['b.test']\n\
                    [[network.rules]]\naction = 'deny'\nto = 'c.test:*'\nwhy = 'x'\nmatch = ['c.test:1']\n\
                    not_match = ['d.test:1']\n";
        let network = RepoSettings::parse(text).unwrap().network;
        assert_eq!((network.preset, network.allow), (vec!["registries".into()], vec!["a.test:443".into()]));
        assert_eq!((network.deny, network.rules.len()), (vec!["b.test".to_owned()], 1));
        assert_eq!(network.rules[0], {
            let rule = EgressRule::deny("c.test:*").because("x");
            EgressRule { matches: vec!["c.test:1".into()], not_match: vec!["d.test:1".into()], ..rule }
        });
        let odd = RepoSettings::parse("[[network.rules]]\nallow = 'c.test'\n").unwrap_err();
        assert!(odd.to_string().contains("palisade.toml"), "{odd}");
    }

    #[test]
    fn a_directory_is_named_however_it_is_written() {
        let settings = RepoSettings::parse("[prepare]\ndirectories = ['./web/', '.']\nskip = ['fuzz/']\n")
            .unwrap()
            .prepare;
        assert!(settings.is_named("web") && settings.is_named("") && !settings.is_named("web/x"));
        for (path, skipped) in [("fuzz", true), ("fuzz/a/b", true), ("fuzzy", false), ("", false)] {
            assert_eq!(settings.is_skipped(path), skipped, "{path}");
        }
    }
}
