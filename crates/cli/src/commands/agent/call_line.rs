//! Tool calls in one line each, and the edits that they made, in short.
//!
//! Trust: arguments and results come from a model and from a Body. Only known fields are read, and everything is cut.

use brain::model::ResultBlock;
use proto::event_data::CallOutcome;
use serde_json::Value;

use super::style::{TextLine, Tone};

/// Arguments that say best what a call is about, the most telling first.
const MAIN_ARGUMENTS: &[&str] =
    &["command", "cmd", "file_path", "pattern", "path", "description", "question", "query", "url", "chars"];
/// How many characters of the main argument and of the result a line shows.
const ARGUMENT_LEN: usize = 100;
const RESULT_LEN: usize = 160;
/// How many removed and how many added lines of one edit are shown.
const EDIT_LINES: usize = 4;
/// How many lines of a patch are shown.
const PATCH_LINES: usize = 10;

/// A call that ended.
pub struct CallReport<'a> {
    /// The tool.
    pub tool: &'a str,
    /// The arguments.
    pub arguments: &'a Value,
    /// How it ended.
    pub outcome: &'a CallOutcome,
    /// The result.
    pub blocks: &'a [ResultBlock],
    /// The exit code of its command.
    pub exit_code: Option<i32>,
    /// How long it took.
    pub took_ms: u64,
}

impl CallReport<'_> {
    /// Whether the call did what it was for.
    pub fn is_success(&self) -> bool {
        is_success(self.outcome, self.exit_code)
    }

    /// The call, its result and its time in one line.
    pub fn line(&self) -> TextLine {
        let (sign, tone) = if self.is_success() { ("✓ ", Tone::Good) } else { ("✗ ", Tone::Bad) };
        let mut line = TextLine::new(tone, sign).add(Tone::Strong, self.tool);
        let argument = main_argument(self.arguments);
        if !argument.is_empty() {
            line = line.add(Tone::Normal, &format!(" {argument}"));
        }
        if let Some(word) = outcome_word(self.outcome) {
            line = line.add(Tone::Bad, &format!("  {word}"));
        }
        if let Some(code) = self.exit_code {
            let tone = if code == 0 { Tone::Faint } else { Tone::Bad };
            line = line.add(tone, &format!("  exit {code}"));
        }
        line = line.add(Tone::Faint, &format!("  {}", time(self.took_ms)));
        // Of an edit the lines that changed say more than the tool's words.
        let result = if self.edit_lines().is_empty() { self.result() } else { String::new() };
        if result.is_empty() { line } else { line.add(Tone::Faint, &format!("  {result}")) }
    }

    /// The result in a few words.
    fn result(&self) -> String {
        let texts: Vec<&str> = self.blocks.iter().filter_map(ResultBlock::as_text).collect();
        let images = self.blocks.len() - texts.len();
        let mut lines = texts
            .iter()
            .flat_map(|text| text.lines())
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with("[Command "));
        let first = lines.next().unwrap_or_default();
        let (count, last) = lines.fold((1, first), |(count, _), line| (count + 1, line));
        let shown = match (count, images) {
            (1, 0) => first.to_owned(),
            (1, images) => format!("{images} images {first}"),
            // The end of a command's output says how it went; of a listing the size is enough.
            _ if self.exit_code.is_some() || !self.is_success() => format!("… {last}"),
            (count, _) => format!("{count} lines"),
        };
        shorten(&shown, RESULT_LEN)
    }

    /// The lines that a successful edit removed and added, in short.
    pub fn edit_lines(&self) -> Vec<TextLine> {
        if *self.outcome != CallOutcome::Done {
            return Vec::new();
        }
        let text = |name: &str| self.arguments.get(name).and_then(Value::as_str);
        match (text("old_string"), text("new_string"), text("content"), text("patch").or(text("input"))) {
            (Some(old), Some(new), ..) => edit_lines(old, new),
            (_, _, Some(content), _) => edit_lines("", content),
            (.., Some(patch)) if self.tool == "apply_patch" => patch_lines(patch),
            _ => Vec::new(),
        }
    }
}

/// Whether a call did what it was for: a command that fails is no success, though its tool worked.
pub fn is_success(outcome: &CallOutcome, exit_code: Option<i32>) -> bool {
    matches!(outcome, CallOutcome::Done | CallOutcome::Answered) && exit_code.unwrap_or(0) == 0
}

fn outcome_word(outcome: &CallOutcome) -> Option<&str> {
    match outcome {
        CallOutcome::Done | CallOutcome::Failed => None,
        CallOutcome::Denied => Some("denied"),
        CallOutcome::Answered => Some("answered by a person"),
        CallOutcome::Interrupted => Some("interrupted"),
        CallOutcome::Unknown => Some("outcome unknown"),
        CallOutcome::Other(word) => Some(word),
    }
}

/// The argument that says best what a call is about, in one line.
pub fn main_argument(arguments: &Value) -> String {
    let Some(object) = arguments.as_object() else {
        return shorten(arguments.as_str().unwrap_or_default(), ARGUMENT_LEN);
    };
    let text = |name: &&str| object.get(*name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let patch = || object.get("patch").or(object.get("input")).and_then(Value::as_str).and_then(patched_file);
    let Some(main) = MAIN_ARGUMENTS.iter().find_map(text).or_else(patch) else {
        return if object.is_empty() { String::new() } else { shorten(&arguments.to_string(), ARGUMENT_LEN) };
    };
    let main = shorten(main, ARGUMENT_LEN);
    match (text(&"pattern"), text(&"path")) {
        (Some(pattern), Some(path)) if pattern != path => {
            format!("{main} in {}", shorten(path, ARGUMENT_LEN))
        }
        _ => main,
    }
}

/// The first file that a patch names.
fn patched_file(patch: &str) -> Option<&str> {
    patch.lines().find_map(|line| line.strip_prefix("*** ")?.split_once("File: ")).map(|(_, file)| file)
}

/// The beginning of a text, in one line.
pub fn shorten(text: &str, len: usize) -> String {
    let mut words = String::new();
    for word in text.split_whitespace() {
        if !words.is_empty() {
            words.push(' ');
        }
        words.push_str(word);
        if words.len() > 4 * len {
            break;
        }
    }
    if words.chars().count() <= len {
        return words;
    }
    words.chars().take(len.saturating_sub(1)).chain(['…']).collect()
}

fn edit_lines(old: &str, new: &str) -> Vec<TextLine> {
    let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let same = |pair: &(&&str, &&str)| pair.0 == pair.1;
    let before = old.iter().zip(&new).take_while(same).count();
    let (old, new) = (&old[before..], &new[before..]);
    let after = old.iter().rev().zip(new.iter().rev()).take_while(same).count();
    let (old, new) = (&old[..old.len() - after], &new[..new.len() - after]);
    let mut lines = signed(old, "- ", Tone::Bad);
    lines.extend(signed(new, "+ ", Tone::Good));
    lines
}

fn signed(lines: &[&str], sign: &str, tone: Tone) -> Vec<TextLine> {
    let shown = if lines.len() > EDIT_LINES + 1 { EDIT_LINES } else { lines.len() };
    let mut signed: Vec<TextLine> =
        lines[..shown].iter().map(|line| TextLine::new(tone, &format!("    {sign}{line}"))).collect();
    if shown < lines.len() {
        let more = format!("    {sign}… {} more lines", lines.len() - shown);
        signed.push(TextLine::new(tone, &more));
    }
    signed
}

fn patch_lines(patch: &str) -> Vec<TextLine> {
    let tone = |line: &str| match line.as_bytes().first() {
        Some(b'+') => Some(Tone::Good),
        Some(b'-') => Some(Tone::Bad),
        Some(b'*') if line.contains("File: ") => Some(Tone::Faint),
        _ => None,
    };
    let mut lines = patch.lines().filter_map(|line| Some((tone(line)?, line)));
    let mut shown: Vec<TextLine> = lines
        .by_ref()
        .take(PATCH_LINES)
        .map(|(tone, line)| TextLine::new(tone, &format!("    {line}")))
        .collect();
    let more = lines.count();
    if more > 0 {
        shown.push(TextLine::new(Tone::Faint, &format!("    … {more} more lines")));
    }
    shown
}

/// A time as people say it.
pub fn time(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..10_000 => format!("{}.{}s", ms / 1000, ms % 1000 / 100),
        10_000..60_000 => format!("{}s", ms / 1000),
        60_000..3_600_000 => format!("{}m {:02}s", ms / 60_000, ms % 60_000 / 1000),
        _ => format!("{}h {:02}m", ms / 3_600_000, ms % 3_600_000 / 60_000),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(
        tool: &str,
        arguments: Value,
        outcome: CallOutcome,
        text: &str,
        exit_code: Option<i32>,
    ) -> String {
        let blocks = [ResultBlock::Text { text: text.into() }];
        let report = CallReport {
            tool,
            arguments: &arguments,
            outcome: &outcome,
            blocks: &blocks,
            exit_code,
            took_ms: 41,
        };
        let edits =
            report.edit_lines().iter().map(|line| format!("\n{}", line.to_text())).collect::<String>();
        report.line().to_text() + &edits
    }

    #[test]
    fn a_call_is_one_line() {
        use CallOutcome::{Denied, Done, Failed};
        let failed = "F..\nFAILED (failures=1)\n\n[Command failed with exit code 1]";
        for (shown, expected) in [
            (
                line("execute", json!({"command": "./test  -q\nx"}), Done, failed, Some(1)),
                "✗ execute ./test -q x  exit 1  41ms  … FAILED (failures=1)",
            ),
            (
                line("read_file", json!({"file_path": "/a.py", "limit": 3}), Done, "1\tx\n2\ty", None),
                "✓ read_file /a.py  41ms  2 lines",
            ),
            (
                line("grep", json!({"pattern": "empty", "path": "/w"}), Done, "/w/a.py", None),
                "✓ grep empty in /w  41ms  /w/a.py",
            ),
            (
                line("execute", json!({"command": "git push"}), Denied, "no person", None),
                "✗ execute git push  denied  41ms  no person",
            ),
            (line("nope", json!({}), Failed, "Error: \x1b[2J", None), "✗ nope  41ms  Error: \\u{1b}[2J"),
            (line("odd", json!({"n": 3}), Done, "", None), "✓ odd {\"n\":3}  41ms"),
            (line("bad", json!("{\"a"), Failed, "", None), "✗ bad {\"a  41ms"),
        ] {
            assert_eq!(shown, expected);
        }
    }

    #[test]
    fn an_edit_shows_the_lines_that_changed() {
        let edit = json!({"file_path": "/a", "old_string": "a\nb\nc", "new_string": "a\nB\nc"});
        let shown = line("edit_file", edit.clone(), CallOutcome::Done, "ok", None);
        assert_eq!(shown, "✓ edit_file /a  41ms\n    - b\n    + B");
        assert_eq!(line("edit_file", edit, CallOutcome::Failed, "no", None), "✗ edit_file /a  41ms  no");
        let write = json!({"file_path": "/a", "content": "1\n2\n3\n4\n5\n6\n7\n"});
        let shown = line("write_file", write, CallOutcome::Done, "ok", None);
        assert_eq!(shown, "✓ write_file /a  41ms\n    + 1\n    + 2\n    + 3\n    + 4\n    + … 3 more lines");
        let patch = json!({"patch": "*** Begin Patch\n*** Update File: a.c\n@@\n x\n-y\n+z\n*** End Patch"});
        let shown = line("apply_patch", patch, CallOutcome::Done, "ok", None);
        assert_eq!(shown, "✓ apply_patch a.c  41ms\n    *** Update File: a.c\n    -y\n    +z");
    }

    #[test]
    fn times_have_two_units_at_most() {
        let shown = [7, 1_230, 59_999, 61_000, 3_720_000].map(time);
        assert_eq!(shown, ["7ms", "1.2s", "59s", "1m 01s", "1h 02m"]);
    }

    #[test]
    fn endless_words_are_cut() {
        assert_eq!(shorten(&"x".repeat(1 << 20), 5), "xxxx…");
        assert_eq!(shorten("a  b\n c", 50), "a b c");
    }
}
