//! Rules: which calls of tools a person allows, refuses or wants to be asked about, and which commands are a risk.
//!
//! A rule is data with a reason and examples:
//! ```toml
//! [[rule]]
//! decision = "ask"
//! command = ["git", "push", "**"]
//! why = "a push publishes commits"
//! match = ["git push origin main", "cd app && git -C . push"]
//! not_match = ["git status", "git stash push"]
//! ```
//! Commands are matched as the shell would read them, not as text: quotes, variables, pipelines, `sh -c` and programs that
//! start programs are understood (see [`super::command`]).
//!
//! Invariant: a rule is a convenience, never the security boundary. A program that the agent writes can do what a rule
//! forbids; the Body decides what is possible.
//! Invariant: deny beats ask, and ask beats allow, whatever their order. A command that cannot be known matches every
//! rule that denies or asks as `unknown`, and a person is asked; it matches no rule that allows.
//! Invariant: a rule holds for its examples, or the file is refused.

mod file;
mod judge;
mod keep;
mod path;
mod risk;
#[cfg(test)]
mod tests;

use proto::event_data::CallRisk;

use super::command::{CommandPattern, Fit, ShellLine, WordPattern};
pub use judge::{CallSubject, RuleCoverage, RuleVerdict, shell_argument};
pub use keep::keep_rule;
use path::PathPattern;
pub use path::normalize_path;
pub use risk::risk_of_command;

/// The rules of one agent.
#[derive(Debug, Clone, Default)]
pub struct RuleSet {
    rules: Vec<CallRule>,
    risks: Vec<RiskRule>,
}

/// The decision of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum RuleDecision {
    Allow,
    Ask,
    Deny,
}

/// One rule.
#[derive(Debug, Clone)]
struct CallRule {
    decision: RuleDecision,
    tool: WordPattern,
    tool_shown: String,
    subject: RuleSubject,
    why: String,
    /// The file and the line.
    place: String,
}

/// The calls of a tool that a rule is about.
#[derive(Debug, Clone)]
enum RuleSubject {
    /// Every call.
    Call,
    /// Calls that run a command.
    Command(CommandRule),
    /// Calls that name a file.
    Path(PathPattern),
}

/// A risk of commands.
#[derive(Debug, Clone)]
struct RiskRule {
    level: CallRisk,
    command: CommandRule,
    why: String,
}

/// A command, alone or together with one that reads its output or comes after it.
#[derive(Debug, Clone)]
struct CommandRule {
    command: CommandPattern,
    /// A command that reads the output of the first one.
    into: Option<CommandPattern>,
    /// A command that comes after the first one.
    then: Option<CommandPattern>,
    /// Commands that the first pattern matches, but the rule is not about.
    except: Vec<CommandPattern>,
}

impl RuleSet {
    /// Adds the rules of another source. The order does not count.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.rules.extend(other.rules);
        self.risks.extend(other.risks);
        self
    }

    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.rules.len() + self.risks.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl CallRule {
    /// The rule as a person reads it. A grant for an agent holds for this text.
    fn shown(&self) -> String {
        let subject = match &self.subject {
            RuleSubject::Call => self.tool_shown.clone(),
            RuleSubject::Command(rule) => rule.shown(),
            RuleSubject::Path(pattern) => format!("{} {}", self.tool_shown, pattern.shown()),
        };
        format!("{subject}: {}", self.why)
    }
}

impl CommandRule {
    fn shown(&self) -> String {
        let into = self.into.as_ref().map(|into| format!(" | {}", into.shown())).unwrap_or_default();
        let then = self.then.as_ref().map(|then| format!(" … {}", then.shown())).unwrap_or_default();
        format!("{}{into}{then}", self.command.shown())
    }

    /// How certainly a call of a command line matches.
    fn fit(&self, line: &ShellLine, index: usize) -> Fit {
        let Some(call) = line.calls.get(index) else { return Fit::Never };
        let fit = self.command.fit(call);
        if fit == Fit::Never || self.except.iter().any(|except| except.fit(call) == Fit::Certain) {
            return Fit::Never;
        }
        let best = |pattern: &CommandPattern, indices: &mut dyn Iterator<Item = usize>| {
            let calls = indices.filter_map(|index| line.calls.get(index));
            calls.map(|call| pattern.fit(call)).max().unwrap_or(Fit::Never)
        };
        let into = self.into.as_ref().map(|into| best(into, &mut line.readers(index).into_iter()));
        let then = self.then.as_ref().map(|then| best(then, &mut (index + 1..line.calls.len())));
        fit.min(into.unwrap_or(Fit::Certain)).min(then.unwrap_or(Fit::Certain))
    }

    /// How certainly a command line has a call that matches.
    fn fit_line(&self, line: &ShellLine) -> Fit {
        let known = (0..line.calls.len()).map(|index| self.fit(line, index)).max().unwrap_or(Fit::Never);
        if line.unknown.is_empty() { known } else { known.max(Fit::Possible) }
    }
}
