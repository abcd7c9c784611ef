//! Why a model gave no answer, sorted by what the caller can do about it.

use std::time::Duration;

use super::TokenUsage;

/// Why a model gave no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// The provider limits the rate of requests.
    #[error("the model endpoint limits requests: {message}")]
    RateLimited {
        /// How long the provider asks to wait.
        retry_after: Option<Duration>,
        /// The provider's words.
        message: String,
    },
    /// The provider has no capacity now.
    #[error("the model endpoint is overloaded: {message}")]
    Overloaded {
        /// How long the provider asks to wait.
        retry_after: Option<Duration>,
        /// The provider's words.
        message: String,
    },
    /// The provider failed.
    #[error("the model endpoint failed with status {status}: {message}")]
    Server {
        /// The HTTP status.
        status: u16,
        /// How long the provider asks to wait.
        retry_after: Option<Duration>,
        /// The provider's words.
        message: String,
    },
    /// The stream ended before the answer did.
    #[error("the model endpoint cut the stream before the answer was complete: {message}")]
    StreamCut {
        /// The place of the cut.
        message: String,
    },
    /// The stream is not what its wire format allows.
    #[error("the model endpoint sent a malformed stream: {message}")]
    MalformedStream {
        /// The fault.
        message: String,
    },
    /// The conversation is longer than the model's context.
    #[error("the conversation is longer than the model's context: {message}")]
    ContextOverflow {
        /// The provider's words.
        message: String,
    },
    /// The key is missing, wrong, without permission or without credit.
    #[error("the model endpoint refused the key with status {status}: {message}")]
    Authentication {
        /// The HTTP status.
        status: u16,
        /// The provider's words.
        message: String,
    },
    /// The provider's policy or the model itself refuses to answer.
    #[error("the model refuses to answer: {message}")]
    Refused {
        /// The provider's words.
        message: String,
        /// The tokens that were used all the same.
        usage: TokenUsage,
    },
    /// The provider does not accept the request.
    #[error("the model endpoint rejected the request with status {status}: {message}")]
    BadRequest {
        /// The HTTP status.
        status: u16,
        /// The provider's words.
        message: String,
    },
    /// No connection.
    #[error("the model endpoint {endpoint} is unreachable: {message}")]
    Unreachable {
        /// Scheme, host and port.
        endpoint: String,
        /// The cause.
        message: String,
    },
    /// No answer in time.
    #[error("the model endpoint did not answer within {after:?}: {phase}")]
    Timeout {
        /// The limit.
        after: Duration,
        /// The step that took too long.
        phase: String,
    },
    /// The answer is longer than the client accepts.
    #[error("the answer of the model is longer than {limit_bytes} bytes")]
    TooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// The request is larger than the provider accepts.
    #[error("the model endpoint rejected the size of the request: {message}")]
    RequestTooLarge {
        /// The provider's words.
        message: String,
    },
    /// A script has no turn for this position, or saw something else than it expects.
    #[error("the scripted model stopped: {message}")]
    Script {
        /// The position in the script and the reason.
        message: String,
    },
}

impl ModelError {
    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::RateLimited { .. }
                | Self::Overloaded { .. }
                | Self::Server { .. }
                | Self::StreamCut { .. }
                | Self::MalformedStream { .. }
                | Self::Unreachable { .. }
                | Self::Timeout { .. }
        )
    }

    /// How long the provider asks to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after, .. }
            | Self::Overloaded { retry_after, .. }
            | Self::Server { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The error with another text.
    #[must_use]
    pub(crate) fn map_message(mut self, map: impl Fn(&str) -> String) -> Self {
        match &mut self {
            Self::RateLimited { message, .. }
            | Self::Overloaded { message, .. }
            | Self::Server { message, .. }
            | Self::StreamCut { message }
            | Self::MalformedStream { message }
            | Self::ContextOverflow { message }
            | Self::Authentication { message, .. }
            | Self::Refused { message, .. }
            | Self::BadRequest { message, .. }
            | Self::Unreachable { message, .. }
            | Self::RequestTooLarge { message }
            | Self::Script { message } => *message = map(message),
            Self::Timeout { .. } | Self::TooLarge { .. } => {}
        }
        self
    }

    /// A short name for events and tables.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::RateLimited { .. } => "rate_limited",
            Self::Overloaded { .. } => "overloaded",
            Self::Server { .. } => "server_error",
            Self::StreamCut { .. } => "stream_cut",
            Self::MalformedStream { .. } => "malformed_stream",
            Self::ContextOverflow { .. } => "context_overflow",
            Self::Authentication { .. } => "authentication",
            Self::Refused { .. } => "refused",
            Self::BadRequest { .. } => "bad_request",
            Self::Unreachable { .. } => "unreachable",
            Self::Timeout { .. } => "timeout",
            Self::TooLarge { .. } => "too_large",
            Self::RequestTooLarge { .. } => "request_too_large",
            Self::Script { .. } => "script",
        }
    }
}
