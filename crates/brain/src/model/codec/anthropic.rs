//! Anthropic Messages.
//!
//! Invariant: thoughts go back with their text and signature unchanged, to the model that had them and no other.
//! Invariant: all results of one answer's calls are in one message, before any other part of it.

mod decode;
mod encode;

pub use decode::AnthropicDecoder;
pub use encode::encode;
