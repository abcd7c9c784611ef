//! `delete`: removes a file, or a directory with its contents.

use brain::{agent::CallResult, model::ToolSchema};
use proto::file_call::{FileAnswer, FileError, FileOperation};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{FileRequest, FileTask, FileTool, checked_path, odd_answer},
};
use crate::files::reason_word;

const NAME: &str = "delete";
const DESCRIPTION: &str = "Deletes a file or directory from the filesystem.

Usage:
- Permanently removes the file or directory at the given absolute path.
- Deleting a directory removes it and everything inside it, recursively. Prefer
  deleting a directory in one call over deleting each file individually.
- This cannot be undone, so only delete paths you are sure are no longer needed.";

/// Deletes a path.
pub struct DeleteTool;

impl FileTool for DeleteTool {
    fn schema(&self) -> ToolSchema {
        let path = "Absolute path to the file to delete. Must be absolute, not relative.";
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {"file_path": {"type": "string", "description": path}},
                "required": ["file_path"],
            }),
        }
    }

    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let path = read.text("file_path");
        read.finish()?;
        let path = checked_path(path)?;
        let request = FileRequest::Operation(FileOperation::Delete { path: path.clone() });
        Ok(FileTask { request, show: Box::new(move |answer| show(&path, answer)) })
    }
}

fn show(path: &str, answer: FileAnswer) -> CallResult {
    match answer {
        FileAnswer::Deleted => CallResult::text(format!("Deleted {path}")),
        FileAnswer::Error { reason: FileError::NotFound | FileError::NotDirectory, .. } => {
            CallResult::error(format!("Error: '{path}' not found"))
        }
        FileAnswer::Error { reason, .. } => {
            CallResult::error(format!("Error deleting file '{path}': {}", reason_word(&reason)))
        }
        _ => odd_answer(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_deep_agents() {
        let text = |answer| show("/x", answer).blocks[0].as_text().unwrap().to_owned();
        assert_eq!(text(FileAnswer::Deleted), "Deleted /x");
        let error = |reason| text(FileAnswer::Error { reason, path: "/x".into() });
        assert_eq!(error(FileError::NotFound), "Error: '/x' not found");
        assert_eq!(error(FileError::PermissionDenied), "Error deleting file '/x': permission_denied");
    }
}
