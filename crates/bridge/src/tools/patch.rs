//! `apply_patch`: changes of several files, in codex's grammar.
//!
//! Invariant: the files are read first, all new contents are computed, and one keyed operation writes them: a patch that
//! does not fit changes nothing.

use std::{collections::BTreeMap, fmt::Write, sync::Arc};

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult},
    model::ToolSchema,
    patch::{FilePatch, PatchChange, apply_chunks},
};
use proto::file_call::{CONTENT_LEN_MAX, FileAnswer, FileCall, FileError, FileOperation, WrittenFile};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{keyed, odd_answer},
};
use crate::{
    Workplace, explain,
    files::{BodyLife, CompositeFiles, reason_word, resolve},
    guest_key,
};

const NAME: &str = "apply_patch";
const DESCRIPTION: &str = "Changes files by a patch. The whole patch is applied, or nothing.

The patch is a text of this form:

*** Begin Patch
*** Add File: <path>
+<each line of the new file>
*** Delete File: <path>
*** Update File: <path>
*** Move to: <new path, if the file moves>
@@ <a line above the change, such as the head of a class or function; may be left out>
 <a line that stays>
-<a line that goes>
+<a new line>
*** End Patch

Usage:
- Each line of an update begins with ' ', '-' or '+'. Show about three lines that stay above and below each change; there are no line numbers.
- Begin a further change of the same file with a new `@@` line, from the top of the file to its end.
- Write `*** End of File` after a change of the last lines of a file.
- Paths may be absolute, or relative to the working directory.";

/// Applies patches.
pub struct PatchTool {
    workplace: Arc<Workplace>,
    files: Arc<CompositeFiles>,
}

/// The patch of a call, with its paths resolved.
struct ResolvedPatch {
    patch: FilePatch,
    /// The absolute path of each path of the patch.
    paths: BTreeMap<String, String>,
}

impl PatchTool {
    /// Patches these files; relative paths count from the working directory of this place.
    pub fn new(workplace: Arc<Workplace>, files: Arc<CompositeFiles>) -> Self {
        Self { workplace, files }
    }

    fn read(&self, arguments: &Map<String, Value>) -> Result<ResolvedPatch, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let input = read.text("input");
        read.finish()?;
        let patch = FilePatch::parse(input).map_err(|error| format!("Error: {error}"))?;
        let mut paths = BTreeMap::new();
        for change in &patch.changes {
            for path in named_paths(change) {
                let resolved =
                    resolve(self.workplace.workdir(), path).map_err(|error| format!("Error: {error}"))?;
                paths.insert(path.to_owned(), resolved);
            }
        }
        Ok(ResolvedPatch { patch, paths })
    }

    /// The new contents of the files; none for one that is removed.
    async fn compute(&self, resolved: &ResolvedPatch) -> Result<Vec<WrittenFile>, String> {
        let mut contents: BTreeMap<&str, Option<String>> = BTreeMap::new();
        let mut total = 0;
        for change in &resolved.patch.changes {
            let at = |path: &String| resolved.paths.get(path).map_or("", String::as_str);
            match change {
                PatchChange::Add { path, content } => {
                    total += content.len();
                    contents.insert(at(path), Some(content.clone()));
                }
                PatchChange::Delete { path } => {
                    self.current(&contents, at(path), path, "delete").await?;
                    contents.insert(at(path), None);
                }
                PatchChange::Update { path, move_to, chunks } => {
                    let current = self.current(&contents, at(path), path, "update").await?;
                    let new =
                        apply_chunks(path, &current, chunks).map_err(|error| format!("Error: {error}"))?;
                    total += new.len();
                    if let Some(target) = move_to {
                        contents.insert(at(path), None);
                        contents.insert(at(target), Some(new));
                    } else {
                        contents.insert(at(path), Some(new));
                    }
                }
            }
            if total > CONTENT_LEN_MAX {
                return Err(format!(
                    "Error: the changed files are longer than {} MiB together. Use smaller patches.",
                    CONTENT_LEN_MAX >> 20
                ));
            }
        }
        let written =
            |(path, content): (&str, Option<String>)| WrittenFile { path: path.to_owned(), content };
        Ok(contents.into_iter().map(written).collect())
    }

    /// The content of a file after the changes so far.
    async fn current(
        &self,
        contents: &BTreeMap<&str, Option<String>>,
        path: &str,
        named: &str,
        act: &str,
    ) -> Result<String, String> {
        let failed = |why: &str| format!("Error: Failed to {act} file {named}: {why}");
        match contents.get(path) {
            Some(Some(content)) => return Ok(content.clone()),
            Some(None) => return Err(failed("file_not_found")),
            None => {}
        }
        let limit = if act == "delete" { 0 } else { u64::MAX };
        let operation = FileOperation::Read { path: path.to_owned(), offset: 0, limit };
        let reply = self.files.call(FileCall { key: None, operation }).await;
        match reply.map_err(|failure| failed(&explain(&failure)))?.answer {
            FileAnswer::Text { content, .. } => Ok(content),
            FileAnswer::Binary { .. } if act == "delete" => Ok(String::new()),
            FileAnswer::Binary { .. } => Err(failed("not_a_text_file")),
            // A long file can be removed all the same.
            FileAnswer::Error { reason: FileError::TooLarge { .. }, .. } if act == "delete" => {
                Ok(String::new())
            }
            FileAnswer::Error { reason, .. } => Err(failed(&reason_word(&reason))),
            _ => Err(failed("unexpected server response")),
        }
    }

    async fn apply(&self, resolved: &ResolvedPatch, key: &str) -> CallResult {
        let files = match self.compute(resolved).await {
            Ok(files) => files,
            Err(text) => return CallResult::error(text),
        };
        let reply = self.files.call(keyed(FileOperation::Write { files }, key)).await;
        match reply {
            Ok(reply) => {
                let mut result = show(&resolved.patch, reply.answer);
                result.events.extend(reply.events);
                result
            }
            Err(failure) => CallResult::error(format!("Error: {}", explain(&failure))),
        }
    }
}

impl AgentTool for PatchTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {"input": {
                    "type": "string",
                    "description": "The entire contents of the apply_patch command",
                }},
                "required": ["input"],
                "additionalProperties": false,
            }),
        }
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let resolved = self.read(arguments)?;
        let file = |path: String| WrittenFile { path, content: None };
        let files = resolved.paths.into_values().map(file).collect();
        let operation = FileOperation::Write { files };
        self.files.check_place(&operation)?;
        Ok(self.files.plan(&operation, NAME))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            match self.read(&context.arguments) {
                Ok(resolved) => self.apply(&resolved, &context.key).await,
                Err(text) => CallResult::error(text),
            }
        })
    }

    /// A patch that was applied does not fit a second time, so that the guest is asked first whether it was.
    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move {
            let resolved = self.read(&context.arguments).ok()?;
            let paths = resolved.paths.values();
            let in_body = paths.clone().all(|path| !self.files.is_routed(path));
            if !in_body || self.workplace.find_life(&context).await.ok()? == BodyLife::Another {
                return None;
            }
            let recall = FileOperation::Recall { key: guest_key(&context.key) };
            match self.files.call(FileCall { key: None, operation: recall }).await.ok()?.answer {
                FileAnswer::Unknown => Some(self.apply(&resolved, &context.key).await),
                answer => Some(show(&resolved.patch, answer)),
            }
        })
    }
}

fn named_paths(change: &PatchChange) -> impl Iterator<Item = &str> {
    let (path, target) = match change {
        PatchChange::Add { path, .. } | PatchChange::Delete { path } => (path, None),
        PatchChange::Update { path, move_to, .. } => (path, move_to.as_ref()),
    };
    [Some(path), target].into_iter().flatten().map(String::as_str)
}

fn show(patch: &FilePatch, answer: FileAnswer) -> CallResult {
    match answer {
        FileAnswer::Written => CallResult::text(show_changes(patch)),
        FileAnswer::Error { reason, path } => CallResult::error(format!(
            "Error: Failed to write file {path}: {}. Files before it in the patch may have been written.",
            reason_word(&reason)
        )),
        _ => odd_answer(),
    }
}

fn show_changes(patch: &FilePatch) -> String {
    let mut text = String::from("Success. Updated the following files:\n");
    let mut list = |sign: char, names: &dyn Fn(&PatchChange) -> Option<&str>| {
        for path in patch.changes.iter().filter_map(names) {
            let _ = writeln!(text, "{sign} {path}");
        }
    };
    list('A', &|change| match change {
        PatchChange::Add { path, .. } => Some(path),
        _ => None,
    });
    list('M', &|change| match change {
        PatchChange::Update { path, move_to, .. } => Some(move_to.as_deref().unwrap_or(path)),
        _ => None,
    });
    list('D', &|change| match change {
        PatchChange::Delete { path } => Some(path),
        _ => None,
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_codex() {
        let text = "*** Begin Patch\n*** Delete File: d\n*** Update File: u\n*** Move to: v\n@@\n-a\n*** Add File: a\n+x\n*** End Patch";
        let patch = FilePatch::parse(text).unwrap();
        assert_eq!(
            show(&patch, FileAnswer::Written).blocks[0].as_text().unwrap(),
            "Success. Updated the following files:\nA a\nM v\nD d\n"
        );
    }
}
