//! The rules of the risk router: which venue each risk has.

use std::path::Path;

use proto::{Failure, Kind, event_data::CallRisk};
use serde::Deserialize;

const SHIPPED: &str = include_str!("venues.toml");
/// The name of the user's file in the configuration directory.
const FILE: &str = "venues.toml";
const FILE_LEN_MAX: u64 = 64 << 10;
const WHY_LEN_MAX: usize = 400;

/// The place that a rule names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VenueChoice {
    /// Nothing runs.
    Agent,
    /// The agent's Body.
    Body,
    /// A fork of the Body that is thrown away.
    Fork,
    /// A fresh microVM that is thrown away.
    Microvm,
    /// The call is refused.
    #[default]
    Refuse,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VenueRule {
    /// The risk of the calls that it is for.
    pub risk: CallRisk,
    /// The place in which they run.
    pub run: VenueChoice,
    /// The place if `run` is a microVM and the host has none.
    #[serde(default)]
    pub otherwise: VenueChoice,
    /// Whether a microVM without KVM counts as one.
    #[serde(default)]
    pub emulated: bool,
    /// The reason, for people and for the model.
    pub why: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VenueFile {
    #[serde(default)]
    venue: Vec<VenueRule>,
}

/// One rule for each risk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VenueRules {
    rules: Vec<VenueRule>,
}

impl VenueRules {
    /// The rules of this program.
    pub fn shipped() -> Result<Self, Failure> {
        parse(SHIPPED).map(|rules| Self { rules }).map_err(|why| Failure::new(Kind::Internal, why))
    }

    /// The rules of this program, and those of the user in their place.
    pub fn load(config: &Path) -> Result<Self, Failure> {
        let shipped = Self::shipped()?;
        let path = config.join(FILE);
        let invalid = |why: String| {
            Failure::new(Kind::Usage, format!("{} has an error: {why}", path.display()))
                .hint("see docs/reference/venues.md")
        };
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(shipped),
            Ok(about) if about.len() > FILE_LEN_MAX => {
                return Err(invalid(format!("it is longer than {} KiB", FILE_LEN_MAX >> 10)));
            }
            _ => {}
        }
        let text = std::fs::read_to_string(&path).map_err(|error| invalid(error.to_string()))?;
        shipped.replaced_by(&text).map_err(invalid)
    }

    /// These rules, with those of a text in the place of the rules for the same risks.
    pub(super) fn replaced_by(mut self, text: &str) -> Result<Self, String> {
        for rule in parse(text)? {
            self.rules.retain(|other| other.risk != rule.risk);
            self.rules.push(rule);
        }
        Ok(self)
    }

    /// The rule for a risk.
    pub fn find(&self, risk: &CallRisk) -> Option<&VenueRule> {
        self.rules.iter().find(|rule| rule.risk == *risk)
    }
}

fn parse(text: &str) -> Result<Vec<VenueRule>, String> {
    let file: VenueFile = toml::from_str(text).map_err(|error| error.message().to_owned())?;
    for (index, rule) in file.venue.iter().enumerate() {
        let number = index + 1;
        if let Some(fault) = find_fault(rule) {
            return Err(format!("rule {number}: {fault}"));
        }
        if file.venue[..index].iter().any(|other| other.risk == rule.risk) {
            return Err(format!("rule {number}: another rule is for the same risk"));
        }
    }
    Ok(file.venue)
}

fn find_fault(rule: &VenueRule) -> Option<String> {
    if let CallRisk::Other(word) = &rule.risk {
        let word = proto::text::visible(word);
        return Some(format!("{word:?} is no risk; use pure, read, workspace, outside or untrusted"));
    }
    if rule.run != VenueChoice::Microvm && (rule.otherwise != VenueChoice::Refuse || rule.emulated) {
        return Some("`otherwise` and `emulated` belong to run = \"microvm\"".to_owned());
    }
    if rule.otherwise == VenueChoice::Microvm {
        return Some("`otherwise` is the choice without a microVM".to_owned());
    }
    if (rule.run == VenueChoice::Agent || rule.otherwise == VenueChoice::Agent) && rule.risk != CallRisk::Pure
    {
        return Some("only a call that computes can do without a Body".to_owned());
    }
    if rule.why.trim().is_empty() || rule.why.len() > WHY_LEN_MAX {
        return Some(format!("`why` has 1 to {WHY_LEN_MAX} bytes"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_rules_are_whole() {
        let rules = VenueRules::shipped().unwrap();
        let risks =
            [CallRisk::Pure, CallRisk::Read, CallRisk::Workspace, CallRisk::Outside, CallRisk::Untrusted];
        assert!(risks.iter().all(|risk| rules.find(risk).is_some()));
        assert_eq!(rules.rules.len(), risks.len());
    }

    #[test]
    fn a_wrong_rule_is_refused_with_its_number() {
        let rule = |rest: &str| format!("[[venue]]\nrisk = 'read'\nwhy = 'w'\n{rest}");
        let cases = [
            (rule("run = 'host'"), "unknown variant"),
            (rule("run = 'body'\nodd = 1"), "unknown field"),
            (rule("run = 'body'\notherwise = 'fork'"), "rule 1: `otherwise`"),
            (rule("run = 'body'\nemulated = true"), "rule 1: `otherwise`"),
            (rule("run = 'microvm'\notherwise = 'microvm'"), "rule 1: `otherwise` is the choice"),
            (rule("run = 'agent'"), "rule 1: only a call that computes"),
            (rule("run = 'body'") + "\n" + &rule("run = 'fork'"), "rule 2: another rule"),
            ("[[venue]]\nrisk = 'odd'\nrun = 'body'\nwhy = 'w'".into(), "\"odd\" is no risk"),
            ("[[venue]]\nrisk = 'read'\nrun = 'body'\nwhy = ' '".into(), "`why` has"),
            ("[[venues]]".into(), "unknown field"),
        ];
        for (text, expected) in cases {
            let found = VenueRules::shipped().unwrap().replaced_by(&text).unwrap_err();
            assert!(found.contains(expected), "{text}: {found}");
        }
    }
}
