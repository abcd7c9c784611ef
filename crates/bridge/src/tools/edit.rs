//! `edit_file`: replaces text in a file.

use brain::{agent::CallResult, model::ToolSchema};
use proto::file_call::{FileAnswer, FileError, FileOperation};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{FileRequest, FileTask, FileTool, checked_path, odd_answer},
    text::quoted,
};
use crate::files::reason_word;

const NAME: &str = "edit_file";
const DESCRIPTION: &str = "Performs exact string replacements in files.

Usage:
- You must read the file before editing; this tool errors otherwise.
- Preserve the exact source indentation from the read output, and never include the read status header in old_string or new_string.
- Prefer editing an existing file over creating a new one.
- Only use emojis if the user explicitly requests it.";

/// Edits a file.
pub struct EditTool;

impl FileTool for EditTool {
    fn schema(&self) -> ToolSchema {
        let text = |description: &str| json!({"type": "string", "description": description});
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "file_path": text("Absolute path to the file to edit. Must be absolute, not relative."),
                    "old_string": text("The exact text to find and replace. Must be unique in the file unless replace_all is True."),
                    "new_string": text("The text to replace old_string with. Must be different from old_string."),
                    "replace_all": {
                        "type": "boolean",
                        "default": false,
                        "description": "If True, replace all occurrences of old_string. If False (default), old_string must be unique.",
                    },
                },
                "required": ["file_path", "old_string", "new_string"],
            }),
        }
    }

    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let path = read.text("file_path");
        let (old, new) = (read.text("old_string").to_owned(), read.text("new_string").to_owned());
        let replace_all = read.flag("replace_all");
        read.finish()?;
        let path = checked_path(path)?;
        let (shown_path, shown_old) = (path.clone(), old.clone());
        let request = FileRequest::Operation(FileOperation::Edit { path, old, new, replace_all });
        Ok(FileTask { request, show: Box::new(move |answer| show(&shown_path, &shown_old, answer)) })
    }
}

fn show(path: &str, old: &str, answer: FileAnswer) -> CallResult {
    let reason = match answer {
        FileAnswer::Edited { occurrences } => {
            let text = format!("Successfully replaced {occurrences} instance(s) of the string in '{path}'");
            return CallResult::text(text);
        }
        FileAnswer::Error { reason, .. } => reason,
        _ => return odd_answer(),
    };
    let old = quoted(old);
    CallResult::error(match reason {
        FileError::NotFound => format!("Error: File '{path}' not found"),
        FileError::PermissionDenied => format!("Error: Permission denied editing file '{path}'"),
        FileError::IsDirectory => format!("Error: '{path}' is not a regular file"),
        FileError::NotText => format!("Error: File '{path}' is not a text file"),
        FileError::NoOccurrence => format!("Error: String not found in file: '{old}'"),
        FileError::Ambiguous { .. } => format!(
            "Error: String '{old}' appears multiple times. Use replace_all=True to replace all occurrences."
        ),
        FileError::EmptyPattern => {
            "Error: old_string cannot be empty. Provide the exact text to replace.".to_owned()
        }
        reason => format!("Error editing file '{path}': {}", reason_word(&reason)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by Deep Agents 0.7.32.
    #[test]
    fn texts_are_those_of_deep_agents() {
        let text = |old: &str, answer| show("/f", old, answer).blocks[0].as_text().unwrap().to_owned();
        assert_eq!(
            text("x", FileAnswer::Edited { occurrences: 2 }),
            "Successfully replaced 2 instance(s) of the string in '/f'"
        );
        let error = |old: &str, reason| text(old, FileAnswer::Error { reason, path: "/f".into() });
        assert_eq!(error("a", FileError::NotFound), "Error: File '/f' not found");
        assert_eq!(error("a", FileError::IsDirectory), "Error: '/f' is not a regular file");
        assert_eq!(error("a", FileError::NotText), "Error: File '/f' is not a text file");
        assert_eq!(error("q", FileError::NoOccurrence), "Error: String not found in file: 'q'");
        assert_eq!(
            error("\n", FileError::Ambiguous { occurrences: 3 }),
            "Error: String '\n' appears multiple times. Use replace_all=True to replace all occurrences."
        );
        assert_eq!(
            error("", FileError::EmptyPattern),
            "Error: old_string cannot be empty. Provide the exact text to replace."
        );
        assert!(error(&"é".repeat(1 << 20), FileError::NoOccurrence).len() < 5000);
    }
}
