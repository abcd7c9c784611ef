//! Questions to a model and its answers: requests, pieces of answers, answers, usage, keys.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ChatMessage, ContentBlock, ModelError, ToolCall};

/// One question to a model: everything that the model sees.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ModelRequest {
    /// The parts of the system prompt, the most stable one first.
    pub system: Vec<String>,
    /// The tools that the model may call.
    pub tools: Vec<ToolSchema>,
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// The longest answer, in tokens; the wire format's own default if absent.
    pub max_output_tokens: Option<u32>,
    /// How much the model may think; the model's own default if absent.
    pub effort: Option<Effort>,
    /// Whether the request marks the prefix that the provider may cache.
    #[serde(default)]
    pub cache: CachePolicy,
    /// A key that is the same for all requests of one conversation; providers route by it to a warm cache.
    pub conversation: Option<String>,
    /// The role of the agent that asks. Only a scripted model reads it.
    pub role: Option<String>,
    /// How many answers the conversation has had, also those that a summary replaced. Only a scripted model
    /// reads it; without it the model counts the messages of the assistant.
    pub turn: Option<usize>,
}

/// A tool as a model sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolSchema {
    /// The name by which the model calls the tool.
    pub name: String,
    /// The use of the tool, for the model.
    pub description: String,
    /// The JSON schema of the arguments: an object.
    pub parameters: Value,
}

/// How much a model may think before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    /// Not at all, where the model allows that.
    None,
    /// A little.
    Low,
    /// The middle.
    Medium,
    /// Much.
    High,
    /// As much as the model can.
    Max,
}

impl Effort {
    /// The word that the wire formats use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Max => "max",
        }
    }
}

/// Whether a request carries the marks of a provider's prompt cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CachePolicy {
    /// No mark.
    Off,
    /// Marks after the tools, after the system prompt and after the newest messages.
    #[default]
    Marks,
}

/// A piece of an answer, while it arrives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ModelDelta {
    /// More text.
    Text {
        /// The text.
        text: String,
    },
    /// More of a thought.
    Reasoning {
        /// The text.
        text: String,
    },
    /// A tool call begins.
    CallStarted {
        /// The number of the call in its answer, from 0.
        index: usize,
        /// The id as the provider gives it; the answer has another one if this one is empty or used already.
        id: String,
        /// The name of the tool.
        name: String,
    },
    /// More text of a call's arguments.
    CallArguments {
        /// The number of the call in its answer, from 0.
        index: usize,
        /// The text.
        text: String,
    },
}

/// One thing that happens while a model is asked.
#[derive(Debug, Clone)]
pub enum ModelProgress {
    /// A request goes out.
    AttemptStarted {
        /// The number of the attempt, from 1.
        attempt: u32,
    },
    /// A piece of the answer arrived.
    Delta(ModelDelta),
    /// The attempt failed; what it sent before is void.
    AttemptFailed {
        /// The number of the attempt, from 1.
        attempt: u32,
        /// The reason.
        error: ModelError,
        /// The time until the next attempt; absent if this was the last one.
        retry_after: Option<Duration>,
    },
}

/// A complete answer of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The parts of the answer, in order.
    pub blocks: Vec<ContentBlock>,
    /// Why the model stopped.
    pub stop: StopReason,
    /// The tokens that were used.
    pub usage: TokenUsage,
    /// The name of the model as the provider gives it; the requested name if the provider gives none.
    pub model: String,
}

impl Answer {
    /// The tool calls, in order.
    pub fn calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.blocks.iter().filter_map(|block| match block {
            ContentBlock::ToolCall(call) => Some(call),
            _ => None,
        })
    }

    /// The text of the answer, without thoughts.
    pub fn text(&self) -> String {
        let texts = self.blocks.iter().filter_map(|block| match block {
            ContentBlock::Text { text } => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }
}

/// Why a model stopped. A refusal is no reason to stop but a [`ModelError`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The answer is complete.
    EndTurn,
    /// The model waits for the results of its tool calls.
    ToolUse,
    /// The answer reached the limit of output tokens; it is cut off.
    MaxTokens,
    /// The conversation reached the end of the model's context; the answer is cut off.
    ContextFull,
    /// The provider paused a long turn: the caller sends the answer back to go on.
    PauseTurn,
    /// A stop sequence occurred.
    StopSequence,
    /// A reason that this version does not know.
    Other(String),
}

/// The tokens of one answer. The three kinds of input do not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TokenUsage {
    /// Input tokens that no cache served.
    pub input: u64,
    /// Output tokens, thoughts included.
    pub output: u64,
    /// Input tokens that were read from the provider's cache.
    #[serde(default)]
    pub cache_read: u64,
    /// Input tokens that were written to the provider's cache.
    #[serde(default)]
    pub cache_write: u64,
}

impl TokenUsage {
    /// All input tokens: the length of the conversation as the model saw it.
    pub fn total_input(&self) -> u64 {
        self.input.saturating_add(self.cache_read).saturating_add(self.cache_write)
    }

    /// The sum of two usages.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            input: self.input.saturating_add(other.input),
            output: self.output.saturating_add(other.output),
            cache_read: self.cache_read.saturating_add(other.cache_read),
            cache_write: self.cache_write.saturating_add(other.cache_write),
        }
    }
}

/// The secret with which a caller authenticates at a model endpoint. It never prints and never serialises.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// Wraps a secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}
