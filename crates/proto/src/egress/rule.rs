//! A rule as a person, a preset or a file wrote it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{fit_to_show, policy::RULES_MAX, rule_reader::split_path};

/// Most examples of a rule.
pub(super) const EXAMPLES_MAX: usize = 32;
/// Longest reason of a rule, in bytes.
pub(super) const WHY_LEN_MAX: usize = 200;

/// A rule that cannot be used.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum RuleError {
    /// The text is not a rule.
    #[error(
        "{0:?} is not a rule: write a name and a port such as `pypi.org:443`, `*.example.org:443` or `db.example.org:5432`, followed by `+private` for a host of your own network, or `+plain` for plain http"
    )]
    Syntax(String),
    /// The policy has too many rules.
    #[error("{0} rules; a policy has at most {RULES_MAX}")]
    TooMany(usize),
    /// A reason or a list of examples is too long.
    #[error(
        "the rule {0:?} has a reason of more than {WHY_LEN_MAX} bytes, or more than {EXAMPLES_MAX} examples"
    )]
    TooLong(String),
    /// The headers of a rule cannot be set.
    #[error(
        "the rule {0:?} sets headers, which needs a name and a rule that allows, without `+tcp` and `+tunnel`; a name or a value of a header is at most 8 KiB of plain text"
    )]
    Headers(String),
    /// A field of the rule has a value that means nothing, alone or beside the other fields.
    #[error("the rule {rule:?} cannot be used: {why}")]
    Field {
        /// The rule.
        rule: String,
        /// The field, and what it needs.
        why: String,
    },
    /// An example contradicts its rule.
    #[error("the rule {rule:?} should {} its example {example:?}", if *.is_match { "match" } else { "not match" })]
    Example {
        /// The rule.
        rule: String,
        /// The example.
        example: String,
        /// Whether the rule should match it.
        is_match: bool,
    },
}

/// The effect of a rule on the connections that it matches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleAction {
    /// The Body may make them.
    #[default]
    Allow,
    /// The Body may not.
    Deny,
    /// Connections wait until a change of the policy allows or denies them.
    Ask,
}

impl RuleAction {
    /// Its word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Ask => "ask",
        }
    }
}

/// A rule as a person or a preset wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressRule {
    /// The effect of the rule.
    #[serde(default, skip_serializing_if = "is_allow")]
    pub action: RuleAction,
    /// The targets, as `[METHODS ]HOST[:PORTS][/PATH][+MARK…]`.
    pub to: String,
    /// Parameters of the query that a request must have, each once, with a value that fits the pattern.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub query: BTreeMap<String, String>,
    /// Headers that a request must have, each once, with a value that fits the pattern.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Headers that each request gets on its way out, in place of its own; `${NAME}` in a value stands for a secret that
    /// the Body may use.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, String>,
    /// The times at which the rule counts, in UTC, such as `mon-fri 08:00-18:00`; without it, always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<String>,
    /// The budgets of the rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<RuleLimit>,
    /// The answer to requests, which then reach no host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub respond: Option<RuleResponse>,
    /// The host, as `HOST:PORT`, to which requests go in place of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<String>,
    /// The reason for the rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Targets (`HOST:PORT`) that the rule must match; checked when it is read.
    #[serde(default, rename = "match", skip_serializing_if = "Vec::is_empty")]
    pub matches: Vec<String>,
    /// Targets that the rule must not match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_match: Vec<String>,
}

/// The budgets of a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleLimit {
    /// How many requests, where requests are judged, or else connections, in any second, minute or hour: `60/min`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<String>,
    /// How many bytes, in both directions together, as long as the Body lives: `100MiB`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<String>,
}

/// The answer of a rule to requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleResponse {
    /// Its status.
    pub status: u16,
    /// Its headers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Its body.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub body: String,
}

fn is_allow(action: &RuleAction) -> bool {
    *action == RuleAction::Allow
}

impl EgressRule {
    /// A rule that allows these targets.
    pub fn allow(to: impl Into<String>) -> Self {
        Self { to: to.into(), ..Self::default() }
    }

    /// A rule that denies these targets.
    pub fn deny(to: impl Into<String>) -> Self {
        Self { action: RuleAction::Deny, ..Self::allow(to) }
    }

    /// A rule that lets connections to these targets wait for a decision.
    pub fn ask(to: impl Into<String>) -> Self {
        Self { action: RuleAction::Ask, ..Self::allow(to) }
    }

    /// The rule, or in the place of one that allows a rule that asks about its host and ports.
    pub fn into_question(self) -> Self {
        match self.action {
            RuleAction::Allow => Self {
                why: self.why.clone(),
                window: self.window.clone(),
                ..Self::ask(self.host_and_ports())
            },
            RuleAction::Deny | RuleAction::Ask => self,
        }
    }

    /// The rule with a reason.
    #[must_use]
    pub fn because(mut self, why: impl Into<String>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// The host and the ports of the rule, without methods, path and marks.
    pub fn host_and_ports(&self) -> &str {
        let text = self.to.split('+').next().unwrap_or_default();
        split_path(text.split_once(' ').map_or(text, |(_, rest)| rest)).0
    }

    /// Whether both rules are about the same connections and requests at the same times, whatever their effect.
    pub fn has_same_targets(&self, other: &Self) -> bool {
        self.to == other.to
            && self.query == other.query
            && self.headers == other.headers
            && self.window == other.window
    }

    /// The rule as one line of text, for decisions and tables.
    pub fn shown(&self) -> String {
        let action = self.action.name();
        match &self.why {
            Some(why) => format!("{action} {} ({})", fit_to_show(&self.to), fit_to_show(why)),
            None => format!("{action} {}", fit_to_show(&self.to)),
        }
    }

    /// The fields of the rule behind its targets, each in a few words.
    pub fn details(&self) -> Vec<String> {
        let pairs = |word: &'static str, pairs: &BTreeMap<String, String>| {
            let shown = |(name, value): (&String, &String)| {
                format!("{word} {}={}", fit_to_show(name), fit_to_show(value))
            };
            pairs.iter().map(shown).collect::<Vec<_>>()
        };
        let mut details = pairs("only query", &self.query);
        details.extend(pairs("only header", &self.headers));
        details.extend(self.window.iter().map(|window| format!("only {} UTC", fit_to_show(window))));
        details.extend(pairs("sets", &self.set_headers));
        if let Some(limit) = &self.limit {
            let budgets = limit.rate.iter().chain(&limit.bytes);
            details.extend(budgets.map(|budget| format!("at most {}", fit_to_show(budget))));
        }
        details.extend(self.respond.iter().map(|answer| format!("responds {}", answer.status)));
        details.extend(self.forward.iter().map(|host| format!("forwards to {}", fit_to_show(host))));
        details
    }
}
