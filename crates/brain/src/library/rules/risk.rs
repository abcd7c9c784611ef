//! The risk of commands: which publish, land or spend, and which run code of unknown origin.

use std::sync::LazyLock;

use proto::event_data::CallRisk;
use serde_json::{Map, Value};

use super::{CommandRule, RiskRule, RuleSet, judge::identify_command, shell_argument};
use crate::library::{
    LibraryError,
    command::{Fit, ShellLine, read_command},
};

const BUILT_IN: &str = include_str!("../../../library/rules.toml");
static BUILT_IN_RULES: LazyLock<Result<RuleSet, LibraryError>> =
    LazyLock::new(|| RuleSet::parse("built-in rules", BUILT_IN));

/// The risk of a text for the shell by the built-in rules, and the rule that decided.
pub fn risk_of_command(text: &str) -> (CallRisk, String) {
    match &*BUILT_IN_RULES {
        Ok(rules) => rules.risk_of_text(text),
        Err(error) => (CallRisk::Outside, format!("the built-in rules cannot be read: {error}")),
    }
}

impl RuleSet {
    /// The rules that are part of Palisade: the risks of well-known commands.
    pub fn built_in() -> Result<Self, LibraryError> {
        BUILT_IN_RULES.clone()
    }

    /// The risk of a call whose tool runs commands, and the rule that decided; none if the command works inside of the
    /// Body, or the tool runs none.
    pub fn risk_of_call(&self, tool: &str, arguments: &Map<String, Value>) -> Option<(CallRisk, String)> {
        let (risk, why) = self.risk_of_text(shell_argument(tool, arguments)?);
        (risk != CallRisk::Workspace).then_some((risk, why))
    }

    /// The risk of a text for the shell, and the rules that decided. A grant is one for these rules: if a part of the
    /// text cannot be known, they are joined by the text itself.
    pub fn risk_of_text(&self, text: &str) -> (CallRisk, String) {
        let line = read_command(text);
        let all: Vec<usize> = (0..line.calls.len()).collect();
        let (risk, why) = self.risk_of_calls(&line, &all);
        let Some(unknown) = line.unknown.first() else { return (risk, why) };
        if risk != CallRisk::Workspace {
            return (risk, format!("{why}; and a part is unknown ({unknown})\n  {}", identify_command(text)));
        }
        let words: Vec<&str> = text.split(|letter: char| !is_word_letter(letter)).map(program_name).collect();
        match self.risks.iter().find(|rule| rule.is_mentioned(&words)) {
            Some(rule) => {
                let why = format!("{}, as far as the text can be read", rule.shown());
                (rule.level.clone(), format!("{why}\n  {}", identify_command(text)))
            }
            None => (risk, format!("unknown command: {unknown}")),
        }
    }

    /// The risk of some of the calls of a command line, and all rules of that risk: a person who grants one of them
    /// grants no other.
    pub fn risk_of_calls(&self, line: &ShellLine, indices: &[usize]) -> (CallRisk, String) {
        let applies = |rule: &&RiskRule| indices.iter().any(|index| rule.command.is_risk(line, *index));
        let found: Vec<&RiskRule> = self.risks.iter().filter(applies).collect();
        // An effect outside of the Body weighs more than code of unknown origin inside of it.
        let outside = found.iter().find(|rule| rule.level == CallRisk::Outside);
        let Some(level) = outside.or(found.first()).map(|rule| rule.level.clone()) else {
            return (CallRisk::Workspace, "the command works inside of the Body".to_owned());
        };
        let rules = found.iter().filter(|rule| rule.level == level).map(|rule| rule.shown());
        (level.clone(), rules.collect::<Vec<_>>().join("; and "))
    }
}

impl RiskRule {
    fn shown(&self) -> String {
        format!("{}: {}", self.command.shown(), self.why)
    }

    /// Whether the fixed words of a command occur in a text that cannot be parsed.
    fn is_mentioned(&self, words: &[&str]) -> bool {
        let rule = &self.command;
        rule.into.is_none() && rule.then.is_none() && rule.command.is_mentioned(words)
    }
}

impl CommandRule {
    /// Whether a call is a risk: its program is known, and its words match or may match.
    pub(super) fn is_risk(&self, line: &ShellLine, index: usize) -> bool {
        let is_program = line.calls.get(index).is_some_and(|call| self.command.fits_program(call));
        is_program && self.fit(line, index) >= Fit::Possible
    }
}

fn is_word_letter(letter: char) -> bool {
    letter.is_alphanumeric() || matches!(letter, '-' | '_' | '.' | '+' | ':' | '/')
}

/// The name of a program that a word may start. A relative path is more likely a file.
fn program_name(word: &str) -> &str {
    match word.rsplit_once('/') {
        Some((_, name)) if word.starts_with(['/', '.']) => name,
        _ => word,
    }
}
