//! Tools on files: the part that all of them share.
//!
//! Invariant: a change carries the key of its call, so that it takes effect once.

use std::sync::Arc;

use brain::{
    agent::{AgentTool, BoxFuture, CallContext, CallPlan, CallResult},
    model::ToolSchema,
};
use proto::{
    Failure,
    file_call::{FileAnswer, FileCall, FileOperation},
};
use serde_json::{Map, Value};

use crate::{
    Workplace, explain,
    files::{CompositeFiles, FileReply, normalize},
    guest_key,
};

/// The request of a tool to the files of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileRequest {
    /// One operation.
    Operation(FileOperation),
    /// A search for names, everywhere if no path is given.
    Glob { pattern: String, path: Option<String> },
    /// A search for text, everywhere if no path is given.
    Grep { pattern: String, path: Option<String>, glob: Option<String>, limit: u64 },
}

/// A request and the way in which its answer becomes a result.
pub struct FileTask {
    /// The request.
    pub request: FileRequest,
    /// Makes the result.
    pub show: Box<dyn FnOnce(FileAnswer) -> CallResult + Send>,
}

/// A tool on files: its schema, and its requests.
pub trait FileTool: Send + Sync {
    /// The name, the description and the parameters.
    fn schema(&self) -> ToolSchema;

    /// The request of a call; an error is a text for the model.
    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String>;
}

/// A tool on the files of an agent.
pub struct FilesTool<T> {
    tool: T,
    workplace: Arc<Workplace>,
    files: Arc<CompositeFiles>,
}

impl<T: FileTool + 'static> FilesTool<T> {
    /// Gives a tool the files that it acts on.
    pub fn on_files(tool: T, workplace: &Arc<Workplace>, files: &Arc<CompositeFiles>) -> Arc<dyn AgentTool> {
        Arc::new(Self { tool, workplace: Arc::clone(workplace), files: Arc::clone(files) })
    }

    async fn ask(&self, request: FileRequest, key: &str) -> Result<FileReply, Failure> {
        match request {
            FileRequest::Operation(operation) => self.files.call(keyed(operation, key)).await,
            FileRequest::Glob { pattern, path } => {
                self.files.glob(pattern, path.as_deref()).await.map(FileReply::from)
            }
            FileRequest::Grep { pattern, path, glob, limit } => {
                let found = self.files.grep(&pattern, path.as_deref(), glob.as_deref(), limit).await;
                found.map(FileReply::from)
            }
        }
    }

    async fn ask_again(
        &self,
        request: FileRequest,
        context: &CallContext,
    ) -> Result<Option<FileReply>, Failure> {
        match request {
            FileRequest::Operation(operation) if operation.changes_files() => {
                let life = self.workplace.find_life(context).await?;
                self.files.recover(keyed(operation, &context.key), life).await
            }
            reading => self.ask(reading, &context.key).await.map(Some),
        }
    }
}

impl<T: FileTool + 'static> AgentTool for FilesTool<T> {
    fn schema(&self) -> ToolSchema {
        self.tool.schema()
    }

    fn plan(&self, arguments: &Map<String, Value>) -> Result<CallPlan, String> {
        let task = self.tool.prepare(arguments)?;
        let name = self.tool.schema().name;
        let FileRequest::Operation(operation) = &task.request else { return Ok(CallPlan::reading(name)) };
        Ok(self.files.plan(operation, name))
    }

    fn run(&self, context: CallContext) -> BoxFuture<'_, CallResult> {
        Box::pin(async move {
            let task = match self.tool.prepare(&context.arguments) {
                Ok(task) => task,
                Err(text) => return CallResult::error(text),
            };
            match self.ask(task.request, &context.key).await {
                Ok(reply) => show_reply(reply, task.show),
                Err(failure) => CallResult::error(format!("Error: {}", explain(&failure))),
            }
        })
    }

    fn recover(&self, context: CallContext) -> BoxFuture<'_, Option<CallResult>> {
        Box::pin(async move {
            let task = self.tool.prepare(&context.arguments).ok()?;
            let reply = self.ask_again(task.request, &context).await.ok()??;
            Some(show_reply(reply, task.show))
        })
    }
}

fn show_reply(reply: FileReply, show: Box<dyn FnOnce(FileAnswer) -> CallResult + Send>) -> CallResult {
    let mut result = show(reply.answer);
    result.events.extend(reply.events);
    result
}

/// The call of an operation. One that only reads needs no key.
pub fn keyed(operation: FileOperation, key: &str) -> FileCall {
    let key = operation.changes_files().then(|| guest_key(key));
    FileCall { key, operation }
}

/// The normalised path of an argument; an error is a text for the model.
pub fn checked_path(path: &str) -> Result<String, String> {
    normalize(path).map_err(|error| format!("Error: {error}"))
}

/// The result for an answer that does not belong to its request: the guest has not kept to the protocol.
pub fn odd_answer() -> CallResult {
    CallResult::error("Error: unexpected server response")
}
