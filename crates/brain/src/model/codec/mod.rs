//! The wire formats: a request becomes JSON, the bytes of an answer become deltas and one answer.
//!
//! Invariant: pure functions; bytes come from the caller, and the caller decides when a stream ended.
//! Invariant: an answer exists only after its terminal event; every other end is an error.

pub mod anthropic;
pub mod chat;
pub mod fault;
mod parts;
pub mod responses;
pub mod sse;

use std::collections::BTreeSet;

use self::sse::{SseEvent, SseParser};
use super::{Answer, ContentBlock, ModelAddress, ModelDelta, ModelError, ModelRequest, Wire};

/// The largest stream of one answer, in bytes. An event of a few letters takes hundreds of bytes.
pub const STREAM_BYTES_MAX: usize = 64 << 20;

/// Receives the pieces of an answer.
pub type DeltaFn<'a> = dyn FnMut(ModelDelta) + 'a;

/// The body of a request in the wire format of an address.
pub fn encode(address: &ModelAddress, request: &ModelRequest) -> Result<String, ModelError> {
    let body = match address.wire() {
        Wire::Anthropic => anthropic::encode(address.model(), request),
        Wire::Chat | Wire::Script => chat::encode(address, request),
        Wire::Responses => responses::encode(address.model(), request),
    };
    body.map_err(|error| ModelError::BadRequest {
        status: 0,
        message: format!("the request cannot be written as JSON: {error}"),
    })
}

/// The decoder of one wire format: it takes events, or a whole JSON answer.
trait WireDecoder: Send {
    /// Reads one event.
    fn read_event(&mut self, event: &SseEvent, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError>;
    /// Reads an answer that came as one JSON document instead of a stream.
    fn read_document(&mut self, text: &str, deltas: &mut DeltaFn<'_>) -> Result<(), ModelError>;
    /// Whether the terminal event came.
    fn is_complete(&self) -> bool;
    /// The answer; an error if the terminal event did not come.
    fn finish(self: Box<Self>) -> Result<Answer, ModelError>;
}

/// The form of a body, known from its first byte.
enum BodyForm {
    Unread,
    Events(SseParser),
    Document(Vec<u8>),
}

/// The reader of one answer.
pub struct AnswerReader {
    form: BodyForm,
    decoder: Box<dyn WireDecoder>,
    used_ids: BTreeSet<String>,
    bytes: usize,
}

impl AnswerReader {
    /// Makes a reader for the answer to a request.
    pub fn new(wire: Wire, model: &str, request: &ModelRequest) -> Self {
        let decoder: Box<dyn WireDecoder> = match wire {
            Wire::Anthropic => Box::new(anthropic::AnthropicDecoder::new(model)),
            Wire::Chat | Wire::Script => Box::new(chat::ChatDecoder::new(model)),
            Wire::Responses => Box::new(responses::ResponsesDecoder::new(model)),
        };
        let blocks = request.messages.iter().flat_map(|message| &message.blocks);
        let used_ids = blocks.filter_map(|block| match block {
            ContentBlock::ToolCall(call) => Some(call.id.clone()),
            _ => None,
        });
        Self { form: BodyForm::Unread, decoder, used_ids: used_ids.collect(), bytes: 0 }
    }

    /// Reads more bytes of the body. Bytes after the terminal event count for nothing, whatever they are.
    pub fn push(&mut self, bytes: &[u8], deltas: &mut DeltaFn<'_>) -> Result<(), ModelError> {
        if self.decoder.is_complete() {
            return Ok(());
        }
        self.bytes = self.bytes.saturating_add(bytes.len());
        if self.bytes > STREAM_BYTES_MAX {
            return Err(ModelError::TooLarge { limit_bytes: STREAM_BYTES_MAX });
        }
        let mut bytes = bytes;
        if let BodyForm::Unread = self.form {
            bytes = bytes.trim_ascii_start();
            match bytes.first() {
                None => return Ok(()),
                Some(b'{') => self.form = BodyForm::Document(Vec::new()),
                Some(_) => self.form = BodyForm::Events(SseParser::default()),
            }
        }
        match &mut self.form {
            BodyForm::Unread => Ok(()),
            BodyForm::Document(text) => {
                text.extend_from_slice(bytes);
                Ok(())
            }
            BodyForm::Events(parser) => {
                let decoder = &mut self.decoder;
                let result = parser.push(bytes, &mut |event| {
                    if decoder.is_complete() { Ok(()) } else { decoder.read_event(&event, deltas) }
                });
                if decoder.is_complete() { Ok(()) } else { result }
            }
        }
    }

    /// Whether the answer is complete, so that no more bytes are needed.
    pub fn is_complete(&self) -> bool {
        self.decoder.is_complete()
    }

    /// Ends the body and gives the answer.
    pub fn finish(mut self, deltas: &mut DeltaFn<'_>) -> Result<Answer, ModelError> {
        match self.form {
            BodyForm::Unread => {}
            BodyForm::Document(text) => {
                let text = std::str::from_utf8(&text).map_err(|_| ModelError::MalformedStream {
                    message: "the answer is not UTF-8".to_owned(),
                })?;
                self.decoder.read_document(text, deltas)?;
            }
            BodyForm::Events(mut parser) if !self.decoder.is_complete() => {
                // An event without its empty line may be cut itself: then its JSON is broken, and the stream is cut.
                if let Ok(Some(event)) = parser.finish()
                    && let Err(error) = self.decoder.read_event(&event, deltas)
                    && !matches!(error, ModelError::MalformedStream { .. })
                {
                    return Err(error);
                }
            }
            BodyForm::Events(_) => {}
        }
        let mut answer = self.decoder.finish()?;
        parts::separate_ids(&mut answer.blocks, self.used_ids);
        Ok(answer)
    }
}

#[cfg(test)]
mod tests;
