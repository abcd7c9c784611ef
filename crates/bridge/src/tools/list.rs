//! `ls`: the entries of a directory.

use brain::{agent::CallResult, model::ToolSchema};
use proto::file_call::{FileAnswer, FileError, FileOperation};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{FileRequest, FileTask, FileTool, checked_path, odd_answer},
    text::{Completeness, show_paths},
};
use crate::files::reason_word;

const NAME: &str = "ls";
const DESCRIPTION: &str = "Lists all files in a directory.

This is useful for exploring the filesystem and finding the right file to read or edit.
You should almost ALWAYS use this tool before using the read_file or edit_file tools.";

/// Lists a directory.
pub struct ListTool;

impl FileTool for ListTool {
    fn schema(&self) -> ToolSchema {
        let path = "Absolute path to the directory to list. Must be absolute, not relative.";
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {"path": {"type": "string", "description": path}},
                "required": ["path"],
            }),
        }
    }

    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let path = read.text("path");
        read.finish()?;
        let path = checked_path(path)?;
        let request = FileRequest::Operation(FileOperation::List { path });
        Ok(FileTask { request, show: Box::new(show) })
    }
}

fn show(answer: FileAnswer) -> CallResult {
    match answer {
        FileAnswer::Entries { entries, truncated } => {
            let paths: Vec<String> = entries.into_iter().map(|entry| entry.path).collect();
            let completeness = if truncated { Completeness::Partial } else { Completeness::Whole };
            CallResult::text(show_paths(&paths, completeness))
        }
        FileAnswer::Error { reason, path } => {
            CallResult::error(format!("Error: Path '{path}': {}", place_word(&reason)))
        }
        _ => odd_answer(),
    }
}

/// Deep Agents' word for an error of a directory.
pub fn place_word(reason: &FileError) -> String {
    match reason {
        FileError::NotFound => "path_not_found".into(),
        reason => reason_word(reason),
    }
}

#[cfg(test)]
mod tests {
    use proto::file_call::FileEntry;

    use super::*;

    fn text(answer: FileAnswer) -> String {
        show(answer).blocks[0].as_text().unwrap_or_default().to_owned()
    }

    #[test]
    fn texts_are_those_of_deep_agents() {
        let entry = |path: &str| FileEntry { path: path.into(), is_dir: false, len: 0, modified_s: 0 };
        let entries = vec![entry("/a b"), entry("/it's")];
        assert_eq!(text(FileAnswer::Entries { entries, truncated: false }), "['/a b', \"/it's\"]");
        assert_eq!(text(FileAnswer::Entries { entries: vec![], truncated: false }), "No files found");
        let error = |reason| text(FileAnswer::Error { reason, path: "/nope".into() });
        assert_eq!(error(FileError::NotFound), "Error: Path '/nope': path_not_found");
        assert_eq!(error(FileError::NotDirectory), "Error: Path '/nope': not_a_directory");
        assert_eq!(error(FileError::PermissionDenied), "Error: Path '/nope': permission_denied");
    }
}
