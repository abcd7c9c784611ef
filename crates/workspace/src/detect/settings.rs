//! `palisade.toml`: what lockfiles cannot say.

use std::collections::BTreeMap;

use serde::Deserialize;

/// `palisade.toml`.
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
    /// Whether lockfiles are looked for.
    pub auto: bool,
    /// Lines of shell after what lockfiles ask for.
    pub commands: Vec<String>,
    /// Files that decide whether that is done again.
    pub inputs: Vec<String>,
    /// Names that may be reached meanwhile.
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
