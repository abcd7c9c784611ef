//! Models: one neutral conversation, three wire formats, one client and one scripted model.
//!
//! Invariant: a codec is a pure function between bytes and values; only `http` and the scripted server do I/O.
//! Invariant: an answer is complete or it is an error; a stream that ends early never becomes an answer.
//! Trust: a model endpoint may send anything; every answer is bounded and parsed before use.

pub mod address;
pub mod catalog;
pub mod codec;
pub mod error;
pub mod http;
pub mod message;
mod open;
pub mod request;
pub mod retry;
pub mod scripted;

use std::{future::Future, pin::Pin};

pub use address::{ModelAddress, ModelAddressError, Wire};
pub use catalog::{MicroDollars, ModelCatalog, ModelFacts, Price};
pub use error::ModelError;
pub use http::{HttpModel, HttpOptions, http_client};
pub use message::{
    ChatMessage, ContentBlock, ImageData, OpaqueBlock, ResultBlock, Speaker, ToolArguments, ToolCall,
    ToolResult,
};
pub use open::{OpenModelError, open};
pub use request::{
    Answer, ApiKey, CachePolicy, Effort, ModelDelta, ModelProgress, ModelRequest, StopReason, TokenUsage,
    ToolSchema,
};
pub use retry::RetryPolicy;

/// The result of one call of a model, as a future that is cancelled when it is dropped.
pub type AnswerFuture<'a> = Pin<Box<dyn Future<Output = Result<Answer, ModelError>> + Send + 'a>>;

/// A language model.
pub trait Model: Send + Sync {
    /// The address of the model.
    fn address(&self) -> &ModelAddress;

    /// Asks for one answer and reports attempts and pieces of the answer on the way.
    ///
    /// The model retries by itself what [`ModelError::is_retryable`] allows, within its own bounds.
    /// After [`ModelProgress::AttemptFailed`] the caller forgets the deltas of that attempt.
    fn answer<'a>(
        &'a self,
        request: &'a ModelRequest,
        progress: &'a (dyn Fn(ModelProgress) + Send + Sync),
    ) -> AnswerFuture<'a>;
}
