//! The file format of scripts. `docs/reference/model-script.md` describes it for people.

use std::{collections::BTreeMap, io::Read, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::TokenUsage;

const FILE_BYTES_MAX: u64 = 64 << 20;

/// Why a script cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// The file cannot be read.
    #[error("cannot read the script {file}")]
    File {
        /// The path.
        file: String,
        /// The error of the kernel.
        #[source]
        source: std::io::Error,
    },
    /// The text is no TOML, or TOML of another form.
    #[error("the script is invalid")]
    Syntax(#[from] toml::de::Error),
    /// The text has the right form but makes no sense.
    #[error("turn {turn} of the script is invalid: {reason}")]
    Turn {
        /// The number of the turn in the file, from 1.
        turn: usize,
        /// The fault.
        reason: String,
    },
    /// The script says nothing.
    #[error("the script has no [[turns]]")]
    Empty,
}

/// A script: what a model answers, turn by turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// A text of the system prompt by which a server recognises a role, by role.
    #[serde(default)]
    pub(super) roles: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) turns: Vec<ScriptTurn>,
}

/// One turn: the conditions under which it is used, and the answer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScriptTurn {
    /// The role whose conversations use this turn; the main agent if absent.
    pub role: Option<String>,
    /// A text of the first message; conversations without it skip this turn.
    pub task: Option<String>,
    /// Texts that the newest message must contain.
    #[serde(default)]
    pub expect: Vec<String>,
    pub think: Option<String>,
    #[serde(default)]
    pub text: String,
    #[serde(default)]
    pub calls: Vec<ScriptCall>,
    #[serde(default)]
    pub stop: ScriptStop,
    pub usage: Option<TokenUsage>,
    pub fault: Option<ScriptFault>,
    /// How many attempts the fault hits.
    #[serde(default)]
    pub times: RepeatCount,
    /// The fault `overflow` hits only conversations with more messages than this.
    #[serde(default)]
    pub over_messages: usize,
    /// The pause between two pieces of the answer.
    pub pause_ms: Option<u64>,
    #[serde(default)]
    pub repeat: RepeatCount,
}

/// One tool call of a turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScriptCall {
    pub tool: String,
    #[serde(default)]
    pub arguments: ScriptArguments,
}

/// Arguments: a table, or text that is sent as it is.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum ScriptArguments {
    Table(Map<String, Value>),
    Text(String),
}

impl Default for ScriptArguments {
    fn default() -> Self {
        Self::Table(Map::new())
    }
}

impl ScriptArguments {
    pub fn to_text(&self) -> String {
        match self {
            Self::Table(map) => Value::Object(map.clone()).to_string(),
            Self::Text(text) => text.clone(),
        }
    }
}

/// Why a turn stops; by default after its calls, or at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ScriptStop {
    #[default]
    Natural,
    MaxTokens,
}

/// A fault of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ScriptFault {
    /// Too many requests.
    #[serde(rename = "429")]
    RateLimit,
    /// No capacity.
    #[serde(rename = "529")]
    Overload,
    /// A failure of the server.
    #[serde(rename = "500")]
    Server,
    /// The body ends in the middle of the answer.
    Cut,
    /// The connection breaks in the middle of the answer.
    Drop,
    /// An error event in the middle of the answer, after status 200.
    Error,
    /// An event that is no JSON in the middle of the answer.
    Malformed,
    /// The conversation is too long.
    Overflow,
    /// The model refuses.
    Refusal,
    /// The answer comes slowly.
    Slow,
}

/// How often: a number, or `"forever"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum RepeatCount {
    Times(usize),
    Word(RepeatWord),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RepeatWord {
    Forever,
}

impl Default for RepeatCount {
    fn default() -> Self {
        Self::Times(1)
    }
}

impl RepeatCount {
    /// The number; none if there is no end.
    pub fn limit(self) -> Option<usize> {
        match self {
            Self::Times(times) => Some(times),
            Self::Word(RepeatWord::Forever) => None,
        }
    }
}

impl Script {
    /// Reads a script from a file.
    pub fn open(file: &Path) -> Result<Self, ScriptError> {
        let failed = |source| ScriptError::File { file: file.display().to_string(), source };
        let mut text = String::new();
        let opened = std::fs::File::open(file).map_err(failed)?;
        opened.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
        Self::parse(&text)
    }

    /// Reads a script from its text.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let script: Self = toml::from_str(text)?;
        if script.turns.is_empty() {
            return Err(ScriptError::Empty);
        }
        for (index, turn) in script.turns.iter().enumerate() {
            let fault = find_fault(turn).or_else(|| script.find_unreachable(index));
            if let Some(reason) = fault {
                return Err(ScriptError::Turn { turn: index + 1, reason });
            }
        }
        Ok(script)
    }

    fn find_unreachable(&self, index: usize) -> Option<String> {
        let turn = &self.turns[index];
        let same =
            |other: &ScriptTurn| other.role == turn.role && (other.task.is_none() || other.task == turn.task);
        let endless = |other: &ScriptTurn| other.repeat.limit().is_none() && same(other);
        let before = self.turns[..index].iter().position(endless)?;
        Some(format!("no conversation reaches it, because turn {} repeats forever", before + 1))
    }
}

fn find_fault(turn: &ScriptTurn) -> Option<String> {
    if turn.repeat.limit() == Some(0) || turn.times.limit() == Some(0) {
        return Some("`repeat` and `times` are at least 1".to_owned());
    }
    if turn.calls.iter().any(|call| call.tool.is_empty()) {
        return Some("a call names no tool".to_owned());
    }
    if turn.over_messages > 0 && turn.fault != Some(ScriptFault::Overflow) {
        return Some("`over_messages` belongs to fault \"overflow\"".to_owned());
    }
    if turn.role.as_deref().is_some_and(str::is_empty) {
        return Some("`role` is empty; leave it out for the main agent".to_owned());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_has_every_part_of_its_documentation() {
        let script = Script::parse(
            r#"
            [roles]
            tester = "You test."

            [[turns]]
            think = "First I look."
            text = "Looking."
            calls = [
              { tool = "ls", arguments = { path = "/", depth = 2 } },
              { tool = "ls", arguments = '{"path": ' },
              { tool = "now" },
            ]
            usage = { input = 10, output = 5, cache_read = 3 }

            [[turns]]
            role = "tester"
            task = "unit"
            expect = ["FAILED", "1 test"]
            text = "Bad."
            fault = "429"
            times = 2
            repeat = "forever"
            pause_ms = 5
            stop = "max_tokens"
            "#,
        )
        .unwrap();
        let [first, second] = script.turns.as_slice() else { panic!("two turns") };
        assert_eq!(first.calls[0].arguments.to_text(), r#"{"depth":2,"path":"/"}"#);
        assert_eq!(first.calls[1].arguments.to_text(), r#"{"path": "#);
        assert_eq!(first.calls[2].arguments.to_text(), "{}");
        assert_eq!(first.usage.unwrap().cache_read, 3);
        assert_eq!((second.fault, second.times.limit()), (Some(ScriptFault::RateLimit), Some(2)));
        assert_eq!((second.repeat.limit(), second.stop), (None, ScriptStop::MaxTokens));
    }

    #[test]
    fn a_wrong_script_is_refused_with_its_turn() {
        let cases = [
            ("", "no [[turns]]"),
            ("[[turns]]\ntxt = 'a'", "txt"),
            ("[[turns]]\nfault = '418'", "418"),
            ("[[turns]]\nrepeat = 0", "turn 1"),
            ("[[turns]]\n[[turns]]\ntimes = 0", "turn 2"),
            ("[[turns]]\nrepeat = 'forever'\n[[turns]]", "turn 1 repeats forever"),
            ("[[turns]]\ncalls = [{ tool = '' }]", "names no tool"),
            ("[[turns]]\nover_messages = 3", "overflow"),
            ("[[turns]]\nrole = ''", "main agent"),
        ];
        for (text, reason) in cases {
            let error = Script::parse(text).unwrap_err();
            let said = format!(
                "{error} {}",
                std::error::Error::source(&error).map_or(String::new(), ToString::to_string)
            );
            assert!(said.contains(reason), "{text:?}: {said}");
        }
        let open = Script::parse(
            "[[turns]]\nrole = 'a'\nrepeat = 'forever'\n[[turns]]\n[[turns]]\ntask = 'x'\nrepeat = 'forever'\n[[turns]]",
        );
        assert!(open.is_ok(), "{open:?}");
    }
}
