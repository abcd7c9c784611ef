//! Judging a call by rules.

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use super::{CallRule, RuleDecision, RuleSet, RuleSubject};
use crate::library::command::{Fit, ShellLine};

/// Tools that run a command, and the argument that holds it.
const SHELL_TOOLS: &[(&str, &str)] =
    &[("execute", "command"), ("exec_command", "cmd"), ("write_stdin", "chars")];
/// A rule for this tool is one for every tool that runs a command.
const SHELL_TOOL: &str = "execute";
/// How much of a command a question shows, in characters.
const SHOWN_LEN_MAX: usize = 160;

/// A call, as rules see it.
#[derive(Debug, Clone, Copy)]
pub struct CallSubject<'a> {
    /// The tool.
    pub tool: &'a str,
    /// The text for the shell and its commands, if the tool runs some.
    pub command: Option<(&'a str, &'a ShellLine)>,
    /// The files that the call names, as absolute paths.
    pub paths: &'a [String],
}

/// The judgement of the rules about a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleVerdict {
    /// The rule that denies it.
    pub denied: Option<String>,
    /// The rules because of which a person is asked.
    pub asked: Vec<String>,
    /// How much of it rules allow.
    pub coverage: RuleCoverage,
}

/// How much of a call rules allow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RuleCoverage {
    /// Nothing: the mode of the agent decides.
    #[default]
    Nothing,
    /// Some of its commands; the mode decides about those with these indices.
    AllBut(Vec<usize>),
    /// All of it.
    Whole,
}

/// The text for the shell in the arguments of a tool that runs commands.
pub fn shell_argument<'a>(tool: &str, arguments: &'a Map<String, Value>) -> Option<&'a str> {
    let (_, name) = SHELL_TOOLS.iter().find(|(name, _)| *name == tool)?;
    arguments.get(*name).and_then(Value::as_str)
}

impl RuleSet {
    /// Judges a call by all rules.
    pub fn judge(&self, call: CallSubject<'_>) -> RuleVerdict {
        let mut verdict = RuleVerdict::default();
        for rule in self.rules.iter().filter(|rule| rule.applies(call.tool)) {
            match (rule.decision, rule.fit(&call)) {
                (RuleDecision::Allow, _) | (_, Fit::Never) => {}
                (RuleDecision::Deny, Fit::Certain) => {
                    verdict.denied.get_or_insert_with(|| format!("{} ({})", rule.shown(), rule.place));
                }
                (RuleDecision::Ask, Fit::Certain) => push_new(&mut verdict.asked, rule.shown()),
                (_, Fit::Possible) => push_new(&mut verdict.asked, unknown_call(rule, &call)),
            }
        }
        verdict.coverage = self.coverage(&call);
        verdict
    }

    fn coverage(&self, call: &CallSubject<'_>) -> RuleCoverage {
        let applies = |rule: &&CallRule| rule.decision == RuleDecision::Allow && rule.applies(call.tool);
        let rules: Vec<&CallRule> = self.rules.iter().filter(applies).collect();
        if rules.iter().any(|rule| matches!(rule.subject, RuleSubject::Call)) {
            return RuleCoverage::Whole;
        }
        let Some((_, line)) = call.command else {
            let allows = |path: &String| {
                rules
                    .iter()
                    .any(|rule| matches!(&rule.subject, RuleSubject::Path(pattern) if pattern.matches(path)))
            };
            let is_whole = !call.paths.is_empty() && call.paths.iter().all(allows);
            return if is_whole { RuleCoverage::Whole } else { RuleCoverage::Nothing };
        };
        let allows = |index: usize| rules.iter().any(|rule| rule.allows(line, index));
        let open: Vec<usize> = (0..line.calls.len()).filter(|index| !allows(*index)).collect();
        match (open.len(), line.unknown.is_empty()) {
            (open, _) if open == line.calls.len() => RuleCoverage::Nothing,
            (0, true) => RuleCoverage::Whole,
            // The mode decides about what cannot be known as it does without rules.
            (_, false) => RuleCoverage::Nothing,
            (_, true) => RuleCoverage::AllBut(open),
        }
    }
}

impl CallRule {
    fn applies(&self, tool: &str) -> bool {
        let is_shell = SHELL_TOOLS.iter().any(|(name, _)| *name == tool);
        self.tool.matches(tool) || (is_shell && self.tool.matches(SHELL_TOOL))
    }

    fn fit(&self, call: &CallSubject<'_>) -> Fit {
        match (&self.subject, call.command) {
            (RuleSubject::Call, _) => Fit::Certain,
            // Text that is typed into a program is a command only if the program is a shell.
            (RuleSubject::Command(rule), Some((_, line))) if call.tool == "write_stdin" => {
                rule.fit_line(&ShellLine { unknown: Vec::new(), ..line.clone() })
            }
            (RuleSubject::Command(rule), Some((_, line))) => rule.fit_line(line),
            (RuleSubject::Path(pattern), _) if call.paths.iter().any(|path| pattern.matches(path)) => {
                Fit::Certain
            }
            (RuleSubject::Command(_), None) | (RuleSubject::Path(_), _) => Fit::Never,
        }
    }

    /// Whether the rule allows a call as it is written: a program in another directory is another program, and options
    /// before a subcommand may change its meaning.
    pub(super) fn allows(&self, line: &ShellLine, index: usize) -> bool {
        let RuleSubject::Command(rule) = &self.subject else { return false };
        let Some(call) = line.calls.get(index) else { return false };
        let is_except = rule.except.iter().any(|except| except.fit(call) > Fit::Never);
        !is_except && rule.command.fit_written(call) == Fit::Certain
    }
}

/// The question about a command that cannot be known. It holds for this command only, so it contains the command.
fn unknown_call(rule: &CallRule, call: &CallSubject<'_>) -> String {
    let text = call.command.map_or("", |(text, _)| text);
    let unknown = call.command.and_then(|(_, line)| line.unknown.first());
    let why = unknown.map_or("a word is computed", String::as_str);
    format!("unknown ({why}), so it may be {}\n  {}", rule.shown(), identify_command(text))
}

/// The beginning of a command and a digest of the whole, so that a grant for this text is one for no other.
pub(super) fn identify_command(text: &str) -> String {
    let shown: String = text.chars().take(SHOWN_LEN_MAX).collect();
    let digest = Sha256::digest(text.as_bytes());
    let digest: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("{shown} [{digest}]")
}

fn push_new(list: &mut Vec<String>, text: String) {
    if !list.contains(&text) {
        list.push(text);
    }
}
