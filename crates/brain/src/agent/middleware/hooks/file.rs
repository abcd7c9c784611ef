//! The file of hooks: TOML of the user, refused as a whole if one hook is wrong.
//!
//! ```toml
//! [[hook]]
//! event = "PreToolUse"
//! matcher = "execute|write_file"
//! command = "scripts/look-at-call"
//! timeout_s = 30
//! where = "body"
//! ```

use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;

use crate::library::{LibraryError, check_file_len, command::WordPattern, line_of};

/// The longest file.
const FILE_LEN_MAX: usize = 64 << 10;
/// The most hooks.
const HOOKS_MAX: usize = 64;
/// The longest command.
const COMMAND_LEN_MAX: usize = 4 << 10;
/// The longest matcher.
const MATCHER_LEN_MAX: usize = 1_024;
/// The time of a hook that names none.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
/// The longest time of a hook.
const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// The hooks of a file, in their order.
#[derive(Debug, Clone, Default)]
pub struct HookSet {
    pub(super) hooks: Vec<Hook>,
}

/// One hook.
#[derive(Debug, Clone)]
pub struct Hook {
    /// The event.
    pub event: HookEvent,
    /// The tools, or the kinds of the event, that it is for; all if there is no matcher.
    matcher: Option<Vec<WordPattern>>,
    /// The command.
    pub command: String,
    /// How long it may take.
    pub timeout: Duration,
    /// The place in which it runs.
    pub place: HookPlace,
}

/// The events at which hooks run, with the names of Claude Code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum HookEvent {
    /// Before a call; it can be blocked.
    PreToolUse,
    /// After a call; the hook can add to the result.
    PostToolUse,
    /// A message of the user, before the model sees it; it can be blocked.
    UserPromptSubmit,
    /// The agent wants to finish; it can be kept at work.
    Stop,
    /// A sub-agent wants to finish; it can be kept at work.
    SubagentStop,
    /// A summary will take the place of older messages.
    PreCompact,
    /// A driver begins.
    SessionStart,
    /// A driver ends.
    SessionEnd,
}

impl HookEvent {
    /// The name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PreToolUse => "PreToolUse",
            Self::PostToolUse => "PostToolUse",
            Self::UserPromptSubmit => "UserPromptSubmit",
            Self::Stop => "Stop",
            Self::SubagentStop => "SubagentStop",
            Self::PreCompact => "PreCompact",
            Self::SessionStart => "SessionStart",
            Self::SessionEnd => "SessionEnd",
        }
    }

    fn takes_matcher(self) -> bool {
        !matches!(self, Self::UserPromptSubmit | Self::Stop | Self::SubagentStop)
    }
}

/// The place in which a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookPlace {
    /// The agent's Body, in its working directory.
    #[default]
    Body,
    /// The host, with the rights of the user.
    Host,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HookFile {
    #[serde(default)]
    hook: Vec<Spanned<HookText>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HookText {
    event: HookEvent,
    matcher: Option<String>,
    command: String,
    timeout_s: Option<u64>,
    #[serde(default, rename = "where")]
    place: HookPlace,
}

impl HookSet {
    /// Reads a file of hooks of the user.
    pub fn parse(file: &str, text: &str) -> Result<Self, LibraryError> {
        check_file_len(file, text, FILE_LEN_MAX)?;
        let read: HookFile =
            toml::from_str(text).map_err(|error| LibraryError::from_toml(file, text, &error))?;
        if read.hook.len() > HOOKS_MAX {
            let fault = format!("the file has more than {HOOKS_MAX} hooks");
            return Err(LibraryError::new(file, 1, fault, "join some in one script"));
        }
        let mut hooks = Vec::new();
        for hook in read.hook {
            let line = line_of(text, hook.span().start);
            let hook = read_hook(hook.into_inner());
            hooks.push(hook.map_err(|(fault, mend)| LibraryError::new(file, line, fault, mend))?);
        }
        Ok(Self { hooks })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.hooks.is_empty()
    }
}

impl Hook {
    /// Whether the hook is for an event with this subject: a tool, or the kind of the event.
    pub(super) fn applies(&self, event: HookEvent, subject: &str) -> bool {
        let fits = |patterns: &Vec<WordPattern>| patterns.iter().any(|pattern| pattern.matches(subject));
        self.event == event && self.matcher.as_ref().is_none_or(fits)
    }
}

fn read_hook(text: HookText) -> Result<Hook, (String, String)> {
    let fault = |fault: &str, mend: &str| Err((fault.to_owned(), mend.to_owned()));
    if text.command.trim().is_empty() || text.command.len() > COMMAND_LEN_MAX {
        return fault("the command is empty or longer than 4096 bytes", "put it into a script");
    }
    let timeout = text.timeout_s.map_or(TIMEOUT_DEFAULT, Duration::from_secs);
    if timeout.is_zero() || timeout > TIMEOUT_MAX {
        return fault("timeout_s is not between 1 and 600", "choose a shorter time");
    }
    let matcher = match text.matcher.as_deref().map(str::trim) {
        None | Some("" | "*") => None,
        Some(_) if !text.event.takes_matcher() => {
            return fault("this event has no matcher", "remove the matcher");
        }
        Some(matcher) if matcher.len() > MATCHER_LEN_MAX => {
            return fault("the matcher is longer than 1024 bytes", "use * for a part of a name");
        }
        Some(matcher) => {
            let patterns: Result<_, String> =
                matcher.split('|').map(|name| WordPattern::parse(name.trim())).collect();
            Some(patterns.map_err(|error| (error, "write names of tools: execute|edit_*".to_owned()))?)
        }
    };
    Ok(Hook { event: text.event, matcher, command: text.command, timeout, place: text.place })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_are_read_and_matched() {
        let text = "[[hook]]\nevent = \"PreToolUse\"\nmatcher = \"execute|edit_*\"\ncommand = \"x\"\n\n\
                    [[hook]]\nevent = \"Stop\"\ncommand = \"y\"\ntimeout_s = 5\nwhere = \"host\"\n";
        let set = HookSet::parse("hooks.toml", text).unwrap();
        let [first, second] = &set.hooks[..] else { panic!("two hooks") };
        assert!(
            first.applies(HookEvent::PreToolUse, "execute")
                && first.applies(HookEvent::PreToolUse, "edit_file")
        );
        assert!(
            !first.applies(HookEvent::PreToolUse, "ls") && !first.applies(HookEvent::PostToolUse, "execute")
        );
        assert_eq!((first.place, first.timeout), (HookPlace::Body, TIMEOUT_DEFAULT));
        assert_eq!((second.place, second.timeout), (HookPlace::Host, Duration::from_secs(5)));
    }

    #[test]
    fn a_wrong_hook_is_refused_with_its_line() {
        let check = |rest: &str, expected: &str| {
            let text = format!("# hooks\n[[hook]]\n{rest}\n");
            assert_eq!(
                HookSet::parse("hooks.toml", &text).unwrap_err().to_string(),
                format!("hooks.toml:2: {expected}")
            );
        };
        check("event = \"Stop\"\ncommand = \" \"", "the command is empty or longer than 4096 bytes");
        check("event = \"Stop\"\ncommand = \"x\"\nmatcher = \"a\"", "this event has no matcher");
        check("event = \"PreToolUse\"\ncommand = \"x\"\ntimeout_s = 0", "timeout_s is not between 1 and 600");
        check(
            "event = \"PreToolUse\"\ncommand = \"x\"\nmatcher = \"{a\"",
            "the brace in \"{a\" is not closed",
        );
        assert!(HookSet::parse("h", "[[hook]]\nevent = \"Never\"\ncommand = \"x\"\n").is_err());
        assert!(
            HookSet::parse("h", "[[hook]]\nevent = \"Stop\"\ncommand = \"x\"\nwhere = \"moon\"\n").is_err()
        );
    }
}
