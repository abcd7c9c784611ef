//! Eviction: a result or a message that is too long for the conversation goes to a file, and the model gets a preview.
//!
//! Invariant: the preview depends only on the text, so that every request has the same one.

use std::sync::{Arc, Mutex};

use proto::EventData;
use sha2::{Digest as _, Sha256};

use super::{AgentFiles, Middleware, preview::show_preview};
use crate::{
    agent::{call::CallResult, journal::BoxFuture, tool::CallContext, view::AgentView},
    model::{ContentBlock, ModelRequest, ResultBlock, Speaker},
};

/// The longest text of a result that stays in the conversation, in characters.
const RESULT_LEN_MAX: usize = 80_000;
/// The longest text of a message that stays in the conversation, in characters.
const MESSAGE_LEN_MAX: usize = 200_000;
/// The longest id of a call that the model sees again, in characters.
const SHOWN_ID_LEN_MAX: usize = 32;
/// Tools that limit their results themselves.
const LIMITED: &[&str] = &["ls", "glob", "grep", "read_file", "edit_file", "write_file", "delete"];

/// Moves oversize results to files.
pub struct ResultEviction {
    files: Arc<dyn AgentFiles>,
    /// The directory, without a slash at its end.
    directory: String,
}

impl ResultEviction {
    /// Writes results below this directory.
    pub fn new(files: Arc<dyn AgentFiles>, directory: impl Into<String>) -> Self {
        Self { files, directory: directory.into() }
    }
}

impl Middleware for ResultEviction {
    fn name(&self) -> &'static str {
        "eviction"
    }

    fn refine<'a>(&'a self, context: &'a CallContext, mut result: CallResult) -> BoxFuture<'a, CallResult> {
        Box::pin(async move {
            let texts: Vec<&str> = result.blocks.iter().filter_map(ResultBlock::as_text).collect();
            let text = texts.join("\n");
            let len = text.chars().count();
            if len <= RESULT_LEN_MAX || LIMITED.contains(&context.tool.as_str()) {
                return result;
            }
            let path = format!("{}/{}", self.directory, file_name(&context.call));
            let shown = match self.files.write(&path, &text).await {
                Ok(()) => format!(
                    "Tool result too large, the result of this tool call {} was saved in the filesystem at this path: {path}\n\n\
                     You can read the result from the filesystem by using the read_file tool, but make sure to only read part of the result at a time.\n\n\
                     You can do this by specifying an offset and limit in the read_file tool call. For example, to read the first 100 lines, you can use the read_file tool with offset=0 and limit=100.\n\n\
                     {}\n",
                    shorten_id(&context.call),
                    show_preview(&text, "result")
                ),
                Err(error) => format!(
                    "The result is too long ({len} characters) and could not be saved to {path} ({error}).\n\n{}",
                    show_preview(&text, "result")
                ),
            };
            result.blocks.retain(|block| block.as_text().is_none());
            result.blocks.insert(0, ResultBlock::Text { text: shown });
            result
        })
    }
}

/// Moves oversize messages of the user to files. The log keeps them whole; the model sees a preview.
pub struct MessageEviction {
    files: Arc<dyn AgentFiles>,
    /// The directory, without a slash at its end.
    directory: String,
    /// The files that this process has written.
    written: Mutex<Vec<String>>,
}

impl MessageEviction {
    /// Writes messages below this directory.
    pub fn new(files: Arc<dyn AgentFiles>, directory: impl Into<String>) -> Self {
        Self { files, directory: directory.into(), written: Mutex::new(Vec::new()) }
    }

    fn path(&self, text: &str) -> String {
        let digest: String = Sha256::digest(text).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        format!("{}/message-{digest}.md", self.directory)
    }

    /// Writes the messages that are too long and not in a file yet. One that cannot be written is tried again before
    /// the next request.
    async fn write_long(&self, view: &AgentView) {
        let users = view.messages.iter().filter(|message| message.speaker == Speaker::User);
        for text in users.flat_map(|message| &message.blocks).filter_map(long_text) {
            let path = self.path(text);
            let is_written = self.written.lock().is_ok_and(|written| written.contains(&path));
            if !is_written
                && self.files.write(&path, text).await.is_ok()
                && let Ok(mut written) = self.written.lock()
            {
                written.push(path);
            }
        }
    }
}

impl Middleware for MessageEviction {
    fn name(&self) -> &'static str {
        "message eviction"
    }

    fn before_request<'a>(&'a self, view: &'a AgentView, overflow: bool) -> BoxFuture<'a, Vec<EventData>> {
        let _ = overflow;
        Box::pin(async move {
            self.write_long(view).await;
            Vec::new()
        })
    }

    fn shape(&self, view: &AgentView, request: &mut ModelRequest) {
        let _ = view;
        let users = request.messages.iter_mut().filter(|message| message.speaker == Speaker::User);
        for block in users.flat_map(|message| &mut message.blocks) {
            let Some(text) = long_text(block) else { continue };
            let shown = format!(
                "Message content too large and was saved to the filesystem at: {}\n\n\
                 You can read the full content using the read_file tool with pagination (offset and limit parameters).\n\n\
                 {}\n",
                self.path(text),
                show_preview(text, "content")
            );
            *block = ContentBlock::Text { text: shown };
        }
    }
}

fn long_text(block: &ContentBlock) -> Option<&str> {
    match block {
        ContentBlock::Text { text } if text.len() > MESSAGE_LEN_MAX => {
            Some(text.as_str()).filter(|text| text.chars().count() > MESSAGE_LEN_MAX)
        }
        _ => None,
    }
}

/// A file name from an id that a model made.
pub(crate) fn file_name(id: &str) -> String {
    let safe = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    id.chars().map(|letter| if safe(letter) { letter } else { '_' }).take(128).collect()
}

fn shorten_id(id: &str) -> String {
    match id.char_indices().nth(SHOWN_ID_LEN_MAX) {
        Some((end, _)) => format!("{}...", &id[..end]),
        None => id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files in memory.
    #[derive(Default)]
    struct MemoryFiles(Mutex<std::collections::BTreeMap<String, String>>);

    impl AgentFiles for MemoryFiles {
        fn write<'a>(&'a self, path: &'a str, text: &'a str) -> BoxFuture<'a, Result<(), String>> {
            self.0.lock().unwrap().insert(path.into(), text.into());
            Box::pin(async { Ok(()) })
        }

        fn read<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<Option<String>, String>> {
            let found = self.0.lock().unwrap().get(path).cloned();
            Box::pin(async { Ok(found) })
        }

        fn list<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<String>, String>> {
            Box::pin(async { Ok(Vec::new()) })
        }
    }

    #[tokio::test]
    async fn a_long_message_goes_to_a_file_and_its_preview_stays_the_same() {
        use crate::model::ChatMessage;
        let files = Arc::new(MemoryFiles::default());
        let eviction = MessageEviction::new(Arc::clone(&files) as Arc<dyn AgentFiles>, "/h");
        let long = "ä\n".repeat(MESSAGE_LEN_MAX);
        let messages = vec![ChatMessage::from_user("short"), ChatMessage::from_user(&long)];
        let view = AgentView { messages: messages.clone(), ..AgentView::default() };
        assert!(eviction.before_request(&view, false).await.is_empty());
        let mut requests =
            [0, 1].map(|_| ModelRequest { messages: messages.clone(), ..ModelRequest::default() });
        requests.iter_mut().for_each(|request| eviction.shape(&view, request));
        assert_eq!(requests[0], requests[1]);
        assert_eq!(requests[0].messages[0], messages[0]);
        let ContentBlock::Text { text } = &requests[0].messages[1].blocks[0] else { panic!("a text") };
        assert!(text.len() < 1_000, "{text}");
        let saved = files.0.lock().unwrap();
        let (path, saved) = saved.iter().next().unwrap();
        assert!(text.contains(path.as_str()) && *saved == long);
    }

    #[test]
    fn an_id_of_a_model_cannot_leave_the_directory() {
        assert_eq!(file_name("../../etc/passwd"), "______etc_passwd");
        assert_eq!(file_name("toolu_01-a"), "toolu_01-a");
        assert_eq!(shorten_id(&"é".repeat(33)), format!("{}...", "é".repeat(32)));
        assert_eq!(shorten_id("call_1"), "call_1");
    }
}
