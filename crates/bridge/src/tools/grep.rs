//! `grep`: lines that contain a literal text.

use std::{collections::BTreeMap, fmt::Write};

use brain::{agent::CallResult, model::ToolSchema};
use proto::file_call::{FileAnswer, FileError, MATCHES_MAX, TextMatch};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{FileRequest, FileTask, FileTool, checked_path, odd_answer},
    glob::pattern_word,
    text::cut,
};

const NAME: &str = "grep";
const DESCRIPTION: &str = "Search for a LITERAL text pattern across files (NOT regex).

The pattern is matched verbatim: regex metacharacters are ordinary characters, not operators. To match any of several strings, run a separate grep for each; `grep(pattern=\"foo|bar\")` searches for the literal text \"foo|bar\", and `.*` or `\\.` match those characters literally.
- If you genuinely need regex, use the execute tool with `rg '<regex>'` instead.

Returns matching files or content per `output_mode`. Offloaded large tool results live under the artifacts root (`/large_tool_results/` by default); grep that directory to search them when you do not know the exact path.";
const GLOB: &str = "Glob pattern (NOT regex) limiting which files are searched (e.g. '*.py', '*.ts'). A pattern without '/' matches the file name at any depth; a pattern containing '/' matches the search-root-relative path (e.g. 'src/**/*.py'). This is an in-tool file filter, not a call to the separate glob tool. Brace expansion (e.g. '*.{ts,tsx}') is not supported on all backends; run a separate search per extension for reliable results.";
const OUTPUT_MODE: &str = "Shape of the returned text. 'files_with_matches' (default): newline-separated matching file paths. 'content': matching lines grouped by file under a '<path>:' header, each line indented and formatted '<line_number>: <line text>' (only the matched line, no surrounding context). 'count': one '<path>: <match_count>' line per file.";
const MAX_COUNT: &str = "Optional cap on the total number of matches returned across all files. Leave unset to use the configured default. When the cap is hit, results are truncated and a note says so; narrow the pattern or path to see the rest.";
const PARTIAL: &str = "Note: the search stopped early (it hit its time limit or the maximum match count). The matches above are valid but incomplete. Narrow the search (a more specific pattern or a narrower path), or raise max_count, to see the rest.";
const LITERAL: &str = "Note: grep matches literal text, not regex, so characters like `|`, `.*`, and `\\.` are searched verbatim. Search for the literal text you need instead; for `|` alternation, run a separate search per alternative.";
const MODES: &[&str] = &["files_with_matches", "content", "count"];

/// Finds lines by their text.
pub struct GrepTool;

impl FileTool for GrepTool {
    fn schema(&self) -> ToolSchema {
        let optional = |kind: Value, description: &str| json!({"anyOf": [kind, {"type": "null"}], "default": null, "description": description});
        let text = || json!({"type": "string"});
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "pattern": {"type": "string", "description": "Text pattern to search for (literal string, not regex)."},
                    "path": optional(text(), "Directory to search in. Defaults to current working directory."),
                    "glob": optional(text(), GLOB),
                    "output_mode": {
                        "type": "string",
                        "enum": MODES,
                        "default": MODES[0],
                        "description": OUTPUT_MODE,
                    },
                    "max_count": optional(json!({"type": "integer", "exclusiveMinimum": 0}), MAX_COUNT),
                },
                "required": ["pattern"],
            }),
        }
    }

    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let pattern = read.text("pattern").to_owned();
        let (path, glob) = (read.optional_text("path"), read.optional_text("glob"));
        let mode = read.word("output_mode", MODES);
        let count = read.optional_integer("max_count");
        if count.is_some_and(|count| count <= 0) {
            read.refuse("max_count", "Input should be greater than 0");
        }
        read.finish()?;
        let path = path.map(checked_path).transpose()?;
        let limit = count.and_then(|count| u64::try_from(count).ok()).unwrap_or(MATCHES_MAX).min(MATCHES_MAX);
        let text = pattern.clone();
        let request = FileRequest::Grep { pattern, path, glob: glob.map(str::to_owned), limit };
        Ok(FileTask { request, show: Box::new(move |answer| show(&text, mode, answer)) })
    }
}

fn show(pattern: &str, mode: &str, answer: FileAnswer) -> CallResult {
    match answer {
        FileAnswer::Matches { matches, truncated } => {
            let shown = cut(show_matches(&matches, mode));
            CallResult::text(match (truncated, matches.is_empty() && looks_like_regex(pattern)) {
                (true, _) => format!("{shown}\n\n{PARTIAL}"),
                (false, true) => format!("{shown}\n\n{LITERAL}"),
                (false, false) => shown,
            })
        }
        // Deep Agents finds nothing in a directory that does not exist.
        FileAnswer::Error { reason: FileError::NotFound, .. } => {
            show(pattern, mode, FileAnswer::Matches { matches: Vec::new(), truncated: false })
        }
        FileAnswer::Error { reason, path } => {
            CallResult::error(format!("Path '{path}': {}", pattern_word(&reason)))
        }
        _ => odd_answer(),
    }
}

fn show_matches(matches: &[TextMatch], mode: &str) -> String {
    if matches.is_empty() {
        return "No matches found".to_owned();
    }
    let mut by_path: BTreeMap<&str, Vec<&TextMatch>> = BTreeMap::new();
    for found in matches {
        by_path.entry(&found.path).or_default().push(found);
    }
    let lines: Vec<String> = by_path
        .iter()
        .map(|(path, found)| match mode {
            "content" => found.iter().fold(format!("{path}:"), |mut text, one| {
                let _ = write!(text, "\n  {}: {}", one.line, one.text);
                text
            }),
            "count" => format!("{path}: {}", found.len()),
            _ => (*path).to_owned(),
        })
        .collect();
    lines.join("\n")
}

/// Whether a pattern was written as a regular expression: signs that literal texts rarely have.
fn looks_like_regex(pattern: &str) -> bool {
    let escaped = |text: &str| {
        let mut pairs = text.chars().zip(text.chars().skip(1));
        pairs.any(|(sign, next)| sign == '\\' && ".wWdDsSbB(){}[]|+*?^$".contains(next))
    };
    ["|", ".*", ".+"].iter().any(|sign| pattern.contains(sign)) || escaped(pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches() -> Vec<TextMatch> {
        let found = |path: &str, line, text: &str| TextMatch { path: path.into(), line, text: text.into() };
        vec![found("/w/b", 3, "  z"), found("/w/a", 1, "z"), found("/w/b", 9, "zz")]
    }

    fn text(pattern: &str, mode: &str, matches: Vec<TextMatch>, truncated: bool) -> String {
        let result = show(pattern, mode, FileAnswer::Matches { matches, truncated });
        result.blocks[0].as_text().unwrap().to_owned()
    }

    /// Printed by Deep Agents 0.7.32.
    #[test]
    fn texts_are_those_of_deep_agents() {
        assert_eq!(text("z", "files_with_matches", matches(), false), "/w/a\n/w/b");
        assert_eq!(text("z", "content", matches(), false), "/w/a:\n  1: z\n/w/b:\n  3:   z\n  9: zz");
        assert_eq!(text("z", "count", matches(), false), "/w/a: 1\n/w/b: 2");
        assert_eq!(text("z", "count", matches(), true), format!("/w/a: 1\n/w/b: 2\n\n{PARTIAL}"));
        assert_eq!(text("z", "content", vec![], false), "No matches found");
        assert_eq!(text("a.*b", "content", vec![], false), format!("No matches found\n\n{LITERAL}"));
        let refused = FileAnswer::Error { reason: FileError::NotFound, path: "/nope".into() };
        assert_eq!(show("z", "content", refused).blocks[0].as_text(), Some("No matches found"));
    }

    #[test]
    fn regular_expressions_are_recognised() {
        for pattern in ["a|b", "x.*", "x.+", "\\d", "a\\.b"] {
            assert!(looks_like_regex(pattern), "{pattern}");
        }
        for pattern in ["self.tools", "f(x)", "a[0]", "C:\\path", "\\n", "^a$"] {
            assert!(!looks_like_regex(pattern), "{pattern}");
        }
    }
}
