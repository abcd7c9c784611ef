//! Reads `palisade.toml`, which states what lockfiles cannot.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The contents of `palisade.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RepoSettings {
    pub prepare: PrepareSettings,
    pub env: BTreeMap<String, String>,
    pub test: TestSettings,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrepareSettings {
    /// Whether to detect lockfiles.
    pub auto: bool,
    /// Shell lines that run after the steps of the lockfiles.
    pub commands: Vec<String>,
    /// Further files whose change makes the steps run again.
    pub inputs: Vec<String>,
    /// Host names that the steps may reach.
    pub allow: Vec<String>,
}

impl Default for PrepareSettings {
    fn default() -> Self {
        Self { auto: true, commands: Vec::new(), inputs: Vec::new(), allow: Vec::new() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TestSettings {
    pub command: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_not_known_are_refused() {
        assert!(toml::from_str::<RepoSettings>("[prepare]\ncommands = ['make']\nallow = ['x.org:443']\n[test]\ncommand = 'make test'\n[env]\nA = 'b'\n").is_ok());
        assert!(toml::from_str::<RepoSettings>("[prepare]\ncomands = ['make']\n").is_err());
    }
}
