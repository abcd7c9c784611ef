//! `write_file`: creates or replaces a file.

use brain::{agent::CallResult, model::ToolSchema};
use proto::file_call::{FileAnswer, FileOperation, WrittenFile};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{FileRequest, FileTask, FileTool, checked_path, odd_answer},
};
use crate::files::reason_word;

const NAME: &str = "write_file";
const DESCRIPTION: &str = "Writes content to a file. Creates the file if it does not exist; replaces it entirely if it does.

Usage:
- Use this tool when you intend to create a new file or replace the whole file. You do not need to read the file first.
- Prefer to edit existing files (with the edit_file tool) over creating new ones when possible.";

/// Writes a file.
pub struct WriteTool;

impl FileTool for WriteTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "file_path": {
                        "type": "string",
                        "description": "Absolute path where the file should be written. Must be absolute, not relative.",
                    },
                    "content": {
                        "type": "string",
                        "description": "The text content to write to the file. This parameter is required.",
                    },
                },
                "required": ["file_path", "content"],
            }),
        }
    }

    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let (path, content) = (read.text("file_path"), read.text("content"));
        read.finish()?;
        let path = checked_path(path)?;
        let files = vec![WrittenFile { path: path.clone(), content: Some(content.to_owned()) }];
        let request = FileRequest::Operation(FileOperation::Write { files });
        Ok(FileTask { request, show: Box::new(move |answer| show(&path, answer)) })
    }
}

fn show(path: &str, answer: FileAnswer) -> CallResult {
    match answer {
        FileAnswer::Written => CallResult::text(format!("Updated file {path}")),
        FileAnswer::Error { reason, .. } => {
            CallResult::error(format!("Failed to write file '{path}': {}", reason_word(&reason)))
        }
        _ => odd_answer(),
    }
}

#[cfg(test)]
mod tests {
    use proto::file_call::FileError;

    use super::*;

    #[test]
    fn texts_are_those_of_deep_agents() {
        let text = |answer| show("/a b/c", answer).blocks[0].as_text().unwrap().to_owned();
        assert_eq!(text(FileAnswer::Written), "Updated file /a b/c");
        let error = |reason| text(FileAnswer::Error { reason, path: "/a b/c".into() });
        assert_eq!(error(FileError::IsDirectory), "Failed to write file '/a b/c': is_directory");
        assert_eq!(error(FileError::PermissionDenied), "Failed to write file '/a b/c': permission_denied");
    }
}
