//! OpenAI Chat Completions, and the servers that imitate it.
//!
//! Trust: vendors differ in ids, indexes, reasons to stop and fields for thoughts; the decoder takes what is
//! unambiguous and refuses the rest.

mod decode;
mod encode;

pub use decode::ChatDecoder;
pub use encode::encode;
