//! OpenAI Responses, without state at the provider.
//!
//! Invariant: items that this version does not know, and encrypted thoughts, go back as the text that came.

mod decode;
mod encode;

pub use decode::ResponsesDecoder;
pub use encode::encode;
