//! `glob`: files by a pattern of their names.

use brain::{agent::CallResult, model::ToolSchema};
use proto::file_call::{FileAnswer, FileError};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{FileRequest, FileTask, FileTool, checked_path, odd_answer},
    list::place_word,
    text::{Completeness, show_paths},
};

const NAME: &str = "glob";
const DESCRIPTION: &str = "Find files matching a glob pattern, returning absolute paths.

Supports `*` (any characters within a path segment), `**` (any directories), `?` (single character), `[abc]` (one character from a set), and `{a,b}` (alternatives), e.g. `*.py`, `src/**/*.py`, `*.{yml,yaml}`.

A pattern without `/` matches the file name at any depth under the search root (`*.py` matches `src/app/main.py`). A pattern containing `/` matches the search-root-relative path (`src/**/*.py`). A leading `/` anchors to the search root (`/*.py` matches only top-level Python files).

Leading-dot names are only matched when the pattern segment itself starts with `.` (use `.env`, or `.github/**/*.yml`). Because `**` will not descend into dot-directories, the bare form `*.yml` is *broader* than `**/*.yml` and is usually what you want.";
const PATTERN: &str = "Glob pattern to match files (e.g., '*.py', '**/*.py', '/subdir/**/*.md'). A pattern without '/' matches the file name at any depth; a pattern containing '/' matches the search-root-relative path; a leading '/' anchors to the search root ('/*.py' matches only top-level files). Leading-dot names are excluded unless the pattern segment starts with '.', so prefer the bare form '*.py' over '**/*.py' -- '**' will not descend into dot-directories like '.github'.";
const PARTIAL: &str = "Note: the search stopped early because it hit its time or size limit. The paths above are valid but incomplete. Narrow the search (a more specific pattern or a narrower path) to see the rest.";
const UNREADABLE: &str = "Note: some directories could not be read, so the paths above are valid but incomplete. Narrowing the search will NOT reveal the missing files -- they are inaccessible. Continue with what is listed, or report the access problem rather than retrying.";

/// Finds files by name.
pub struct GlobTool;

impl FileTool for GlobTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "pattern": {"type": "string", "description": PATTERN},
                    "path": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "default": null,
                        "description": "Base directory to search from. Defaults to the backend's default root.",
                    },
                },
                "required": ["pattern"],
            }),
        }
    }

    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let (pattern, path) = (read.text("pattern").to_owned(), read.optional_text("path"));
        read.finish()?;
        let path = path.map(checked_path).transpose()?;
        Ok(FileTask { request: FileRequest::Glob { pattern, path }, show: Box::new(show) })
    }
}

fn show(answer: FileAnswer) -> CallResult {
    match answer {
        FileAnswer::Paths { paths, truncated, unreadable } => {
            let shown = show_paths(&paths, Completeness::Whole);
            CallResult::text(match (unreadable, truncated) {
                (true, _) => format!("{shown}\n\n{UNREADABLE}"),
                (false, true) => format!("{shown}\n\n{PARTIAL}"),
                (false, false) => shown,
            })
        }
        FileAnswer::Error { reason, path } => {
            CallResult::error(format!("Error: Path '{path}': {}", pattern_word(&reason)))
        }
        _ => odd_answer(),
    }
}

/// Deep Agents' word for an error of a search.
pub fn pattern_word(reason: &FileError) -> String {
    match reason {
        FileError::InvalidPattern { why } if why == "pattern_too_broad" => why.clone(),
        FileError::InvalidPattern { .. } => "invalid_pattern".into(),
        reason => place_word(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by Deep Agents 0.7.32.
    #[test]
    fn texts_are_those_of_deep_agents() {
        let text = |answer| show(answer).blocks[0].as_text().unwrap().to_owned();
        let paths = |truncated, unreadable| {
            text(FileAnswer::Paths { paths: vec!["/w/c.txt".into()], truncated, unreadable })
        };
        assert_eq!(paths(false, false), "['/w/c.txt']");
        assert_eq!(paths(true, false), format!("['/w/c.txt']\n\n{PARTIAL}"));
        assert_eq!(paths(true, true), format!("['/w/c.txt']\n\n{UNREADABLE}"));
        let error = |reason| text(FileAnswer::Error { reason, path: "/w".into() });
        assert_eq!(error(FileError::NotFound), "Error: Path '/w': path_not_found");
        assert_eq!(error(FileError::NotDirectory), "Error: Path '/w': not_a_directory");
        assert_eq!(
            error(FileError::InvalidPattern { why: "anything".into() }),
            "Error: Path '/w': invalid_pattern"
        );
    }
}
